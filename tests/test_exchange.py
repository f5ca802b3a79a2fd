"""torch tensors borrowed all at once, by DLPack's C exchange API: the same results and the same errors as one by one."""

from __future__ import annotations

import contextlib
import struct
import warnings

import numpy as np
import pytest
from harness import check

import pylinattn
from pylinattn import _exchange
from pylinattn._call import Op
from pylinattn._lib import ffi, lib

torch = pytest.importorskip("torch")
B, T, H, HV, K, V, N = 1, 20, 2, 4, 8, 6, 3
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def exchange():
    """The shortcut of this torch, which the first call finds."""
    x = inputs("gdn")
    pylinattn.gdn_fwd(*x["plain"])
    if torch.Tensor not in _exchange.exchanges:
        check(
            not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), "its exchange API is not used"
        )
        pytest.skip(f"torch {torch.__version__} has no C exchange API")
    return _exchange.exchanges[torch.Tensor]


@pytest.fixture
def launches(exchange, monkeypatch):
    """The ops that take the shortcut, in turn."""
    taken, launch = [], exchange.launch
    monkeypatch.setattr(exchange, "launch", lambda op, *a: taken.append(op.name) or launch(op, *a))
    return taken


@contextlib.contextmanager
def one_by_one():
    kept = dict(_exchange.exchanges)
    _exchange.exchanges.clear()
    try:
        yield
    finally:
        _exchange.exchanges.update(kept)


def inputs(family, dtype=torch.float32, wide=torch.float32, tokens=T):
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    gates = (B, tokens, HV, K) if family == "kda" else (B, tokens, HV)
    q, k, v = normal(B, tokens, H, K), normal(B, tokens, H, K), normal(B, tokens, HV, V)
    plain = [q.to(dtype), k.to(dtype), v.to(dtype), -normal(*gates).abs().to(wide)]
    plain.append(torch.rand(B, tokens, HV, generator=random).to(wide))
    return {
        "plain": plain,
        "state": normal(N, HV, K, V).to(wide),
        "cu": torch.tensor([0, 7, 7, tokens - 1]),
        "A_log": torch.nn.Parameter(normal(HV), requires_grad=False),
        "dt_bias": normal(*gates[2:]),
        "d_o": normal(B, tokens, HV, V).to(dtype),
    }


def calls(family, **options):
    """Every op of a family as (name, function of nothing that returns all it wrote)."""
    x = inputs(family, **options)
    plain, cu = x["plain"], x["cu"]
    gate = dict(gate="softplus", A_log=x["A_log"], dt_bias=x["dt_bias"], beta_form="logits")
    more = dict(scale=0.3, qk_l2norm=True)
    fwd, decode, verify, bwd = (
        getattr(pylinattn, f"{family}_{op}") for op in ("fwd", "decode", "verify", "bwd")
    )
    one = [y[:, :N].transpose(0, 1) for y in plain]  # a row per sequence, not contiguous
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)

    def in_place(op, *a, **k):
        state = x["state"].clone()
        return [op(*a, state, **k), state]

    yield "fwd", lambda: fwd(*plain, qk_l2norm=True)[:1]
    yield "fwd", lambda: fwd(*plain, output_final_state=True, **more, **gate)
    yield "fwd", lambda: fwd(*plain, initial_state=x["state"], cu_seqlens=cu, output_final_state=True, **more)  # fmt: skip
    yield "fwd", lambda: in_place(lambda *a: fwd(*a[:5], initial_state=a[5], final_state=a[5], cu_seqlens=cu).o, *plain)  # fmt: skip
    yield "decode", lambda: in_place(decode, *plain, cu_seqlens=cu, **more)
    yield "decode", lambda: in_place(decode, *one, read_indices=rows, write_indices=rows, **more, **gate)  # fmt: skip
    yield "decode", lambda: [decode(*one, x["state"].clone(), o=torch.empty(N, 1, HV, V, dtype=one[0].dtype))]  # fmt: skip
    yield "verify", lambda: verify(*one, x["state"], qk_l2norm=True)
    yield "verify", lambda: in_place(lambda *a, **k: verify(*a, **k).o, *one, read_indices=rows, write_indices=rows[:, None])  # fmt: skip
    yield "bwd", lambda: [y for y in bwd(*plain, x["d_o"], **more) if y is not None]
    yield "bwd", lambda: bwd(*plain, x["d_o"], initial_state=x["state"], d_final_state=x["state"], cu_seqlens=cu, **more, **gate)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_same_results(launches, family, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for op, call in calls(family, dtype=dtype, wide=wide):
        launches.clear()
        got = call()
        check(launches == [f"{family}_{op}"], f"{op} did not take the shortcut: {launches}")
        with one_by_one():
            want = call()
        check(len(launches) == 1, "one by one took the shortcut")
        for mine, theirs in zip(got, want, strict=True):
            check(type(mine) is torch.Tensor and mine.dtype == theirs.dtype, f"{op}: {mine.dtype}")
            check(mine.is_contiguous() == theirs.is_contiguous(), f"{op}: strides {mine.stride()}")
            check(torch.equal(mine, theirs), f"{op}: other values")


def negated(x):
    y = torch.complex(torch.zeros_like(x), -x).conj().imag
    check(y.is_neg(), "the view is not lazy")
    return y


class Subclass(torch.Tensor):
    pass


ODD = {
    "negated": negated,
    "sparse": torch.Tensor.to_sparse,
    "meta": lambda x: x.to("meta"),
    "bool": torch.Tensor.bool,
    "complex": lambda x: x.to(torch.complex64),
    "six_axes": lambda x: x[None, None, None],
    "no_axis": lambda x: x.sum(),
    "numpy": lambda x: x.numpy(),
    "subclass": lambda x: x.as_subclass(Subclass),
    "number": lambda x: 1.0,
    "none": lambda x: None,
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "shape": lambda x: x[..., 1:],
    "dtype": torch.Tensor.int,
    "empty": lambda x: x[:0],
    "expanded": lambda x: x[..., :1].expand_as(x),
}


def outcome(call):
    """Values or the error, as something that can be compared."""
    try:
        return [None if y is None else y.tolist() for y in call()[:2]]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", ["q", "v", "g", "initial_state", "cu_seqlens", "o"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_tensors_have_the_same_outcome(odd, name):
    x = inputs("gdn", tokens=4)
    names = ("q", "k", "v", "g", "beta")
    arrays = dict(zip(names, x["plain"]), initial_state=x["state"][:1])
    arrays |= {"cu_seqlens": torch.tensor([0, 4.0]), "o": torch.zeros(B, 4, HV, V)}
    if odd not in ("negated", "complex", "requires_grad", "dtype"):
        arrays["cu_seqlens"] = arrays["cu_seqlens"].int()
    if name not in ("cu_seqlens", "o"):
        del arrays["cu_seqlens"], arrays["o"]
    arrays[name] = ODD[odd](arrays[name])

    def call():
        rest = {n: y for n, y in arrays.items() if n not in names}
        return pylinattn.gdn_fwd(*(arrays[n] for n in names), **rest, output_final_state=True)

    got = outcome(call)
    with one_by_one():
        want = outcome(call)
    check(got == want, f"{odd} {name}: {got}, one by one {want}")


@pytest.mark.parametrize(
    "wrong", [[0, 4], 4, torch.zeros(0), torch.tensor(4), torch.zeros(2, 2)], ids=str
)
def test_odd_lengths_have_the_same_outcome(wrong):
    x = inputs("gdn", tokens=4)["plain"]
    call = lambda: pylinattn.gdn_fwd(*x, cu_seqlens=wrong, output_final_state=True)  # noqa: E731
    got = outcome(call)
    with one_by_one():
        want = outcome(call)
    check(got == want, f"{wrong}: {got}, one by one {want}")


@pytest.mark.parametrize("initial", [False, True])
def test_write_indices_need_a_final_state(initial):
    """Of a table of rows no size of a pool is known; rows that it leaves out would not be written."""
    x = inputs("gdn", tokens=4)
    more = dict(initial_state=x["state"][:B]) if initial else {}
    with pytest.raises(ValueError, match="write_indices is given, but final_state is not"):
        pylinattn.gdn_fwd(
            *x["plain"], write_indices=torch.tensor([-1] * B), output_final_state=True, **more
        )


def test_nothing_is_allocated_for_tensors_without_memory():
    shape = (1, 1 << 40, 2, 8)
    x = torch.empty(shape, device="meta")
    g = torch.empty(shape[:3], device="meta")
    with pytest.raises(TypeError, match="meta"):
        pylinattn.gdn_fwd(x, x, x, g, g)


OPTIONS = {
    "scale": (
        *("1/2", "0.5", b"1", 0.0, None, 0.25, 1, 10**400, torch.tensor(0.25), [1]),
        *(np.float32(0.3), torch.tensor(0.25, requires_grad=True)),
    ),
    "lower_bound": (-5, None, "x", "-5"),
    "qk_l2norm": (True, 1, 2, None, ""),
    "gate": ("softplus", "hard", None, [1]),
    "beta_form": ("logits", "logits_x2", 3),
    "checkpoint_every": (0, 64, 63, None, 0.0),
    "save": ("states", "nothing", {}),
    "splits": ("auto", 1, 2, 0, "some", None, [1]),
    "checked": (True, 0, "yes"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_same_outcome(name):
    x = inputs("gdn")
    for value in OPTIONS[name]:
        call = lambda: pylinattn.gdn_fwd(*x["plain"], **{name: value})  # noqa: B023, E731
        got = outcome(call)
        with one_by_one():
            want = outcome(call)
        check(got == want, f"{name}={value!r}: {got}, one by one {want}")


def test_a_learned_scale_is_refused():
    """Its gradient would be lost, here and in FLA's functions, which take the same way to the library."""
    import pylinattn.torch as ours

    x, learned = inputs("gdn")["plain"], torch.tensor(0.25, requires_grad=True)
    for function in (pylinattn.gdn_fwd, ours.chunk_gated_delta_rule):
        with pytest.raises(TypeError, match=r"\bscale\b.*requires grad"):
            function(*x, scale=learned)
        function(*x, scale=learned.item())


def test_functorch_and_modes_have_the_same_outcome():
    x = inputs("gdn")["plain"]

    def mapped(v):
        return pylinattn.gdn_fwd(*x[:2], v, *x[3:]).o

    for transform in (torch.vmap, torch.func.functionalize):
        given = x[2][None] if transform is torch.vmap else x[2]
        got = outcome(lambda: [transform(mapped)(given)])  # noqa: B023
        with one_by_one():
            want = outcome(lambda: [transform(mapped)(given)])  # noqa: B023
        check(got == want or got[0] == want[0], f"{transform.__name__}: {got}, one by one {want}")


def test_compiled_callers_break_the_graph_without_a_warning():
    x = inputs("gdn", tokens=1)

    def step(q, state):
        return pylinattn.gdn_decode(2 * q, *x["plain"][1:], state) + 1

    state = x["state"][:1]
    want = step(x["plain"][0], state.clone())
    compiled = torch.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            check(torch.equal(compiled(x["plain"][0], state.clone()), want), "other values")


def test_copy_on_write_is_not_written_through():
    x = inputs("gdn")
    shared = x["state"][:1].clone()
    state = shared._lazy_clone()
    before = shared.clone()
    pylinattn.gdn_decode(*(y[:, :1] for y in x["plain"]), state)
    check(torch.equal(shared, before), "a lazy clone's original was written")
    check(not torch.equal(state, before), "the lazy clone was not")


def writing_calls(x, state, o):
    """Calls that write one of these two, each with the one that it writes."""
    plain, d_o = x["plain"], torch.ones_like(o)
    each = [y[0, :N].unsqueeze(1) for y in plain]  # one token for each state
    kept = pylinattn.gdn_verify(*each, state)[1:]
    yield state, lambda: pylinattn.gdn_decode(*each, state)
    yield state, lambda: pylinattn.delta_commit(state, *kept, torch.ones(N, dtype=torch.int64))
    yield state, lambda: pylinattn.gdn_fwd(*each, initial_state=state, final_state=state)
    rows = dict(read_indices=torch.tensor([0]), write_indices=torch.tensor([[1]]))
    yield state, lambda: pylinattn.gdn_verify(*(y[:1] for y in each), state, **rows)
    yield o, lambda: pylinattn.gdn_fwd(*plain, o=o)
    yield o, lambda: pylinattn.gdn_verify(*(y[:, :3] for y in plain), state[:1], o=o[:, :3])
    yield o, lambda: pylinattn.gdn_bwd(*plain, d_o, dv=o)
    yield o, lambda: pylinattn.gdn_fwd(*(y.numpy() for y in plain), o=o)


@pytest.mark.parametrize("way", [contextlib.nullcontext, one_by_one], ids=["at_once", "one_by_one"])
def test_autograd_sees_what_is_written(way):
    """A tensor that a gradient needs, written by a call, is an error in the backward, not a wrong gradient."""
    x = inputs("gdn")
    weight = torch.ones(1, requires_grad=True)
    state, o = x["state"].clone(), torch.zeros(B, T, HV, V)
    for written, call in writing_calls(x, state, o):
        loss = (weight * written).sum()
        with way(), torch.no_grad():
            call()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            loss.backward()
    loss = (weight * state).sum()
    token = [y[:, :1] for y in x["plain"]]
    with way(), torch.no_grad():
        with pytest.raises(ValueError, match="scale"):
            pylinattn.gdn_decode(*token, state[:1], scale=0.0)
        check(bool(pylinattn.supports("gdn_decode", *token, state[:1])), "not supported")
    loss.backward()  # nothing was written
    with torch.inference_mode(), way():
        pylinattn.gdn_decode(*token, state[:1].clone())


def test_threads_and_calls_within_calls():
    """A call from a weak reference's callback, while another is being packed, disturbs neither."""
    import gc
    import threading

    x = inputs("kda")
    want = pylinattn.kda_fwd(*x["plain"]).o
    failures = []

    def work():
        for _ in range(200):
            if not torch.equal(pylinattn.kda_fwd(*x["plain"]).o, want):
                failures.append(1)

    def collected(phase, info):
        if phase == "stop":
            pylinattn.kda_fwd(*x["plain"])

    gc.callbacks.append(collected)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(collected)
    check(not failures, f"{len(failures)} results differ")


def test_references_and_memory_stay(exchange):
    import sys

    x = inputs("gdn")
    before = [sys.getrefcount(y) for y in x["plain"]]
    for _ in range(1000):
        pylinattn.gdn_fwd(*x["plain"])
    check([sys.getrefcount(y) for y in x["plain"]] == before, "references are lost or kept")


# ---- the C function alone


def borrowed(exchange, arrays, views=None, op="gdn_decode"):
    op = Op(op)
    arrays = (*arrays, *(None,) * (op.tensors - len(arrays)))
    key, args = exchange.borrow(op, arrays, (1.0, 0.0, 0, 0, 0, 0, 0, 0), views)
    tensor = ffi.new("linattn_tensor *")
    found = []
    for i in range(op.tensors if key else 0):
        size = ffi.sizeof("linattn_tensor")
        ffi.memmove(tensor, args[8 + i * size : 8 + (i + 1) * size], size)
        shape, strides = (list(y)[: tensor.ndim] for y in (tensor.shape, tensor.strides))
        data = int(ffi.cast("uintptr_t", tensor.data))
        found.append((data, shape, strides, tensor.dtype, tensor.device_type))
    return key, found


def test_fields(exchange):
    arrays = [
        torch.zeros(2, 3, dtype=dtype)[:, 1:]
        for dtype in (*DTYPES, torch.int32, torch.int64, torch.uint8)
    ]
    key, found = borrowed(exchange, arrays)
    check(key != 0, "not taken")
    codes = [lib.LINATTN_F32, lib.LINATTN_F64, lib.LINATTN_BF16, lib.LINATTN_F16]
    codes += [lib.LINATTN_I32, lib.LINATTN_I64, lib.LINATTN_U8]
    for x, code, got in zip(arrays, codes, found):
        want = (x.data_ptr(), [2, 2], [3, 1], code, lib.LINATTN_CPU)
        check(got == want, f"{x.dtype}: {got}, expected {want}")
    check(found[len(arrays)] == (0, [], [], 0, 0), "a tensor that is not given is not empty")


def test_views(exchange):
    q, x = torch.zeros(1, 1, 2, 8), torch.zeros(2, 3, 5, 4)
    same, swap, flat, rows = (bytes([0, view]) for view in range(4))
    for views, given, shape, strides in (
        (same, x, [2, 3, 5, 4], [60, 20, 4, 1]),
        (swap, x, [2, 3, 4, 5], [60, 20, 1, 4]),
        (flat, x[:1, :, :1, :1], None, None),
        (flat, x[0, 0, :1], [4], [1]),
        (flat, torch.zeros(1, 1, 4, 1), [4], [1]),
        (flat, torch.zeros(()), [1], [1]),
        (flat, torch.zeros(8)[::2], None, None),
        (rows, torch.zeros(32), [4, 8], [8, 1]),
        (rows, torch.zeros(1, 4, 8), [4, 8], [8, 1]),
        (rows, torch.zeros(30), None, None),
        (swap, torch.zeros(3, 4), None, None),
    ):
        key, found = borrowed(exchange, (q, given), views + bytes(20))
        check((key == 0) == (shape is None), f"{views[1]} of {tuple(given.shape)}: key {key}")
        if key:
            check(found[1][1:3] == (shape, strides), f"{views[1]}: {found[1]}")


def test_keys_tell_calls_apart(exchange):
    """Shapes, strides, dtypes, places, alignment and scalars are in the key; addresses are not."""
    op = Op("gdn_decode")
    base = torch.zeros(64)
    scalars = (1.0, 0.0, 0, 0, 0, 0, 0, 0)

    def key(*arrays, scalars=scalars):
        return exchange.borrow(op, (*arrays, *(None,) * (op.tensors - len(arrays))), scalars)[0]

    x = base[:8].view(2, 4)
    check(key(x) == key(base[16:24].view(2, 4)) == key(torch.ones(2, 4)), "the address matters")
    others = [
        key(x.view(4, 2)), key(x.view(8)), key(x.t()), key(x, x), key(x, None, x), key(x.int()),
        key(base[1:9].view(2, 4)), key(x.view(1, 2, 4)), key(base[:16].view(2, 8)[:, :4]),
        *(key(x, scalars=(*scalars[:i], 2, *scalars[i + 1 :])) for i in range(len(scalars))),
    ]  # fmt: skip
    check(len({key(x), *others}) == 1 + len(others), "two calls have one key")


def test_unknown_major_version(exchange):
    """Of a newer interface the older one behind it is taken, and without one none."""
    import ctypes

    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )

    def type_with(*versions, name=b"dlpack_exchange_api"):
        apis = [ctypes.create_string_buffer(56) for _ in versions]
        for i, (api, major) in enumerate(zip(apis, versions)):
            behind = ctypes.addressof(apis[i + 1]) if i + 1 < len(apis) else 0
            api[:16] = struct.pack("<IIQ", major, 0, behind)
        cls = type("Array", (), {})
        cls.__dlpack_c_exchange_api__, cls.apis = new(ctypes.addressof(apis[0]), name, None), apis
        cls.name = name  # a capsule keeps no copy of it
        return cls

    old = type_with(2, 1)
    check(_exchange._api(old) == ctypes.addressof(old.apis[1]), "the older one is not found")
    check(_exchange._api(type_with(2)) == 0, "an unknown version is taken")
    check(_exchange._api(type_with(1, name=b"another")) == 0, "another capsule is taken")
    check(_exchange._api(int) == 0, "a type without one")


@pytest.mark.gpu
def test_on_the_gpu(gpu, launches):
    """Shortcut taken on the current stream; same bits one by one."""
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random).cuda()  # noqa: E731
    q, k, v = (normal(1, 70, 2, 64).bfloat16() for _ in range(3))
    x = (q, k, v, -normal(1, 70, 2).abs(), normal(1, 70, 2).sigmoid())
    state = normal(1, 2, 64, 64)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x[0].mul_(0.5)  # seen only by what runs behind it on this stream
        got = pylinattn.gdn_fwd(*x, initial_state=state, output_final_state=True, qk_l2norm=True)
        stepped = state.clone()
        o = pylinattn.gdn_decode(*(y[:, :1] for y in x), stepped)
    check(launches == ["gdn_fwd", "gdn_decode"], f"the shortcut was taken by {launches}")
    torch.cuda.synchronize()
    with one_by_one():
        want = pylinattn.gdn_fwd(*x, initial_state=state, output_final_state=True, qk_l2norm=True)
        again = state.clone()
        o2 = pylinattn.gdn_decode(*(y[:, :1] for y in x), again)
    for mine, theirs in (
        (got.o, want.o),
        (got.final_state, want.final_state),
        (o, o2),
        (stepped, again),
    ):
        check(mine.is_cuda and torch.equal(mine, theirs), "other values")

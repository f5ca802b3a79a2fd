"""pylinattn.jax: bits of the eager ops under jit, vmap, shard_map and donation; errors; XLA's interface as declared."""

from __future__ import annotations

import functools
import pathlib
import shutil
import subprocess

import header
import numpy as np
import pytest
from cases import Case, make
from harness import POSITIONAL, check, check_outputs, check_states, expect

import pylinattn

jax = pytest.importorskip("jax")
ml_dtypes = pytest.importorskip("ml_dtypes")
jnp = jax.numpy

import pylinattn.jax as pj  # noqa: E402

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i32": np.int32}
PLAIN = Case("gdn", (40, 40), 1, 2, 16, 8, packed=False)
GATED = (("gate", "softplus"), ("beta_form", "logits"), ("qk_l2norm", True))
CASES = [
    PLAIN,
    Case("kda", (33, 33), 2, 4, 8, 16, packed=False, initial=False),
    Case("gdn", (40, 9, 70), 1, 2, 16, 8, "bf16", options=(*GATED, ("checkpoint_every", 64))),
    Case("kda", (40, 9), 2, 2, 16, 8, "f16", options=GATED, state_dtype="bf16"),
    Case(
        "kda",
        (20,),
        2,
        2,
        8,
        8,
        options=(("gate", "bounded"), ("lower_bound", -5.0), ("scale", 0.3)),
    ),
]


def inputs_of(case, family=None):
    arrays = {name: x.values.astype(NUMPY[x.dtype]) for name, x in make(case).items()}
    return [arrays.pop(n) for n in POSITIONAL[case.op]], arrays


def same(got, want, what="results"):
    got, want = (jax.tree_util.tree_leaves(x) for x in (got, want))
    check(len(got) == len(want), f"{len(got)} {what}, not {len(want)}")
    for number, (a, b) in enumerate(zip(got, want)):
        check(a.dtype == b.dtype and a.shape == b.shape, f"{what} {number}: {a.dtype}{a.shape}")
        check(np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{what} {number}: other bits")


def decode_inputs(family="gdn", N=3, T=1, rows=5, **more):
    case = Case(family, (T,) * N, 1, 2, 16, 8, packed=False, initial=False)
    positional, _ = inputs_of(case)
    pool = np.random.default_rng(3).normal(size=(rows, 2, 16, 8)).astype(np.float32)
    return positional, pool


# ---- the forward


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_forward_eager_and_jit(case):
    """The bits of the eager ops on NumPy arrays, which are checked against the reference."""
    positional, arrays = inputs_of(case)
    op = functools.partial(getattr(pj, case.op), output_final_state=True, **case.keywords)
    want = getattr(pylinattn, case.op)(
        *positional, **arrays, **case.keywords, output_final_state=True
    )
    reference = expect(case.op, make(case), case.keywords)
    check_outputs(want.o.astype(np.float64), reference.o, case.dtype, case.spans)
    check_states(
        want.final_state.astype(np.float64),
        reference.final_state,
        case.state,
        pylinattn.last_path(),
    )
    eager = op(*positional, **arrays)
    traced = jax.jit(op)(*positional, **arrays)
    for got in (eager, traced):
        check(type(got) is pylinattn.Forward, f"{type(got)}")
        check(isinstance(got.o, jax.Array), f"o is {type(got.o)}")
        same((*got, got.checkpoints), (*want, want.checkpoints))


def wide_dtypes():
    """JAX with float64 and int64, in any of its generations."""
    context = getattr(jax, "enable_x64", None)
    return jax.experimental.enable_x64() if context is None else context(True)


def test_float64():
    case = Case("gdn", (40, 9), 1, 2, 16, 8, "f64")
    arrays = {
        n: x.values.astype(np.int64 if n == "cu_seqlens" else np.float64)
        for n, x in make(case).items()
    }
    positional = [arrays.pop(n) for n in POSITIONAL["gdn_fwd"]]
    want = pylinattn.gdn_fwd(*positional, **arrays, output_final_state=True)
    with wide_dtypes():
        same(pj.gdn_fwd(*positional, **arrays, output_final_state=True), want)


def test_one_custom_call_with_readable_options():
    positional, _ = inputs_of(PLAIN)
    text = jax.jit(functools.partial(pj.gdn_fwd, scale=0.5)).lower(*positional).as_text()
    check(text.count("@linattn_gdn_fwd") == 1, text)
    for word in ('inputs = "q,k,v,g,beta"', 'results = "o"', "scale = 5.0"):
        check(word in text, f"{word} is not in\n{text}")


def test_pools_of_the_forward():
    """Index tables, padding, in place and into another pool, checkpoints into rows."""
    case = Case("gdn", (70, 64, 130), 1, 2, 16, 8)
    positional, arrays = inputs_of(case)
    pool = np.random.default_rng(1).normal(size=(6, 2, 16, 8)).astype(np.float32)
    other, marks = pool + 1, pool + 2
    tables = dict(
        cu_seqlens=arrays["cu_seqlens"],
        read_indices=np.array([4, -1, 0], np.int32),
        checkpoint_every=64,
        checkpoint_indices=np.array([[0, -1], [1, -1], [2, 5]], np.int32),
    )
    write = np.array([1, 2, -1], np.int32)

    def both(into, options):
        """into: the pool itself (None) or another."""
        p, c = pool.copy(), marks.copy()
        f = p if into is None else into.copy()
        want = pylinattn.gdn_fwd(
            *positional, initial_state=p, final_state=f, checkpoints=c, **tables, **options
        )
        p, c = jnp.asarray(pool), jnp.asarray(marks)
        f = p if into is None else jnp.asarray(into)
        for run in (pj.gdn_fwd, lambda *a, **k: jax.jit(lambda: pj.gdn_fwd(*a, **k))()):
            got = run(
                *positional, initial_state=p, final_state=f, checkpoints=c, **tables, **options
            )
            same((*got, got.checkpoints), (*want, c_of(want)))
        same([p, c], [pool, marks], "pools given")

    def c_of(done):
        return done.checkpoints

    both(None, {})
    both(None, {"write_indices": write})
    both(other, {"write_indices": write})
    want = pylinattn.gdn_fwd(
        *positional, initial_state=pool, output_final_state=True,
        cu_seqlens=tables["cu_seqlens"], read_indices=tables["read_indices"],
    )  # fmt: skip
    got = pj.gdn_fwd(
        *positional, initial_state=pool, output_final_state=True,
        cu_seqlens=tables["cu_seqlens"], read_indices=tables["read_indices"],
    )  # fmt: skip
    same(got, want)
    check(not np.asarray(got.final_state[1]).any(), "the row of padding is not zero")


# ---- decode, verify, commit


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_decode_in_place(family):
    """The donated pool is updated where it lies; one that is not donated stays as it is."""
    positional, pool = decode_inputs(family)
    tables = dict(
        read_indices=np.array([3, -1, 0], np.int32), write_indices=np.array([1, 4, -1], np.int32)
    )
    after = pool.copy()
    o = getattr(pylinattn, f"{family}_decode")(*positional, after, **tables)
    decode = functools.partial(getattr(pj, f"{family}_decode"), **tables)
    kept = jnp.asarray(pool)
    same(decode(*positional, kept), (o, after))
    same([kept], [pool], "pool given")
    jitted = jax.jit(decode, donate_argnums=5)
    for run in (functools.partial(decode, donate=True), jitted):
        state = jnp.array(pool)
        address = state.unsafe_buffer_pointer()
        got = run(*positional, state)
        same(got, (o, after))
        check(state.is_deleted(), "the donated pool is still there")
        check(got[1].unsafe_buffer_pointer() == address, "the pool moved")
    given = pool.copy()  # NumPy's memory is never JAX's to give away
    same(decode(*positional, given, donate=True), (o, after))
    same([given], [pool], "NumPy pool")


def test_decode_loop_equals_the_forward():
    positional, arrays = inputs_of(PLAIN)
    want = pj.gdn_fwd(*positional, **arrays, output_final_state=True)

    def step(state, token):
        o, state = pj.gdn_decode(*(x[:, None] for x in token), state)
        return state, o[:, 0]

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in positional)
    state, o = jax.jit(lambda s: jax.lax.scan(step, s, tokens))(arrays["initial_state"])
    check(np.allclose(jnp.moveaxis(o, 0, 1), want.o, atol=1e-6), "outputs differ")
    check(np.allclose(state, want.final_state, atol=1e-6), "states differ")


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_verify_and_commit(family):
    positional, pool = decode_inputs(family, T=4)
    options = dict(read_indices=np.array([3, 2, 0], np.int32))
    accepted, path = np.array([2, 0, 4], np.int32), np.tile(np.arange(4, dtype=np.int32), (3, 1))
    verify, jax_verify = (getattr(x, f"{family}_verify") for x in (pylinattn, pj))
    want = verify(*positional, pool, **options)
    state = pool.copy()
    pylinattn.delta_commit(state, *want[1:], accepted, path=path, **options)

    def both(*a):
        done = jax_verify(*a, **options)
        return done, pj.delta_commit(
            done.state, done.kept_k, done.kept_u, done.kept_g, accepted, path=path, **options
        )

    for run in (both, jax.jit(both)):
        done, committed = run(*positional, jnp.asarray(pool))
        same((done, committed), ((*want, pool), state))
    alone = jax.jit(lambda *a: jax_verify(*a, **options, keep=False))(
        *positional, jnp.asarray(pool)
    )
    same(alone.o, want.o)
    check(alone[1:4] == (None, None, None), "something was kept")
    gone = jnp.array(pool)
    same(pj.delta_commit(gone, *want[1:], accepted, donate=True, **options), state)
    check(gone.is_deleted(), "the donated pool is still there")

    tables = dict(
        read_indices=np.array([0, 1, 0], np.int32)[:1],
        write_indices=np.array([[4, -1, 3, 2]], np.int32),
        parents=np.array([[-1, 0, 0, 1]], np.int32),
    )
    first = [x[:1] for x in positional]
    after = pool.copy()
    want = verify(*first, after, **tables)
    got = jax_verify(*first, pool, **tables)
    same((got.o, got.state), (want.o, after))
    check(got[1:4] == (None, None, None), "something was kept beside written rows")


needs_segments = pytest.mark.skipif(
    not pylinattn.supports("gdn_segment", device="cpu", dtype="f32", K=16, V=8),
    reason="the library has no segments",
)


@needs_segments
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_segments_and_their_merge(family):
    """The bits of the eager ops; three spans merged start the pieces of a forward where the whole one was."""
    case = Case(family, (48, 48), 1, 2, 16, 8, packed=False)
    positional, arrays = inputs_of(case)
    spans = [[x[:, a : a + 16] for x in positional] for a in (0, 16, 32)]
    eager, ours = (getattr(x, f"{family}_segment") for x in (pylinattn, pj))
    same([ours(*s) for s in spans], [eager(*s) for s in spans])
    M, h = (jnp.stack(x) for x in zip(*(jax.jit(ours)(*s) for s in spans)))
    want = pylinattn.segment_merge(np.asarray(M), np.asarray(h), **arrays)
    merged = pj.segment_merge(M, h, **arrays)
    same((merged, jax.jit(pj.segment_merge)(M, h)[0][0]), (want, np.zeros_like(h[0])))
    both = jax.vmap(pj.segment_merge)(jnp.stack([M, M]), jnp.stack([h, h]))
    same(both.states[1], pj.segment_merge(M, h).states)
    forward = functools.partial(getattr(pj, f"{family}_fwd"), output_final_state=True)
    whole = forward(*positional, **arrays)
    for a, (span, state) in enumerate(zip(spans, merged.states)):
        o = forward(*span, initial_state=state).o
        check(np.allclose(o, whole.o[:, 16 * a : 16 * a + 16], atol=1e-5), f"span {a}")
    check(np.allclose(merged.final_state, whole.final_state, atol=1e-5), "final state")


# ---- vmap, shard_map


def test_vmap_folds_or_loops():
    """Over one axis and two, with and without arrays that keep the calls apart."""
    positional, arrays = inputs_of(PLAIN)
    op = functools.partial(pj.gdn_fwd, output_final_state=True)
    stack = [jnp.stack([x, x * 0.5, x * 0.25]) for x in positional]
    state = arrays["initial_state"]
    want = [op(*(x[i] for x in stack), initial_state=state) for i in range(3)]
    folded = jax.vmap(lambda *a: op(*a, initial_state=state))
    text = str(jax.make_jaxpr(folded)(*stack))
    check("scan" not in text and "while" not in text, f"a loop in\n{text}")
    for run in (folded, jax.jit(folded)):
        for i, got in enumerate(zip(*run(*stack))):
            same(got, tuple(want[i]))
    twice = jax.vmap(folded)(*(x[None] for x in stack))
    same(twice.o[0, 2], want[2].o)

    gated = functools.partial(pj.gdn_fwd, A_log=np.zeros(2, np.float32), gate="softplus")
    got = jax.vmap(gated)(*stack)
    for i in range(3):
        same(got.o[i], gated(*(x[i] for x in stack)).o)


def test_vmap_of_decode_with_tables():
    positional, pool = decode_inputs()
    tables = dict(read_indices=np.array([3, -1, 0], np.int32))
    pools = jnp.stack([pool, pool * 2])
    o, after = jax.vmap(lambda s: pj.gdn_decode(*positional, s, **tables))(pools)
    for i in range(2):
        same((o[i], after[i]), pj.gdn_decode(*positional, pools[i], **tables))


SHARDED = """
import jax, numpy as np, pylinattn, pylinattn.jax as pj
from test_jax import PLAIN, decode_inputs, inputs_of
from jax.sharding import Mesh, PartitionSpec as P
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
mesh = Mesh(np.array(jax.devices()), ("heads",))
(q, k, v, g, beta), arrays = inputs_of(PLAIN)
q, k = np.repeat(q, 2, 2), np.repeat(k, 2, 2)
h0 = arrays["initial_state"]
heads, states = P(None, None, "heads"), P(None, "heads")
def fwd(*a):
    return tuple(pj.gdn_fwd(*a[:5], initial_state=a[5], output_final_state=True))
spec = dict(mesh=mesh, in_specs=(heads,) * 5 + (states,), out_specs=(heads, states))
run = jax.jit(shard_map(fwd, **spec))
o, s = run(q, k, v, g, beta, h0)
print(len(jax.devices()), len(o.sharding.device_set), end=" ")
for a, b in zip((o, s), fwd(q, k, v, g, beta, h0)):
    print(np.array_equal(a, b), end=" ")
def decode(*a):
    return pj.gdn_decode(*a, read_indices=np.array([1, -1], np.int32))
one = [x[:, :1] for x in (q, k, v, g, beta)]
for a, b in zip(jax.jit(shard_map(decode, **spec))(*one, h0), decode(*one, h0)):
    print(np.array_equal(a, b), end=" ")
if pylinattn.supports("gdn_bwd", device="cpu", dtype="f32", K=16, V=8):
    loss = lambda f: jax.grad(lambda *a: sum((x * x).sum() for x in f(*a)), range(6))
    for a, b in zip(loss(run)(q, k, v, g, beta, h0), loss(fwd)(q, k, v, g, beta, h0)):
        print(np.allclose(a, b, atol=1e-6), end=" ")
    # batch over the devices, gate parameters on all of them: their gradient is the sum
    def gated(*a):
        return (pj.gdn_fwd(*a[:5], A_log=a[5], gate="softplus").o,)
    rows = P("heads")
    run = jax.jit(shard_map(gated, mesh=mesh, in_specs=(rows,) * 5 + (P(),), out_specs=(rows,)))
    A_log = np.array([0.0, -1.0], np.float32)
    for a, b in zip(loss(run)(q, k, v, g, beta, A_log), loss(gated)(q, k, v, g, beta, A_log)):
        print(np.allclose(a, b, atol=1e-5), end=" ")
"""


def test_sharded_over_heads(watchdog):
    """Two CPU devices, half of the heads each: outputs, states, the pool of decode and gradients of one device."""
    out = watchdog(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2").split()
    check(out[:2] == ["2", "2"], f"devices: {out}")
    check(len(out) >= 6 and set(out[2:]) == {"True"}, f"sharded and whole differ: {out}")


# ---- errors


def message(error, run, *words):
    with pytest.raises(error) as caught:
        jax.block_until_ready(run())
    for word in words:
        check(word in str(caught.value), f"{word} is not in: {caught.value}")


def test_errors_when_traced():
    """The sentence and the class of the eager ops, from eager and jitted calls."""
    positional, arrays = inputs_of(PLAIN)
    q, k, v, g, beta = positional
    short = [q, k[:, :-1], v, g, beta]
    for arguments, options, builtin in (
        (short, {}, ValueError),
        ([q, k, v, g.astype(np.int32), beta], {}, TypeError),
        (positional, {"gate": "softplus"}, ValueError),
        (positional, {"gate": "sigmoid"}, ValueError),
        (positional, {"scale": 0.0}, ValueError),
        (positional, {"splits": "many"}, ValueError),
        (positional, {"checkpoint_every": 5}, ValueError),
        (positional, {"initial_state": arrays["initial_state"][:1]}, ValueError),
    ):
        with pytest.raises(builtin) as eager:
            pylinattn.gdn_fwd(*arguments, **options)
        for run in (pj.gdn_fwd, lambda *a, **o: jax.jit(functools.partial(pj.gdn_fwd, **o))(*a)):
            with pytest.raises(builtin) as caught:
                run(*arguments, **options)
            check(type(caught.value) is type(eager.value), f"{type(caught.value)}")
            check(str(caught.value) == str(eager.value), f"{caught.value}, eager {eager.value}")
    message(TypeError, lambda: pj.gdn_fwd(q, None, v, g, beta), "gdn_fwd: k", "an array")
    message(TypeError, lambda: pj.gdn_fwd(q, [1.0], v, g, beta), "gdn_fwd: k", "an array")
    message(TypeError, lambda: jax.jit(lambda s: pj.gdn_fwd(*positional, scale=s))(1.0), "scale")
    message(TypeError, lambda: pj.gdn_fwd(q.astype(bool), k, v, g, beta), "q", "bool")


def test_errors_that_values_decide():
    """Found when the call runs; the sentence arrives in JAX's own exception."""
    case = Case("gdn", (40, 9), 1, 2, 16, 8)
    positional, arrays = inputs_of(case)
    arrays["cu_seqlens"] = np.array([0, 40, 9], np.int32)
    message(RuntimeError, lambda: pj.gdn_fwd(*positional, **arrays), "gdn_fwd: cu_seqlens")
    positional, pool = decode_inputs()
    rows = np.array([0, 1, 99], np.int32)
    message(
        RuntimeError,
        lambda: pj.gdn_decode(*positional, pool, read_indices=rows),
        "gdn_decode: read_indices",
        "99",
    )
    o, _ = pj.gdn_decode(*positional, pool, read_indices=np.array([0, 1, 2], np.int32))
    check(o.shape == (3, 1, 2, 8), "no result after an error")


# ---- XLA's interface

OFFSETS = {
    "Version": ("XLA_FFI_Api_Version", "major:major_version", "minor:minor_version"),
    "Metadata": ("XLA_FFI_Metadata", "version:api_version", "traits"),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", "metadata"),
    "Extension": ("XLA_FFI_Extension_Base", "type", "next"),
    "Buffer": ("XLA_FFI_Buffer", "dtype", "data", "rank", "dims"),
    "Span": ("XLA_FFI_ByteSpan", "at:ptr", "length:len"),
    "Scalar": ("XLA_FFI_Scalar", "dtype", "value"),
    "Buffers": ("XLA_FFI_Args", "count:size", "types", "items:args"),
    "Buffers ": ("XLA_FFI_Rets", "count:size", "types", "items:rets"),
    "Attributes": ("XLA_FFI_Attrs", "count:size", "types", "names", "items:attrs"),
    "Call": ("XLA_FFI_CallFrame", "extension:extension_start", "api", "context:ctx", "stage",
             "arguments:args", "results:rets", "attributes:attrs"),
    "ErrorCreate": ("XLA_FFI_Error_Create_Args", "message", "code:errc"),
    "StreamGet": ("XLA_FFI_Stream_Get_Args", "context:ctx", "stream"),
    "OrdinalGet": ("XLA_FFI_DeviceOrdinal_Get_Args", "context:ctx", "ordinal:device_ordinal"),
    "Api": ("XLA_FFI_Api", "version:api_version", "error_create:XLA_FFI_Error_Create",
            "stream_get:XLA_FFI_Stream_Get", "ordinal_get:XLA_FFI_DeviceOrdinal_Get"),
}  # fmt: skip
NUMBERS = {
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "kCommandBufferCompatible": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    "kAttributeScalar": "XLA_FFI_AttrType_SCALAR",
    "kAttributeString": "XLA_FFI_AttrType_STRING",
    "kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "kUnimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "kInternal": "XLA_FFI_Error_Code_INTERNAL",
} | {
    f"k{n.capitalize()}": f"XLA_FFI_DataType_{n}"
    for n in ["S32", "S64", "U8", "F16", "F32", "F64", "BF16"]
}


@pytest.mark.skipif(
    not (header.REPOSITORY / "cuda/xla_ffi.c").exists(), reason="no source tree beside the tests"
)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_declarations_are_those_of_xla(tmp_path):
    """Offsets, numbers and the declared version against the header that this jaxlib brings."""
    theirs = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla_ffi.c"']
    for ours, (name, *fields) in OFFSETS.items():
        for field in fields:
            a, _, b = field.partition(":")
            if name not in theirs or (b.startswith("XLA_FFI") and f"({b})" not in theirs):
                continue  # this jaxlib is older than that part of the interface
            lines.append(
                f"_Static_assert(offsetof({ours.strip()}, {a}) == offsetof({name}, {b or a}), "
                f'"{name}.{b or a}");'
            )
    lines += [f'_Static_assert((int){a} == (int){b}, "{b}");' for a, b in NUMBERS.items()]
    check(len(lines) > 40, f"only {len(lines)} comparisons")
    source = tmp_path / "offsets.c"
    source.write_text("\n".join(lines) + "\n")
    folders = [
        jax.ffi.include_dir(),
        header.REPOSITORY / "cuda",
        header.REPOSITORY / "cuda/include",
    ]
    done = subprocess.run(
        ["cc", "-std=c11", "-fsyntax-only", *(f"-I{f}" for f in folders), str(source)],
        capture_output=True,
        text=True,
    )
    check(done.returncode == 0, done.stderr)


def test_the_handler_refuses_what_it_does_not_know():
    """Custom calls made by hand: a wrong tensor, option or type, buffers missing, a result that is not aliased."""
    (q, k, v, g, beta), pool = decode_inputs(rows=3)
    o, state = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, pool))

    arrays = (q, k, v, g, beta, pool)
    names = dict(inputs="q,k,v,g,beta,state", results="o,state", scale=np.float64(1))

    def call(aliases=None, **attributes):
        aliases = {5: 1} if aliases is None else aliases
        made = jax.ffi.ffi_call("linattn_gdn_decode", (o, state), input_output_aliases=aliases)
        return made(*arrays, **(names | attributes))

    jax.block_until_ready(call())
    for attributes, words in (
        ({"inputs": "q,k,v,g,beta,pool"}, "no tensor pool"),
        ({"inputs": "q,k,v,g,beta,scale"}, "no tensor scale"),
        ({"inputs": "q,k,v,g,beta"}, "no tensor"),
        ({"inputs": "q,k,v,g,beta,state,A_log"}, "no buffer for A_log"),
        ({"temperature": np.float64(1)}, "temperature"),
        ({"scale": np.float32(2)}, "scale"),
        ({"gate": np.int32(7)}, "gate is 7"),
        ({"aliases": {}}, "did not alias the result state"),
    ):
        message(RuntimeError, lambda attributes=attributes: call(**attributes), words)

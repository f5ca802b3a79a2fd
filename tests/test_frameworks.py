"""Array libraries: NumPy, ml_dtypes, torch, JAX and anything that speaks DLPack, old or new; what is taken and what is not."""

from __future__ import annotations

import ctypes
import gc
import inspect

import numpy as np
import pytest
from arrays import TorchDevice
from cases import Case, make
from dlpack_producer import Producer
from harness import POSITIONAL, check, check_forward, check_outputs, expect, forward

import pylinattn
from pylinattn.ops import OPS

ml_dtypes = pytest.importorskip("ml_dtypes")
CASE = Case("gdn", (40, 9), 1, 2, 16, 8, "f32")
NUMPY = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
NUMPY |= {"i32": np.int32, "i64": np.int64}


def numpy_inputs(case=CASE):
    return {name: x.values.astype(NUMPY[x.dtype]) for name, x in make(case).items()}


def fwd(inputs, **options):
    arrays = dict(inputs)
    positional = [arrays.pop(n) for n in POSITIONAL["gdn_fwd"]]
    return pylinattn.gdn_fwd(*positional, **arrays, **options)


@pytest.fixture(scope="module")
def plain():
    return fwd(numpy_inputs(), output_final_state=True)


def same(done, plain):
    for got, want in zip(done[:2], plain[:2]):
        check(
            np.asarray(got).tobytes() == np.asarray(want).tobytes(),
            "other bits than with NumPy arrays",
        )


# ---- NumPy


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_numpy(dtype):
    case = Case("gdn", (40, 9), 1, 2, 16, 8, dtype)
    done = fwd(numpy_inputs(case), output_final_state=True)
    check(type(done.o) is np.ndarray and done.o.dtype == NUMPY[dtype], f"o is {type(done.o)}")
    check_outputs(done.o.astype(np.float64), expect("gdn_fwd", make(case)).o, dtype, case.spans)


def test_numpy_read_only(plain):
    inputs = numpy_inputs()
    for array in inputs.values():
        array.flags.writeable = False
    same(fwd(inputs, output_final_state=True), plain)
    o = np.zeros_like(inputs["v"])
    o.flags.writeable = False
    with pytest.raises(ValueError, match=r"\bo\b.*read-only"):
        fwd(inputs, o=o)
    frozen = numpy_inputs()["initial_state"]
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"final_state.*read-only"):
        fwd(inputs | {"initial_state": frozen}, final_state=frozen)


def test_numpy_odd_strides(plain):
    """Negative strides, byte offsets, and size-1 axes whose strides mean nothing."""
    inputs = numpy_inputs()
    for name in POSITIONAL["gdn_fwd"]:
        x = inputs[name]
        backwards = x[:, ::-1].copy()[:, ::-1]
        check(any(s < 0 for s in backwards.strides), "the view was copied")
        same(fwd(inputs | {name: backwards}, output_final_state=True), plain)
        raw = np.zeros(x.nbytes + 64, np.uint8)
        shifted = raw[52 : 52 + x.nbytes].view(x.dtype).reshape(x.shape)
        shifted[...] = x
        same(fwd(inputs | {name: shifted}, output_final_state=True), plain)
        odd = np.lib.stride_tricks.as_strided(x, x.shape, (24, *x.strides[1:]))  # B = 1
        same(fwd(inputs | {name: odd}, output_final_state=True), plain)


def test_numpy_subclasses_and_structs(plain, tmp_path):
    inputs = numpy_inputs()
    np.save(tmp_path / "q.npy", inputs["q"])
    mapped = np.load(tmp_path / "q.npy", mmap_mode="r")
    done = fwd(inputs | {"q": mapped}, output_final_state=True)
    same(done, plain)
    check(type(done.o) is np.ndarray, f"o of a memory map is {type(done.o)}")
    for name in ("q", "v"):
        masked = np.ma.masked_less(inputs[name], 0)
        with pytest.raises(TypeError, match=rf"\b{name}\b.*mask"):
            fwd(inputs | {name: masked})
        same(fwd(inputs | {name: masked.data}, output_final_state=True), plain)
    record = np.zeros(inputs["g"].shape, [("g", np.float32), ("beta", np.float32), ("x", np.int16)])
    record["g"] = inputs["g"]
    with pytest.raises(
        ValueError, match=r"\bg\b.*stride"
    ):  # 10 bytes apart: no whole number of elements
        fwd(inputs | {"g": record["g"]})


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.int32, np.complex64, np.bool_, np.uint16, ">f4", object, "V2"),
        np.dtype(ml_dtypes.bfloat16).newbyteorder(),
    ],
)
def test_dtypes_that_are_refused(dtype):
    inputs = numpy_inputs()
    wrong = np.zeros(inputs["g"].shape, dtype)
    with pytest.raises(TypeError, match=r"\bg\b") as error:
        fwd(inputs | {"g": wrong})
    check(isinstance(error.value, pylinattn.LinattnError), "not a LinattnError")


@pytest.mark.parametrize(
    "wrong", [None, 3.0, [[1.0]], "q", object()], ids=lambda x: type(x).__name__
)
def test_things_that_are_no_arrays(wrong):
    inputs = numpy_inputs()
    for name in ("q", "k", "beta"):
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b") as error:
            fwd(inputs | {name: wrong})
        check(
            isinstance(error.value, pylinattn.LinattnError),
            f"{type(error.value)} is not a LinattnError",
        )


def small_call(op):
    """What an op needs, as NumPy arrays of no content, and what else it takes with gate "softplus"."""
    family, N, T, H, HV, K, V = op[:3], 2, 3, 1, 2, 4, 5
    gates = (HV, K) if family == "kda" else (HV,)
    key, value, state = (N, T, H, K), (N, T, HV, V), (N, HV, K, V)
    shapes = dict(q=key, k=key, v=value, g=(N, T, *gates), beta=(N, T, HV), state=state, d_o=value)
    shapes |= dict(initial_state=state, d_final_state=state, o=value, dq=key, dg=(N, T, *gates))
    shapes |= dict(u=value, kept_k=key, kept_u=value, states=(1, *state), final_state=state)
    rank = (1,) if op == "segment_merge" else ()
    shapes |= dict(M=(*rank, N, HV, K, K), h=(*rank, *state))
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    arrays |= {name: np.arange(N) for name in ("accepted", "read_indices", "write_indices")}
    gate = dict(A_log=np.zeros(HV, np.float32), dt_bias=np.zeros(gates, np.float32))
    parameters = inspect.signature(OPS[op].function).parameters
    needed = {n: arrays[n] for n, p in parameters.items() if p.default is p.empty}
    return needed, [n for n in (*arrays, *gate) if n in parameters], gate | {"gate": "softplus"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("op", OPS)
def test_things_that_are_no_arrays_in_any_place(op):
    """Each array of each op, with NumPy and with torch: an error of ours that names it."""
    torch = pytest.importorskip("torch")
    needed, names, gate = small_call(op)
    sparse, nested = torch.zeros(2, 2).to_sparse(), torch.nested.nested_tensor([torch.zeros(2)] * 2)
    wrong = [None, 3.0, "x", [1.0], object(), np.array(["a"]), memoryview(b"x"), sparse, nested]
    for library in (np.asarray, torch.from_numpy):
        for name in names:
            given = needed | (gate if name in ("A_log", "dt_bias") else {})
            given = {n: library(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
            for x in wrong if name in needed else wrong[1:]:
                with pytest.raises(pylinattn.LinattnError, match=rf"\b{name}\b"):
                    OPS[op].function(**(given | {name: x}))


def test_wrong_options_name_themselves():
    inputs = numpy_inputs()
    for option, wrong in (
        ("gate", "sigmoid"),
        ("beta_form", "logit"),
        ("save", "all"),
        ("splits", "many"),
        ("splits", -2),
        ("checkpoint_every", 63),
        ("scale", "big"),
        ("scale", "0.5"),
        ("scale", 10**400),
        ("scale", 0.0),
        ("lower_bound", 2.0),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"\b{option}\b") as error:
            fwd(inputs, **{option: wrong})
        check(isinstance(error.value, pylinattn.LinattnError), f"{option}: {type(error.value)}")
    with pytest.raises(TypeError):
        fwd(inputs, no_such_option=1)


@pytest.mark.parametrize("shape", [(), (1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)], ids=len)
def test_any_number_of_axes(shape):
    """0 to 6 axes, through NumPy's attributes and through DLPack."""
    for wrong in (np.zeros(shape, np.float32), Producer(np.zeros(shape, np.float32))):
        with pytest.raises((TypeError, ValueError), match=r"\bg\b") as error:
            fwd(numpy_inputs() | {"g": wrong}, o=np.zeros((1, 49, 2, 8), np.float32))
        check(isinstance(error.value, pylinattn.LinattnError), f"{type(error.value)}")


def test_supports_answers_for_one_call():
    """The checks of the call itself, with the reason it would give, and nothing written."""
    inputs = numpy_inputs()
    positional = [inputs.pop(n) for n in POSITIONAL["gdn_fwd"]]
    o = np.full((1, 49, 2, 8), 7.0, np.float32)
    yes = pylinattn.supports("gdn_fwd", *positional, **inputs, o=o, qk_l2norm=True)
    check(bool(yes) and not yes.reason, f"{yes!r}")
    for wrong, word in (
        ({"gate": "softplus"}, "A_log"),
        ({"checkpoint_every": 5}, "checkpoint_every"),
    ):
        no = pylinattn.supports("gdn_fwd", *positional, **inputs, o=o, **wrong)
        check(not no and word in no.reason, f"{no!r}")
        with pytest.raises(ValueError, match=word) as error:
            pylinattn.gdn_fwd(*positional, **inputs, o=o, **wrong)
        check(str(error.value) == no.reason, f"{no.reason} before, {error.value} in the call")
    check((o == 7.0).all(), "supports wrote o")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("K", "8"), ("K", 8.0), ("K", 2**70), ("V", None), ("device", f"cuda:{2**40}"), ("op", [])],
    ids=str,
)
def test_supports_names_what_is_wrong(name, wrong):
    question = dict(op="gdn_fwd", device="cpu", dtype="f32", K=8, V=8) | {name: wrong}
    if wrong is None:  # as K
        check(bool(pylinattn.supports(**question)), "V = None is refused")
        return
    with pytest.raises(pylinattn.LinattnError, match=rf"\b{name}\b"):
        pylinattn.supports(**question)


def test_errors_are_builtin_exceptions_too():
    for name, builtin in (
        ("LinattnValueError", ValueError),
        ("LinattnTypeError", TypeError),
        ("LinattnUnsupportedError", NotImplementedError),
        ("LinattnRuntimeError", RuntimeError),
    ):
        check(issubclass(getattr(pylinattn, name), (pylinattn.LinattnError,)), name)
        check(issubclass(getattr(pylinattn, name), builtin), name)
    with pytest.raises(NotImplementedError, match="splits"):
        fwd(numpy_inputs(), splits=4)


# ---- DLPack


@pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "old"])
@pytest.mark.parametrize("accepts_max_version", [True, False])
def test_dlpack_producers(plain, versioned, accepts_max_version):
    """Capsules of either kind, from libraries that know max_version and that do not; outputs in the caller's buffers."""
    options = dict(versioned=versioned, accepts_max_version=accepts_max_version)
    inputs = {name: Producer(x, **options) for name, x in numpy_inputs().items()}
    o, state = np.full_like(plain.o, np.nan), np.full_like(plain.final_state, np.nan)
    fwd(inputs, o=Producer(o, **options), final_state=Producer(state, **options))
    same((o, state), plain)
    del inputs
    gc.collect()
    check(Producer.alive == 0, f"{Producer.alive} capsules were never given back")


def test_dlpack_details(plain):
    """No strides, size-1 axes with senseless strides, byte offsets, bfloat16 by its code."""
    inputs = numpy_inputs()
    for name in POSITIONAL["gdn_fwd"]:
        for odd in (dict(strides=None), dict(byte_offset=16), dict(strides_of_ones=7777)):
            done = fwd(inputs | {name: Producer(inputs[name], **odd)}, o=np.zeros_like(plain.o))
            check(done.o.tobytes() == plain.o.tobytes(), f"{name} with {odd} gives other bits")
    empty = Producer(inputs["v"][:, :0], strides_of_ones=-3)
    none = {n: inputs[n][:, :0] for n in POSITIONAL["gdn_fwd"]} | {"v": empty}
    check(fwd(none, o=np.zeros((1, 0, 2, 8), np.float32)).o.shape == (1, 0, 2, 8), "T = 0")
    gates = inputs["g"].astype(ml_dtypes.bfloat16)
    got = fwd(inputs | {"g": Producer(gates.view(np.uint16), code=4)}, o=np.zeros_like(plain.o))
    want = fwd(inputs | {"g": gates})
    check(got.o.tobytes() == want.o.tobytes(), "bfloat16 by DLPack differs from bfloat16 by NumPy")


@pytest.mark.parametrize(
    ("odd", "error"),
    [
        (dict(code=5), "dtype"),
        (dict(code=0), "i32"),
        (dict(lanes=2), "lanes"),
        (dict(bits=8, code=7), "dtype"),
        (dict(device=(7, 0)), "device"),
        (dict(device=(2, 0)), "CUDA|device"),
        (dict(major=2), "2"),
    ],
    ids=lambda x: str(x),
)
def test_dlpack_that_is_refused(odd, error):
    """Unsupported dtype, device or version: TypeError that names the argument, nothing written, nothing leaked."""
    inputs = numpy_inputs()
    for name in ("g", "q"):
        with pytest.raises(TypeError, match=error) as caught:
            fwd(inputs | {name: Producer(inputs[name], **odd)}, o=np.zeros_like(inputs["v"]))
        check(name in str(caught.value), f"{caught.value} does not name {name}")
        check(isinstance(caught.value, pylinattn.LinattnError), f"{type(caught.value)}")
    del caught
    gc.collect()
    check(Producer.alive == 0, f"{Producer.alive} capsules were never given back")


@pytest.mark.parametrize("flag", [1, 2], ids=["read_only", "copied"])
def test_dlpack_outputs_that_would_be_lost(plain, flag):
    inputs = numpy_inputs()
    o = np.full_like(plain.o, 7.0)
    same(
        fwd({n: Producer(x, flags=flag) for n, x in inputs.items()}, o=o, output_final_state=False),
        (plain.o,),
    )
    o[...] = 7.0
    with pytest.raises(ValueError, match=r"\bo\b.*read-only"):
        fwd(inputs, o=Producer(o, flags=flag))
    check((o == 7.0).all(), "a refused call wrote o")


def test_dlpack_producer_that_raises():
    class Stubborn:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("not today")

    with pytest.raises(TypeError, match=r"\bk\b.*not today"):
        fwd(numpy_inputs() | {"k": Stubborn()})


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("library", ["dlpack", "numpy", "torch"])
def test_ten_thousand_imports_keep_memory_flat(library):
    inputs = numpy_inputs(Case("gdn", (3,), 1, 1, 4, 4, "f32"))
    o = np.zeros_like(inputs["v"])
    if library == "torch":
        torch = pytest.importorskip("torch")
        inputs, o = {n: torch.from_numpy(x) for n, x in inputs.items()}, torch.from_numpy(o)

    def rounds(count):
        for _ in range(count):
            if library == "dlpack":
                fwd({n: Producer(x) for n, x in inputs.items()}, o=Producer(o))
            else:
                fwd(inputs, o=o)
        gc.collect()

    rounds(300)
    before = resident_bytes()
    rounds(1300)  # eight arrays each
    grown = resident_bytes() - before
    check(grown < 4 << 20, f"{grown} bytes more after 10,000 imports")
    check(Producer.alive == 0, f"{Producer.alive} capsules were never given back")


def test_ctypes_pointers_survive(plain):
    """The producer is dropped right after the call: its memory is not looked at any more."""
    inputs = numpy_inputs()
    done = fwd({n: x.copy() for n, x in inputs.items()}, output_final_state=True)
    gc.collect()
    scribble = [ctypes.create_string_buffer(b"\xff" * x.nbytes) for x in inputs.values()]
    same(done, plain)
    del scribble


# ---- torch


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_torch_on_the_cpu(family, dtype):
    pytest.importorskip("torch")
    case = Case(family, (40, 9, 64), 1, 2, 32, 16, dtype)
    check_forward(case, forward(TorchDevice("cpu"), case))


def torch_inputs():
    torch = pytest.importorskip("torch")
    return torch, {n: torch.from_numpy(x) for n, x in numpy_inputs().items()}


def test_torch_outputs_are_torch(plain):
    torch, inputs = torch_inputs()
    done = fwd(inputs, output_final_state=True)
    check(type(done.o) is torch.Tensor and done.o.device.type == "cpu", "o is no torch tensor")
    same([x.numpy() for x in done[:2]], plain)
    base = torch.zeros(1, 49, 6, 8)
    fwd(inputs, o=base[:, :, 2:4])  # a slice of a larger tensor
    check(
        base[:, :, 2:4].contiguous().numpy().tobytes() == plain.o.tobytes(),
        "a sliced output differs",
    )
    check(not base[:, :, :2].any() and not base[:, :, 4:].any(), "written beside a sliced output")


def test_big_torch_outputs():
    """Above 4 MiB the memory of a new output is advised to be huge pages; the numbers are the same."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 700, 4, 8), np.float32) for _ in range(2))
    v, beta = (
        rng.standard_normal((1, 700, 16, 128), np.float32),
        rng.random((1, 700, 16), np.float32),
    )
    inputs = (q, k, v, -beta, beta)
    o = pylinattn.gdn_fwd(*map(torch.from_numpy, inputs), qk_l2norm=True)[0]
    assert o.nbytes > 1 << 22
    np.testing.assert_array_equal(o.numpy(), pylinattn.gdn_fwd(*inputs, qk_l2norm=True)[0])


def test_torch_tensors_that_are_refused(plain):
    torch, inputs = torch_inputs()
    with pytest.raises(TypeError, match=r"\bq\b.*grad"):
        fwd(inputs | {"q": inputs["q"].clone().requires_grad_()})
    with torch.no_grad():
        done = fwd(inputs | {"q": inputs["q"].clone().requires_grad_()})
    check(done.o.numpy().tobytes() == plain.o.tobytes(), "no_grad differs")
    negated = (
        torch.complex(inputs["g"], -inputs["g"]).conj().imag
    )  # a view that only remembers its sign
    check(negated.is_neg(), "the view is not lazy")
    with pytest.raises(TypeError, match=r"\bg\b"):
        fwd(inputs | {"g": negated})
    for wrong in (
        inputs["g"].to_sparse(),
        inputs["g"].to("meta"),
        inputs["g"].bool(),
        inputs["g"].to(torch.complex64),
    ):
        with pytest.raises(TypeError, match=r"\bg\b") as error:
            fwd(inputs | {"g": wrong})
        check(isinstance(error.value, pylinattn.LinattnError), f"{type(error.value)}")


def test_torch_parameters_and_numpy_together(plain):
    """Libraries mixed in one call, on one device: outputs are of the first array's."""
    torch, inputs = torch_inputs()
    arrays = numpy_inputs()
    with torch.no_grad():
        mixed = inputs | {
            "k": arrays["k"],
            "q": torch.nn.Parameter(inputs["q"]),
            "g": Producer(arrays["g"]),
        }
        done = fwd(mixed, output_final_state=True)
    check(type(done.o) is torch.Tensor, f"o is {type(done.o)}")
    same([x.numpy() for x in done[:2]], plain)
    done = fwd(inputs | {"q": arrays["q"]}, output_final_state=True)
    check(type(done.o) is np.ndarray, f"o is {type(done.o)}")
    same(done, plain)


def test_torch_inference_mode_and_expanded(plain):
    torch, inputs = torch_inputs()
    with torch.inference_mode():
        check(fwd(inputs).o.numpy().tobytes() == plain.o.tobytes(), "inference mode differs")
    one = inputs["beta"][:, :1].expand(inputs["beta"].shape)  # stride 0
    got, want = fwd(inputs | {"beta": one}), fwd(inputs | {"beta": one.contiguous()})
    check(torch.equal(got.o, want.o), "an expanded beta differs")
    with pytest.raises(ValueError, match=r"\bo\b"):
        fwd(inputs, o=torch.zeros(1, 1, 2, 8).expand(1, 49, 2, 8))


# ---- JAX


def test_jax(plain):
    jax = pytest.importorskip("jax")
    inputs = {n: jax.numpy.asarray(x) for n, x in numpy_inputs().items()}
    done = fwd(inputs, output_final_state=True)
    check(
        isinstance(done.o, jax.Array) and isinstance(done.final_state, jax.Array),
        "outputs are no jax arrays",
    )
    same(done, plain)
    brains = {
        n: x.astype(jax.numpy.bfloat16) if n in ("q", "k", "v") else x for n, x in inputs.items()
    }
    check(fwd(brains).o.dtype == jax.numpy.bfloat16, "bf16 in, something else out")
    with pytest.raises(ValueError, match=r"\bo\b.*immutable|read-only"):
        fwd(inputs, o=jax.numpy.zeros(plain.o.shape))
    with pytest.raises(TypeError, match=r"\bq\b.*traced|jit"):
        jax.jit(lambda q: fwd(inputs | {"q": q}).o)(inputs["q"])


def test_the_package_imports_no_array_library(watchdog):
    """Only NumPy arrays used: torch and JAX stay unloaded."""
    watchdog(
        "import sys, numpy as np, pylinattn\n"
        "x = np.ones((1, 3, 1, 4), np.float32); g = np.zeros((1, 3, 1), np.float32)\n"
        "pylinattn.gdn_fwd(x, x, x, g, g)\n"
        "loaded = {'torch', 'jax', 'cupy', 'ml_dtypes'} & set(sys.modules)\n"
        "if loaded: raise SystemExit(f'loaded: {loaded}')\n"
    )

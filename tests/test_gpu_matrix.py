"""Every op x library x dtype x order of states x stream x device on a GPU: the bits of a plain call on torch tensors."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import threading

import header
import pytest
from cases import Case
from gpu_tools import CUDA, same_bits, tensors
from harness import POSITIONAL, check

import pylinattn
from pylinattn._lib import library_path

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
OPS = [f"{family}_{kind}" for family in ("gdn", "kda") for kind in ("fwd", "decode", "verify", "bwd", "segment")]  # fmt: skip
GATED = (("qk_l2norm", True), ("beta_form", "logits"), ("gate", "softplus"))


def arguments(op, dtype, order, device=CUDA):
    """Positional arrays and keywords of a call, torch tensors; states in the order asked for."""
    family, kind = op.split("_")
    few = kind in ("decode", "verify")
    lengths = (3, 3, 3) if few else (70, 5, 66)
    case = Case(family, lengths, 2, 4, 64, 64, dtype, options=GATED, packed=not few)
    x = tensors(case, device=device)
    state = x.pop("initial_state")
    if order == "v_first":
        state = state.transpose(2, 3).contiguous().transpose(2, 3)
    names = list(POSITIONAL[f"{family}_fwd"])
    positional, rest = [x.pop(n) for n in names], x
    if kind in ("decode", "verify"):
        positional.append(state)
    elif kind == "bwd":
        generator = torch.Generator(device=device).manual_seed(5)
        d_o = torch.randn(positional[2].shape, device=device, generator=generator)
        positional.append(d_o.to(positional[2].dtype))
        rest |= {"initial_state": state, "d_final_state": state * 2}
    elif kind == "fwd":
        rest |= {"initial_state": state, "output_final_state": True}
    return positional, rest | case.keywords


def call(op, positional, rest):
    """The arrays that come out, a pool that was updated in place among them."""
    done = getattr(pylinattn, op)(*positional, **rest)
    done = list(done) if isinstance(done, tuple) else [done]
    return [x for x in done if x is not None] + ([positional[5]] if op.endswith("decode") else [])


def lend(library, x):
    """An array of the library with the memory of a torch tensor; anything else as it is."""
    if not isinstance(x, torch.Tensor) or library == "torch":
        return x
    if library == "cupy":
        return pytest.importorskip("cupy").from_dlpack(x)
    return pytest.importorskip("jax").dlpack.from_dlpack(x.contiguous())


def give_back(x):
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


def equal(op, got, want, how):
    check(len(got) == len(want), f"{op}: {len(got)} results, not {len(want)}, {how}")
    for number, (a, b) in enumerate(zip(got, want)):
        check(same_bits(give_back(a).to(b.device), b), f"{op}: result {number}: other bits {how}")


@pytest.mark.parametrize("order", ["k_first", "v_first"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("library", ["torch", "cupy", "jax"])
@pytest.mark.parametrize("op", OPS)
def test_libraries_and_streams(gpu, op, library, dtype, order):
    if library == "jax":
        jax = pytest.importorskip("jax")
        if jax.default_backend() != "gpu":
            pytest.skip("this jax sees no GPU")
        if order == "v_first" or op.endswith("decode"):
            pytest.skip("a JAX array is row-major, and none that was given is written")
    want = call(op, *arguments(op, dtype, order))
    torch.cuda.synchronize()
    for side in (False, True):
        positional, rest = arguments(op, dtype, order)
        try:
            lent = [lend(library, x) for x in positional]
            named = {n: lend(library, x) for n, x in rest.items()}
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            pytest.skip(f"{library} does not take a {dtype} tensor: {error}")
        stream = contextlib.nullcontext()
        if side and library == "cupy":
            stream = pytest.importorskip("cupy").cuda.Stream(non_blocking=True)
        elif side and library == "torch":
            stream = torch.cuda.stream(torch.cuda.Stream())
        torch.cuda.synchronize()
        with stream:
            got = call(op, lent, named)
        torch.cuda.synchronize()
        if library == "torch" or not (op.endswith("decode") and library == "jax"):
            equal(op, got, want, f"with {library} on a {'side' if side else 'default'} stream")


@pytest.mark.parametrize("op", OPS)
def test_another_device_than_the_current_one(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU here")
    want = call(op, *arguments(op, "bf16", "k_first"))
    torch.cuda.synchronize()
    for current in (0, 1):
        with torch.cuda.device(current):
            got = call(op, *arguments(op, "bf16", "k_first", "cuda:1"))
            check(torch.cuda.current_device() == current, "the current device was changed")
        for x in got:
            check(x.device.index == 1, f"a result is on {x.device}")
        torch.cuda.synchronize(1)
        equal(op, got, want, f"on device 1 while {current} is current")


@pytest.mark.parametrize("op", OPS)
def test_two_threads_two_streams_two_inputs(op):
    """Each thread on a stream of its own, again and again: the bits of the calls alone."""
    inputs = {
        dtype: lambda dtype=dtype: arguments(op, dtype, "k_first") for dtype in ("bf16", "f16")
    }
    want = {dtype: call(op, *make()) for dtype, make in inputs.items()}
    torch.cuda.synchronize()
    faults = []

    def work(dtype):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    got = call(op, *inputs[dtype]())
                    torch.cuda.current_stream().synchronize()
                    equal(op, got, want[dtype], "beside another thread")
        except BaseException as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(not faults, str(faults))


EXAMPLE = header.REPOSITORY / "examples" / "gpu" / "c_gpu_example.c"


@pytest.mark.skipif(not EXAMPLE.exists(), reason="no source tree beside the tests")
def test_c_program(gpu, tmp_path):
    """From C99 on a stream of its own: the numbers of the CPU."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    toolkit = pathlib.Path(nvcc).resolve().parent.parent
    if not (toolkit / "include" / "cuda_runtime_api.h").exists() or not shutil.which("cc"):
        pytest.skip("no CUDA headers or no C compiler")
    program, library = tmp_path / "example", pathlib.Path(library_path)
    build = ["cc", "-std=c99", "-O2", EXAMPLE, "-o", program, library]
    build += [f"-I{header.REPOSITORY / 'cuda' / 'include'}", f"-isystem{toolkit / 'include'}"]
    build += [f"-L{toolkit / 'lib64'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-lm"]
    subprocess.run([*map(str, build), f"-Wl,-rpath,{library.parent}"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    check(done.returncode == 0 and "cuda/" in done.stdout, done.stdout + done.stderr)


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="the device's free memory is everybody's"
)
def test_ten_thousand_calls_keep_memory_flat():
    import resource

    positional, rest = arguments("gdn_decode", "bf16", "k_first")
    for number in range(11_000):
        pylinattn.gdn_decode(*positional, **rest)
        if number == 1_000:
            torch.cuda.synchronize()
            device = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
            host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.cuda.synchronize()
    check(torch.cuda.memory_allocated() == device[0], "torch holds more device memory")
    check(device[1] - torch.cuda.mem_get_info()[0] < 1 << 24, "the device has less memory left")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host
    check(grown < 8 * 1024, f"the process grew by {grown} KB")

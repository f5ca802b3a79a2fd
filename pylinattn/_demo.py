"""python -m pylinattn demo: prefill and decode of both ops, checked and timed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from . import LinattnUnsupportedError, last_path, reference, supports
from ._support import best_device
from .ops import OPS

HEADS_CHECKED = (0, 13, 31)
SEQUENCES_CHECKED = (0, 7)


class Case(NamedTuple):
    op: str
    B: int
    T: int
    H: int
    HV: int
    D: int  # K = V

    def __str__(self) -> str:
        return f"B {self.B}, T {self.T}, H {self.H}, HV {self.HV}, K = V = {self.D}"


class Machine:
    """Where the demo runs. This one: NumPy on the CPU."""

    dtype, tolerance = "f32", 1e-5
    decode_sequences = 16
    copy_bytes = 1 << 27

    def __init__(self, device: str) -> None:
        self.device = device

    def array(self, x: Any) -> Any:
        return x

    def in_dtype(self, x: Any) -> Any:
        """q, k or v in the dtype of the demo."""
        return x

    def synchronize(self) -> None:
        pass

    def copy(self) -> Callable[[], Any]:
        """A copy of copy_bytes, by all cores."""
        source = np.ones(self.copy_bytes, np.uint8)
        target = np.zeros_like(source)
        cores = len(os.sched_getaffinity(0))
        parts = [np.array_split(x, cores) for x in (target, source)]
        pool = ThreadPoolExecutor(cores)
        return lambda: list(pool.map(np.copyto, *parts))


class TorchMachine(Machine):
    dtype, tolerance = "bf16", 5e-3
    decode_sequences = 128
    copy_bytes = 1 << 30

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.torch = importlib.import_module("torch")

    def array(self, x: Any) -> Any:
        return self.torch.from_numpy(x).to(self.device)

    def in_dtype(self, x: Any) -> Any:
        return self.array(x).to(self.torch.bfloat16)

    def synchronize(self) -> None:
        self.torch.cuda.synchronize(self.device)

    def copy(self) -> Callable[[], Any]:
        source = self.torch.ones(self.copy_bytes, dtype=self.torch.uint8, device=self.device)
        target = self.torch.zeros_like(source)
        return lambda: target.copy_(source)


class CupyMachine(Machine):
    dtype, tolerance = "f16", 1e-3
    decode_sequences = 128
    copy_bytes = 1 << 30

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.cupy = importlib.import_module("cupy")
        self.cupy.cuda.Device(int(device.partition(":")[2] or 0)).use()

    def array(self, x: Any) -> Any:
        return self.cupy.asarray(x)

    def in_dtype(self, x: Any) -> Any:
        return self.cupy.asarray(x.astype(np.float16))

    def synchronize(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def copy(self) -> Callable[[], Any]:
        source = self.cupy.ones(self.copy_bytes, np.uint8)
        target = self.cupy.zeros_like(source)
        return lambda: self.cupy.copyto(target, source)


def _machine(device: str | None) -> Machine:
    if device is None:
        device = best_device()
    else:
        supported = supports("gdn_fwd", device=device, dtype="bf16", K=128)
        if not supported:
            raise LinattnUnsupportedError(supported.reason)
    if device == "cpu":
        return Machine(device)
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch and importlib.import_module("torch").cuda.is_available():
        return TorchMachine(device)
    if importlib.util.find_spec("cupy") is not None:
        return CupyMachine(device)
    print(f"{device} is there, but neither CuPy nor a torch with CUDA is; running on the CPU.\n")
    return Machine("cpu")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _seconds(machine: Machine, call: Callable[[], Any], budget: float = 0.4) -> float:
    """Best of several rounds after one to warm up, each long enough to be timed."""
    call()
    machine.synchronize()
    best, calls, spent = float("inf"), 1, 0.0
    while spent < budget:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        machine.synchronize()
        elapsed = time.perf_counter() - start
        best, spent = min(best, elapsed / calls), spent + elapsed
        calls = max(1, min(100, int(0.02 / best)))
    return best


def _inputs(case: Case, rng: np.random.Generator) -> list[Any]:
    """q, k, v, g, beta and a state in the range of a trained model."""

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    B, T, H, HV, D = case[1:]
    q, k = normal(B, T, H, D), normal(B, T, H, D)
    k /= np.sqrt((k * k).sum(-1, keepdims=True))
    g = -0.1 * np.abs(normal(B, T, HV, D) if case.op.startswith("kda") else normal(B, T, HV))
    beta = rng.random((B, T, HV), np.float32)
    return [q, k, normal(B, T, HV, D), g, beta, normal(B, HV, D, D)]


def _error(x: Any, expected: Any) -> float:
    """rms(x - expected) / rms(expected)"""
    difference = reference.as_float64(x) - expected
    return float(np.sqrt((difference**2).mean() / (expected**2).mean()))


def _run_case(case: Case, machine: Machine, copy_rate: float) -> tuple[list[str], bool]:
    host = _inputs(case, np.random.default_rng(0))
    q, k, v = (machine.in_dtype(x) for x in host[:3])
    g, beta, state = (machine.array(x) for x in host[3:])
    # the reference reads what the op reads, rounding included
    inputs = (q, k, v, g, beta)
    function = OPS[case.op].function
    heads = [h for h in HEADS_CHECKED if h < case.HV]
    rows = [n for n in SEQUENCES_CHECKED if n < case.B]
    sample = {"heads": heads, "sequences": rows}
    oracle = getattr(reference, case.op)
    tensors = [*inputs, state]
    if case.op.endswith("fwd"):
        expected = oracle(*inputs, initial_state=state, **sample)
        o, after = function(*inputs, initial_state=state, output_final_state=True)
        state_expected = expected.final_state
        final = after + 0  # an array of its own, to be written again and again

        def call() -> None:
            function(*inputs, initial_state=state, o=o, final_state=final)

    else:
        expected = oracle(*inputs, state, **sample)
        o, after = function(*inputs, state), state
        state_expected = expected.state
        after = state + 0

        def call() -> None:
            function(*inputs, state, o=o)

    path = last_path()
    error_o = _error(o[rows][:, :, heads], expected.o[rows])
    error_state = _error(after[rows][:, heads], state_expected[rows])
    seconds = _seconds(machine, call)
    moved = sum(x.nbytes for x in (*tensors, state, o))  # the state is read and written
    good = max(error_o, error_state) <= machine.tolerance
    return [
        case.op,
        str(case),
        machine.device,
        machine.dtype,
        path,
        f"{seconds * 1e3:.3f}",
        f"{error_o:.1e}",
        f"{error_state:.1e}" + ("" if good else " WRONG"),
        f"{moved / seconds / copy_rate:.0%}",
    ], good


def run(device: str | None) -> int:
    """Prints the table; 1 where a result is wrong."""
    machine = _machine(device)
    N = machine.decode_sequences
    cases = [
        Case("gdn_fwd", 1, 2048, 16, 32, 128),
        Case("kda_fwd", 1, 2048, 32, 32, 128),
        Case("gdn_decode", N, 1, 16, 32, 128),
        Case("kda_decode", N, 1, 32, 32, 128),
    ]
    _progress("measuring a copy ...")
    copy_rate = 2 * machine.copy_bytes / _seconds(machine, machine.copy())
    table = [
        ["op", "case", "device", "dtype", "path", "ms", "error of o", "of the state", "bandwidth"]
    ]
    all_good = True
    for number, case in enumerate(cases):
        _progress(f"{case.op} ({number + 1} of {len(cases)}) ...")
        row, good = _run_case(case, machine, copy_rate)
        table.append(row)
        all_good &= good
    _progress("")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    print(
        f"\nError: rms(x - ref) / rms(ref) against the float64 loop, on heads "
        f"{', '.join(map(str, HEADS_CHECKED))}; at most {machine.tolerance:g} is right.\n"
        f"Bandwidth: bytes that must move, as a share of what a copy moves here "
        f"({copy_rate / 1e9:.0f} GB/s); above 100 %\nwhere a cache holds the states."
    )
    return 0 if all_good else 1

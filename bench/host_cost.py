"""Host time of one Python call, taken apart: python bench/host_cost.py [--device cuda]

On the CPU, calls of one token and one small head, so that nearly all of the time is what a call costs on the host; on a GPU,
decode calls whose kernels take less time than the call. Each part is timed on its own; "rest" is the whole less the parts:
argument passing, options, the result. "ask" are questions to torch that its exchange API does not answer: a view that is
negated lazily, a gradient to record. "launch" is an empty kernel with as many threads and bytes of parameters, launched
through cudaLaunchKernelExC; "c" is the library's call less that. Writes bench/results/host_cost_{cpu,h200}.json and prints a table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cffi
import numpy as np
import torch
from source_tree import provenance, write_result

import pylinattn
from pylinattn import _call, _exchange

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PARTS = ("borrow", "ask", "stream", "allocate", "pack", "workspace", "c", "launch", "rest")
PARAMETER_BYTES, THREADS = 1400, 384  # of a decode kernel, about
EMPTY_PTX = f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry empty(.param .align 8 .b8 p[{PARAMETER_BYTES}]) {{ ret; }}
"""


class Dlpack:
    """An array that offers nothing but DLPack."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


def microseconds(call: Callable[[], Any], calls: int = 40) -> float:
    """The best of many rounds, each shorter than a time slice of a busy machine and than a GPU's queue."""
    gpu = torch.cuda.is_initialized()
    idle: Any = torch.cuda.synchronize if gpu else "pass"
    rounds = 100 if gpu else 400
    return min(timeit.repeat(call, idle, number=calls, repeat=rounds)) / calls * 1e6


def empty_launch() -> Callable[[], Any]:
    """A launch of a kernel that does nothing, by the CUDA runtime that torch has loaded."""
    ffi = cffi.FFI()
    ffi.cdef("""
        typedef struct { unsigned grid[3], block[3]; size_t shared; void *stream, *attributes; unsigned count; } config;
        int cudaLibraryLoadData(void **, const char *, void *, void *, unsigned, void *, void *, unsigned);
        int cudaLibraryGetKernel(void **, void *, const char *);
        int cudaLaunchKernelExC(const config *, const void *, void **);
    """)
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/\S*libcudart\.so\S*", maps)
    if not found:
        raise RuntimeError("torch has loaded no libcudart")
    runtime = ffi.dlopen(found[0])
    null, library, kernel = ffi.NULL, ffi.new("void **"), ffi.new("void **")
    ptx = ffi.new("char[]", EMPTY_PTX.encode())
    parameters = ffi.new(f"char[{PARAMETER_BYTES}]")
    arguments = ffi.new("void *[]", [parameters])
    stream = ffi.cast("void *", torch.cuda.current_stream().cuda_stream)
    launch = ffi.new("config *", ((1, 1, 1), (THREADS, 1, 1), 0, stream, null, 0))

    def checked(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")

    checked(runtime.cudaLibraryLoadData(library, ptx, null, null, 0, null, null, 0))
    checked(runtime.cudaLibraryGetKernel(kernel, library[0], b"empty"))
    run, function, keep = runtime.cudaLaunchKernelExC, kernel[0], (library, parameters)
    checked(run(launch, function, arguments))

    def call(_: Any = keep) -> Any:
        return run(launch, function, arguments)

    return call


def arguments(library: str, device: str) -> dict[str, Any]:
    """Every argument of a call with the gate activated inside and a pool of states: one head and K = V = 4, or 32 and 128."""
    heads, K, dtype = (32, 128, torch.bfloat16) if device == "cuda" else (1, 4, torch.float32)
    V = K
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    given = {
        "q": normal(1, 1, heads, K),
        "k": normal(1, 1, heads, K),
        "v": normal(1, 1, heads, V),
        "g": -np.abs(normal(1, 1, heads, K)),
        "beta": normal(1, 1, heads),
        "state": np.zeros((1, heads, K, V), np.float32),
        "A_log": normal(heads),
        "dt_bias": normal(heads, K),
        "read_indices": np.zeros(1, np.int32),
        "write_indices": np.zeros(1, np.int32),
        "o": np.empty((1, 1, heads, V), np.float32),
    }

    def to_torch(x: Any, name: str) -> Any:
        y = torch.from_numpy(x).to(device)
        return y.to(dtype) if name in ("q", "k", "v", "o") else y

    if library == "torch":
        return {name: to_torch(x, name) for name, x in given.items()}
    return {name: Dlpack(x) if library == "dlpack" else x for name, x in given.items()}


class Recorded(NamedTuple):
    """A call up to the library, and its parts for a stopwatch."""

    op: _call.Op
    args: bytes
    result: Any
    parts: dict[str, Callable[[], Any]]


def recorded(call: Callable[[], Any]) -> Recorded:
    """What a call hands to the library, without the library being called."""
    seen: dict[str, Any] = {}
    run, launch, borrow = _call.Call.run, _exchange.Exchange.launch, _exchange.Exchange.borrow

    def remember(name: str, function: Any) -> Any:
        def wrapper(*given: Any) -> Any:
            seen[name] = given
            return function(*given) if function else None

        return wrapper

    _call.Call.run = remember("call", None)  # type: ignore[method-assign]
    _exchange.Exchange.launch = remember("launch", None)  # type: ignore[method-assign]
    _exchange.Exchange.borrow = remember("borrow", borrow)  # type: ignore[method-assign]
    try:
        result = call()
    finally:
        _call.Call.run = run  # type: ignore[method-assign]
        _exchange.Exchange.launch = launch  # type: ignore[method-assign]
        _exchange.Exchange.borrow = borrow  # type: ignore[method-assign]
    if "launch" in seen:
        exchange, op, key, args, arrays = seen["launch"]
        scalars = seen["borrow"][3]
        exchange.launch(op, key, args, arrays)  # so that the workspace is known
        parts = {
            "borrow": lambda: exchange.borrow(*seen["borrow"][1:]),
            "ask": lambda: exchange.any_negated(arrays) or exchange.records_gradients(),
            "pack": lambda: op.pack_scalars(op.size, *scalars, 0),
            "workspace": lambda: op.workspaces[key],
        }
        return Recorded(op, args, result, parts)
    call_, fields = seen["call"][0], seen["call"][2:]
    op = call_.op
    args = op.pack(op.size, *fields)
    parts = {
        "stream": lambda: call_._library.stream(call_.first[1].device_id),
        "pack": lambda: op.pack(op.size, *fields),
        "workspace": lambda: op.workspace_bytes(args, fields),
    }
    return Recorded(op, args, result, parts)


def measure(
    op: str, library: str, gated: bool, made: tuple[str, ...], device: str, launch_us: float
) -> dict[str, Any]:
    """One row: `made` are the outputs that the call allocates, by the names of what they look like."""
    x = arguments(library, device)
    inputs = [x[name] for name in ("q", "k", "v", "g", "beta")]
    options: dict[str, Any] = {}
    if gated:
        options |= {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "gate": "softplus"}
    if op == "kda_decode":
        inputs.append(x["state"])
        options |= {"read_indices": x["read_indices"], "write_indices": x["write_indices"]}
    else:
        options["initial_state"] = x["state"]
        if "state" in made:
            options["output_final_state"] = True
    if not made:
        options["o"] = x["o"]
    function = getattr(pylinattn, op)

    def whole() -> Any:
        return function(*inputs, **options)

    whole()
    call = recorded(whole)
    result = call.result
    outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]
    given = [*inputs, *(y for y in options.values() if hasattr(y, "__dlpack__"))]
    tensors = given + [y for y in outputs if all(y is not other for other in given)]
    exchange = _exchange.exchanges.get(type(x["q"]))
    one = _call.Call(call.op, x["q"], "q")
    v, state = one.take(x["v"], "v")[1], one.take(x["state"], "state")[1]

    def borrow() -> None:
        each = _call.Call(call.op, tensors[0], "q")
        for y in tensors[1:]:
            each.take(y, "x")

    def allocate() -> None:
        if "v" in made:
            exchange.output(x["q"], x["v"]) if exchange else one.make_like(x["v"], v)
        if "state" in made:
            exchange.like(x["state"]) if exchange else one.make_states(1, v, v, state, "empty")

    times = {name: microseconds(part) for name, part in call.parts.items()}
    if exchange:
        times["borrow"] -= times["pack"]
    else:
        times["borrow"] = microseconds(borrow)
        if device == "cuda":
            times["borrow"] -= times["stream"]
        else:
            del times["stream"]  # not asked for
    times["allocate"] = microseconds(allocate) if made else 0.0
    times["c"] = microseconds(lambda: call.op.run(call.args)) - launch_us
    times["launch"] = launch_us
    whole_us = microseconds(whole)
    times["rest"] = whole_us - sum(times.values())
    row: dict[str, Any] = {
        "op": op,
        "library": library,
        "arrays": len(tensors),
        "allocated": len(made),
        "whole_us": whole_us,
        **{f"{part}_us": times.get(part, 0.0) for part in PARTS},
    }
    return {name: round(y, 2) if isinstance(y, float) else y for name, y in row.items()}


CASES: dict[str, tuple[tuple[str, str, bool, tuple[str, ...]], ...]] = {}
CASES["cuda"] = (
    ("kda_decode", "torch", False, ("v",)),
    ("kda_decode", "torch", False, ()),
    ("kda_decode", "torch", True, ()),
)
CASES["cpu"] = (
    ("kda_decode", "torch", False, ("v",)),
    ("kda_decode", "torch", False, ()),
    ("kda_decode", "torch", True, ("v",)),
    ("kda_fwd", "torch", False, ("v", "state")),
    ("kda_fwd", "torch", True, ("v", "state")),
    ("kda_decode", "numpy", False, ("v",)),
    ("kda_fwd", "numpy", False, ("v", "state")),
    ("kda_decode", "dlpack", False, ()),
)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    out = options.out or RESULTS / f"host_cost_{'h200' if gpu else 'cpu'}.json"
    launch_us = microseconds(empty_launch()) if gpu else 0.0  # initialises CUDA
    rows = [measure(*case, options.device, launch_us) for case in CASES[options.device]]
    result = {
        "cpu": processor(),
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "torch", "cffi")},
        "library": pylinattn.__version__,
        **provenance(ROOT),
        "rows": rows,
    }
    write_result(out, result)
    print("| op | arrays of | arrays | of them allocated | whole | " + " | ".join(PARTS) + " |")
    print("|---" * (len(PARTS) + 5) + "|")
    for row in rows:
        cells = [row["op"], row["library"], row["arrays"], row["allocated"], row["whole_us"]]
        cells += [row[f"{part}_us"] for part in PARTS]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()

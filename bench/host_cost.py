"""Host time of one Python call, taken apart: python bench/host_cost.py

Calls of one token and one small head on the CPU, so that nearly all of the time is what a call costs
on the host. Each part is timed on its own; "rest" is the whole less the parts: argument passing,
options, the result. Writes bench/results/host_cost_cpu.json and prints a table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from source_tree import commit_id, tree_id

import pylinattn
from pylinattn import _call

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "host_cost_cpu.json"
PARTS = ("borrow", "allocate", "pack", "workspace", "c", "rest")


class Dlpack:
    """An array that offers nothing but DLPack."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


def microseconds(call: Callable[[], Any], rounds: int = 400, calls: int = 40) -> float:
    """The best of many rounds, each shorter than a time slice of a busy machine."""
    return min(timeit.repeat(call, number=calls, repeat=rounds)) / calls * 1e6


def arguments(library: str) -> dict[str, Any]:
    """Every argument of a call with the gate activated inside and a pool of states, K = V = 4."""
    K = V = 4
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    given = {
        "q": normal(1, 1, 1, K),
        "k": normal(1, 1, 1, K),
        "v": normal(1, 1, 1, V),
        "g": normal(1, 1, 1, K),
        "beta": normal(1, 1, 1),
        "state": np.zeros((1, 1, K, V), np.float32),
        "A_log": normal(1),
        "dt_bias": normal(1, K),
        "read_indices": np.zeros(1, np.int32),
        "write_indices": np.zeros(1, np.int32),
        "o": np.empty((1, 1, 1, V), np.float32),
    }
    wrap = {"numpy": lambda x: x, "torch": torch.from_numpy, "dlpack": Dlpack}[library]
    return {name: wrap(x) for name, x in given.items()}


def recorded(call: Callable[[], Any]) -> tuple[_call.Call, tuple[Any, ...], Any]:
    """What a call hands to the library, without the library being called, and its result."""
    seen: list[Any] = []
    run = _call.Call.run
    _call.Call.run = lambda self, _, *fields: seen.extend((self, fields))  # type: ignore
    try:
        result = call()
    finally:
        _call.Call.run = run  # type: ignore[method-assign]
    return seen[0], seen[1], result


def measure(op: str, library: str, gated: bool, made: tuple[str, ...]) -> dict[str, Any]:
    """One row: `made` are the outputs that the call allocates, by the names of what they look like."""
    x = arguments(library)
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
    c, fields, result = recorded(whole)
    outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]
    given = [*inputs, *(y for y in options.values() if hasattr(y, "__dlpack__"))]
    tensors = given + [y for y in outputs if all(y is not other for other in given)]
    args = c.op.pack(c.op.size, *fields)
    v, state = c.take(x["v"], "v")[1], c.take(x["state"], "state")[1]

    def borrow() -> None:
        call = _call.Call(c.op, tensors[0], "q")
        for y in tensors[1:]:
            call.take(y, "x")

    def allocate() -> None:
        if "v" in made:
            c.make_like(x["v"], v)
        if "state" in made:
            c.make_states(1, v, v, state, "empty")

    row: dict[str, Any] = {
        "op": op,
        "library": library,
        "arrays": len(tensors),
        "allocated": len(made),
        "whole_us": microseconds(whole),
        "borrow_us": microseconds(borrow),
        "allocate_us": microseconds(allocate) if made else 0.0,
        "pack_us": microseconds(lambda: c.op.pack(c.op.size, *fields)),
        "workspace_us": microseconds(lambda: c.op.workspace_bytes(args, fields)),
        "c_us": microseconds(lambda: c.op.run(args)),
    }
    row["rest_us"] = row["whole_us"] - sum(row[f"{part}_us"] for part in PARTS if part != "rest")
    return {name: round(y, 2) if isinstance(y, float) else y for name, y in row.items()}


CASES = (
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
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file to write")
    options = parser.parse_args()
    rows = [measure(*case) for case in CASES]
    result = {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("numpy", "torch", "cffi")},
        "library": pylinattn.__version__,
        "commit": commit_id(ROOT),
        "cuda_tree": tree_id(ROOT, "cuda"),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("| op | arrays of | arrays | of them allocated | whole | " + " | ".join(PARTS) + " |")
    print("|---" * (len(PARTS) + 5) + "|")
    for row in rows:
        cells = [row["op"], row["library"], row["arrays"], row["allocated"], row["whole_us"]]
        cells += [row[f"{part}_us"] for part in PARTS]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()

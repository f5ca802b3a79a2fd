"""Times the backward of GDN and KDA on a GPU, alone and with the forward: python bench/backward.py

Device time of graph replays with the L2 flushed, peak memory of the call beside it, and the largest difference of two calls
(none is allowed). Whether the gradients are right is what tests/test_gpu_backward.py shows. Writes
bench/results/backward_h200.json and prints a table.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from source_tree import provenance, write_result
from timing import Stopwatch

import pylinattn

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = {
    "1x8192": [8192],
    "8x1024": [1024] * 8,
    "1x32768": [32768],
    "ragged": [1, 500, 64, 2048, 1300, 0, 3000, 1279],
}
HEADS = {"gdn": ((16, 32), (4, 8), (2, 4), (16, 64)), "kda": ((8, 8),)}
KDA_LENGTHS = ("1x8192", "8x1024")


def inputs(family: str, lengths: list[int], H: int, HV: int) -> tuple[list[Any], dict[str, Any]]:
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = dict(device="cuda", generator=generator)
    T, D = sum(lengths), 128
    q, k = (torch.randn(1, T, H, D, **options).bfloat16() for _ in range(2))
    v, d_o = (torch.randn(1, T, HV, D, **options).bfloat16() for _ in range(2))
    gate = (1, T, HV, D) if family == "kda" else (1, T, HV)
    g = torch.nn.functional.logsigmoid(torch.randn(*gate, **options)) / 16
    beta = torch.rand(1, T, HV, **options)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    return [q, k, v, g, beta, d_o], {"cu_seqlens": bounds, "qk_l2norm": True}


def measure(watch: Stopwatch, family: str, case: str, H: int, HV: int) -> dict[str, Any]:
    arrays, options = inputs(family, LENGTHS[case], H, HV)
    forward, backward = (getattr(pylinattn, f"{family}_{op}") for op in ("fwd", "bwd"))

    def alone() -> Any:
        return backward(*arrays, **options)

    def both() -> Any:
        return forward(*arrays[:5], **options), backward(*arrays, **options)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = [x for x in alone() if x is not None]
    peak = torch.cuda.max_memory_allocated() - before
    path = pylinattn.last_path()
    second = [x for x in alone() if x is not None]
    apart = max(float((a.float() - b.float()).abs().max()) for a, b in zip(first, second))
    return {
        "op": f"{family}_bwd",
        "case": f"{case} h{H}/{HV}",
        "path": path,
        "backward_ms": round(watch.device_ms(alone, 11)[0], 4),
        "forward_and_backward_ms": round(watch.device_ms(both, 11)[0], 4),
        "peak_MB": round(peak / 1e6, 1),
        "difference_of_two_calls": apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/backward_h200.json")
    options = parser.parse_args()
    watch = Stopwatch()
    rows = []
    for family, heads in HEADS.items():
        for (H, HV), case in itertools.product(heads, LENGTHS):
            if family == "kda" and case not in KDA_LENGTHS:
                continue
            row = measure(watch, family, case, H, HV)
            rows.append(row)
            print(*row.values(), sep=" | ", flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "dtype": "bfloat16, K = V = 128, l2norm inside",
        "library": pylinattn.__version__,
        "torch": torch.__version__,
        **provenance(ROOT),
        "rows": rows,
    }
    write_result(options.out, result)


if __name__ == "__main__":
    main()

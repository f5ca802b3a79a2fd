"""Times the backward of GDN and KDA on a GPU, alone and with the forward: python bench/backward.py [--peer 16/32,4/8]

Device time of graph replays with the L2 flushed, GDN with save = "states" too (saving_*), peak memory of the call beside it, and the largest difference of two calls
(none is allowed). --peer names head counts for which FlashQLA, where it can be imported, does the same in the same process after all of
ours, and how far its gradients are from ours; it compiles for each of them. It refuses empty sequences, so there are none. Whether
gradients are right is what tests/test_gpu_backward.py shows.
Writes bench/results/backward_h200.json after every row and prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from importlib.metadata import version
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
    "ragged8": [1, 500, 64, 2048, 1300, 700, 2300, 1279],
}
HEADS = {"gdn": ((16, 32), (4, 8), (2, 4), (16, 64)), "kda": ((8, 8),)}
KDA_LENGTHS = ("1x8192", "8x1024")
REPEATS = 11
COLUMNS = (
    "op", "case", "impl", "backward_ms", "forward_and_backward_ms", "peak_MB", "from_ours",
    "saving_backward_ms", "saving_both_ms", "saved_MB",
)  # fmt: skip


def inputs(
    family: str, lengths: list[int], H: int, HV: int, device: str = "cuda"
) -> tuple[list[Any], Any]:
    """q, k (normalised), v, g, beta and do; the bounds of the sequences."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = dict(device=device, generator=generator)
    T, D = sum(lengths), 128
    q, k = (
        torch.nn.functional.normalize(torch.randn(1, T, H, D, **options), dim=-1).bfloat16()
        for _ in range(2)
    )
    v, d_o = (torch.randn(1, T, HV, D, **options).bfloat16() for _ in range(2))
    gate = (1, T, HV, D) if family == "kda" else (1, T, HV)
    g = torch.nn.functional.logsigmoid(torch.randn(*gate, **options)) / 16
    beta = torch.rand(1, T, HV, **options)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return [q, k, v, g, beta, d_o], bounds


def peak_of(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)


def ours(watch: Stopwatch, family: str, arrays: list[Any], bounds: Any) -> dict[str, Any]:
    forward, backward = (getattr(pylinattn, f"{family}_{op}") for op in ("fwd", "bwd"))

    def alone() -> Any:
        return [x for x in backward(*arrays, cu_seqlens=bounds) if x is not None]

    def both() -> Any:
        return forward(*arrays[:5], cu_seqlens=bounds), alone()

    first, path = alone(), pylinattn.last_path()
    apart = max(float((a.float() - b.float()).abs().max()) for a, b in zip(first, alone()))
    row = {
        "impl": "pylinattn",
        "version": pylinattn.__version__,
        "path": path,
        "backward_ms": round(watch.device_ms(alone, REPEATS)[0], 4),
        "forward_and_backward_ms": round(watch.device_ms(both, REPEATS)[0], 4),
        "peak_MB": peak_of(both),
        "difference_of_two_calls": apart,
    }
    return row | saving(watch, arrays, bounds, first) if family == "gdn" else row


def saving(watch: Stopwatch, arrays: list[Any], bounds: Any, want: list[Any]) -> dict[str, Any]:
    """With save = "states"; how far its gradients are from those of a backward that recomputes."""
    options: dict[str, Any] = {"cu_seqlens": bounds, "save": "states"}

    def forward() -> Any:
        return pylinattn.gdn_fwd(*arrays[:5], **options)

    def backward(saved: Any) -> Any:
        return [x for x in pylinattn.gdn_bwd(*arrays, saved=saved, **options) if x is not None]

    def both() -> Any:
        done = forward()
        return done, backward(done.saved)

    saved = forward().saved
    distance = max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(backward(saved), want)
    )
    return {
        "saving_backward_ms": round(watch.device_ms(lambda: backward(saved), REPEATS)[0], 4),
        "saving_both_ms": round(watch.device_ms(both, REPEATS)[0], 4),
        "saving_peak_MB": peak_of(both),
        "saved_MB": round(saved.nbytes / 1e6, 1),
        "saving_from_recomputed": float(f"{distance:.1e}"),
    }


def flash_qla(watch: Stopwatch, arrays: list[Any], bounds: Any) -> dict[str, Any]:
    from flash_qla import chunk_gated_delta_rule

    leaves = [x.detach().clone().requires_grad_() for x in arrays[:5]]

    def both() -> Any:
        o = chunk_gated_delta_rule(*leaves, output_final_state=False, cu_seqlens=bounds)[0]
        return torch.autograd.grad(o, leaves, arrays[5])

    theirs = both()
    mine = pylinattn.gdn_bwd(*arrays, cu_seqlens=bounds)
    distance = max(
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(theirs, mine)
    )
    return {
        "impl": "flash_qla",
        "version": version("flash-qla"),
        "forward_and_backward_ms": round(watch.device_ms(both, REPEATS)[0], 4),
        "peak_MB": peak_of(both),
        "from_ours": float(f"{distance:.1e}"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/backward_h200.json")
    parser.add_argument("--peer", default="", help="head counts, such as 16/32,4/8")
    options = parser.parse_args()
    watch = Stopwatch()
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "inputs": "bfloat16, K = V = 128, q and k normalised outside",
        "torch": torch.__version__,
        **provenance(ROOT),
        "rows": [],
    }
    print(*COLUMNS, sep=" | ")
    cases = [
        (family, H, HV, case)
        for family, heads in HEADS.items()
        for (H, HV), case in itertools.product(heads, LENGTHS)
        if family == "gdn" or case in KDA_LENGTHS
    ]
    with_peer = [c for c in cases if c[0] == "gdn" and f"{c[1]}/{c[2]}" in options.peer.split(",")]
    for impl, (family, H, HV, case) in [
        *(("pylinattn", c) for c in cases),
        *(("flash_qla", c) for c in with_peer),
    ]:
        arrays, bounds = inputs(family, LENGTHS[case], H, HV)
        row = {"op": f"{family}_bwd", "case": f"{case} h{H}/{HV}"}
        try:
            row |= (
                ours(watch, family, arrays, bounds)
                if impl == "pylinattn"
                else flash_qla(watch, arrays, bounds)
            )
        except Exception as error:  # the row says why it has no time
            row |= {"impl": impl, "error": f"{type(error).__name__}: {error}"[:300]}
        result["rows"].append(row)
        print(
            *(row.get(name, "-") for name in COLUMNS), row.get("error", ""), sep=" | ", flush=True
        )
        write_result(options.out, result)
    return 1 if any("error" in r for r in result["rows"] if r["impl"] == "pylinattn") else 0


if __name__ == "__main__":
    sys.exit(main())

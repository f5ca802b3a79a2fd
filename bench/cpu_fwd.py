"""pylinattn on the CPU against the torch functions of transformers' Qwen3-Next, warm, in turns, on the same cores.

    python bench/cpu_fwd.py [--threads 2] [--repeats 7] [--json bench/results/cpu.json]

The peer has no grouped heads, so it gets q and k repeated for the value heads, outside the timed call. Both sides return
the final state; decode updates a state, ours in place. The error is between the two, both in fp32.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from source_tree import provenance, write_result
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import pylinattn

ROOT = Path(__file__).resolve().parents[1]
TARGET = 8.0  # a plain gdn_fwd at B 1, T 2048, 16/32 heads, K = V = 128, fp32, 2 threads


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def in_turns(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median milliseconds of each call; every round runs all of them once."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times):
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    x, reference = x.double(), reference.double()
    return float((x - reference).square().mean().sqrt() / reference.square().mean().sqrt())


def inputs(B: int, T: int, H: int, HV: int, K: int, V: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, HV, V),
        "g": -torch.nn.functional.softplus(torch.randn(B, T, HV)),
        "beta": torch.rand(B, T, HV),
    }


def row(name: str, sizes: dict[str, int], repeats: int, given: bool = True) -> dict[str, Any]:
    """Times one case; `name` is gdn_fwd, or gdn_decode for one token per sequence.

    given: gdn_fwd writes into buffers of the caller, as in a loop over layers or steps; otherwise it allocates its outputs.
    """
    x = inputs(**sizes)
    r = sizes["HV"] // sizes["H"]
    peer_x = [x["q"].repeat_interleave(r, 2), x["k"].repeat_interleave(r, 2), x["v"]]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    state = torch.randn(sizes["B"], sizes["HV"], sizes["K"], sizes["V"])
    if name == "gdn_fwd":
        peer_call, start = qwen3_next.torch_chunk_gated_delta_rule, None

        outputs = {"o": torch.empty_like(x["v"]), "final_state": torch.empty_like(state)}
        outputs = outputs if given else {"output_final_state": True}

        def ours() -> Any:
            return pylinattn.gdn_fwd(**x, **outputs, qk_l2norm=True)
    else:
        peer_call, start = qwen3_next.torch_recurrent_gated_delta_rule, state
        pool = state.clone()

        def ours() -> Any:
            return pylinattn.gdn_decode(**x, state=pool, qk_l2norm=True), pool

    def peer() -> Any:
        return peer_call(*peer_x, g=x["g"], beta=x["beta"], initial_state=start, **options)

    with torch.no_grad():
        (o, final), (peer_o, peer_final) = ours(), peer()
        errors = relative_error(o, peer_o), relative_error(final, peer_final)
        path = pylinattn.last_path()
        ms, peer_ms = in_turns([ours, peer], repeats)
    return {
        "op": name,
        "case": " ".join(f"{k}{v}" for k, v in sizes.items()) + ("" if given else " allocated"),
        "dtype": "f32",
        "path": path,
        "peer": peer_call.__name__,
        "ms": round(ms, 3),
        "peer_ms": round(peer_ms, 3),
        "ratio": round(peer_ms / ms, 2),
        "err_o": errors[0],
        "err_state": errors[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "cpu.json")
    args = parser.parse_args()
    os.environ["LINATTN_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)

    head = {"H": 16, "HV": 32, "K": 128, "V": 128}
    cases = [
        ("gdn_fwd", {"B": 1, "T": 2048, **head}, True),
        ("gdn_fwd", {"B": 1, "T": 2048, **head}, False),
        ("gdn_fwd", {"B": 1, "T": 256, **head}, True),
        ("gdn_decode", {"B": 1, "T": 1, **head}, True),
        ("gdn_decode", {"B": 16, "T": 1, **head}, True),
    ]
    rows = [row(name, sizes, args.repeats, given) for name, sizes, given in cases]
    report = {
        "cpu": cpu_name(),
        "threads": args.threads,
        "versions": {name: version(name) for name in ("pylinattn", "torch", "transformers")},
        "python": platform.python_version(),
        **provenance(ROOT),
        "rows": rows,
    }
    write_result(args.json, report)

    print(f"{report['cpu']}, {args.threads} threads, {rows[0]['path']}")
    print(
        f"{'op':<12}{'case':<40}{'ms':>10}{'peer ms':>11}{'ratio':>8}{'err o':>10}{'err state':>11}"
    )
    for r in rows:
        print(
            f"{r['op']:<12}{r['case']:<40}{r['ms']:>10.3f}{r['peer_ms']:>11.3f}{r['ratio']:>8.1f}"
            f"{r['err_o']:>10.1e}{r['err_state']:>11.1e}"
        )
    plain = next(r for r in rows if r["case"].endswith("allocated"))
    verdict = "met" if plain["ratio"] >= TARGET else "missed"
    print(f"target for the plain call, outputs allocated: {TARGET:.0f} times the peer, {verdict}")


if __name__ == "__main__":
    main()

"""How far a pool of states drifts from the exact ones over many decode calls: python bench/drift.py [--device cpu]

2,000 calls of one token, each of which rounds the pool once to its dtype, against the same recurrence in float64, from one
start and with the same bf16 inputs. Writes bench/results/drift_{h200,cpu}.json and prints a table.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from source_tree import provenance, write_result

import pylinattn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
N, HEADS, D = 4, 8, 128
MARKS = (1, 10, 100, 500, 1000, 2000)
SLOWEST = {"fast gates": -1.0, "slow gates": -0.02}  # log decays are uniform from here to 0


def relative(x: Any, exact: Any) -> float:
    return float(((x.double() - exact).square().mean() / exact.square().mean()).sqrt())


def exact_step(S: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, Any]:
    """The recurrence in float64, with l2norm: [N,HV,K,V] and vectors of one token."""
    q, k, v = (x[:, 0].double() for x in (q, k, v))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = g[:, 0].double().exp()
    S = S * (decay[..., None] if decay.dim() == 3 else decay[..., None, None])
    u = beta[:, 0].double()[..., None] * (v - torch.einsum("nhkv,nhk->nhv", S, k))
    S = S + k[..., None] * u[..., None, :]
    return S, D**-0.5 * torch.einsum("nhkv,nhk->nhv", S, q)


def drift(device: str, family: str, dtype: torch.dtype, slowest: float) -> list[dict[str, float]]:
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = dict(device=device, generator=generator)
    pool = (0.1 * torch.randn(N, HEADS, D, D, **options)).to(dtype)
    S = pool.double()
    decode = getattr(pylinattn, f"{family}_decode")
    rows = []
    for step in range(1, MARKS[-1] + 1):
        q, k, v = (torch.randn(N, 1, HEADS, D, **options).bfloat16() for _ in range(3))
        shape = (N, 1, HEADS, D) if family == "kda" else (N, 1, HEADS)
        g = slowest * torch.rand(*shape, **options)
        beta = torch.rand(N, 1, HEADS, **options)
        o = decode(q, k, v, g, beta, pool, qk_l2norm=True)
        S, exact = exact_step(S, q, k, v, g, beta)
        if step in MARKS:
            rows.append({"step": step, "state": relative(pool, S), "o": relative(o[:, 0], exact)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    out = options.out or RESULTS / f"drift_{'h200' if gpu else 'cpu'}.json"
    rows = []
    for family in ("gdn", "kda"):
        for dtype in (torch.float32, torch.bfloat16):
            for gates, slowest in SLOWEST.items():
                for row in drift(options.device, family, dtype, slowest):
                    name = str(dtype).removeprefix("torch.")
                    rows.append({"op": f"{family}_decode", "pool": name, "gates": gates} | row)
    result = {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "path": pylinattn.last_path(),
        "shape": f"{N} sequences, {HEADS} heads, K = V = {D}",
        "library": pylinattn.__version__,
        "torch": torch.__version__,
        **provenance(ROOT),
        "rows": rows,
    }
    write_result(out, result)
    print("| op | pool | gates | step | state | o |\n|---|---|---|---|---|---|")
    for r in rows:
        print(
            f"| {r['op']} | {r['pool']} | {r['gates']} | {r['step']} | {r['state']:.1e} | {r['o']:.1e} |"
        )


if __name__ == "__main__":
    main()

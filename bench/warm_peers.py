"""Compiles the peers' kernels for the rows of bench.py and backward.py before they are timed, on a machine with or without a GPU.

    python bench/warm_peers.py CACHES                      compile into the folder CACHES
    python bench/warm_peers.py CACHES --pack FOLDER        ... nothing, but pack what is there, an archive a cache
    python bench/warm_peers.py CACHES --unpack FOLDER...   on the other machine; prints what to export

No kernel runs (pretend_gpu.py): FLA's configurations are all compiled, and which is the fastest is found where there is a GPU.
The archive `tuned` holds what was found there. Same versions of the peers, Triton and Python's minor version on both machines.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_caches import KEPT, VARIABLES, pack, unpack

COMPILED = {
    "gdn_fwd": ("fla", "flash_qla"),
    "kda_fwd": ("fla",),
    "gdn_decode": ("fla", "flashinfer", "flashinfer_kfirst"),
    "kda_decode": ("fla",),
    "gdn_verify": ("fla", "flashinfer"),
    "kda_verify": ("fla",),
}
ORDER = [  # what takes longest comes first
    "fla:kda_fwd",
    "fla:gdn_fwd",
    "flash_qla:gdn_bwd",
    "flash_qla:gdn_fwd",
    "flashinfer:gdn_verify",
    "fla:tests",
]
GATES = (
    ("fused_kda_gate", {}, (4, 64)),
    ("fused_kda_gate", {"lower_bound": -5.0}, (4, 64)),
    ("fused_gdn_gate", {}, (4,)),
)
MOST_SEQUENCES = 256  # more take the same kernels, and gigabytes of states


def jobs() -> list[str]:
    """peer:op:H/HV, a process each. What a peer keeps in memory alone is left out."""
    from backward import HEADS
    from workloads import OPS, workloads

    found = [f"flash_qla:gdn_bwd:{H}/{HV}" for H, HV in HEADS["gdn"]] + ["fla:tests:4/4"]
    for op in OPS:
        heads = dict.fromkeys(f"{w.H}/{w.HV}" for w in workloads(op) if not w.variant)
        found += [f"{peer}:{op}:{pair}" for peer in COMPILED[op] for pair in heads]
    rank = {name: number for number, name in enumerate(ORDER)}
    return sorted(found, key=lambda job: rank.get(job.rpartition(":")[0], len(rank)))


def rows(peer: str, op: str, heads: str) -> Iterator[Any]:
    """The calls of a job; inputs are zeros, which take no time to make, and little memory."""
    import torch
    from peers import PEERS
    from workloads import make, workloads

    torch.randn = lambda *shape, device, generator: torch.zeros(shape, device=device)
    (implementation,) = (x for x in PEERS[op] if x.name == peer)
    seen = set()
    for w in workloads(op):
        if f"{w.H}/{w.HV}" == heads and not w.variant and w.case not in seen:
            seen.add(w.case)
            if w.N <= MOST_SEQUENCES:
                yield lambda w=w: implementation.prepare(w, make(w, "cpu")).call()


def backward_rows(heads: str) -> Iterator[Any]:
    import torch
    from backward import LENGTHS, inputs
    from flash_qla import chunk_gated_delta_rule

    for lengths in LENGTHS.values():
        arrays, bounds = inputs("gdn", lengths, *map(int, heads.split("/")), device="cpu")
        leaves = [x.requires_grad_() for x in arrays[:5]]

        def call(leaves: Any = leaves, d_o: Any = arrays[5], bounds: Any = bounds) -> None:
            o = chunk_gated_delta_rule(*leaves, output_final_state=False, cu_seqlens=bounds)[0]
            torch.autograd.grad(o, leaves, d_o)

        yield call


def calls_of_tests() -> Iterator[Any]:
    """FLA's share of tests/test_gpu_fla.py. It refuses GDN's gradients."""
    import test_gpu_fla as tests
    import torch

    tests.DEVICE = "cpu"
    functions = tests.fla.__wrapped__()
    options = itertools.product((*tests.HALF.values(), torch.float32), (200, 20))
    for name, (dtype, tokens) in itertools.product(tests.FUNCTIONS, options):
        for case in tests.cases_of(name):
            x = tests.problems(name, case, dtype, tokens)[1]
            yield lambda name=name, x=x: tests.call(functions[name], x)

    def gradients(function: Any, tensors: Any) -> None:
        for x in tensors:
            x.requires_grad_()
        outputs = [x for x in function() if x is not None]
        torch.autograd.grad(outputs, tensors, [torch.zeros_like(x) for x in outputs])

    for case, dtype in itertools.product(tests.GRADIENT_CASES["chunk_kda"], tests.HALF.values()):
        x = tests.problems("chunk_kda", case, dtype, 200)[1]
        run = functools.partial(tests.call, functions["chunk_kda"], x)
        yield lambda run=run, x=x: gradients(run, list(x.tensors().values()))
    for gate, dtype in itertools.product(GATES, (torch.bfloat16, torch.float32)):
        name, keywords, shape = gate
        tensors = [torch.zeros(2, 50, *shape, dtype=dtype), torch.zeros(4), torch.zeros(shape)]
        tensors[2] = tensors[2].flatten()
        run = functools.partial(functions[name], *tensors, **keywords)
        yield lambda run=run, x=tensors: gradients(lambda: [run()], x)


def run_job(job: str) -> int:
    from pretend_gpu import pretend

    peer, op, heads = job.split(":")
    pretend("tests" if op == "tests" else peer)
    import torch
    from impls import Unsupported

    begin, failed = time.monotonic(), []
    calls = {"tests": calls_of_tests, "gdn_bwd": lambda: backward_rows(heads)}
    for call in calls.get(op, lambda: rows(peer, op, heads))():
        try:
            with contextlib.nullcontext() if op in calls else torch.inference_mode():
                call()
        except Unsupported:
            pass
        except Exception as error:
            failed.append(f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200])
    print(f"{job}: {time.monotonic() - begin:.0f} s", *dict.fromkeys(failed), sep="\n    ")
    return bool(failed)


def compile_all(caches: Path, only: list[str], processes: int) -> int:
    """Runs the jobs whose name has one of these substrings; returns how many failed."""
    caches.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {name: str(caches / x) for x, name in VARIABLES.items()}

    def run(job: str) -> int:
        command = [sys.executable, __file__, str(caches), "--job", job]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        _, found, result = done.stdout.rpartition(f"{job}:")
        print(f"{job}:{result.rstrip() if found else done.stderr[-2000:]}", flush=True)
        return done.returncode != 0

    chosen = [job for job in jobs() if any(part in job for part in only)]
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        return sum(pool.map(run, chosen))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("caches", type=Path, metavar="CACHES")
    parser.add_argument("--pack", type=Path, metavar="FOLDER")
    parser.add_argument("--unpack", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--only", default="", help="jobs with these substrings, comma-separated")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--list", action="store_true", help="print the jobs and stop")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    caches = options.caches.resolve()
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    if options.job:
        return run_job(options.job)
    if options.list:
        print("\n".join(jobs()))
        return 0
    if options.pack:
        pack(caches, options.pack)
        return 0
    if options.unpack:
        names = [folder / f"{name}.tar.xz" for folder in options.unpack for name in KEPT]
        unpack(caches, [x for x in names if x.exists()])
        return 0
    return compile_all(caches, options.only.split(","), options.jobs)


if __name__ == "__main__":
    sys.exit(main())

"""Times pylinattn and the other implementations on this machine, each row after a check of it.

    python bench/bench.py --quick
    python bench/bench.py --ops gdn_decode,kda_decode --cases B64 --impl pylinattn,fla

Rows are merged into bench/results/<gpu>.json, with a Markdown table beside it. The exit code is 1
when a row of pylinattn was wrong or failed. bench/README.md says how to get the peers.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import oracle
import report
import source_tree
import torch
from cases import TOLERANCE_O, TOLERANCE_STATE, TOLERANCE_STATE_HALF_PRODUCTS
from impls import OURS, Implementation, Unsupported
from peers import SLOW_TO_COMPILE, peers_of
from timing import Stopwatch
from workloads import ELSEWHERE, OPS, QUICK, Inputs, Workload, floor_bytes, make, workloads

ROOT = Path(__file__).resolve().parent.parent


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated: %(default)s")
    parser.add_argument(
        "--cases",
        default="",
        help="only rows whose case has one of these substrings, comma-separated",
    )
    parser.add_argument("--gates", default="", help="only rows of these gates, comma-separated")
    parser.add_argument(
        "--impl",
        default="",
        help="only these implementations, comma-separated, such as pylinattn,fla",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few rows of each op, in some 80 s",
    )
    parser.add_argument(
        "--time-budget",
        type=float,
        default=None,
        help="seconds after which no further row is started",
    )
    parser.add_argument("--repeats", type=int, default=30, help="replays whose median is taken")
    parser.add_argument(
        "--flush", choices=("write", "read"), default="write", help="how the L2 cache is flushed"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="result file; bench/results/<gpu>.json if not given"
    )
    parser.add_argument(
        "--commit",
        default=os.environ.get("LINATTN_COMMIT"),
        help="commit measured, if git cannot tell",
    )
    parser.add_argument(
        "--cuda-tree",
        default=os.environ.get("LINATTN_CUDA_TREE"),
        help="git tree id of cuda/, likewise",
    )
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    options = parser.parse_args(argv)
    wanted = split(options.ops)
    unknown = [op for op in wanted if op not in OPS + ELSEWHERE]
    if unknown:
        parser.error(f"--ops has {unknown[0]!r}; it takes {', '.join(OPS)}")
    if options.time_budget is None:
        options.time_budget = 80.0 if options.quick else float("inf")
    return options


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def rows_of(options: argparse.Namespace) -> list[Workload]:
    chosen = [w for op in OPS if op in split(options.ops) for w in workloads(op)]
    if options.quick:
        chosen = [w for w in chosen if w.case in QUICK[w.op]]
    if options.cases:
        chosen = [w for w in chosen if any(part in w.case for part in split(options.cases))]
    if options.gates:
        chosen = [w for w in chosen if w.gate in split(options.gates)]
    return chosen


def jobs_of(
    chosen: list[Workload], options: argparse.Namespace
) -> list[tuple[Workload, Implementation]]:
    """Row by row; --quick has ours first, then the peers' rows that compile fast: forward rows last.

    FLA's chunked kernels took 40 s to compile and tune for one shape (H200, 2026-11-30).
    """
    wanted = split(options.impl)
    jobs = [(w, impl) for w in chosen for impl in [OURS, *peers_of(w)]]
    if wanted:
        jobs = [job for job in jobs if job[1].name in wanted]
    elif options.quick:
        jobs = [job for job in jobs if job[1].name not in SLOW_TO_COMPILE]
    if options.quick:
        jobs.sort(
            key=lambda job: (
                job[1] is not OURS,
                job[1] is not OURS and job[0].op.endswith("_fwd"),
                job[1].name.startswith("flashinfer"),
            )
        )
    return jobs


def head(options: argparse.Namespace) -> dict[str, Any]:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "commit": options.commit or source_tree.commit_id(ROOT),
        "cuda_tree": options.cuda_tree or source_tree.tree_id(ROOT, "cuda"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def limits(w: Workload) -> tuple[float, float]:
    """Largest errors allowed of o and of the states."""
    of_state = TOLERANCE_STATE_HALF_PRODUCTS if w.state == "f32" else TOLERANCE_STATE[w.state]
    return TOLERANCE_O[w.dtype], of_state


def poison(w: Workload, x: Inputs) -> None:
    """Leaves NaN in memory that the next outputs are likely to get: what is not written shows."""
    filled = [torch.full_like(x.v, float("nan")), torch.full_like(x.state, float("nan"))]
    torch.cuda.synchronize()
    del filled


class Bench:
    def __init__(
        self, options: argparse.Namespace, watch: Stopwatch, copy_TBps: float, run: str
    ) -> None:
        self.options, self.watch, self.copy_TBps, self.run = options, watch, copy_TBps, run
        self.current: tuple[Workload, Inputs, oracle.Expected] | None = None
        self.seen: set[str] = set()

    def inputs(self, w: Workload) -> tuple[Inputs, oracle.Expected]:
        if self.current is None or self.current[0] != w:
            self.current = None
            torch.cuda.empty_cache()
            x = make(w)
            self.current = w, x, oracle.expect(w, x)
        return self.current[1:]

    def measure(self, w: Workload, impl: Implementation) -> report.Row:
        """One row. A failure of any kind is a row that says so."""
        values: dict[str, Any] = {"op": w.op, "case": w.case, "gate": w.gate, "impl": impl.name}
        try:
            values["version"] = impl.version()
            x, expected = self.inputs(w)
            values["floor_ms"] = round(floor_bytes(w, x) / self.copy_TBps / 1e9, 6)
            self._check_and_time(w, impl, x, expected, values)
        except ImportError as e:
            values["error"] = f"not importable: {e}"
        except Unsupported as e:
            values["error"] = f"unsupported: {e}"
        except Exception as e:
            values["error"] = f"failed: {type(e).__name__}: {str(e)[:300]}".replace("\n", " ")
        if values.get("error"):
            try:
                torch.cuda.synchronize()
            except RuntimeError as e:  # the context is lost: no later row could run
                values["error"] += f"; {str(e).splitlines()[0]}"
        return report.make_row(self.run, **values)

    def _check_and_time(
        self,
        w: Workload,
        impl: Implementation,
        x: Inputs,
        expected: oracle.Expected,
        values: dict[str, Any],
    ) -> None:
        prepared = impl.prepare(w, x)
        poison(w, x)
        o, state = prepared.outputs(prepared.call())
        torch.cuda.synchronize()
        if impl.name not in self.seen:
            # every graph capture collects garbage; what a package imported need not be searched
            self.seen.add(impl.name)
            gc.collect()
            gc.freeze()
        errors = {"err_o": oracle.output_error(w, expected, o)}
        if state is not None:
            errors["err_state"] = oracle.state_error(expected, state)
        del o, state
        # JSON has no infinity
        values |= {name: float(f"{min(error, 1e9):.3g}") for name, error in errors.items()}
        values["path"] = prepared.path()
        for (name, error), limit in zip(errors.items(), limits(w), strict=False):
            if impl is OURS and not error <= limit:
                values["error"] = f"wrong: {name} is {error:.1e}, allowed {limit:.0e}"
                return
        ms, captured = self.watch.device_ms(prepared.call)
        values["ms"] = round(ms, 5)
        values["wall_us"] = round(self.watch.wall_us(prepared.call), 1)
        if w.kind == "decode" and w.N in (1, 64):
            values["kernels_us"] = round(self.watch.kernels_us(prepared.call), 2)
        if not captured:
            values["path"] += " (no graph)"


def is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    begin = time.monotonic()
    options = arguments(argv)
    chosen = rows_of(options)
    for op in ELSEWHERE:
        if op in split(options.ops):
            print(f"{op}: timed by bench/backward.py")
    jobs = jobs_of(chosen, options)
    if options.list:
        for w, impl in jobs:
            print(f"{w.op:<10} {w.case:<34} {w.gate:<8} {impl.name}")
        return 0
    if not jobs:
        print("no row fits these options; --list prints those there are")
        return 0
    if not torch.cuda.is_available():
        print("there is no CUDA device here, and bench.py times nothing else", file=sys.stderr)
        return 2

    torch.set_grad_enabled(False)
    about = head(options)
    name = about["gpu"].lower().replace("nvidia", "").split()[0]
    out = options.out or ROOT / "bench" / "results" / f"{name}.json"
    old = report.read(out)
    watch = Stopwatch(options.repeats, options.flush)
    about["ceilings"] = watch.ceilings()
    print(f"{about['gpu']}, driver {about['driver']}, {about['ceilings']}", flush=True)
    bench = Bench(options, watch, about["ceilings"]["copy_TBps"], about["date"])
    rows: list[report.Row] = []
    for number, (w, impl) in enumerate(jobs, 1):
        spent = time.monotonic() - begin
        if spent > options.time_budget or not is_alive():
            why = "time budget" if spent > options.time_budget else "CUDA context lost"
            named = {"op": w.op, "case": w.case, "gate": w.gate, "impl": impl.name}
            rows.append(report.make_row(about["date"], **named, error=f"not run: {why}"))
            continue
        with torch.inference_mode():
            row = bench.measure(w, impl)
        rows.append(row)
        result = f"{report.number(row['ms'])} ms" if row["ms"] is not None else row["error"]
        line = f"[{number}/{len(jobs)} {spent:.0f}s] {' '.join(w.key)} {impl.name}: {result}"
        print(line[:110], flush=True)
        report.write(out, report.merge(old, about, rows))
    report.write(out, report.merge(old, about, rows))

    print()
    print(report.terminal(rows))
    print(report.summary(rows))
    bad = [
        r
        for r in rows
        if r["impl"] == OURS.name and r["ms"] is None and not r["error"].startswith("not run")
    ]
    left = sum(str(r.get("error", "")).startswith("not run") for r in rows)
    print(f"\n{len(rows)} rows, {left} not run, {len(bad)} of ours wrong or failed; {out}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

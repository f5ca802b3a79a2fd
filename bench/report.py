"""Result rows: the JSON file, earlier rows merged in, and the tables for Markdown and terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workloads import MAIN_LENGTHS

Row = dict[str, Any]

FIELDS = (
    "op", "case", "gate", "impl", "version", "path", "ms", "wall_us", "floor_ms",
    "err_o", "err_state",
)  # fmt: skip
OURS = "pylinattn"
NOT_MEASURED = (
    "not run",
    "not importable",
)  # how errors begin that say nothing about the implementation
FULL_CARD = ("4x8192 h8/32", "8x1024 h8/32", "4x8192 h16/64", "8x1024 h16/64")
TITLES = {
    "gdn_fwd": "GDN forward",
    "kda_fwd": "KDA forward",
    "gdn_decode": "GDN decode",
    "kda_decode": "KDA decode",
    "gdn_verify": "GDN verify",
    "kda_verify": "KDA verify",
}


def key(row: Row) -> tuple[str, str, str, str]:
    return row["op"], row["case"], row["gate"], row["impl"]


def make_row(run: str, **values: Any) -> Row:
    """A row with every field; ``error`` is there only where something went wrong."""
    row: Row = {name: values.pop(name, None) for name in FIELDS}
    row["run"] = run
    if values.get("kernels_us") is not None:
        row["kernels_us"] = values["kernels_us"]  # of decodes of batch 1 and 64 alone
    if values.get("error"):
        row["error"] = values["error"]
    return row


def merge(old: Row | None, head: Row, rows: list[Row]) -> Row:
    """The new file: measured rows replace those of the same name. Our old rows stay only while
    cuda/ is what it was then; a row that was not measured replaces nothing that was."""
    kept: dict[tuple[str, ...], Row] = {}
    if old and old.get("gpu") == head["gpu"]:
        same = old.get("cuda_tree") == head["cuda_tree"]
        kept = {key(r): r for r in old["rows"] if same or r["impl"] != OURS}
    for row in rows:
        before = kept.get(key(row))
        measured = not str(row.get("error", "")).startswith(NOT_MEASURED)
        if measured or before is None or str(before.get("error", "")).startswith(NOT_MEASURED):
            kept[key(row)] = row
    return head | {"rows": list(kept.values())}


def read(path: Path) -> Row | None:
    return json.loads(path.read_text()) if path.exists() else None


def write(path: Path, result: Row) -> None:
    """The file is complete at every moment: a run that is cut short leaves what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(r)}" for r in result["rows"]]
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)[:-2]
    partial = path.with_suffix(".partial")
    partial.write_text(f'{head},\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n")
    partial.replace(path)
    path.with_suffix(".md").write_text(markdown(result))


def number(x: float | None, digits: int = 3) -> str:
    """Three significant digits, without an exponent."""
    if x is None:
        return "-"
    if not math.isfinite(x) or x == 0:
        return str(x)
    places = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    return f"{x:.{places}f}"


def error_number(x: float | None) -> str:
    return "-" if x is None else f"{x:.1e}"


def grouped(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(key(row)[:3], {})[row["impl"]] = row
    return groups


def best_peer(group: dict[str, Row]) -> Row | None:
    """The fastest peer timed in the same process as our row."""
    ours = group.get(OURS)
    timed = [
        r
        for name, r in group.items()
        if name != OURS and r["ms"] is not None and ours is not None and r["run"] == ours["run"]
    ]
    return min(timed, key=lambda r: r["ms"], default=None)


def ratio(group: dict[str, Row]) -> float | None:
    """Best peer's time over ours: above 1 we are faster."""
    ours, best = group.get(OURS), best_peer(group)
    if ours is None or ours["ms"] is None or best is None:
        return None
    return best["ms"] / ours["ms"]


def _geometric(values: list[float]) -> str:
    return number(math.exp(sum(map(math.log, values)) / len(values))) if values else "-"


def _summary(op: str, groups: dict[tuple[str, str, str], dict[str, Row]]) -> list[str]:
    """Means are geometric, and of a forward's main lengths."""
    found = {k: r for k, g in groups.items() if (r := ratio(g)) is not None}
    if not found:
        return []
    main = found
    if op.endswith("fwd"):
        main = {k: r for k, r in found.items() if k[1].split(" h")[0] in MAIN_LENGTHS}
    mean = _geometric([*main.values()])
    lines = [f"- best peer / ours, geometric mean of {len(main)} rows: **{mean}**"]
    full = [r for (_, case, _), r in found.items() if case in FULL_CARD]
    if op == "gdn_fwd" and full:
        lines.append(f"- of the {len(full)} full-card rows: **{_geometric(full)}**")
    for gate in sorted({k[2] for k in main}) if op == "kda_fwd" else []:
        of_gate = [r for k, r in main.items() if k[2] == gate]
        lines.append(f"- gates {gate}, {len(of_gate)} rows: **{_geometric(of_gate)}**")
    worst = min(found, key=lambda k: found[k])
    lines.append(f"- lowest: {number(found[worst])} ({worst[1]}, {worst[2]})")
    return lines


def summary(rows: list[Row]) -> str:
    """The ratios of the rows of one run, an op a line."""
    lines = []
    for op in TITLES:
        found = _summary(op, grouped(r for r in rows if r["op"] == op))
        lines += [
            f"{op}: {'; '.join(line.strip('- ').replace('**', '') for line in found)}"
        ] * bool(found)
    return "\n".join(lines)


def _table(op: str, groups: dict[tuple[str, str, str], dict[str, Row]]) -> list[str]:
    peers = list(dict.fromkeys(name for g in groups.values() for name in g if name != OURS))
    head = [
        "case", "gate", "floor ms", "ours ms", "share", "ours wall us", "err o", "err state",
        "path",
        *(f"{p} ms" for p in peers), "best peer / ours",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (_, case, gate), group in groups.items():
        ours = group.get(OURS, dict.fromkeys(FIELDS))
        cells = [
            case,
            gate,
            number(next((r["floor_ms"] for r in group.values() if r["floor_ms"]), None)),
            _cell(ours),
            f"{ours['floor_ms'] / ours['ms']:.0%}" if ours["ms"] else "-",
            number(ours["wall_us"]),
            error_number(ours["err_o"]),
            error_number(ours["err_state"]),
            ours["path"] or "-",
            *(_cell(group.get(p), inexact=True) for p in peers),
            number(ratio(group)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _kernels(groups: dict[tuple[str, str, str], dict[str, Row]]) -> list[str]:
    """Where it was measured, what the kernels take without the launch."""
    found = {k: g for k, g in groups.items() if any("kernels_us" in r for r in g.values())}
    lines = ["Kernels alone, from start to end by the profiler, L2 flushed, us:", ""] * bool(found)
    for (_, case, _), group in found.items():
        times = [f"{n} {number(r['kernels_us'])}" for n, r in group.items() if "kernels_us" in r]
        lines.append(f"- {case}: {', '.join(times)}")
    return [*lines, *[""] * bool(found)]


def _cell(row: Row | None, inexact: bool = False) -> str:
    if row is None:
        return "-"
    if row["ms"] is None:
        return str(row.get("error") or "-").split(":")[0]
    wrong = inexact and any(
        row[e] is not None and not row[e] <= 1e-2 for e in ("err_o", "err_state")
    )
    return number(row["ms"]) + ("\\*" if wrong else "")


def markdown(result: Row) -> str:
    ceilings = ", ".join(f"{k} {v}" for k, v in result.get("ceilings", {}).items())
    lines = [
        f"# Benchmarks on {result['gpu']}",
        "",
        f"Written by `bench/bench.py` on {result['date']}. Driver {result['driver']}, commit",
        f"{result['commit']}, tree of `cuda/` {result['cuda_tree']}.",
        f"Ceilings in that run: {ceilings}.",
        "",
        "Device time of one call (CUDA-graph replay, L2 flushed before each, median). Floor: every",
        "input read once and every output written once at the copy rate of the run; share: floor",
        "over our time. Errors: the largest relative RMS error over sequences and heads against",
        "float64. \\*: a peer whose error is above 1e-2. Ratios are between times of one process.",
        "",
    ]
    for op, title in TITLES.items():
        groups = grouped(r for r in result["rows"] if r["op"] == op)
        if groups:
            means = _summary(op, groups)
            lines += [f"## {title}", "", *means, *[""] * bool(means), *_table(op, groups), ""]
            lines += _kernels(groups)
    failures = sorted({(r["op"], r["impl"], r["error"]) for r in result["rows"] if r.get("error")})
    if failures:
        lines += ["## Rows without a time", ""]
        lines += [f"- {op}, {impl}: {error}" for op, impl, error in failures]
    return "\n".join(lines).rstrip() + "\n"


def terminal(rows: list[Row], width: int = 110) -> str:
    """One line a row, no longer than ``width``."""
    form = "{:<10} {:<26} {:<8} {:<17} {:>8} {:>8} {:>6} {:>8} {:>8}"
    lines = [form.format("op", "case", "gate", "impl", "ms", "wall us", "share", "err o", "err st")]
    for (op, case, gate), group in grouped(rows).items():
        for name, r in group.items():
            if r["ms"] is None:
                line = f"{op:<10} {case[:26]:<26} {gate:<8} {name:<17} {r.get('error') or '-'}"
            else:
                share = f"{r['floor_ms'] / r['ms']:.0%}"
                line = form.format(
                    op, case[:26], gate, name, number(r["ms"]), number(r["wall_us"]), share,
                    error_number(r["err_o"]), error_number(r["err_state"]),
                )  # fmt: skip
            lines.append(line[:width].rstrip())
        if (faster := ratio(group)) is not None:
            best = best_peer(group)
            lines.append(
                f"{'':<46} best peer ({best['impl'] if best else ''}) / ours = {number(faster)}"
            )
    return "\n".join(lines)

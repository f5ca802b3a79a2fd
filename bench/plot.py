"""The picture of a result file: python bench/plot.py [bench/results/h200.json] draws docs/speed_<gpu>.svg beside the numbers' source.

Forwards: device time of each row, ours and the peers of the same process; decode: the share of the copy rate. Needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import report
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from workloads import DECODE_BATCHES, GDN_LENGTHS, KDA_LENGTHS

ROOT = Path(__file__).resolve().parent.parent
GDN_HEADS, KDA_HEADS = ("h2/8", "h8/32", "h16/64"), ("h8", "h32", "h96")
DECODE = (
    ("gdn_decode", "h16/32 fp32state", "GDN decode, 16/32 heads, fp32 states"),
    ("gdn_decode", "h16/32 bf16state", "GDN decode, 16/32 heads, bf16 states"),
    ("kda_decode", "h32 bf16state", "KDA decode, 32 heads, bf16 states"),
)
# colours that are told apart without red and green; ours is the one that is filled
STYLE = {
    "pylinattn": ("#0072B2", "o"),
    "flashinfer": ("#E69F00", "s"),
    "flashinfer_cp": ("#CC79A7", "D"),
    "flash_qla": ("#009E73", "^"),
    "cudnn": ("#D55E00", "v"),
    "fla": ("#56B4E9", "P"),
}
NAMES = {
    "flashinfer": "FlashInfer",
    "flashinfer_cp": "FlashInfer, context parallel",
    "flash_qla": "FlashQLA",
    "cudnn": "cuDNN frontend",
    "fla": "FLA",
}
Groups = dict[tuple[str, str, str], dict[str, report.Row]]


def points(axes: Axes, groups: Groups, op: str, cases: list[str], gate: str) -> None:
    """A marker for each implementation timed in the process that timed ours; slow gates beside steep ones."""
    decode, slow = op.endswith("decode"), gate == "slow"
    for name, (colour, marker) in STYLE.items():
        found = []
        for x, case in enumerate(cases):
            group = groups.get((op, case, gate), {})
            row, ours = group.get(name), group.get(report.OURS)
            if row and ours and row["ms"] and row["run"] == ours["run"]:
                share = 100 * row["floor_ms"] / row["ms"]
                found.append((x + 0.18 * slow, share if decode else row["ms"]))
        if not found:
            continue
        mine = name == report.OURS
        axes.plot(
            *zip(*found), marker, color=colour, markersize=6, zorder=3 if mine else 2, markeredgewidth=1.3,
            markerfacecolor=colour if mine and not slow else "none", linestyle="-" if decode else "",
            linewidth=0.8, label=NAMES.get(name, name) + ", slow gates" * slow,
            alpha=0.6 if slow and not mine else 1,
        )  # fmt: skip


def finish(axes: Axes, title: str, ticks: list[str], ylabel: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xticks(range(len(ticks)), ticks, rotation=35, ha="right", fontsize=7)
    axes.tick_params(axis="y", which="both", labelsize=7)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    axes.set_ylabel(ylabel, fontsize=8)
    if not axes.lines:
        axes.yaxis.set_visible(False)
        axes.text(0.5, 0.5, "not timed with these kernels yet", transform=axes.transAxes, ha="center", fontsize=8)  # fmt: skip
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.grid(axis="x", linewidth=0.3, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(result: report.Row, out: Path) -> None:
    # the same file from the same numbers; text as text
    matplotlib.rcParams |= {"svg.hashsalt": "pylinattn", "svg.fonttype": "none"}
    groups = report.grouped(result["rows"])
    figure, rows = plt.subplots(3, 3, figsize=(12, 10.5))
    for row, op, all_heads, all_lengths, gates in (
        (rows[0], "gdn_fwd", GDN_HEADS, GDN_LENGTHS, ("none",)),
        (rows[1], "kda_fwd", KDA_HEADS, KDA_LENGTHS, ("steep", "slow")),
    ):
        lengths = sorted(all_lengths, key=lambda n: (sum(all_lengths[n]), len(all_lengths[n])))
        for axes, heads in zip(row, all_heads):
            axes.set_yscale("log")
            for gate in gates:
                points(axes, groups, op, [f"{n} {heads}" for n in lengths], gate)
            title = f"{op[:3].upper()} forward, {heads[1:]} heads"
            finish(axes, title, lengths, "ms, lower is better")
    for axes, (op, heads, title) in zip(rows[2], DECODE):
        gate = "softplus" if op == "gdn_decode" else "steep"
        points(axes, groups, op, [f"B{b} {heads}" for b in DECODE_BATCHES], gate)
        axes.set_ylim(0, 105)
        ticks = [f"batch {b}" for b in DECODE_BATCHES]
        finish(axes, title, ticks, "% of the copy rate, higher is better")
    for row in rows:
        row[0].legend(fontsize=7, frameon=False)
    when = f"{result['gpu']}, {result['date'][:10]}, cuda/ tree {result['cuda_tree'][:7]}"
    figure.suptitle(
        f"{when}; each point's peers ran in its process, on its inputs", fontsize=9, x=0.01, ha="left"
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(out, metadata={"Date": None})
    print(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "file", type=Path, nargs="?", default=ROOT / "bench" / "results" / "h200.json"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    draw(report.read(options.file), options.out or ROOT / f"docs/speed_{options.file.stem}.svg")

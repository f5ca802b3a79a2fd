"""Fails when a kernel spills, uses a stack or has its wgmma serialised, unless tools/ptxas_allow.txt says why it may.

python tools/check_ptxas.py BUILD
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import ptxas_log

ALLOW = Path(__file__).with_name("ptxas_allow.txt")


def allowed() -> list[tuple[str, str]]:
    """(fault, pattern of kernel names) of each line `fault pattern : reason`."""
    rows = []
    for number, line in enumerate(ALLOW.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = re.fullmatch(r"(spill|stack|remark)\s+(\S+)\s+:\s+\S.*", line)
        if not found:
            sys.exit(f"{ALLOW.name}:{number}: expected `spill|stack|remark <pattern> : <reason>`")
        rows.append((found[1], found[2]))
    return rows


def faults(kernel: dict[str, Any]) -> dict[str, str]:
    found = {}
    if kernel.get("spill_stores") or kernel.get("spill_loads"):
        found["spill"] = f"spills {kernel['spill_stores']} bytes, reloads {kernel['spill_loads']}"
    if kernel.get("stack"):
        found["stack"] = f"has a stack frame of {kernel['stack']} bytes"
    if kernel["remarks"]:
        found["remark"] = "; ".join(kernel["remarks"])
    return found


def main(build: Path) -> None:
    kernels = ptxas_log.read_all(build)
    if not kernels:
        sys.exit(f"There are no .ptxas logs below {build}.")
    rows, used, bad = allowed(), set(), []
    for kernel in kernels.values():
        for fault, text in faults(kernel).items():
            row = next(
                (
                    r
                    for r in rows
                    if r[0] == fault and re.fullmatch(r[1], kernel["name"].replace(" ", ""))
                ),
                None,
            )
            used.add(row)
            if row is None:
                bad.append(f"{kernel['name']} {text}")
    bad += [
        f"{ALLOW.name} allows `{' '.join(row)}`, which no kernel needs"
        for row in rows
        if row not in used
    ]
    if bad:
        sys.exit("\n".join(bad))
    most = max(kernel.get("registers", 0) for kernel in kernels.values())
    print(
        f"{len(kernels)} kernels, at most {most} registers; no spill, stack or serialised wgmma outside {ALLOW.name}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""CUDA compiler launcher: runs the compiler and keeps what ptxas said beside the object file, as <object>.ptxas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def is_note(line: str) -> bool:
    return line.startswith("ptxas info") or "bytes stack frame" in line


def read(log: Path) -> dict[str, dict[str, Any]]:
    """What each kernel of one log uses, by mangled name; `remarks` are ptxas' complaints about it."""
    kernels: dict[str, dict[str, Any]] = {}

    def row(name: str) -> dict[str, Any]:
        return kernels.setdefault(name, {"static_smem": 0, "remarks": []})

    entry = function = log.name
    for line in log.read_text().splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            entry = found[1]
            row(entry)["arch"] = found[2]
        elif found := re.search(r"Function properties for '?([^\s']+)", line):
            function = found[1]
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            stack, stores, loads = map(int, found.groups())
            row(function).update(stack=stack, spill_stores=stores, spill_loads=loads)
        elif found := re.search(r"Used (\d+) registers", line):
            row(entry)["registers"] = int(found[1])
            if smem := re.search(r"(\d+) bytes smem", line):
                row(entry)["static_smem"] = int(smem[1])
        elif "Performance Loss" in line or "serialized" in line:
            found = re.search(r"in function '?([^\s']+)", line)
            row(found[1] if found else entry)["remarks"].append(line.split(": ", 1)[1].strip())
    return kernels


def without_parameters(signature: str) -> str:
    """`void a::f<(E)1>(int, P)` -> `a::f<(E)1>`."""
    depth = 0
    for i in range(len(signature) - 1, -1, -1):
        depth += (signature[i] == ")") - (signature[i] == "(")
        if depth == 0 and signature[-1] == ")":
            signature = signature[:i]
            break
    return signature.removeprefix("void ")


def read_all(build: Path) -> dict[str, dict[str, Any]]:
    """The kernels of every log below a build folder."""
    kernels: dict[str, dict[str, Any]] = {}
    for log in sorted(build.rglob("*.ptxas")):
        kernels.update(read(log))
    names = "\n".join(kernels)
    plain = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    for kernel, name in zip(kernels.values(), plain.stdout.splitlines(), strict=True):
        kernel["name"] = without_parameters(name)
    return kernels


def main(command: list[str]) -> int:
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    lines = run.stderr.splitlines(keepends=True)
    sys.stderr.writelines(line for line in lines if not is_note(line))
    if run.returncode == 0 and "-o" in command:
        log = Path(command[command.index("-o") + 1] + ".ptxas")
        log.write_text("".join(line for line in lines if is_note(line)))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Builds the parts library, for sm_90a: every .cu of this folder and the host files of cuda/common.

python tests/gpu_parts/build.py OUTPUT [--report] [--jobs N]
--report prints what ptxas says of every kernel. Its warnings (serialised wgmma among them) and
spilled registers are errors.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[1] / "cuda"
SOURCES = [*sorted(HERE.glob("*.cu")), CUDA / "common/launch.cpp", CUDA / "common/tensor_map.cpp"]
FLAGS = [
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    f"-I{CUDA}",
]


def compile_one(nvcc: str, source: Path, folder: Path) -> tuple[Path, str]:
    """Compiles one source; returns the object file and the compiler's messages."""
    target = folder / f"{source.stem}.o"
    command = [nvcc, *FLAGS, "-Xptxas=-v", "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
    return target, done.stderr


def complaints(messages: str) -> list[str]:
    """Lines that report a warning, spilled registers or serialised wgmma (C7510-C7519)."""
    bad = re.compile(r"warning|[1-9]\d* bytes spill|\(C751\d\)")
    return [line for line in messages.splitlines() if bad.search(line)]


def build(output: Path, *, jobs: int = 2, report: bool = False) -> None:
    """Builds the library at output; raises RuntimeError with the compiler's words if it cannot."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError("nvcc is not on the PATH.")
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        results = list(pool.map(lambda source: compile_one(nvcc, source, folder), SOURCES))
        messages = "".join(text for _, text in results)
        if report:
            print(messages)
        found = complaints(messages)
        if found:
            raise RuntimeError("ptxas complains:\n" + "\n".join(found))
        output.parent.mkdir(parents=True, exist_ok=True)
        objects = [str(target) for target, _ in results]
        command = [nvcc, "-shared", "-cudart=static", "-o", str(output), *objects]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    try:
        build(arguments.output, jobs=arguments.jobs, report=arguments.report)
    except RuntimeError as error:
        sys.exit(str(error))

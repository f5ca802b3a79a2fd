"""The emulations of the kernels (tests/emulation) still compile with the sources; they run by hand, for minutes."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent / "emulation"
CUDA = FOLDER.parents[1] / "cuda"


def toolkit():
    """A folder with the CUDA headers."""
    nvcc = shutil.which("nvcc")
    folders = [os.environ.get("CUDA_HOME"), nvcc and pathlib.Path(nvcc).resolve().parents[1]]
    for folder in (*filter(None, folders), "/usr/local/cuda"):
        if (pathlib.Path(folder) / "include/cuda_fp16.h").exists():
            return pathlib.Path(folder)
    return None


@pytest.mark.parametrize("name", ["main", "kda", "decode", "verify", "gdn_bwd"])
def test_compiles(name):
    compiler, cuda = shutil.which("g++"), toolkit()
    if not (compiler and cuda and CUDA.exists()):
        pytest.skip("g++, the CUDA headers or the sources are not here")
    command = [compiler, "-std=c++17", "-fsyntax-only", "-fno-strict-aliasing", "-w", "-I."]
    command += [f"-I{folder}" for folder in (CUDA, CUDA / "include", cuda / "include")]
    done = subprocess.run([*command, f"{name}.cpp"], cwd=FOLDER, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stderr[:2000])

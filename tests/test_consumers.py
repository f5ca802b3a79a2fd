"""Programs in other languages, built and run against the installed package: CMake with C and C++, and Rust."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import header
import pytest
from harness import check

import pylinattn

EXAMPLES = header.REPOSITORY / "examples"
INSTALLED = pathlib.Path(pylinattn.get_cmake_dir(), "pylinattnConfig.cmake").exists()
needs_install = pytest.mark.skipif(
    not INSTALLED, reason="pylinattn is used from its source folder, not installed"
)


def needs(*tools):
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}")


def run(folder, *words, **environment):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    check(done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


@needs_install
@needs("cmake", "c++", "cc")
@pytest.mark.skipif(not EXAMPLES.exists(), reason="no source tree beside the tests")
def test_cmake_package(tmp_path):
    """find_package from the folder that the command line names; C99 and C++17 without a warning; both programs run."""
    folder = run(tmp_path, sys.executable, "-m", "pylinattn", "--cmakedir").strip()
    warnings = "-Wall -Wextra -Wpedantic -Werror"
    run(
        tmp_path, "cmake", "-S", str(EXAMPLES), "-B", str(tmp_path), f"-Dpylinattn_DIR={folder}",
        f"-DCMAKE_CXX_FLAGS={warnings}", f"-DCMAKE_C_FLAGS={warnings}",
    )  # fmt: skip
    run(tmp_path, "cmake", "--build", str(tmp_path))
    for program in ("c_example", "cpp_example"):
        out = run(tmp_path, str(tmp_path / program))
        check("cpu/" in out, f"{program} does not say what ran:\n{out}")


@needs("cargo")
@pytest.mark.skipif(not EXAMPLES.exists(), reason="no source tree beside the tests")
def test_rust(tmp_path):
    """examples/rust built by cargo without network, found by Python and by LINATTN_LIB_DIR."""
    source = tmp_path / "rust"
    shutil.copytree(EXAMPLES / "rust", source, ignore=shutil.ignore_patterns("target"))
    build = [tmp_path, "cargo", "run", "--offline", "--manifest-path", str(source / "Cargo.toml")]
    places = [{"LINATTN_LIB_DIR": pylinattn.get_library_dir()}, {"PYTHON": sys.executable}]
    for place in places:
        out = run(
            *build, CARGO_TARGET_DIR=str(tmp_path / "target"), RUSTFLAGS="-Dwarnings", **place
        )
        check("cpu/" in out and "gdn_fwd: k must have shape" in out, out)

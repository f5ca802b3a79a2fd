"""Rebuilds prebuilt/liblinattn.so and its manifest, or checks a library against them.

    python tools/prebuilt.py                       compile twice, in two folders; keep the result when the bytes agree
    python tools/prebuilt.py --check [BUILD]       compile (or take BUILD/liblinattn.so) and compare with prebuilt/

Needs CMake, Ninja, a C++ compiler and nvcc (see tools/toolchain.py for which).
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import manifest
import ptxas_log
from manifest import ROOT

# Beside what the compilers read: the files that say how they are called.
BUILD_FILES = [
    "CMakeLists.txt",
    "cmake/Build.cmake",
    "cmake/Sources.cmake",
    "cmake/GlibcFloor.cmake",
    "cmake/linattn.map",
]


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_library(tree: Path, build: Path) -> Path:
    print(f"compiling {tree} in {build}", flush=True)
    run(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        tree,
        "-B",
        build,
        "-DLINATTN_FROM=SOURCE",
        "-DLINATTN_WERROR=ON",  # as CI has it: nvcc keeps the options that it passes on in the file
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    run("cmake", "--build", build)
    return build / "liblinattn.so"


def sources_read(tree: Path, build: Path) -> list[str]:
    """The files of this repository that the compilers read, from the dependency lists they wrote."""
    listed = (line.strip() for line in run("ninja", "-C", build, "-t", "deps").splitlines())
    paths = {(build / line).resolve() for line in listed if line and not line.endswith(")")}
    tree = tree.resolve()
    found = {
        p.relative_to(tree).as_posix()
        for p in paths
        if p.is_relative_to(tree) and not p.is_relative_to(build)
    }
    return sorted(found | set(BUILD_FILES))


def toolchain(build: Path, library: Path) -> dict[str, str]:
    loaded = ctypes.CDLL(str(library))
    loaded.linattn_build_info.restype = ctypes.c_char_p
    cache = (build / "CMakeCache.txt").read_text().splitlines()
    cxx = next(line.split("=", 1)[1] for line in cache if line.startswith("CMAKE_CXX_COMPILER:"))
    return {
        "build_info": loaded.linattn_build_info().decode(),
        # "c++ (Debian 12.2.0-14) 12.2.0" without the name it was called by
        "cxx": run(cxx, "--version").splitlines()[0].partition(" ")[2],
        "linker": run(cxx, "-Wl,--version").splitlines()[0],
    }


def rebuild() -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        build = Path(first).resolve() / "build"
        library = compile_library(ROOT, build)
        copy = Path(second) / "another/folder"
        for name in ("CMakeLists.txt", "cmake", "cuda", "tools"):
            copier = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy.mkdir(parents=True, exist_ok=True)
            copier(ROOT / name, copy / name)
        again = compile_library(copy, Path(second) / "build")
        if library.read_bytes() != again.read_bytes():
            sys.exit(
                "Two builds of the same sources in two folders differ, so the library is not reproducible."
            )
        manifest.write(
            ROOT,
            library,
            sources_read(ROOT, build),
            toolchain(build, library),
            ptxas_log.read_all(build),
        )
    recorded = manifest.read()
    print(
        f"prebuilt/liblinattn.so: {recorded['library']['bytes']} bytes, sha256 {recorded['library']['sha256']}"
    )
    print(
        f"the same from two folders; {len(recorded['kernels'])} kernels, {len(recorded['sources'])} sources"
    )


def check(build: Path | None) -> None:
    if stale := manifest.stale():
        print(f"{stale} Nothing to compare; `python tools/prebuilt.py` refreshes it.")
        return
    with tempfile.TemporaryDirectory() as scratch:
        if build is None:
            build = Path(scratch).resolve() / "build"
            compile_library(ROOT, build)
        library = build / "liblinattn.so"
        ours, theirs = toolchain(build, library), manifest.read()["toolchain"]
        if ours != theirs:
            print(
                f"prebuilt/ was compiled by {theirs}, this library by {ours}: bytes are not comparable."
            )
        elif manifest.sha256(library) != manifest.read()["library"]["sha256"]:
            sys.exit(
                "prebuilt/liblinattn.so differs from what the same compilers make of the same sources here."
            )
        else:
            print("prebuilt/liblinattn.so is what these sources give, byte for byte.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", nargs="?", const="", metavar="BUILD")
    args = parser.parse_args()
    if args.check is None:
        rebuild()
    else:
        check(Path(args.check).resolve() if args.check else None)


if __name__ == "__main__":
    main()

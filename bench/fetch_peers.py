"""Brings the peers to a machine without a network, as archives small enough to carry one by one.

    python bench/fetch_peers.py FOLDER                       here: pip download, leave out, pack
    python bench/fetch_peers.py --unpack SITE FOLDER...      there: unpack what is in the folders

`base` holds FLA, cuDNN frontend and the Python halves of FlashInfer and CuTe DSL; FlashInfer's calls
need `cutlass` too, and FlashQLA is in `tilelang` (with `base`). Wheels are for Linux on x86-64.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import lzma
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CUTE_DSL = "4.8.1"
ARCHIVES = {
    "base": [
        "fla-core==0.6.0",
        "nvidia-cudnn-frontend==1.32.0",
        "flashinfer-python==0.7.4",
        "apache-tvm-ffi==0.1.12",
        f"nvidia-cutlass-dsl-libs-base=={CUTE_DSL}",
        f"nvidia-cutlass-dsl-libs-core=={CUTE_DSL}",
    ],
    "cutlass": [f"nvidia-cutlass-dsl-libs-cu13=={CUTE_DSL}"],
    "tilelang": ["flash-qla==0.1.3", "tilelang==0.1.15", "z3-solver==4.15.4.0"],
}
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)
MEGABYTE = 1 << 20


def wanted(member: str) -> bool:
    """FlashInfer carries CUDA sources for its compiler at run time, which these calls do not use."""
    if member.startswith("flashinfer/"):
        return member.endswith(".py") and not member.startswith("flashinfer/data/")
    if member.startswith(("b12x/", "include/", "build_")):
        return False
    return "/stubs/" not in member and not member.endswith("libiket_cubin_info.so")


def download(packages: list[str], folder: Path, python: str) -> None:
    platforms = [f"manylinux_2_{n}_x86_64" for n in GLIBC] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "-d", str(folder)]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, *packages], check=True)


def pack(packages: list[str], archive: Path, python: str, preset: int) -> None:
    filters = [
        {"id": lzma.FILTER_X86},  # most of the bytes are machine code
        {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": 128 * MEGABYTE},
    ]
    with tempfile.TemporaryDirectory() as temporary:
        wheels, tree = Path(temporary, "wheels"), Path(temporary, "tree")
        download(packages, wheels, python)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as content:
                content.extractall(tree, [m for m in content.namelist() if wanted(m)])
        with lzma.open(archive, "wb", filters=filters) as raw, tarfile.open(None, "w|", raw) as tar:
            for path in sorted(tree.iterdir()):
                tar.add(path, path.name)


def unpack(archive: Path, site: Path) -> str:
    with tarfile.open(archive) as tar:
        tar.extractall(site, filter="data")
    return archive.name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--unpack", type=Path, metavar="SITE")
    parser.add_argument("--archives", default=",".join(ARCHIVES), help="default: %(default)s")
    parser.add_argument("--python", default="3.12", help="of that machine; default: %(default)s")
    parser.add_argument("--preset", type=int, default=9, help="of xz, 0 (fast) to 9 (small)")
    options = parser.parse_args()

    if options.unpack:
        found = [path for folder in options.folders for path in sorted(folder.glob("*.tar.xz"))]
        options.unpack.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ProcessPoolExecutor() as pool:
            for name in pool.map(unpack, found, [options.unpack] * len(found)):
                print(f"unpacked {name}", flush=True)
        dsl = options.unpack / "nvidia_cutlass_dsl" / "dsl_packages"
        print(f"export PYTHONPATH={options.unpack}:{dsl}")
        return
    for name in options.archives.split(","):
        archive = options.folders[0] / f"{name}.tar.xz"
        archive.parent.mkdir(parents=True, exist_ok=True)
        pack(ARCHIVES[name], archive, options.python, options.preset)
        print(f"{archive}: {archive.stat().st_size / MEGABYTE:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()

"""python -m pylinattn: what is installed, what this machine can run, and a demo."""

from __future__ import annotations

import argparse
import os
import sys

from . import __version__, get_cmake_dir, get_include, get_library_dir, supports
from ._lib import LIBRARY_NAME, LinattnError, lib, library_path, text_of
from ._support import cuda_devices
from .ops import OPS

_DTYPES = ("bf16", "f16", "f32", "f64")
_HEAD_SIZES = (64, 128, 256)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _what_runs(op: str, device: str) -> str:
    """The dtypes of q with a kernel, for K = V of common sizes."""
    sizes: dict[str, list[int]] = {}
    for size in _HEAD_SIZES:
        dtypes = " ".join(t for t in _DTYPES if supports(op, device=device, dtype=t, K=size))
        if dtypes:
            sizes.setdefault(dtypes, []).append(size)
    return "; ".join(f"{d}, K = V = {' '.join(map(str, s))}" for d, s in sizes.items()) or "-"


def print_info() -> None:
    abi = lib.linattn_abi_version()
    print(f"pylinattn  {__version__}, ABI {abi >> 16}.{abi & 0xFFFF}")
    print(f"library    {library_path.resolve()}")
    print(f"built with {text_of(lib.linattn_build_info())}")
    devices = ["cpu"]
    try:
        for number, device in enumerate(cuda_devices()):
            kernels = "usable" if device.usable else "no kernels for it, or it did not run one"
            print(
                f"cuda:{number}     {device.name}, compute capability "
                f"{device.compute_capability // 10}.{device.compute_capability % 10}, "
                f"{device.multiprocessors} multiprocessors, {device.memory_bytes / 2**30:.0f} GiB, "
                f"driver for CUDA {_version(device.driver_version)}, "
                f"runtime {_version(device.runtime_version)}: {kernels}"
            )
            if device.usable:
                devices.append(f"cuda:{number}")
    except LinattnError as error:
        print(f"cuda       none: {error}")

    print()
    rows = [("op", *devices)] + [(op, *(_what_runs(op, d) for d in devices)) for op in OPS]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pylinattn",
        description="Print what is installed and what runs on this machine.",
        epilog=f"Compile a C program with: cc main.c $({sys.executable} -m pylinattn --cflags --libs)",
    )
    parser.add_argument("--cflags", action="store_true", help="print the compiler's flags")
    parser.add_argument("--libs", action="store_true", help="print the linker's flags")
    parser.add_argument("--cmakedir", action="store_true", help="print the folder for CMake")
    commands = parser.add_subparsers(dest="command", title="commands")
    demo = commands.add_parser(
        "demo",
        help="run prefill and decode of both ops, checked and timed",
        description="Run prefill and decode of GDN and KDA on the best device, check sampled heads "
        "against the float64 reference, and print time, error and share of the memory bandwidth.",
    )
    demo.add_argument("--device", help='"cpu", "cuda" or "cuda:<n>"; the best one if not given')
    options = parser.parse_args()

    if options.command == "demo":
        from ._demo import run

        try:
            return run(options.device)
        except LinattnError as error:
            print(error, file=sys.stderr)
            return 1
    flags = []
    if options.cflags:
        flags.append(f"-I{get_include()}")
    if options.libs:
        folder = get_library_dir()
        name = LIBRARY_NAME.removeprefix("lib").removesuffix(".so")
        flags.append(f"-L{folder} -Wl,-rpath,{folder} -l{name}")
    if options.cmakedir:
        flags.append(get_cmake_dir())
    if flags:
        print(" ".join(flags))
    else:
        print_info()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)

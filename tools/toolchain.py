"""Where liblinattn.so comes from: compiled here, or taken from prebuilt/.

CMake runs this file, the build backend imports it, so that both decide alike. PYLINATTN_NVCC says which CUDA compilers
count: `auto` (a toolkit on this machine, else the nvcc wheels), `system`, `wheel`, `none`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import manifest

NVCC_WHEELS = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2"
OLDEST_NVCC = (13, 0)


@dataclasses.dataclass
class Choice:
    from_: str  # SOURCE or PREBUILT
    why: str
    nvcc: str = ""
    wheel_root: str = ""  # folder of the toolkit, when nvcc is a wheel's
    needs_wheels: bool = False  # SOURCE, once the nvcc wheels are installed


class NoLibrary(Exception):
    """Neither way is open; the text says what would open one."""


def nvcc_version(nvcc: Path) -> tuple[int, ...]:
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0, 0)


def system_nvcc() -> Path | None:
    """CUDACXX, a folder named by the usual variables, PATH, then the usual folder."""
    folders = [os.environ.get(name) for name in ("CUDA_PATH", "CUDAToolkit_ROOT", "CUDA_HOME")]
    places = [os.environ.get("CUDACXX"), *(f"{folder}/bin/nvcc" for folder in folders if folder)]
    places += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((Path(place) for place in places if place and os.access(place, os.X_OK)), None)


def wheel_root() -> Path | None:
    """Folder of the nvcc wheels, asked of this Python: pip spreads build requirements over several folders."""
    try:
        root = Path(
            str(metadata.distribution("nvidia-cuda-nvcc").locate_file("nvidia/cu13"))
        ).resolve()
    except metadata.PackageNotFoundError:
        return None
    parts = ("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h")
    return root if all((root / part).is_file() for part in parts) else None


def cxx_compiler() -> str | None:
    names = [*os.environ.get("CXX", "").split()[:1], "c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def choose(
    wanted: str = "AUTO", cuda: bool = True, nvcc: str = "", root: Path = manifest.ROOT
) -> Choice:
    mode = os.environ.get("PYLINATTN_NVCC") or "auto"
    if mode not in ("auto", "system", "wheel", "none"):
        raise NoLibrary(f"PYLINATTN_NVCC is {mode!r}; it may be auto, system, wheel or none.")
    if wanted not in ("AUTO", "SOURCE", "PREBUILT"):
        raise NoLibrary(f"LINATTN_FROM is {wanted!r}; it may be AUTO, SOURCE or PREBUILT.")
    cxx = cxx_compiler()
    if not cuda:
        if wanted == "PREBUILT" or not cxx:
            raise NoLibrary(
                "A CPU-only library is compiled from source, which needs a C++ compiler."
            )
        return Choice("SOURCE", "CPU only")
    stale = manifest.stale(root)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        stale = f"prebuilt/ holds a library for Linux x86_64, not for {sys.platform} {platform.machine()}."
    if wanted == "PREBUILT":
        if stale:
            raise NoLibrary(stale)
        return Choice("PREBUILT", "as asked")

    why_not = "there is no CUDA compiler"
    wheel = None
    if not nvcc and mode in ("auto", "system") and (system := system_nvcc()):
        version = nvcc_version(system)
        if version >= OLDEST_NVCC or mode == "system":
            nvcc = str(system)
        else:
            why_not = f"{system} is CUDA {version[0]}.{version[1]} and 13.0 is needed"
    if not nvcc and mode in ("auto", "wheel") and (wheel := wheel_root()):
        nvcc = str(wheel / "bin/nvcc")
    if cxx and nvcc:
        return Choice("SOURCE", f"compiled by {nvcc} and {cxx}", nvcc, str(wheel or ""))
    if not cxx:
        why_not = "there is no C++ compiler"
    if wanted == "AUTO" and not stale and not (mode == "wheel" and cxx):
        return Choice("PREBUILT", why_not)
    if cxx and mode in ("auto", "wheel"):
        return Choice("SOURCE", f"{why_not}{'; ' + stale if stale else ''}", needs_wheels=True)
    raise NoLibrary(f"liblinattn.so cannot be compiled: {why_not}. {stale or ''}".strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="from_", default="AUTO")
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--nvcc", default="")
    args = parser.parse_args()
    try:
        choice = choose(args.from_, not args.no_cuda, args.nvcc)
    except NoLibrary as error:
        sys.exit(str(error))
    if choice.needs_wheels:
        sys.exit(
            f"{choice.why}. Install a CUDA 13.0 toolkit, or `pip install '{NVCC_WHEELS}'` for this Python, or compile "
            "for the CPU alone with -DLINATTN_CUDA=OFF."
        )
    print(json.dumps({key.rstrip("_"): value for key, value in dataclasses.asdict(choice).items()}))


if __name__ == "__main__":
    main()

"""Checks a repaired wheel: its tag, what its library needs from the system, and what it exports.

python tools/check_wheel.py WHEEL          needs pyelftools
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

ROOT = Path(__file__).resolve().parent.parent
NEWEST = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}  # manylinux_2_28
SYSTEM = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so\.\d+"
)


def tag_faults(wheel: Path) -> list[str]:
    faults = []
    tags = re.fullmatch(r"pylinattn-[^-]+-([^-]+)-([^-]+)-([^-]+)\.whl", wheel.name)
    if tags is None or tags.groups()[:2] != ("py3", "none"):
        return [f"{wheel.name} is not tagged py3-none"]
    for platform in tags[3].split("."):
        glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", platform)
        if platform != "manylinux2014_x86_64" and (
            glibc is None or tuple(map(int, glibc.groups())) > NEWEST["GLIBC"]
        ):
            faults.append(f"platform tag {platform} is not manylinux_2_28_x86_64 or lower")
    return faults


def needs_faults(elf: ELFFile) -> list[str]:
    """Symbol versions, libraries and search paths that would keep the library from loading elsewhere."""
    faults = []
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for library, versions in section.iter_versions():
                for version in versions:
                    family, _, number = version.name.partition("_")
                    digits = tuple(int(n) for n in number.split(".") if n.isdigit())
                    if family not in NEWEST or digits > NEWEST[family]:
                        faults.append(f"needs {version.name} of {library.name}")
        if isinstance(section, DynamicSection):
            for entry in section.iter_tags():
                if entry.entry.d_tag == "DT_NEEDED" and not SYSTEM.fullmatch(entry.needed):
                    faults.append(f"needs the library {entry.needed}")
                if entry.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    faults.append(f"has a search path: {entry.entry.d_tag}")
    return faults


def export_faults(elf: ELFFile) -> list[str]:
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    exported = {
        s.name
        for s in symbols
        if s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["type"] != "STT_OBJECT"
    }
    header = (ROOT / "cuda/include/linattn.h").read_text()
    declared = set(re.findall(r"^LINATTN_API [^;(]*?(\w+)\(", header, re.M))
    return [
        f"{name} is exported but not declared in linattn.h"
        for name in sorted(exported - declared)
        if not name.startswith("linattn_xla_")
    ] + [
        f"{name} is declared in linattn.h but not exported" for name in sorted(declared - exported)
    ]


def main(wheel: Path) -> None:
    faults = tag_faults(wheel)
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so") or ".so." in name]
        if libraries != ["pylinattn/lib/liblinattn.so"]:
            faults.append(
                f"the wheel holds the libraries {libraries}, not pylinattn/lib/liblinattn.so alone"
            )
        elf = ELFFile(io.BytesIO(archive.read("pylinattn/lib/liblinattn.so")))
    faults += needs_faults(elf) + export_faults(elf)
    if faults:
        sys.exit("\n".join(f"{wheel.name}: {fault}" for fault in faults))
    print(f"{wheel.name}: tag, symbol versions and exports are as they should be")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

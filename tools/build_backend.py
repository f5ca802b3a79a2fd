"""scikit-build-core, plus one decision: bring the nvcc wheels when the library has to be compiled and there is no nvcc."""

from __future__ import annotations

import os
import sys
from typing import Any

import toolchain
from scikit_build_core import build as core
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any] | None


def _compilers(settings: Settings) -> list[str]:
    def setting(name: str, default: str) -> str:
        return str((settings or {}).get(f"cmake.define.{name}", default)).upper()

    cuda = setting("LINATTN_CUDA", os.environ.get("PYLINATTN_CUDA", "ON"))
    wanted = setting("LINATTN_FROM", "AUTO")
    try:
        choice = toolchain.choose(wanted, cuda not in ("OFF", "0", "FALSE", "NO", "N"))
    except toolchain.NoLibrary as error:
        sys.exit(str(error))
    if not choice.needs_wheels:
        return []
    print(f"{choice.why}: bringing {toolchain.NVCC_WHEELS}", file=sys.stderr)
    return [toolchain.NVCC_WHEELS]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*core.get_requires_for_build_wheel(config_settings), *_compilers(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*core.get_requires_for_build_editable(config_settings), *_compilers(config_settings)]

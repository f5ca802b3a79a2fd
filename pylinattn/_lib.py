"""The shared library: where it is, whether it fits this package, and its statuses as exceptions.

It is opened when the package is imported: a library that is missing or does not fit is a broken
installation, best told at once. Nothing else can make the import fail; a GPU, a driver or an array
library is looked for when a call needs it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any, NoReturn

_PACKAGE = __name__.rpartition(".")[0]
LIBRARY_NAME = "liblinattn.so"


class LinattnError(Exception):
    """Base of every error of this package; each subclass is a builtin exception too."""


class LinattnValueError(LinattnError, ValueError):
    """A shape, stride, alignment, range or overlap."""


class LinattnTypeError(LinattnError, TypeError):
    """A dtype, a device, or an object that is no array."""


class LinattnUnsupportedError(LinattnError, NotImplementedError):
    """A legal call that there is no kernel for."""


class LinattnRuntimeError(LinattnError, RuntimeError):
    """A failure of CUDA, of memory or of the library itself."""


def package_folder(*parts: str) -> Path:
    """A folder of the package, which an editable install spreads over two."""
    places = [Path(folder, *parts) for folder in importlib.import_module(_PACKAGE).__path__]
    return next((place for place in places if place.is_dir()), places[0])


def _find_library() -> Path:
    named = os.environ.get("PYLINATTN_LIBRARY")
    if named:
        return Path(named)
    path = package_folder("lib") / LIBRARY_NAME
    if not path.exists():
        folders = ", ".join(importlib.import_module(_PACKAGE).__path__)
        raise ImportError(
            f"pylinattn: {LIBRARY_NAME} is not in lib/ under {folders}. Install the package "
            f"(pip install ., or pip install -e . to work on it), or name a library in the "
            f"environment variable PYLINATTN_LIBRARY."
        )
    return path


def _installed_cdef() -> Any:
    """Of the package as it is installed, where Python runs in its source tree, whose folder comes first and has no library."""
    package = importlib.import_module(_PACKAGE)
    package.__path__ = pkgutil.extend_path(package.__path__, _PACKAGE)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(f"{_PACKAGE}._cdef").ffi
    except ModuleNotFoundError as error:
        raise ImportError(
            f"pylinattn: the module {error.name} is missing. Install the package (pip install ., or "
            f"pip install -e . to work on it), which brings cffi and generates pylinattn._cdef."
        ) from error


def _open() -> tuple[Any, Any, Path]:
    try:
        ffi = importlib.import_module(f"{_PACKAGE}._cdef").ffi
    except ModuleNotFoundError:
        ffi = _installed_cdef()
    path = _find_library()
    try:
        lib = ffi.dlopen(os.fspath(path))
        version = lib.linattn_abi_version()
    except (OSError, AttributeError) as error:
        raise ImportError(f"pylinattn: {path} cannot be used: {error}") from error
    if version >> 16 != lib.LINATTN_ABI_VERSION >> 16:
        raise ImportError(
            f"pylinattn: {path} has ABI {version >> 16}.{version & 0xFFFF}, but this package needs "
            f"{lib.LINATTN_ABI_VERSION >> 16}.x. Reinstall the package, or unset PYLINATTN_LIBRARY."
        )
    return ffi, lib, path


ffi, lib, library_path = _open()

F32, F64, BF16, F16 = lib.LINATTN_F32, lib.LINATTN_F64, lib.LINATTN_BF16, lib.LINATTN_F16
I32, I64, U8 = lib.LINATTN_I32, lib.LINATTN_I64, lib.LINATTN_U8
CPU, CUDA = lib.LINATTN_CPU, lib.LINATTN_CUDA
READ_ONLY = lib.LINATTN_READ_ONLY

# The options that are words.
GATES = {
    "none": lib.LINATTN_GATE_NONE,
    "softplus": lib.LINATTN_GATE_SOFTPLUS,
    "bounded": lib.LINATTN_GATE_BOUNDED,
}
BETA_FORMS = {
    "weight": lib.LINATTN_BETA_WEIGHT,
    "logits": lib.LINATTN_BETA_LOGITS,
    "logits_x2": lib.LINATTN_BETA_LOGITS_X2,
}
SAVES = {"nothing": lib.LINATTN_SAVE_NOTHING, "states": lib.LINATTN_SAVE_STATES}
DIRECTIONS = {"forward": lib.LINATTN_FORWARD, "backward": lib.LINATTN_BACKWARD}

_ERRORS = {
    lib.LINATTN_ERR_VALUE: LinattnValueError,
    lib.LINATTN_ERR_TYPE: LinattnTypeError,
    lib.LINATTN_ERR_UNSUPPORTED: LinattnUnsupportedError,
    lib.LINATTN_ERR_RUNTIME: LinattnRuntimeError,
}


def text_of(chars: Any) -> str:
    return str(ffi.string(chars).decode("utf-8", "replace"))


def raise_status(status: int) -> NoReturn:
    """The exception of a status that is not LINATTN_OK, with this thread's message."""
    error = _ERRORS.get(status, LinattnRuntimeError)
    raise error(text_of(lib.linattn_last_error()) or f"status {status} without a message")

"""What runs where, asked without running anything."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ._dlpack import DTYPE_NAMES
from ._layout import Caller
from ._lib import (
    BF16,
    CPU,
    CUDA,
    F16,
    F32,
    F64,
    LinattnError,
    LinattnTypeError,
    LinattnValueError,
    ffi,
    lib,
    library_path,
    package_folder,
    raise_status,
    text_of,
)
from .ops import OPS

_caller = Caller("supports")
_DTYPES = {"f32": F32, "f64": F64, "bf16": BF16, "f16": F16}
_DTYPES.update({name: code for code, name in DTYPE_NAMES.items() if code in _DTYPES.values()})


class Support:
    """True where the call would be taken; otherwise `reason` says why not."""

    __slots__ = ("reason",)

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return not self.reason

    def __repr__(self) -> str:
        return f"Support({bool(self)}{', ' if self.reason else ''}{self.reason})"


class Device(NamedTuple):
    name: str
    memory_bytes: int
    compute_capability: int
    multiprocessors: int
    driver_version: int  # of CUDA, 13000 for 13.0
    runtime_version: int
    usable: bool


def cuda_devices() -> list[Device]:
    """The CUDA devices; LinattnRuntimeError with the reason where there is no usable driver."""
    count = ffi.new("int32_t *")
    status = lib.linattn_device_count(count)
    if status:
        raise_status(status)
    found = []
    for device_id in range(count[0]):
        info = ffi.new("linattn_device_info *")
        status = lib.linattn_device_query(device_id, info)
        if status:
            raise_status(status)
        found.append(
            Device(
                name=text_of(info.name),
                memory_bytes=info.memory_bytes,
                compute_capability=info.compute_capability,
                multiprocessors=info.multiprocessors,
                driver_version=info.driver_version,
                runtime_version=info.runtime_version,
                usable=bool(info.usable),
            )
        )
    return found


def best_device() -> str:
    """ "cuda:<n>" of the first usable device, else "cpu"."""
    try:
        usable = [n for n, device in enumerate(cuda_devices()) if device.usable]
    except LinattnError:
        return "cpu"
    return f"cuda:{usable[0]}" if usable else "cpu"


def supports(
    op: str,
    *args: Any,
    device: Any = None,
    dtype: Any = None,
    K: int | None = None,
    V: int | None = None,
    **kwargs: Any,
) -> Support:
    """Would this call be taken? Nothing is computed, and nothing written but arrays made here.

    Two forms: ``supports("gdn_fwd", q, k, v, g, beta, gate="softplus", ...)`` makes every check of
    the call itself that reads no values, of lengths and indices. ``supports("gdn_fwd", device="cuda", dtype="bfloat16", K=128, V=128)`` asks for
    a kernel in general.

    Args:
        op: Name of the op.
        device: "cpu", "cuda" or "cuda:<n>"; the best of this machine if None.
        dtype: dtype of q (for delta_commit, in the verify call before it), by name or as an array
            library's object.
        K: Size of a key head.
        V: Size of a value head; K if None.
    Returns:
        An object that is true or false, with the ``reason`` for a refusal.
    Raises:
        ValueError: no such op, or neither form.
    """
    if not isinstance(op, str) or op not in OPS:
        raise LinattnValueError(f"supports: there is no op {op!r}; the ops are {', '.join(OPS)}")
    if args or kwargs:
        if any(x is not None for x in (device, dtype, K, V)):
            raise LinattnValueError(
                f"supports: give either the arguments of {op}, or device, dtype, K and V"
            )
        return _supports_call(op, args, kwargs)
    if dtype is None or K is None:
        raise LinattnValueError(
            f"supports: give the arguments of {op}, or dtype and K (and device and V)"
        )
    device_type, device_id = _device_of(best_device() if device is None else device)
    K = _caller.integer("K", K)
    V = K if V is None else _caller.integer("V", V)
    status = lib.linattn_supports(op.encode(), device_type, device_id, _dtype_of(dtype), K, V)
    if status not in (lib.LINATTN_OK, lib.LINATTN_ERR_UNSUPPORTED):
        raise_status(status)
    return Support(text_of(lib.linattn_last_error()) if status else "")


def _supports_call(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Support:
    import inspect  # costs more to import than the rest of this package

    entry = OPS[op]
    bound = inspect.signature(entry.function).bind(*args, **kwargs)
    bound.apply_defaults()
    try:
        entry.body(entry.op.without_launch(), *bound.arguments.values())
    except LinattnError as error:
        return Support(str(error))
    return Support()


def _device_of(device: Any) -> tuple[int, int]:
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", str(device))
    if match is None:
        raise LinattnValueError(
            f'supports: device is {str(device)!r}; "cpu", "cuda" and "cuda:<n>" are accepted'
        )
    return (CUDA if match[1] == "cuda" else CPU), _caller.integer("device", int(match[2] or 0))


def _dtype_of(dtype: Any) -> int:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    name = name or getattr(dtype, "__name__", None) or str(dtype)
    code = _DTYPES.get(name.removeprefix("torch."))
    if code is None:
        raise LinattnTypeError(f"supports: dtype is {name!r}; {', '.join(_DTYPES)} are accepted")
    return code


def last_path() -> str:
    """What ran this thread's last op, such as "cpu/avx512"; "" before any."""
    return text_of(lib.linattn_last_path())


def get_include() -> str:
    """Folder of linattn.h."""
    return str(package_folder("include"))


def get_library_dir() -> str:
    """Folder of liblinattn.so."""
    return str(library_path.resolve().parent)


def get_cmake_dir() -> str:
    """Folder of pylinattnConfig.cmake, for CMAKE_PREFIX_PATH or pylinattn_DIR."""
    return str(package_folder("lib", "cmake", "pylinattn"))

"""Arrays by DLPack: the way for any library that has no shorter one, JAX among them."""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any

from ._layout import Borrowed, Caller, Layout, keep, parse_layout
from ._lib import (
    BF16,
    CUDA,
    F16,
    F32,
    F64,
    I32,
    I64,
    READ_ONLY,
    U8,
    LinattnRuntimeError,
    LinattnTypeError,
    ffi,
    lib,
    text_of,
)

Array = Any

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype = ctypes.c_int
_capsule_is.argtypes = [ctypes.py_object, ctypes.c_char_p]

# DLManagedTensorVersioned: uint32 major, minor; void *ctx; deleter; uint64 flags; DLTensor
_FLAGS_AT, _TENSOR_AT = 24, 32
_FLAG_READ_ONLY, _FLAG_COPIED = 1, 2
_layouts: dict[bytes, Layout] = {}
LEGACY_DEFAULT_STREAM = 1  # DLPack's number for the stream that CUDA writes as NULL

DTYPE_NAMES = {
    F32: "float32",
    F64: "float64",
    BF16: "bfloat16",
    F16: "float16",
    I32: "int32",
    I64: "int64",
    U8: "uint8",
}


def capsule_address(capsule: Any, name: bytes) -> int:
    """What a capsule of this name holds; 0 if it is none."""
    return _capsule_pointer(capsule, name) if _capsule_is(capsule, name) else 0


def type_name(cls: type) -> str:
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


def borrow_by_dlpack(x: Array, caller: Caller, name: str, stream: int) -> Borrowed:
    """Borrow an array. What its library has pending on a GPU goes before `stream`."""
    try:
        options = {"stream": stream} if x.__dlpack_device__()[0] == CUDA else {}
        try:
            capsule = x.__dlpack__(max_version=(1, 1), **options)
        except TypeError:  # a library from before DLPack 1.0
            capsule = x.__dlpack__(**options)
    except Exception as error:
        raise caller.type_error(
            name, f"is a {type_name(type(x))} that does not lend its memory by DLPack: {error}"
        ) from error

    flags = 0
    if _capsule_is(capsule, b"dltensor_versioned"):
        address = _capsule_pointer(capsule, b"dltensor_versioned")
        major, minor = ffi.cast("uint32_t *", address)[0:2]
        if major != 1:
            raise caller.type_error(name, f"comes in DLPack {major}.{minor}; 0.x and 1.x are known")
        # A copy is as bad as read-only memory: what is written there never reaches the array.
        lent = ffi.cast("uint64_t *", address + _FLAGS_AT)[0]
        flags = READ_ONLY if lent & (_FLAG_READ_ONLY | _FLAG_COPIED) else 0
        address += _TENSOR_AT
    else:
        address = _capsule_pointer(capsule, b"dltensor")

    tensor = ffi.new("linattn_tensor *")
    if lib.linattn_tensor_from_dlpack(ffi.cast("struct DLTensor *", address), tensor):
        raise caller.type_error(name, f"is not accepted: {text_of(lib.linattn_last_error())}")
    tensor.flags = flags
    raw = bytes(ffi.buffer(tensor))
    behind = raw[8:]
    layout = _layouts.get(behind)
    if layout is None:
        layout = keep(_layouts, behind, parse_layout(caller, name, behind))
    caller.lenders = (*caller.lenders, capsule)
    return int.from_bytes(raw[:8], "little"), layout


class Library:
    """What a call needs of an array's library. This one: anything that speaks DLPack."""

    copies_back = False  # outputs are written in buffers of another library, and handed back after

    def check_type(self, cls: type, caller: Caller, name: str) -> None:
        """Refuse array types that are more than what the library reads of them."""

    def borrow(self, x: Array, caller: Caller, name: str, write: bool) -> Borrowed:
        return self.borrow_on(x, caller, name, write, LEGACY_DEFAULT_STREAM)

    def borrow_on(self, x: Array, caller: Caller, name: str, write: bool, stream: int) -> Borrowed:
        """Borrow for a call on the stream of another library (DLPack's number)."""
        return borrow_by_dlpack(x, caller, name, stream)

    def stream(self, device_id: int) -> int:
        """The current stream of a GPU, as a cudaStream_t."""
        return 0

    def make(self, kind: str, like: Array, shape: tuple[int, ...], dtype: int) -> Array:
        """A new row-major array, kind "empty" or "zeros", on the device of `like`."""
        try:
            xp = like.__array_namespace__()
            native = getattr(xp, DTYPE_NAMES[dtype])
            return getattr(xp, kind)(shape, dtype=native, device=like.device)
        except Exception as error:
            raise self._no_output(like, error) from error

    def like(self, x: Array, layout: Layout) -> Array:
        """A new array as the row-major `x`."""
        try:
            return x.__array_namespace__().empty_like(x)
        except Exception as error:
            raise self._no_output(x, error) from error

    def swap_last(self, x: Array) -> Array:
        """A view with the last two of four axes exchanged."""
        return x.__array_namespace__().permute_dims(x, (0, 1, 3, 2))

    def hand_back(self, x: Array, like: Array) -> Array:
        """An output in the library of `like`, of which the op wrote a stand-in."""
        return x

    def wrote(self, x: Array) -> None:
        """Called after the launch for each array that borrow() put on the caller's list `written`."""

    def finish(self, device_id: int) -> None:
        """Called after the launch of a GPU call whose first array is of this library."""

    @staticmethod
    def _no_output(like: Array, error: Exception) -> LinattnTypeError:
        return LinattnTypeError(
            f"no output can be allocated in the library of a {type_name(type(like))} ({error}); "
            f"give the output and workspace arrays yourself"
        )


class Jax(Library):
    """JAX arrays outside of jax.jit: only read. Outputs are written in NumPy or CuPy buffers."""

    copies_back = True

    def borrow_on(self, x: Array, caller: Caller, name: str, write: bool, stream: int) -> Borrowed:
        if write:
            raise caller.value_error(
                name, "is written, but jax arrays are immutable; give a NumPy or CuPy array"
            )
        x.block_until_ready()
        return borrow_by_dlpack(x, caller, name, stream)

    def make(self, kind: str, like: Array, shape: tuple[int, ...], dtype: int) -> Array:
        native = sys.modules["ml_dtypes"].bfloat16 if dtype == BF16 else DTYPE_NAMES[dtype]
        device_type, device_id = like.__dlpack_device__()
        if device_type != CUDA:
            return getattr(importlib.import_module("numpy"), kind)(shape, dtype=native)
        cupy = self._cupy()
        with cupy.cuda.Device(device_id):
            return getattr(cupy, kind)(shape, dtype=native)

    def like(self, x: Array, layout: Layout) -> Array:
        return self.make("empty", x, layout.shape, layout.dtype)

    def swap_last(self, x: Array) -> Array:
        return x.swapaxes(2, 3)

    def hand_back(self, x: Array, like: Array) -> Array:
        jax = sys.modules["jax"]
        if type(x).__module__ == "numpy":
            return jax.device_put(x, next(iter(like.devices())))
        return jax.dlpack.from_dlpack(self._cupy().ascontiguousarray(x))

    def finish(self, device_id: int) -> None:
        # XLA may reuse an input's memory on a stream of its own once the caller drops the array.
        cupy = self._cupy()
        with cupy.cuda.Device(device_id):
            cupy.cuda.Stream.null.synchronize()

    @staticmethod
    def _cupy() -> Any:
        try:
            return importlib.import_module("cupy")
        except ImportError as error:
            raise LinattnRuntimeError(
                "jax arrays on a GPU need CuPy, in whose buffers the outputs are written; "
                "install cupy-cuda13x"
            ) from error

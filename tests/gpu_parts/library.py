"""Loads the parts library and moves NumPy arrays to the card and back; needs numpy only."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

STATUS_RUNTIME, STATUS_UNSUPPORTED = 4, 3
DTYPES = {"f32": 1, "bf16": 3, "f16": 4}  # linattn::DType
SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes -> linattn::ptx::Swizzle
K_MAJOR, MN_MAJOR = 0, 1


class PartsError(Exception):
    """A part failed: the Status and the sentence of its Error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Buffer:
    """Device memory that holds a copy of a NumPy array."""

    def __init__(self, library: Library, array: np.ndarray) -> None:
        self.library, self.dtype, self.shape = library, array.dtype, array.shape
        pointer = ctypes.c_void_p()
        library.call("malloc", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 16)))
        self.address: int = pointer.value
        host = np.ascontiguousarray(array)
        library.call(
            "copy", self, host.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(host.nbytes)
        )

    def numpy(self) -> np.ndarray:
        host = np.empty(self.shape, self.dtype)
        self.library.call(
            "copy", host.ctypes.data_as(ctypes.c_void_p), self, ctypes.c_size_t(host.nbytes)
        )
        return host

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self.library.call("free", self)


class Library:
    """The shared library; call("x", ...) is parts_x(...), raising PartsError unless it gives 0.

    Python ints pass as C int, Buffers as pointers, lists as int64 arrays, None as a null pointer;
    anything of ctypes passes as it is.
    """

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.parts_error.restype = ctypes.c_char_p
        self.c.parts_max_chunks.restype = ctypes.c_int64

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self.c, f"parts_{name}")(*[_c_value(a) for a in arguments])
        if status != 0:
            raise PartsError(status, self.c.parts_error().decode())

    def device_count(self) -> int:
        """Cards that can be used; 0 without a driver."""
        count = ctypes.c_int()
        try:
            self.call("device_count", ctypes.byref(count))
        except PartsError:
            return 0
        return count.value

    def put(self, array: np.ndarray) -> Buffer:
        return Buffer(self, array)

    def empty(self, shape: object, dtype: object) -> Buffer:
        """Filled with 0xff: NaN in every float type."""
        host = np.zeros(shape, dtype)
        host.view(np.uint8)[...] = 0xFF
        return Buffer(self, host)


def _c_value(value: object) -> object:
    if isinstance(value, Buffer):
        return ctypes.c_void_p(value.address)
    if isinstance(value, list):
        return (ctypes.c_int64 * len(value))(*value)
    return value


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to bf16 or f16 (nearest even) and gives the bits as uint16."""
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values of bf16 or f16 bits."""
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def halves(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Bits of normally distributed bf16 or f16 values."""
    return to_bits(rng.standard_normal(shape), dtype)


def swizzle(rows: np.ndarray, width: int) -> np.ndarray:
    """Permutes the 16-byte units of rows of `width` bytes as the hardware does; row 0 is aligned.

    128: unit ^ (row mod 8); 64: unit ^ (row / 2 mod 4); 32: unit ^ (row / 4 mod 2); 0: as it is.
    Its own inverse.
    """
    if width == 0:
        return rows
    units = rows.view(np.uint8).reshape(rows.shape[0], width // 16, 16)
    row = np.arange(rows.shape[0])[:, None]
    unit = np.arange(width // 16)[None, :]
    source = unit ^ (row // (128 // width) % (width // 16))
    return units[row, source].reshape(rows.shape[0], width).view(rows.dtype)

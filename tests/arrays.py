"""Arrays for tests: dtypes NumPy may lack, any strides, NaN-filled surroundings, and the devices to put them on.

A `Buffer` lives on the host as a flat array of storage words (bf16 as uint16) filled with NaN, of which the tested array is a
strided view well inside. A `Device` copies the whole flat array over and returns the same view of it, so that margins, gaps
between strided rows and inputs can all be compared afterwards, bit by bit.
"""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import pytest

STORAGE = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": np.uint16,
    "i32": np.int32, "i64": np.int64, "u8": np.uint8,
}  # fmt: skip
FLOATS = ("f32", "f64", "f16", "bf16")
MARGIN = 128  # elements before and after, a multiple of 16 bytes in every dtype


def encode(x, dtype):
    """float64 values as storage words, rounded to nearest even."""
    if dtype != "bf16":
        return np.asarray(x).astype(STORAGE[dtype])
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(np.asarray(x, np.float32)), np.uint16(0x7FC0), rounded)


def decode(words, dtype):
    """float64 values of storage words."""
    if dtype == "bf16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return words.astype(np.float64) if dtype in FLOATS else words.astype(np.int64)


def round_to(x, dtype):
    return decode(encode(x, dtype), dtype)


def strides_for(shape, order=None, gap=0, axis_gap=None, step=1):
    """Strides in elements: `order` lists axes from slowest to fastest, `gap` elements lie between rows of the fastest axis,
    `axis_gap` = {axis: elements after each index of that axis}, `step` is the stride of the fastest axis."""
    order = list(range(len(shape))) if order is None else list(order)
    strides, reach = [0] * len(shape), step
    for place, axis in enumerate(reversed(order)):
        strides[axis] = reach
        reach = (
            reach * max(shape[axis], 1) + (gap if place == 0 else 0) + (axis_gap or {}).get(axis, 0)
        )
    return strides


class Buffer:
    def __init__(self, shape, dtype, strides=None, values=None):
        self.shape, self.dtype = tuple(int(n) for n in shape), dtype
        self.strides = tuple(strides_for(self.shape) if strides is None else strides)
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides)] if all(self.shape) else [0]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        self.offset = MARGIN - low + (low % MARGIN)  # keeps the alignment of the margin
        words = self.offset + high + 1 + MARGIN
        self.flat = np.empty(words, STORAGE[dtype])
        # NaN in every floating dtype; integers get a number far outside every table
        self.flat.view(np.uint8)[:] = 0xFF if dtype in FLOATS else 0x7E
        if values is not None:
            self.host()[...] = encode(values, dtype)

    def host(self, flat=None):
        flat = self.flat if flat is None else flat
        return np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.shape, [s * flat.itemsize for s in self.strides]
        )

    def values(self, flat=None):
        return decode(self.host(flat), self.dtype)


class Placed:
    """A buffer on a device. `array` is what the op is given."""

    def __init__(self, device, buffer):
        self.device, self.buffer = device, buffer
        self.before = buffer.flat.copy()
        self.handle, self.array = device.place(buffer)

    def fetch(self):
        return self.device.fetch(self.handle, self.buffer)

    def values(self):
        return self.buffer.values(self.fetch())

    def bits(self):
        return self.buffer.host(self.fetch()).tobytes()

    def untouched(self):
        return self.fetch().tobytes() == self.before.tobytes()

    def surroundings_untouched(self):
        after, before = self.fetch().copy(), self.before.copy()
        for flat in (after, before):
            self.buffer.host(flat)[...] = 0
        return after.tobytes() == before.tobytes()


class NumpyDevice:
    name, library, kind, index = "cpu", "numpy", "cpu", 0

    def place(self, buffer):
        flat = buffer.flat
        if buffer.dtype == "bf16":
            ml_dtypes = pytest.importorskip(
                "ml_dtypes", reason="NumPy has no bf16 without ml_dtypes"
            )
            flat = flat.view(ml_dtypes.bfloat16)
        return flat, buffer.host(flat)

    def fetch(self, handle, buffer):
        return buffer.flat

    def synchronize(self):
        pass

    def to_host(self, array):
        return np.asarray(array)


class TorchDevice:
    library = "torch"

    def __init__(self, kind="cuda", index=0):
        import torch

        self.torch, self.kind, self.index = torch, kind, index
        self.name = kind
        self.device = torch.device(kind, index) if kind == "cuda" else torch.device("cpu")

    def place(self, buffer):
        torch = self.torch
        if any(s < 0 for s in buffer.strides):
            pytest.skip("torch has no negative strides")
        flat = buffer.flat.view(np.int16) if buffer.dtype == "bf16" else buffer.flat
        handle = torch.from_numpy(flat.copy()).to(self.device)
        if buffer.dtype == "bf16":
            handle = handle.view(torch.bfloat16)
        return handle, handle.as_strided(buffer.shape, buffer.strides, buffer.offset)

    def fetch(self, handle, buffer):
        if buffer.dtype == "bf16":
            handle = handle.view(self.torch.int16)
        return handle.cpu().numpy().view(STORAGE[buffer.dtype])

    def synchronize(self):
        if self.kind == "cuda":
            self.torch.cuda.synchronize(self.device)

    def to_host(self, array):
        if array.dtype == self.torch.bfloat16:
            return array.double().cpu().numpy()
        return array.cpu().numpy()


class CupyDevice:
    name, library, kind, index = "cuda", "cupy", "cuda", 0

    def __init__(self):
        import cupy
        import ml_dtypes

        self.cupy, self.bfloat16 = cupy, ml_dtypes.bfloat16

    def place(self, buffer):
        handle = self.cupy.cuda.alloc(max(buffer.flat.nbytes, 1))
        handle.copy_from_host(buffer.flat.ctypes.data, buffer.flat.nbytes)
        size = buffer.flat.itemsize
        dtype = self.bfloat16 if buffer.dtype == "bf16" else buffer.flat.dtype
        pointer = handle + buffer.offset * size
        return handle, self.cupy.ndarray(
            buffer.shape, dtype, memptr=pointer, strides=[s * size for s in buffer.strides]
        )

    def fetch(self, handle, buffer):
        self.synchronize()
        flat = np.empty_like(buffer.flat)
        handle.copy_to_host(flat.ctypes.data, flat.nbytes)
        return flat

    def synchronize(self):
        self.cupy.cuda.get_current_stream().synchronize()

    def to_host(self, array):
        return array.get()


@functools.cache
def why_no_gpu():
    """Why GPU tests cannot run here, or None."""
    import pylinattn

    if importlib.util.find_spec("torch") is None and importlib.util.find_spec("cupy") is None:
        return "no GPU tests: neither torch nor cupy is installed"
    support = pylinattn.supports("gdn_fwd", device="cuda", dtype="bf16", K=128, V=128)
    return None if support else f"no GPU to test: {support.reason}"


@functools.cache
def gpu_device(library=None):
    """The GPU through torch, or through CuPy where asked for or where there is no torch."""
    if library == "cupy" or (library is None and importlib.util.find_spec("torch") is None):
        pytest.importorskip("cupy")
        pytest.importorskip("ml_dtypes", reason="CuPy has no bf16 without ml_dtypes")
        return CupyDevice()
    pytest.importorskip("torch")
    return TorchDevice("cuda")


CPU = NumpyDevice()

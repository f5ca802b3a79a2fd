"""Async copies: boxes with ragged edges in and out, 1-D, multicast, pushes to a peer, cp.async."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_parts.library import DTYPES, halves, swizzle

pytestmark = pytest.mark.gpu

# sizes, boxes and start coordinates, innermost first; sizes are not multiples of the boxes
BOXES = {
    "inside": ([96, 40], [64, 16], [16, 8]),
    "past the end": ([96, 40], [64, 16], [64, 32]),
    "before the start": ([96, 40], [64, 16], [-8, -3]),
    "wholly outside": ([96, 40], [64, 16], [0, 40]),
    "a last token": ([64, 1], [64, 64], [0, 0]),
    "3d": ([72, 5, 33], [64, 2, 16], [8, 4, 24]),
    "3d before the start": ([72, 5, 33], [64, 2, 16], [-16, -1, -5]),
    "4d": ([64, 3, 21, 2], [64, 1, 16, 2], [0, 2, 10, 1]),
    "5d": ([64, 3, 21, 2, 3], [64, 1, 16, 1, 2], [0, 2, 10, 1, 1]),
    "4d one token at a time": ([64, 3, 21, 2], [64, 3, 1, 1], [0, 1, 20, 1]),
}


def coordinates(c: list[int]) -> ctypes.Array:
    return (ctypes.c_int32 * len(c))(*c)


class Box:
    """An array with padded strides and a box of it.

    sizes, strides and boxes are innermost first, as TMA counts; the NumPy arrays outermost first.
    """

    def __init__(self, rng, name: str, width: int, dtype: str) -> None:
        sizes, boxes, self.start = (list(x) for x in BOXES[name])
        self.bytes = 4 if dtype == "f32" else 2
        if width:  # a swizzled box is as wide as the swizzle
            boxes[0] = width // self.bytes
        self.sizes, self.boxes, self.width, self.dtype = sizes, boxes, width, dtype
        pitch = -(-sizes[0] * self.bytes // 16) * 16 // self.bytes + 16 // self.bytes
        shape = [*reversed(sizes[1:]), pitch]
        raw = rng.standard_normal(shape).astype(np.float32)
        self.array = raw if dtype == "f32" else halves(rng, tuple(shape), dtype)
        self.strides = [1, *(s // self.bytes for s in reversed(self.array.strides[:-1]))]
        if sizes[-1] == 1:
            self.strides[-1] = 3  # of no meaning, and not a legal stride

    def window(self) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Slices of the array, and of the box, that the box covers; outermost first."""
        inside, covered = [], []
        for size, box, start in zip(self.sizes, self.boxes, self.start):
            lo, hi = max(start, 0), min(start + box, size)
            hi = max(lo, hi)
            inside.append(slice(lo, hi))
            covered.append(slice(lo - start, hi - start))
        return tuple(reversed(inside)), tuple(reversed(covered))

    def arguments(self) -> tuple[object, ...]:
        return (
            DTYPES[self.dtype],
            len(self.sizes),
            self.sizes,
            self.strides,
            self.boxes,
            self.width,
            coordinates(self.start),
        )

    def rows(self, box: np.ndarray) -> np.ndarray:
        """The box as rows of shared memory, swizzled."""
        return swizzle(np.ascontiguousarray(box).reshape(-1, self.boxes[0]), self.width)


@pytest.mark.parametrize("form", ["plain", "hint", "global map"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("name", BOXES)
def test_box_load(card, rng, name, width, dtype, form):
    box = Box(rng, name, width, dtype)
    inside, covered = box.window()
    expected = np.zeros([*reversed(box.boxes)], box.array.dtype)
    expected[covered] = box.array[..., : box.sizes[0]][inside]
    out = card.empty((expected.size // box.boxes[0], box.boxes[0]), box.array.dtype)
    g_map = card.empty(128, np.uint8)
    card.call(
        "box_load",
        card.put(box.array),
        *box.arguments(),
        out,
        int(form == "hint"),
        int(form == "global map"),
        g_map,
    )
    np.testing.assert_array_equal(out.numpy(), box.rows(expected))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("name", [name for name in BOXES if "before the start" not in name])
def test_box_store(card, rng, name, width, dtype):
    box = Box(rng, name, width, dtype)
    inside, covered = box.window()
    values = rng.standard_normal([*reversed(box.boxes)]).astype(np.float32)
    if dtype != "f32":
        values = halves(rng, values.shape, dtype)
    expected = box.array.copy()
    expected[..., : box.sizes[0]][inside] = values[covered]
    out = card.put(box.array)
    card.call("box_store", out, *box.arguments(), card.put(box.rows(values)))
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("hint", [0, 1])
@pytest.mark.parametrize("size", [16, 48, 4096, 32768])
def test_bulk(card, rng, size, hint):
    data = rng.integers(0, 256, (5, size)).astype(np.uint8)
    out = card.empty((6, size), np.uint8)
    card.call("bulk", card.put(data), out, 5, size, hint)
    np.testing.assert_array_equal(out.numpy()[:5], data)
    assert (out.numpy()[5] == 0xFF).all()


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["tensor", "tensor hint", "bulk"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_multicast(card, rng, size, mode):
    data = halves(rng, (64, 64), "bf16")
    out = card.empty((3 * size, 64, 64), np.uint16)
    card.call("multicast", card.put(data), out, 3, size, mode)
    expected = data if mode == 2 else swizzle(data, 128)
    for tile in out.numpy():
        np.testing.assert_array_equal(tile, expected)


@pytest.mark.parametrize("mode", range(5), ids=["bulk", "st.async", "st", "ld", "st.v4"])
def test_push_to_peer(card, rng, mode):
    data = rng.integers(0, 2**32, (40, 1024)).astype(np.uint32)
    out = card.empty((40, 1024), np.uint32)
    card.call("push", card.put(data), out, 40, mode)
    np.testing.assert_array_equal(out.numpy(), data)


@pytest.mark.parametrize("arrive", [0, 1], ids=["group", "mbarrier"])
@pytest.mark.parametrize("zfill", [False, True])
def test_cp_async(card, rng, zfill, arrive):
    data = rng.integers(0, 256, (128, 16)).astype(np.uint8)
    count = rng.integers(0, 17, 128).astype(np.int32)
    out = card.empty((128, 16), np.uint8)
    card.call("cp_async", card.put(data), card.put(count) if zfill else None, out, arrive)
    expected = np.where(np.arange(16) < count[:, None], data, 0) if zfill else data
    np.testing.assert_array_equal(out.numpy(), expected[::-1])

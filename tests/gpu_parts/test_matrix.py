"""mma.sync, ldmatrix, stmatrix and movmatrix against their definitions in the PTX manual."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_parts.library import from_bits, halves

pytestmark = pytest.mark.gpu

LANE = np.arange(32)
G, Q = LANE // 4, LANE % 4


def fragment(matrix: np.ndarray, trans: bool) -> np.ndarray:
    """What the 32 lanes hold of one 8x8 matrix of uint16."""
    m = matrix.T if trans else matrix
    return m[G, 2 * Q].astype(np.uint32) | m[G, 2 * Q + 1].astype(np.uint32) << 16


def rows_of_lanes(rng: np.random.Generator) -> np.ndarray:
    """Byte offsets of 32 different 16-byte units of 4096 bytes; lane 8i+r has row r of matrix i."""
    return (rng.permutation(256)[:32] * 16).astype(np.uint32)


@pytest.mark.parametrize("trans", [False, True], ids=["plain", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(card, rng, count, trans):
    scratch = rng.integers(0, 65536, 2048).astype(np.uint16)
    offsets = rows_of_lanes(rng)
    out = card.empty((32, count), np.uint32)
    card.call("ldmatrix", card.put(scratch), card.put(offsets), out, count, int(trans))
    units = scratch.reshape(256, 8)
    for i in range(count):
        matrix = units[offsets[8 * i : 8 * i + 8] // 16]
        np.testing.assert_array_equal(out.numpy()[:, i], fragment(matrix, trans))


@pytest.mark.parametrize("trans", [False, True], ids=["plain", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(card, rng, count, trans):
    scratch = rng.integers(0, 65536, 2048).astype(np.uint16)
    offsets = rows_of_lanes(rng)
    matrices = rng.integers(0, 65536, (count, 8, 8)).astype(np.uint16)
    registers = np.stack([fragment(m, trans) for m in matrices], axis=1)
    device = card.put(scratch)
    card.call("stmatrix", device, card.put(offsets), card.put(registers), count, int(trans))
    expected = scratch.reshape(256, 8).copy()
    for i in range(count):
        expected[offsets[8 * i : 8 * i + 8] // 16] = matrices[i]
    np.testing.assert_array_equal(device.numpy().reshape(256, 8), expected)


def test_movmatrix(card, rng):
    matrix = rng.integers(0, 65536, (8, 8)).astype(np.uint16)
    out = card.empty(32, np.uint32)
    card.call("movmatrix", card.put(fragment(matrix, False)), out)
    np.testing.assert_array_equal(out.numpy(), fragment(matrix, True))


@pytest.mark.parametrize("k", [16, 8])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_mma(card, rng, dtype, k):
    a, b = halves(rng, (16, k), dtype), halves(rng, (k, 8), dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d = card.empty((16, 8), np.float32)
    card.call("mma", card.put(a), card.put(b), card.put(c), d, k, int(dtype == "bf16"))
    fa, fb = from_bits(a, dtype), from_bits(b, dtype)
    bound = np.abs(fa) @ np.abs(fb) + np.abs(c)
    assert (np.abs(d.numpy() - (fa @ fb + c)) < 1e-6 * bound).all()


def test_mma_tf32(card, rng):
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (8, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    d = card.empty((16, 8), np.float32)
    card.call("mma_tf32", card.put(a), card.put(b), card.put(c), d)

    def tf32(x):
        return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32).astype(np.float64)

    fa, fb = tf32(a), tf32(b)
    bound = np.abs(fa) @ np.abs(fb) + np.abs(c)
    assert (np.abs(d.numpy() - (fa @ fb + c)) < 1e-6 * bound).all()

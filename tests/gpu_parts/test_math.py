"""The bounds that cuda/ptx/math.cuh states, and the special values."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_parts.library import from_bits, to_bits

pytestmark = pytest.mark.gpu

EX2, LG2, RCP, RSQRT, TANH, TF32 = range(6)
BF16X2, F16X2, MUL_BF16X2, MUL_F16X2 = range(4)
COUNT = 1 << 20


def evaluate(card, function: int, x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float32)
    y = card.empty(x.shape, np.float32)
    card.call("function", function, card.put(x), y, ctypes.c_int64(x.size))
    return y.numpy().astype(np.float64)


def packed(card, function: int, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high halves of the result."""
    y = card.empty(a.shape, np.uint32)
    card.call("packed", function, card.put(a), card.put(b), y, ctypes.c_int64(a.size))
    words = y.numpy()
    return (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)


def spread(rng, low: float, high: float) -> np.ndarray:
    """Positive floats of evenly spread exponents."""
    return np.exp2(rng.uniform(low, high, COUNT)).astype(np.float32)


def relative(y: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(y - expected) / np.abs(expected)))


@pytest.mark.parametrize(("low", "high"), [(-125.9, 0), (-1, 1), (-40, 0), (0, 127.9)])
def test_ex2(card, rng, low, high):
    x = rng.uniform(low, high, COUNT).astype(np.float32)
    assert relative(evaluate(card, EX2, x), np.exp2(x.astype(np.float64))) <= 2.0**-22


def test_ex2_of_special_values(card):
    x = [-np.inf, -1e30, -127.0, -0.0, 0.0, 1e-40, 1.0, 128.0, np.inf, np.nan]
    expected = [0, 0, 0, 1, 1, 1, 2, np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(evaluate(card, EX2, x), expected)


def test_lg2(card, rng):
    near = rng.uniform(0.5, 2, COUNT).astype(np.float32)
    assert np.max(np.abs(evaluate(card, LG2, near) - np.log2(near.astype(np.float64)))) <= 2.0**-22
    for low, high in ((-125, -1), (1, 127)):
        far = spread(rng, low, high)
        assert relative(evaluate(card, LG2, far), np.log2(far.astype(np.float64))) <= 2.0**-22
    special = evaluate(card, LG2, [0.0, 1e-40, 1.0, np.inf, -1.0])
    np.testing.assert_array_equal(special, [-np.inf, -np.inf, 0, np.inf, np.nan])


def test_rcp(card, rng):
    x = spread(rng, -125, 125) * rng.choice([-1, 1], COUNT).astype(np.float32)
    assert relative(evaluate(card, RCP, x), 1 / x.astype(np.float64)) <= 2.0**-22
    special = evaluate(card, RCP, [0.0, -0.0, 1e-40, np.inf, 2.0**127])
    np.testing.assert_array_equal(special, [np.inf, -np.inf, np.inf, 0, 0])


def test_rsqrt(card, rng):
    x = spread(rng, -125, 127)
    assert relative(evaluate(card, RSQRT, x), 1 / np.sqrt(x.astype(np.float64))) <= 2.0**-22
    special = evaluate(card, RSQRT, [0.0, np.inf, -1.0])
    np.testing.assert_array_equal(special, [np.inf, 0, np.nan])


def test_tanh(card, rng):
    x = rng.uniform(-9, 9, COUNT).astype(np.float32)
    x = x[x != 0]
    assert relative(evaluate(card, TANH, x), np.tanh(x.astype(np.float64))) <= 2.0**-10


def test_tf32(card, rng):
    x = spread(rng, -100, 100) * rng.choice([-1, 1], COUNT).astype(np.float32)
    expected = ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)
    np.testing.assert_array_equal(evaluate(card, TF32, x), expected)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_packed_conversion(card, rng, dtype):
    span = (-100, 100) if dtype == "bf16" else (-30, 15.9)
    low, high = (spread(rng, *span) * rng.choice([-1, 1], COUNT) for _ in range(2))
    low, high = low.astype(np.float32), high.astype(np.float32)
    function = BF16X2 if dtype == "bf16" else F16X2
    got = packed(card, function, low.view(np.uint32), high.view(np.uint32))
    for bits, value in zip(got, (low, high)):
        np.testing.assert_array_equal(bits, to_bits(value, dtype))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_packed_product(card, rng, dtype):
    parts = [to_bits(rng.standard_normal(COUNT), dtype) for _ in range(4)]
    words = [parts[i].astype(np.uint32) | parts[i + 1].astype(np.uint32) << 16 for i in (0, 2)]
    got = packed(card, MUL_BF16X2 if dtype == "bf16" else MUL_F16X2, *words)
    for i, bits in enumerate(got):
        exact = from_bits(parts[i], dtype) * from_bits(parts[i + 2], dtype)
        np.testing.assert_array_equal(bits, to_bits(exact, dtype))

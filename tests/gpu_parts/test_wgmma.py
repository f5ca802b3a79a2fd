"""One wgmma tile against NumPy in every N, type, transposition, swizzle; A also from registers."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_parts.library import K_MAJOR, MN_MAJOR, SWIZZLES, from_bits, halves

pytestmark = pytest.mark.gpu

MAJORS = {"k": K_MAJOR, "mn": MN_MAJOR}
WIDTHS = (0, 32, 64, 128)
# A: (major, swizzle in bytes), or registers
A_KINDS = {"reg": ("reg", 0), **{f"{m}{w}": (m, w) for m in MAJORS for w in WIDTHS}}


def starts(n: int, major: str, width: int) -> list[int]:
    """0 and, if there is one, another legal place of B in its tile of 128: best inside a panel."""
    if major == "k":
        return [0, 8] if n < 128 else [0]
    panel = (width or 16) // 2
    for n0 in (8, 16, 32, 64):
        if n0 + n <= 128 and (n0 % panel == 0 or n0 % panel + n <= panel):
            return [0, n0]
    return [0]


@pytest.mark.parametrize("width_b", WIDTHS)
@pytest.mark.parametrize("major_b", MAJORS)
@pytest.mark.parametrize("kind_a", A_KINDS)
@pytest.mark.parametrize("n", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_wgmma(card, rng, dtype, n, kind_a, major_b, width_b):
    major_a, width_a = A_KINDS[kind_a]
    a, b = halves(rng, (64, 128), dtype), halves(rng, (n, 128), dtype)
    c = rng.standard_normal((64, n)).astype(np.float32)
    fa, fb = from_bits(a, dtype), from_bits(b, dtype)
    product, bound = fa @ fb.T, np.abs(fa) @ np.abs(fb).T + np.abs(c)
    da, db, dc = card.put(a), card.put(b), card.put(c)
    for n0 in starts(n, major_b, width_b):
        for form in ("accumulate", "overwrite", "first"):
            d = card.empty((64, n), np.float32)
            card.call(
                f"wgmma_{dtype}",
                *(da, db, dc, d, n),
                int(major_a == "reg"),
                MAJORS.get(major_a, K_MAJOR),
                MAJORS[major_b],
                SWIZZLES[width_a],
                SWIZZLES[width_b],
                n0,
                int(form == "accumulate"),
                int(form == "first"),
            )
            expected = product + c if form == "accumulate" else product
            error = np.abs(d.numpy() - expected) / bound
            worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
            assert error[worst] < 1e-5, f"n0={n0} {form}: element {worst} is off by {error[worst]}"


@pytest.mark.parametrize("trans", [False, True], ids=["plain", "trans"])
@pytest.mark.parametrize("width", WIDTHS)
def test_accumulator_goes_on(card, rng, width, trans):
    """Y = bf16(A X^T) X: the accumulator as the next A fragment; X as K-major and MN-major operand.

    Y leaves by stmatrix and a TMA store.
    """
    a, x = halves(rng, (64, 64), "bf16"), halves(rng, (64, 64), "bf16")
    y = card.empty((64, 64), np.uint16)
    card.call("chain", card.put(a), card.put(x), y, SWIZZLES[width], int(trans))
    fa, fx = from_bits(a, "bf16"), from_bits(x, "bf16")
    w = fa @ fx.T
    got = from_bits(y.numpy(), "bf16")
    expected = w @ fx
    error = np.abs((got.T if trans else got) - expected)
    assert (error <= 2.0**-8 * (np.abs(w) @ np.abs(fx))).all()
    assert np.linalg.norm(error) < 5e-3 * np.linalg.norm(expected)

"""Imports the installed package and runs one small op against the reference; for a Python that has only NumPy."""

from __future__ import annotations

import sys

import numpy as np

import pylinattn
from pylinattn import reference

rng = np.random.default_rng(0)
B, T, H, HV, K, V = 1, 70, 1, 2, 16, 8
q, k = (rng.standard_normal((B, T, H, K), dtype=np.float32) for _ in "qk")
v = rng.standard_normal((B, T, HV, V), dtype=np.float32)
g = -rng.random((B, T, HV), dtype=np.float32)
beta = rng.random((B, T, HV), dtype=np.float32)
o = pylinattn.gdn_fwd(q, k, v, g, beta, qk_l2norm=True)[0]
expected = reference.gdn_fwd(q, k, v, g, beta, qk_l2norm=True)[0]
error = float(np.abs(o - expected).max() / np.abs(expected).max())
print(
    f"Python {sys.version.split()[0]}: {pylinattn.last_path()}, error {error:.1e}, {pylinattn.__file__}"
)
if not error < 1e-5:
    sys.exit("gdn_fwd differs from the reference")

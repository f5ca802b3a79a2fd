"""What the functions of reference.py share: inputs as the recurrence reads them, and the step of one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def as_float64(x: Any) -> Array:
    """A float64 NumPy copy of an array of any library."""
    if hasattr(x, "detach"):  # torch: NumPy has no bfloat16, so widen there
        x = x.detach().double().cpu().numpy()
    elif hasattr(x, "get") and not isinstance(x, np.ndarray):  # CuPy
        x = x.get()
    return np.array(x, dtype=np.float64)


def as_rows(x: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return as_float64(x).astype(np.int64)


def l2norm(x: Any) -> Array:
    """x / sqrt(sum x^2 + 1e-6) over the last axis."""
    x = as_float64(x)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def sigmoid(x: Any) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -as_float64(x)))


def activate_gate(
    g: Any,
    gate: str = "none",
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: float | None = None,
) -> Array:
    """The log decay of raw gate inputs ``[B,T,HV]`` or ``[B,T,HV,K]``; A_log is ``[HV]``, dt_bias ``[HV]`` or ``[HV,K]``."""
    g = as_float64(g)
    if gate == "none":
        return g
    x = g if dt_bias is None else g + as_float64(dt_bias)
    amplitude = np.ones(g.shape[2]) if A_log is None else np.exp(as_float64(A_log))
    amplitude = amplitude.reshape(-1, *[1] * (g.ndim - 3))  # [HV] or [HV,1]
    if gate == "softplus":
        return -amplitude * np.logaddexp(0.0, x)
    if gate == "bounded" and lower_bound is not None:
        return lower_bound * sigmoid(amplitude * x)
    raise ValueError(
        f"gate must be 'none', 'softplus' or 'bounded' with a lower_bound, got {gate!r}"
    )


def activate_beta(beta: Any, beta_form: str = "weight") -> Array:
    """The write strength of beta or of its logits."""
    if beta_form == "weight":
        return as_float64(beta)
    if beta_form == "logits":
        return sigmoid(beta)
    if beta_form == "logits_x2":
        return 2.0 * sigmoid(beta)
    raise ValueError(f"beta_form must be 'weight', 'logits' or 'logits_x2', got {beta_form!r}")


def token(
    S: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, scale: float
) -> tuple[Array, Array, Array]:
    """One token: S [..,K,V]; q, k [..,K]; v [..,V]; decay [..,1] or [..,K]; beta [..]. Returns S, u, o."""
    S = decay[..., :, None] * S
    u = beta[..., None] * (v - (k[..., None, :] @ S)[..., 0, :])
    S = S + k[..., :, None] * u[..., None, :]
    o = scale * (q[..., None, :] @ S)[..., 0, :]
    return S, u, o


class Inputs:
    """The inputs as the recurrence reads them: activated, normalised, q and k repeated per value head."""

    def __init__(
        self,
        family: str,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        *,
        A_log: Any,
        dt_bias: Any,
        scale: float | None,
        lower_bound: float | None,
        qk_l2norm: bool,
        gate: str,
        beta_form: str,
        heads: Sequence[int] | None,
    ) -> None:
        self.q, self.k = (l2norm(x) if qk_l2norm else as_float64(x) for x in (q, k))
        self.v = as_float64(v)
        self.g = activate_gate(g, gate, A_log, dt_bias, lower_bound)
        self.beta = activate_beta(beta, beta_form)
        self.all_heads = heads is None
        HV = self.v.shape[2]
        self.heads = np.arange(HV) if heads is None else np.asarray(heads)
        self.key_heads = self.heads // max(HV // max(self.q.shape[2], 1), 1)  # there may be none
        self.scale = self.q.shape[-1] ** -0.5 if scale is None else float(scale)
        if self.g.ndim != (3 if family == "gdn" else 4):
            raise ValueError(
                f"g has {self.g.ndim} axes, {family} takes {3 if family == 'gdn' else 4}"
            )

    @property
    def out_shape(self) -> tuple[int, ...]:
        B, T, _, V = self.v.shape
        return B, T, len(self.heads), V

    @property
    def state_shape(self) -> tuple[int, ...]:
        return len(self.heads), self.k.shape[-1], self.v.shape[-1]

    def tokens(
        self, rows: Sequence[int], starts: Sequence[int], t: int
    ) -> tuple[Array, Array, Array, Array, Array]:
        """q, k, v, decay, beta of the t-th token of several sequences, with axes [sequence, head, ..]."""
        at = (np.asarray(rows), np.asarray(starts) + t)
        decay = np.exp(self.g[at][:, self.heads])
        return (
            self.q[at][:, self.key_heads],
            self.k[at][:, self.key_heads],
            self.v[at][:, self.heads],
            decay if decay.ndim == 3 else decay[..., None],
            self.beta[at][:, self.heads],
        )


def spans_of(B: int, T: int, cu_seqlens: Any) -> list[tuple[int, int, int]]:
    """(batch row, first token, length) of every sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    ends = np.clip(as_rows(cu_seqlens), 0, T)
    return [(0, int(a), max(0, int(b - a))) for a, b in zip(ends[:-1], ends[1:])]


def pool_rows(indices: Any, N: int, rows: int) -> list[int]:
    """Row of the pool for each of N sequences, -1 for none."""
    wanted = np.arange(N) if indices is None else as_rows(indices)
    return [int(r) if 0 <= r < rows else -1 for r in wanted]

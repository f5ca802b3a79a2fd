"""What every op computes, as a float64 loop over tokens in NumPy: slow, obvious, and sharing no code with the kernels.

GDN (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464) and KDA (Kimi Team 2025, arXiv:2510.26692) are one recurrence, per
sequence and value head, with S in R^{K x V}:

    S = exp(g) S;   u = beta (v - S^T k);   S = S + k u^T;   o = scale S^T q

In GDN g is one number per token and head, in KDA one per key channel. The functions take the arguments of the ops of the
same names, from any array library, and change none of them: a pool that an op updates in place comes back as a copy.

``heads`` (value heads) and ``sequences`` restrict the work to a sample, for large shapes: the results then hold those heads
alone, and the rows of the other sequences stay zero (outputs) or as given (states).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class Forward(NamedTuple):
    o: Array  # [B,T,HV,V]
    final_state: Array  # [F,HV,K,V]
    checkpoints: Array | None  # [C,HV,K,V]


class Decode(NamedTuple):
    o: Array  # [B,T,HV,V]
    state: Array  # [P,HV,K,V]


class Verify(NamedTuple):
    o: Array  # [B,T,HV,V]
    state: Array  # [P,HV,K,V]
    kept_k: Array  # [B,T,H,K], or [B,T,len(heads),K] with heads
    kept_u: Array  # [B,T,HV,V]
    kept_g: Array  # [B,T,HV] or [B,T,HV,K]


def as_float64(x: Any) -> Array:
    """A float64 NumPy copy of an array of any library."""
    if hasattr(x, "detach"):  # torch: NumPy has no bfloat16, so widen there
        x = x.detach().double().cpu().numpy()
    elif hasattr(x, "get") and not isinstance(x, np.ndarray):  # CuPy
        x = x.get()
    return np.array(x, dtype=np.float64)


def _as_rows(x: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
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


def _token(
    S: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, scale: float
) -> tuple[Array, Array, Array]:
    """One token: S [..,K,V]; q, k [..,K]; v [..,V]; decay [..,1] or [..,K]; beta [..]. Returns S, u, o."""
    S = decay[..., :, None] * S
    u = beta[..., None] * (v - (k[..., None, :] @ S)[..., 0, :])
    S = S + k[..., :, None] * u[..., None, :]
    o = scale * (q[..., None, :] @ S)[..., 0, :]
    return S, u, o


class _Inputs:
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
        self.key_heads = self.heads // (HV // self.q.shape[2])
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


def _spans(B: int, T: int, cu_seqlens: Any) -> list[tuple[int, int, int]]:
    """(batch row, first token, length) of every sequence."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    ends = np.clip(_as_rows(cu_seqlens), 0, T)
    return [(0, int(a), max(0, int(b - a))) for a, b in zip(ends[:-1], ends[1:])]


def _pool_rows(indices: Any, N: int, rows: int) -> list[int]:
    """Row of the pool for each of N sequences, -1 for none."""
    wanted = np.arange(N) if indices is None else _as_rows(indices)
    return [int(r) if 0 <= r < rows else -1 for r in wanted]


def _scan(
    x: _Inputs,
    spans: list[tuple[int, int, int]],
    start: list[Array],
    live: list[int],
    o: Array,
    every: int,
) -> tuple[dict[int, Array], dict[tuple[int, int], Array]]:
    """Runs the live sequences; sequences of one length share a loop. Returns final states and checkpoints by sequence."""
    final: dict[int, Array] = {}
    marks: dict[tuple[int, int], Array] = {}
    for length in sorted({spans[n][2] for n in live}):
        group = [n for n in live if spans[n][2] == length]
        rows, starts = [spans[n][0] for n in group], [spans[n][1] for n in group]
        S = np.stack([start[n] for n in group])
        for t in range(length):
            q, k, v, decay, beta = x.tokens(rows, starts, t)
            S, _, out = _token(S, q, k, v, decay, beta, x.scale)
            o[rows, np.asarray(starts) + t] = out
            if every and (t + 1) % every == 0:
                marks.update({(n, t // every): S[i].copy() for i, n in enumerate(group)})
        final.update({n: S[i] for i, n in enumerate(group)})
    return final, marks


def _fwd(
    family: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    read_indices: Any = None,
    write_indices: Any = None,
    checkpoint_indices: Any = None,
    final_state: Any = None,
    checkpoints: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    checkpoint_every: int = 0,
    heads: Sequence[int] | None = None,
    sequences: Sequence[int] | None = None,
) -> Forward:
    x = _Inputs(
        family, q, k, v, g, beta,
        A_log=A_log, dt_bias=dt_bias, scale=scale, lower_bound=lower_bound,
        qk_l2norm=qk_l2norm, gate=gate, beta_form=beta_form, heads=heads,
    )  # fmt: skip
    B, T = x.v.shape[:2]
    spans = _spans(B, T, cu_seqlens)
    N = len(spans)
    pool = None if initial_state is None else as_float64(initial_state)[:, x.heads]
    in_place = final_state is not None and final_state is initial_state
    if write_indices is None and in_place:
        write_indices = read_indices
    result = (
        np.zeros((N, *x.state_shape))
        if final_state is None
        else as_float64(final_state)[:, x.heads]
    )

    read = list(range(N)) if pool is None else _pool_rows(read_indices, N, len(pool))
    write = _pool_rows(write_indices, N, len(result))
    start = [np.zeros(x.state_shape) if pool is None else pool[row] for row in read]
    wanted = range(N) if sequences is None else sequences
    live = [
        n for n in wanted if read[n] >= 0
    ]  # a read row of -1 is padding: output rows zero, nothing written

    o = np.zeros(x.out_shape)
    final, marks = _scan(x, spans, start, live, o, checkpoint_every)
    for n in live:
        if write[n] >= 0:
            result[write[n]] = final[n]

    saved = None
    if checkpoint_every:
        counts = [span[2] // checkpoint_every for span in spans]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        saved = (
            np.zeros((first[-1], *x.state_shape))
            if checkpoints is None
            else as_float64(checkpoints)[:, x.heads]
        )
        table = None if checkpoint_indices is None else _as_rows(checkpoint_indices)
        for (n, m), S in marks.items():
            named = -1 if table is None or m >= table.shape[1] else table[n, m]
            row = first[n] + m if table is None else named
            if 0 <= row < len(saved):
                saved[row] = S
    return Forward(o, result, saved)


def gdn_fwd(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Forward:
    """Gated delta rule over whole sequences; g is ``[B,T,HV]``."""
    return _fwd("gdn", q, k, v, g, beta, **options)


def kda_fwd(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Forward:
    """Kimi delta attention over whole sequences; g is ``[B,T,HV,K]``."""
    return _fwd("kda", q, k, v, g, beta, **options)


def _decode(
    family: str, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, **options: Any
) -> Decode:
    done = _fwd(family, q, k, v, g, beta, initial_state=state, final_state=state, **options)
    return Decode(done.o, done.final_state)


def gdn_decode(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, **options: Any) -> Decode:
    """Gated delta rule, one or a few tokens per sequence against a pool of states."""
    return _decode("gdn", q, k, v, g, beta, state, **options)


def kda_decode(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, **options: Any) -> Decode:
    """Kimi delta attention, one or a few tokens per sequence against a pool of states."""
    return _decode("kda", q, k, v, g, beta, state, **options)


def _verify(
    family: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    read_indices: Any = None,
    write_indices: Any = None,
    parents: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    heads: Sequence[int] | None = None,
) -> Verify:
    x = _Inputs(
        family, q, k, v, g, beta,
        A_log=A_log, dt_bias=dt_bias, scale=scale, lower_bound=lower_bound,
        qk_l2norm=qk_l2norm, gate=gate, beta_form=beta_form, heads=heads,
    )  # fmt: skip
    B, T = x.v.shape[:2]
    pool = as_float64(state)[:, x.heads]
    result = pool.copy()
    read = _pool_rows(read_indices, B, len(pool))
    follows = np.tile(np.arange(T) - 1, (B, 1)) if parents is None else _as_rows(parents)
    write = np.full((B, T), -1) if write_indices is None else _as_rows(write_indices)
    o, kept_u = np.zeros(x.out_shape), np.zeros(x.out_shape)
    for n in range(B):
        if read[n] < 0:
            continue
        after: list[Array] = []  # state after each token
        for t in range(T):
            before = pool[read[n]] if follows[n, t] < 0 else after[follows[n, t]]
            q_t, k_t, v_t, decay, beta_t = x.tokens([n], [0], t)
            S, u, out = _token(before[None], q_t, k_t, v_t, decay, beta_t, x.scale)
            after.append(S[0])
            o[n, t], kept_u[n, t] = out[0], u[0]
            if 0 <= write[n, t] < len(result):
                result[write[n, t]] = S[0]
    kept_k = x.k if x.all_heads else x.k[:, :, x.key_heads]
    return Verify(o, result, kept_k, kept_u, x.g[:, :, x.heads])


def gdn_verify(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, **options: Any) -> Verify:
    """Gated delta rule, outputs of drafted tokens, a chain or (with ``parents``) a tree; the rows read stay as they are."""
    return _verify("gdn", q, k, v, g, beta, state, **options)


def kda_verify(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, **options: Any) -> Verify:
    """Kimi delta attention, outputs of drafted tokens, a chain or (with ``parents``) a tree."""
    return _verify("kda", q, k, v, g, beta, state, **options)


def delta_commit(
    state: Any,
    k: Any,
    u: Any,
    g: Any,
    accepted: Any,
    *,
    path: Any = None,
    read_indices: Any = None,
    write_indices: Any = None,
) -> Array:
    """The pool after the first ``accepted[n]`` kept tokens are folded in: S = exp(g) S + k u^T, in the order of ``path``."""
    pool, k, u, g = (as_float64(x) for x in (state, k, u, g))
    N, T, HV = u.shape[:3]
    k = np.repeat(k, HV // k.shape[2], axis=2)
    decay = np.exp(g if g.ndim == 4 else g[..., None])
    counts = np.clip(_as_rows(accepted), 0, T)
    order = np.tile(np.arange(T), (N, 1)) if path is None else _as_rows(path)
    read = _pool_rows(read_indices, N, len(pool))
    write = _pool_rows(read_indices if write_indices is None else write_indices, N, len(pool))
    result = pool.copy()
    for n in range(N):
        if read[n] < 0:
            continue
        S = pool[read[n]]
        for t in order[n, : counts[n]]:
            S = decay[n, t][..., :, None] * S + k[n, t][..., :, None] * u[n, t][..., None, :]
        if write[n] >= 0:
            result[write[n]] = S
    return result

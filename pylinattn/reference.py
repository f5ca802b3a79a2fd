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

from ._reference_bwd import (
    Gradients,
    Merged,
    Segment,
    gdn_bwd,
    gdn_segment,
    kda_bwd,
    kda_segment,
    segment_merge,
)
from ._reference_inputs import (
    Array,
    Inputs,
    activate_beta,
    activate_gate,
    as_float64,
    as_rows,
    l2norm,
    pool_rows,
    sigmoid,
    spans_of,
    token,
)

__all__ = [
    "Decode", "Forward", "Gradients", "Merged", "Segment", "Verify", "activate_beta",
    "activate_gate", "as_float64", "delta_commit", "gdn_bwd", "gdn_decode", "gdn_fwd",
    "gdn_segment", "gdn_verify", "kda_bwd", "kda_decode", "kda_fwd", "kda_segment", "kda_verify",
    "l2norm", "segment_merge", "sigmoid",
]  # fmt: skip


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


def _scan(
    x: Inputs,
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
            S, _, out = token(S, q, k, v, decay, beta, x.scale)
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
    x = Inputs(
        family, q, k, v, g, beta,
        A_log=A_log, dt_bias=dt_bias, scale=scale, lower_bound=lower_bound,
        qk_l2norm=qk_l2norm, gate=gate, beta_form=beta_form, heads=heads,
    )  # fmt: skip
    B, T = x.v.shape[:2]
    spans = spans_of(B, T, cu_seqlens)
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

    read = list(range(N)) if pool is None else pool_rows(read_indices, N, len(pool))
    write = pool_rows(write_indices, N, len(result))
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
        table = None if checkpoint_indices is None else as_rows(checkpoint_indices)
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
    x = Inputs(
        family, q, k, v, g, beta,
        A_log=A_log, dt_bias=dt_bias, scale=scale, lower_bound=lower_bound,
        qk_l2norm=qk_l2norm, gate=gate, beta_form=beta_form, heads=heads,
    )  # fmt: skip
    B, T = x.v.shape[:2]
    pool = as_float64(state)[:, x.heads]
    result = pool.copy()
    read = pool_rows(read_indices, B, len(pool))
    follows = np.tile(np.arange(T) - 1, (B, 1)) if parents is None else as_rows(parents)
    write = np.full((B, T), -1) if write_indices is None else as_rows(write_indices)
    o, kept_u = np.zeros(x.out_shape), np.zeros(x.out_shape)
    for n in range(B):
        if read[n] < 0:
            continue
        after: list[Array] = []  # state after each token
        for t in range(T):
            before = pool[read[n]] if follows[n, t] < 0 else after[follows[n, t]]
            q_t, k_t, v_t, decay, beta_t = x.tokens([n], [0], t)
            S, u, out = token(before[None], q_t, k_t, v_t, decay, beta_t, x.scale)
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
    k = np.repeat(k, HV // max(k.shape[2], 1), axis=2)
    decay = np.exp(g if g.ndim == 4 else g[..., None])
    counts = np.clip(as_rows(accepted), 0, T)
    order = np.tile(np.arange(T), (N, 1)) if path is None else as_rows(path)
    read = pool_rows(read_indices, N, len(pool))
    write = pool_rows(read_indices if write_indices is None else write_indices, N, len(pool))
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

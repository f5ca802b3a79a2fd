"""gdn_verify, kda_verify and delta_commit: speculative decoding."""

from __future__ import annotations

from typing import NamedTuple

from ._call import Array, Call, Op
from ._exchange import exchanges
from ._lib import BETA_FORMS, GATES

_GDN_VERIFY, _KDA_VERIFY = Op("gdn_verify"), Op("kda_verify")
_DELTA_COMMIT = Op("delta_commit")


class Verify(NamedTuple):
    o: Array
    kept_k: Array | None
    kept_u: Array | None
    kept_g: Array | None


def _verify(
    op: Op, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array,
    A_log: Array | None, dt_bias: Array | None, read_indices: Array | None,
    write_indices: Array | None, parents: Array | None, o: Array | None, kept_k: Array | None,
    kept_u: Array | None, kept_g: Array | None, workspace: Array | None, scale: float | None,
    lower_bound: float | None, qk_l2norm: bool, gate: str, beta_form: str, keep: bool, checked: bool,
) -> Verify:  # fmt: skip
    exchange = exchanges.get(type(q))
    if (
        exchange is not None
        and not exchange.is_compiling()
        and v is not None
        and exchange.all_plain(k, v, g)
    ):
        made = [exchange.output(q, v) if o is None else o, kept_k, kept_u, kept_g]
        if keep and write_indices is None and k is not None and g is not None:
            kept = zip((k, v, g), made[1:], strict=True)
            made[1:] = [exchange.wide(q, x) if mine is None else mine for x, mine in kept]
        tables = (A_log, dt_bias, read_indices, write_indices, parents)
        arrays = (q, k, v, g, beta, state, *tables, *made, workspace)
        options = (scale, lower_bound, qk_l2norm, gate, beta_form, bool(checked))
        plain = made[0] is not None and (keep or all(x is None for x in made[1:]))
        pool = None if write_indices is None else state
        written = [x for x in (o, kept_k, kept_u, kept_g, pool) if x is not None]
        if plain and exchange.run(op, arrays, written, *options):
            return Verify(*made)
    call = Call(op, q, "q")
    if not keep:
        for name, given in (("kept_k", kept_k), ("kept_u", kept_u), ("kept_g", kept_g)):
            if given is not None:
                raise call.value_error(name, "is given, and keep is False: nothing is kept")
    take = call.take
    tk, tv, tg = take(k, "k"), take(v, "v"), take(g, "g")
    if o is None and v is not None:
        o = call.make_like(v, tv[1])
    if keep and write_indices is None and k is not None and v is not None and g is not None:
        kept_k = call.make(tk[1].shape, call.wide) if kept_k is None else kept_k
        kept_u = call.make(tv[1].shape, call.wide) if kept_u is None else kept_u
        kept_g = call.make(tg[1].shape, call.wide) if kept_g is None else kept_g
    call.run(
        workspace,
        *call.first,
        *tk,
        *tv,
        *tg,
        *take(beta, "beta"),
        *take(state, "state", write_indices is not None),
        *take(A_log, "A_log"),
        *take(dt_bias, "dt_bias"),
        *take(read_indices, "read_indices"),
        *take(write_indices, "write_indices"),
        *take(parents, "parents"),
        *take(o, "o", True),
        *take(kept_k, "kept_k", True),
        *take(kept_u, "kept_u", True),
        *take(kept_g, "kept_g", True),
        *take(workspace, "workspace", True),
        call.scale(scale),
        0.0 if lower_bound is None else call.number("lower_bound", lower_bound),
        bool(qk_l2norm),
        call.choice("gate", gate, GATES),
        call.choice("beta_form", beta_form, BETA_FORMS),
        bool(checked),
        call.stream,
    )
    return Verify(*(call.result(x) for x in (o, kept_k, kept_u, kept_g)))


def _commit(
    op: Op, state: Array, k: Array, u: Array, g: Array, accepted: Array, path: Array | None,
    read_indices: Array | None, write_indices: Array | None, workspace: Array | None, checked: bool,
) -> None:  # fmt: skip
    call = Call(op, state, "state", True)
    take = call.take
    call.run(
        workspace,
        *call.first,
        *take(k, "k"),
        *take(u, "u"),
        *take(g, "g"),
        *take(accepted, "accepted"),
        *take(path, "path"),
        *take(read_indices, "read_indices"),
        *take(write_indices, "write_indices"),
        *take(workspace, "workspace", True),
        bool(checked),
        0,
        call.stream,
    )


def gdn_verify(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    read_indices: Array | None = None,
    write_indices: Array | None = None,
    parents: Array | None = None,
    o: Array | None = None,
    kept_k: Array | None = None,
    kept_u: Array | None = None,
    kept_g: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    keep: bool = True,
    checked: bool = False,
) -> Verify:
    """Gated delta rule, outputs of 1 to 16 drafted tokens per sequence, a chain or a tree.

    The rows of state that are read stay as they are.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV]`` f32|bf16|f16|f64. Log decay per token, <= 0, or raw gate input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        state: ``[P,HV,K,V]`` f32|bf16|f64. Pool of states, read at read_indices; written only at
            write_indices.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        read_indices: ``[N]`` i32|i64, optional. Row of state per sequence; -1 is padding.
        write_indices: ``[N,T]`` i32|i64, optional. Row of state to write after each token, none of
            them read by this call; -1 writes nothing; if None, none is written.
        parents: ``[N,T]`` i32|i64, optional. Token that each token follows, smaller than its own
            number, -1 for the state; if None, a chain.
        o: ``[B,T,HV,V]`` dtype of q. Outputs; allocated if None.
        kept_k: ``[B,T,H,K]`` f32|f64, optional. Keys as used, after qk_l2norm; allocated if None,
            unless keep is False or write_indices is given.
        kept_u: ``[B,T,HV,V]`` f32|f64, optional. What each token writes: beta (v - S^T k);
            allocated if None, unless keep is False or write_indices is given.
        kept_g: ``[B,T,HV]`` f32|f64, optional. Log decay as used, after gate; per token, so that
            -inf stays exact; allocated if None, unless keep is False or write_indices is given.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        keep: bool. Allocate kept_k, kept_u and kept_g if they are None. False: outputs alone, which
            a GPU computes faster, to its accuracy, not to the bits of decode.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        ``(o, kept_k, kept_u, kept_g)``; what is kept is for delta_commit. Arrays made here are of
        the library and on the device of q; a kept one is float32 (float64 for float64 q), or None
        if it is not given and keep is False or write_indices is given.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464.
    """
    return _verify(
        _GDN_VERIFY, q, k, v, g, beta, state, A_log, dt_bias, read_indices, write_indices, parents,
        o, kept_k, kept_u, kept_g, workspace, scale, lower_bound, qk_l2norm, gate, beta_form, keep,
        checked,
    )  # fmt: skip


def kda_verify(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    read_indices: Array | None = None,
    write_indices: Array | None = None,
    parents: Array | None = None,
    o: Array | None = None,
    kept_k: Array | None = None,
    kept_u: Array | None = None,
    kept_g: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    keep: bool = True,
    checked: bool = False,
) -> Verify:
    """Kimi delta attention, outputs of 1 to 16 drafted tokens per sequence, a chain or a tree.

    The rows of state that are read stay as they are.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV,K]`` f32|bf16|f16|f64. Log decay per token and key channel, <= 0, or raw gate
            input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        state: ``[P,HV,K,V]`` f32|bf16|f64. Pool of states, read at read_indices; written only at
            write_indices.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV,K]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        read_indices: ``[N]`` i32|i64, optional. Row of state per sequence; -1 is padding.
        write_indices: ``[N,T]`` i32|i64, optional. Row of state to write after each token, none of
            them read by this call; -1 writes nothing; if None, none is written.
        parents: ``[N,T]`` i32|i64, optional. Token that each token follows, smaller than its own
            number, -1 for the state; if None, a chain.
        o: ``[B,T,HV,V]`` dtype of q. Outputs; allocated if None.
        kept_k: ``[B,T,H,K]`` f32|f64, optional. Keys as used, after qk_l2norm; allocated if None,
            unless keep is False or write_indices is given.
        kept_u: ``[B,T,HV,V]`` f32|f64, optional. What each token writes: beta (v - S^T k);
            allocated if None, unless keep is False or write_indices is given.
        kept_g: ``[B,T,HV,K]`` f32|f64, optional. Log decay as used, after gate; per token, so that
            -inf stays exact; allocated if None, unless keep is False or write_indices is given.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        keep: bool. Allocate kept_k, kept_u and kept_g if they are None. False: outputs alone, which
            a GPU computes faster, to its accuracy, not to the bits of decode.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        ``(o, kept_k, kept_u, kept_g)``; what is kept is for delta_commit. Arrays made here are of
        the library and on the device of q; a kept one is float32 (float64 for float64 q), or None
        if it is not given and keep is False or write_indices is given.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Kimi Team 2025, arXiv:2510.26692.
    """
    return _verify(
        _KDA_VERIFY, q, k, v, g, beta, state, A_log, dt_bias, read_indices, write_indices, parents,
        o, kept_k, kept_u, kept_g, workspace, scale, lower_bound, qk_l2norm, gate, beta_form, keep,
        checked,
    )  # fmt: skip


def delta_commit(
    state: Array,
    k: Array,
    u: Array,
    g: Array,
    accepted: Array,
    *,
    path: Array | None = None,
    read_indices: Array | None = None,
    write_indices: Array | None = None,
    workspace: Array | None = None,
    checked: bool = False,
) -> None:
    """Fold the first ``accepted[n]`` drafted tokens into the states.

    ``S = exp(g) S + k u'`` for each, in order. For what gdn_verify and kda_verify kept.

    Args:
        state: ``[P,HV,K,V]`` f32|bf16|f64. Pool of states, read at read_indices and written at
            write_indices.
        k: ``[B,T,H,K]`` f32|f64. Kept_k of the verify call.
        u: ``[B,T,HV,V]`` dtype of k. Kept_u of the verify call.
        g: ``[B,T,HV]|[B,T,HV,K]`` dtype of k. Kept_g of the verify call.
        accepted: ``[N]`` i32|i64. Tokens to fold in; clamped to 0 .. T.
        path: ``[N,T]`` i32|i64, optional. Number of the j-th accepted token of a tree; if None, 0,
            1, 2, ...
        read_indices: ``[N]`` i32|i64, optional. Row of state per sequence; -1 is padding.
        write_indices: ``[N]`` i32|i64, optional. Row of state to write per sequence, -1 writes
            nothing; if None, read_indices.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        None; state is updated in place.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    """
    return _commit(
        _DELTA_COMMIT, state, k, u, g, accepted, path, read_indices, write_indices, workspace,
        checked,
    )  # fmt: skip

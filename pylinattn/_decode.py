"""gdn_decode and kda_decode: a few tokens against a pool of states."""

from __future__ import annotations

from ._call import Array, Call, Op
from ._exchange import exchanges
from ._lib import BETA_FORMS, GATES

_GDN_DECODE, _KDA_DECODE = Op("gdn_decode"), Op("kda_decode")


def _decode(
    op: Op, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array,
    cu_seqlens: Array | None, A_log: Array | None, dt_bias: Array | None,
    read_indices: Array | None, write_indices: Array | None, o: Array | None,
    workspace: Array | None, scale: float | None, lower_bound: float | None, qk_l2norm: bool,
    gate: str, beta_form: str, checked: bool,
) -> Array:  # fmt: skip
    zero_tail = o is None and cu_seqlens is not None
    exchange = exchanges.get(type(q))
    if exchange is not None and not exchange.is_compiling():
        out = exchange.output(q, v) if o is None else o
        arrays = (
            q, k, v, g, beta, state, cu_seqlens, A_log, dt_bias, read_indices, write_indices, out,
            workspace,
        )  # fmt: skip
        options = (scale, lower_bound, qk_l2norm, gate, beta_form, bool(checked), zero_tail, 0)
        given = (state,) if o is None else (state, o)
        if out is not None and exchange.run(op, arrays, given, *options):
            return out
    call = Call(op, q, "q")
    take = call.take
    tv = take(v, "v")
    if o is None and v is not None:
        o = call.make_like(v, tv[1])
    call.run(
        workspace,
        *call.first,
        *take(k, "k"),
        *tv,
        *take(g, "g"),
        *take(beta, "beta"),
        *take(state, "state", True),
        *take(cu_seqlens, "cu_seqlens"),
        *take(A_log, "A_log"),
        *take(dt_bias, "dt_bias"),
        *take(read_indices, "read_indices"),
        *take(write_indices, "write_indices"),
        *take(o, "o", True),
        *take(workspace, "workspace", True),
        call.scale(scale),
        0.0 if lower_bound is None else call.number("lower_bound", lower_bound),
        bool(qk_l2norm),
        call.choice("gate", gate, GATES),
        call.choice("beta_form", beta_form, BETA_FORMS),
        bool(checked),
        zero_tail,
        0,
        call.stream,
    )
    return call.result(o)


def gdn_decode(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    read_indices: Array | None = None,
    write_indices: Array | None = None,
    o: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    checked: bool = False,
) -> Array:
    """Gated delta rule, one or a few tokens per sequence against a pool of states, in place.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV]`` f32|bf16|f16|f64. Log decay per token, <= 0, or raw gate input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        state: ``[P,HV,K,V]`` f32|bf16|f64. Pool of states, read at read_indices and written at
            write_indices.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        read_indices: ``[N]`` i32|i64, optional. Row of state per sequence; -1 is padding.
        write_indices: ``[N]`` i32|i64, optional. Row of state to write per sequence, -1 writes
            nothing; if None, read_indices.
        o: ``[B,T,HV,V]`` dtype of q. Outputs; allocated if None.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        o, in the library and on the device of q if it is made here. state is updated in place.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464.
    """
    return _decode(
        _GDN_DECODE, q, k, v, g, beta, state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, o, workspace, scale, lower_bound, qk_l2norm, gate, beta_form, checked,
    )  # fmt: skip


def kda_decode(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    state: Array,
    *,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    read_indices: Array | None = None,
    write_indices: Array | None = None,
    o: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    checked: bool = False,
) -> Array:
    """Kimi delta attention, one or a few tokens per sequence against a pool of states, in place.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV,K]`` f32|bf16|f16|f64. Log decay per token and key channel, <= 0, or raw gate
            input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        state: ``[P,HV,K,V]`` f32|bf16|f64. Pool of states, read at read_indices and written at
            write_indices.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV,K]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        read_indices: ``[N]`` i32|i64, optional. Row of state per sequence; -1 is padding.
        write_indices: ``[N]`` i32|i64, optional. Row of state to write per sequence, -1 writes
            nothing; if None, read_indices.
        o: ``[B,T,HV,V]`` dtype of q. Outputs; allocated if None.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        o, in the library and on the device of q if it is made here. state is updated in place.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Kimi Team 2025, arXiv:2510.26692.
    """
    return _decode(
        _KDA_DECODE, q, k, v, g, beta, state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, o, workspace, scale, lower_bound, qk_l2norm, gate, beta_form, checked,
    )  # fmt: skip

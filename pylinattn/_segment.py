"""gdn_segment, kda_segment, segment_merge: affine maps of spans of tokens, and their composition."""

from __future__ import annotations

from typing import NamedTuple

from ._call import Array, Call, Op
from ._lib import BETA_FORMS, DIRECTIONS, GATES

_GDN_SEGMENT, _KDA_SEGMENT = Op("gdn_segment"), Op("kda_segment")
_SEGMENT_MERGE = Op("segment_merge")


class Segment(NamedTuple):
    M: Array
    h: Array


class Merged(NamedTuple):
    states: Array
    final_state: Array | None


def _segment(
    op: Op, q: Array, k: Array, v: Array, g: Array, beta: Array, d_o: Array | None,
    cu_seqlens: Array | None, A_log: Array | None, dt_bias: Array | None, M: Array | None,
    h: Array | None, workspace: Array | None, scale: float | None, lower_bound: float | None,
    qk_l2norm: bool, gate: str, beta_form: str, direction: str, checked: bool,
) -> Segment:  # fmt: skip
    call = Call(op, q, "q")
    take = call.take
    tq, tk, tv, t_cu = call.first, take(k, "k"), take(v, "v"), take(cu_seqlens, "cu_seqlens")

    # Of arrays of another rank no shape can be derived; the library refuses them below.
    if len(tk[1].shape) == len(tv[1].shape) == 4:
        B, _, HV, V = tv[1].shape
        K = tk[1].shape[3]
        N = B if cu_seqlens is None else max(t_cu[1].shape[0] - 1, 0)
        if M is None:
            M = call.make((N, HV, K, K), call.wide)
        if h is None:
            h = call.make((N, HV, K, V), call.wide)

    call.run(
        workspace,
        *tq,
        *tk,
        *tv,
        *take(g, "g"),
        *take(beta, "beta"),
        *take(d_o, "d_o"),
        *t_cu,
        *take(A_log, "A_log"),
        *take(dt_bias, "dt_bias"),
        *take(M, "M", True),
        *take(h, "h", True),
        *take(workspace, "workspace", True),
        call.scale(scale),
        0.0 if lower_bound is None else call.number("lower_bound", lower_bound),
        bool(qk_l2norm),
        call.choice("gate", gate, GATES),
        call.choice("beta_form", beta_form, BETA_FORMS),
        call.choice("direction", direction, DIRECTIONS),
        bool(checked),
        0,
        call.stream,
    )
    return Segment(call.result(M), call.result(h))


def _merge(
    op: Op, M: Array, h: Array, initial_state: Array | None, states: Array | None,
    final_state: Array | None, workspace: Array | None, direction: str, checked: bool,
) -> Merged:  # fmt: skip
    call = Call(op, M, "M")
    take = call.take
    t_M, t_h, t_initial = call.first, take(h, "h"), take(initial_state, "initial_state")

    # Of arrays of another rank no shape can be derived; the library refuses them below.
    if len(t_h[1].shape) == 5:
        if states is None:
            states = call.make(t_h[1].shape, t_h[1].dtype)
        if final_state is None:
            like = t_initial[1]
            final_state = call.make(t_h[1].shape[1:], like.dtype or t_h[1].dtype)

    call.run(
        workspace,
        *t_M,
        *t_h,
        *t_initial,
        *take(states, "states", True),
        *take(final_state, "final_state", True),
        *take(workspace, "workspace", True),
        call.choice("direction", direction, DIRECTIONS),
        bool(checked),
        call.stream,
    )
    return Merged(call.result(states), call.result(final_state))


def gdn_segment(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    d_o: Array | None = None,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    M: Array | None = None,
    h: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    direction: str = "forward",
    checked: bool = False,
) -> Segment:
    """Gated delta rule, the affine map of a span of tokens: ``S_out = M S_in + h``.

    Backward, ``dS_in = M dS_out + h``, with M transposed already. For context parallelism over
    devices: the maps of all segments go to segment_merge.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV]`` f32|bf16|f16|f64. Log decay per token, <= 0, or raw gate input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        d_o: ``[B,T,HV,V]`` dtype of q, optional. Gradient of o, for direction "backward"
            alone.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        M: ``[N,HV,K,K]`` f32|f64. Transition; allocated if None.
        h: ``[N,HV,K,V]`` f32|f64. What the span adds; allocated if None.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        direction: "forward", or "backward".
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        ``(M, h)``; float32, or float64 for float64 q, where they are made here.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464.
    """
    return _segment(
        _GDN_SEGMENT, q, k, v, g, beta, d_o, cu_seqlens, A_log, dt_bias, M, h, workspace, scale,
        lower_bound, qk_l2norm, gate, beta_form, direction, checked,
    )  # fmt: skip


def kda_segment(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    d_o: Array | None = None,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    M: Array | None = None,
    h: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    direction: str = "forward",
    checked: bool = False,
) -> Segment:
    """Kimi delta attention, the affine map of a span of tokens: ``S_out = M S_in + h``.

    Backward, ``dS_in = M dS_out + h``, with M transposed already. For context parallelism over
    devices: the maps of all segments go to segment_merge.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV,K]`` f32|bf16|f16|f64. Log decay per token and key channel, <= 0, or raw gate
            input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        d_o: ``[B,T,HV,V]`` dtype of q, optional. Gradient of o, for direction "backward"
            alone.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV,K]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        M: ``[N,HV,K,K]`` f32|f64. Transition; allocated if None.
        h: ``[N,HV,K,V]`` f32|f64. What the span adds; allocated if None.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        direction: "forward", or "backward".
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        ``(M, h)``; float32, or float64 for float64 q, where they are made here.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Kimi Team 2025, arXiv:2510.26692.
    """
    return _segment(
        _KDA_SEGMENT, q, k, v, g, beta, d_o, cu_seqlens, A_log, dt_bias, M, h, workspace, scale,
        lower_bound, qk_l2norm, gate, beta_form, direction, checked,
    )  # fmt: skip


def segment_merge(
    M: Array,
    h: Array,
    *,
    initial_state: Array | None = None,
    states: Array | None = None,
    final_state: Array | None = None,
    workspace: Array | None = None,
    direction: str = "forward",
    checked: bool = False,
) -> Merged:
    """Compose the maps of R segments in order: ``states[r] = S; S = M[r] S + h[r]``.

    Backward, from the last segment to the first: initial_state is then the gradient of the state
    after the last segment, ``states[r]`` that of the state after segment r, and final_state that of
    the state before the first.



    Args:
        M: ``[R,N,HV,K,K]`` f32|f64. Transitions.
        h: ``[R,N,HV,K,V]`` dtype of M. What each segment adds.
        initial_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. State before the first segment, zeros
            if None.
        states: ``[R,N,HV,K,V]`` dtype of M. State each segment starts from; allocated
            if None.
        final_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. State after the last segment;
            allocated if None.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        direction: "forward", or "backward".
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        ``(states, final_state)``: the state before each segment, and the one after the last.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    """
    return _merge(
        _SEGMENT_MERGE, M, h, initial_state, states, final_state, workspace, direction, checked,
    )  # fmt: skip

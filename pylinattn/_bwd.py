"""gdn_bwd and kda_bwd: every gradient of the forward over whole sequences."""

from __future__ import annotations

from typing import NamedTuple

from ._call import Array, Call, Op
from ._exchange import Exchange, exchanges
from ._layout import NOT_GIVEN, Borrowed
from ._lib import BETA_FORMS, GATES, SAVES

_GDN_BWD, _KDA_BWD = Op("gdn_bwd"), Op("kda_bwd")


class Gradients(NamedTuple):
    dq: Array
    dk: Array
    dv: Array
    dg: Array
    dbeta: Array
    d_initial_state: Array | None
    dA_log: Array | None
    ddt_bias: Array | None


def _like(call: Call, given: Array | None, source: Borrowed, kind: str) -> Array | None:
    """The caller's array, or a row-major one with the shape and dtype of `source`, if that is given."""
    if given is not None or source is NOT_GIVEN:
        return given
    return call.make(source[1].shape, source[1].dtype, kind)


def _gradients(
    exchange: Exchange, inputs: tuple[Array | None, ...], given: tuple[Array | None, ...]
) -> Gradients | None:
    """The gradients of a plain call, of which those not given are made; None if it is not plain."""
    if not exchange.all_plain(*inputs):
        return None
    q, k, v, g, beta, _, initial, _, cu_seqlens, A_log, dt_bias, _ = inputs
    # Tokens past the last packed sequence have no part in the outputs: their gradients are zero.
    like, packed = exchange.like, cu_seqlens is not None
    of = (q, k, v, g, beta, initial, A_log, dt_bias)
    try:
        if initial is not None and not initial.is_contiguous():
            return None
        return Gradients(
            *(
                like(x, packed and i < 5) if mine is None and x is not None else mine
                for i, (x, mine) in enumerate(zip(of, given, strict=True))
            )
        )
    except RuntimeError:  # of a tensor without strides
        return None


def _bwd(
    op: Op, q: Array, k: Array, v: Array, g: Array, beta: Array, d_o: Array,
    initial_state: Array | None, d_final_state: Array | None, cu_seqlens: Array | None,
    A_log: Array | None, dt_bias: Array | None, saved: Array | None, dq: Array | None,
    dk: Array | None, dv: Array | None, dg: Array | None, dbeta: Array | None,
    d_initial_state: Array | None, dA_log: Array | None, ddt_bias: Array | None,
    workspace: Array | None, scale: float | None, lower_bound: float | None, qk_l2norm: bool,
    gate: str, beta_form: str, save: str, splits: int | str, checked: bool,
) -> Gradients:  # fmt: skip
    exchange = exchanges.get(type(q))
    if exchange is not None and not exchange.is_compiling():
        inputs = (
            q, k, v, g, beta, d_o, initial_state, d_final_state, cu_seqlens, A_log, dt_bias, saved,
        )  # fmt: skip
        given = (dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias)
        gradients = _gradients(exchange, inputs, given)
        arrays = (*inputs, *(gradients or ()), workspace)
        options = (
            scale, lower_bound, qk_l2norm, gate, beta_form, 0 if save == "nothing" else None,
            0 if splits == "auto" else None, bool(checked),
        )  # fmt: skip
        written = [x for x in given if x is not None]
        if gradients is not None and exchange.run(op, arrays, written, *options):
            return gradients
    call = Call(op, q, "q")
    take = call.take
    tq, tk, tv, tg = call.first, take(k, "k"), take(v, "v"), take(g, "g")
    t_beta, t_initial = take(beta, "beta"), take(initial_state, "initial_state")
    t_A_log, t_dt_bias = take(A_log, "A_log"), take(dt_bias, "dt_bias")

    # Tokens past the last packed sequence have no part in the outputs: their gradients are zero.
    kind = "empty" if cu_seqlens is None else "zeros"
    dq = _like(call, dq, tq, kind)
    dk = _like(call, dk, tk, kind)
    dv = _like(call, dv, tv, kind)
    dg = _like(call, dg, tg, kind)
    dbeta = _like(call, dbeta, t_beta, kind)
    if A_log is not None:
        dA_log = _like(call, dA_log, t_A_log, "empty")
    if dt_bias is not None:
        ddt_bias = _like(call, ddt_bias, t_dt_bias, "empty")
    # Of arrays of another rank no shape can be derived; the library refuses them below.
    shapes = [tensor[1].shape for tensor in (tk, tv, t_initial)]
    if d_initial_state is None and all(len(shape) == 4 for shape in shapes):
        d_initial_state = call.make_states(shapes[2][0], tk[1], tv[1], t_initial[1], "empty")

    call.run(
        workspace,
        *tq,
        *tk,
        *tv,
        *tg,
        *t_beta,
        *take(d_o, "d_o"),
        *t_initial,
        *take(d_final_state, "d_final_state"),
        *take(cu_seqlens, "cu_seqlens"),
        *t_A_log,
        *t_dt_bias,
        *take(saved, "saved"),
        *take(dq, "dq", True),
        *take(dk, "dk", True),
        *take(dv, "dv", True),
        *take(dg, "dg", True),
        *take(dbeta, "dbeta", True),
        *take(d_initial_state, "d_initial_state", True),
        *take(dA_log, "dA_log", True),
        *take(ddt_bias, "ddt_bias", True),
        *take(workspace, "workspace", True),
        call.scale(scale),
        0.0 if lower_bound is None else call.number("lower_bound", lower_bound),
        bool(qk_l2norm),
        call.choice("gate", gate, GATES),
        call.choice("beta_form", beta_form, BETA_FORMS),
        call.choice("save", save, SAVES),
        call.splits(splits),
        bool(checked),
        call.stream,
    )
    made = (dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias)
    return Gradients(*(None if x is None else call.result(x) for x in made))


def gdn_bwd(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    d_o: Array,
    *,
    initial_state: Array | None = None,
    d_final_state: Array | None = None,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    saved: Array | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dg: Array | None = None,
    dbeta: Array | None = None,
    d_initial_state: Array | None = None,
    dA_log: Array | None = None,
    ddt_bias: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    save: str = "nothing",
    splits: int | str = "auto",
    checked: bool = False,
) -> Gradients:
    """Gated delta rule, every gradient of gdn_fwd.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV]`` f32|bf16|f16|f64. Log decay per token, <= 0, or raw gate input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        d_o: ``[B,T,HV,V]`` dtype of q. Gradient of o.
        initial_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. As in the forward.
        d_final_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. Gradient of final_state, zeros if
            None.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        saved: ``[S]`` u8, optional. What the forward saved, for save "states".
        dq: ``[B,T,H,K]`` dtype of q. Gradient of q; allocated if None.
        dk: ``[B,T,H,K]`` dtype of q. Gradient of k; allocated if None.
        dv: ``[B,T,HV,V]`` dtype of q. Gradient of v; allocated if None.
        dg: ``[B,T,HV]`` f32|bf16|f16|f64. Gradient of g; allocated if None.
        dbeta: ``[B,T,HV]`` f32|bf16|f16|f64. Gradient of beta; allocated if None.
        d_initial_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. Gradient of initial_state, or of the
            zeros in its place; allocated if initial_state is given.
        dA_log: ``[HV]`` f32|bf16|f64, optional. Gradient of A_log; allocated if A_log is given.
        ddt_bias: ``[HV]`` f32|bf16|f64, optional. Gradient of dt_bias; allocated if dt_bias
            is given.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        save: "nothing": all is recomputed from the inputs. "states": saved is what gdn_fwd saved
            with the same arguments, save and all.
        splits: "auto" or int. Pieces per sequence inside the card; 1 is none, and a sequence then has
            the same bits packed and alone.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        ``(dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias)``, each with the shape and dtype
        of what it is the gradient of; None for what is neither given nor allocated. dq and dk are
        summed over the value heads of a group, dA_log and ddt_bias over all tokens. Rows of tokens
        past cu_seqlens[-1] are zero in arrays made here, and left as they are in yours.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464.
    """
    return _bwd(
        _GDN_BWD, q, k, v, g, beta, d_o, initial_state, d_final_state, cu_seqlens, A_log, dt_bias,
        saved, dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias, workspace, scale,
        lower_bound, qk_l2norm, gate, beta_form, save, splits, checked,
    )  # fmt: skip


def kda_bwd(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    d_o: Array,
    *,
    initial_state: Array | None = None,
    d_final_state: Array | None = None,
    cu_seqlens: Array | None = None,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    saved: Array | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dg: Array | None = None,
    dbeta: Array | None = None,
    d_initial_state: Array | None = None,
    dA_log: Array | None = None,
    ddt_bias: Array | None = None,
    workspace: Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    save: str = "nothing",
    splits: int | str = "auto",
    checked: bool = False,
) -> Gradients:
    """Kimi delta attention, every gradient of kda_fwd.

    Args:
        q: ``[B,T,H,K]`` bf16|f16|f32|f64. Queries, of norm <= 1 unless qk_l2norm.
        k: ``[B,T,H,K]`` dtype of q. Keys, of norm <= 1 unless qk_l2norm.
        v: ``[B,T,HV,V]`` dtype of q. Values.
        g: ``[B,T,HV,K]`` f32|bf16|f16|f64. Log decay per token and key channel, <= 0, or raw gate
            input.
        beta: ``[B,T,HV]`` f32|bf16|f16|f64. Write strength, or its logits.
        d_o: ``[B,T,HV,V]`` dtype of q. Gradient of o.
        initial_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. As in the forward.
        d_final_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. Gradient of final_state, zeros if
            None.
        cu_seqlens: ``[N+1]`` i32|i64, optional. Where each packed sequence starts, and the end; B
            is 1.
        A_log: ``[HV]`` f32|bf16|f64, optional. Log of the gate's amplitude; for gate "softplus" or
            "bounded".
        dt_bias: ``[HV,K]`` f32|bf16|f64, optional. Added to the raw gate input; for gate "softplus"
            or "bounded".
        saved: ``[S]`` u8, optional. What the forward saved, for save "states".
        dq: ``[B,T,H,K]`` dtype of q. Gradient of q; allocated if None.
        dk: ``[B,T,H,K]`` dtype of q. Gradient of k; allocated if None.
        dv: ``[B,T,HV,V]`` dtype of q. Gradient of v; allocated if None.
        dg: ``[B,T,HV,K]`` f32|bf16|f16|f64. Gradient of g; allocated if None.
        dbeta: ``[B,T,HV]`` f32|bf16|f16|f64. Gradient of beta; allocated if None.
        d_initial_state: ``[N,HV,K,V]`` f32|bf16|f64, optional. Gradient of initial_state, or of the
            zeros in its place; allocated if initial_state is given.
        dA_log: ``[HV]`` f32|bf16|f64, optional. Gradient of A_log; allocated if A_log is given.
        ddt_bias: ``[HV,K]`` f32|bf16|f64, optional. Gradient of dt_bias; allocated if dt_bias
            is given.
        workspace: ``[W]`` u8, optional. Scratch; allocated if None.
        scale: float. Multiplies q, not 0; ``K**-0.5`` if None.
        lower_bound: float, < 0. Lower bound of the log decay, for gate "bounded" alone.
        qk_l2norm: bool. Divide q and k by ``sqrt(sum x^2 + 1e-6)`` first.
        gate: "none": g is the log decay. "softplus": it is ``-exp(A_log) softplus(g + dt_bias)``.
            "bounded": it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for
            ``exp(A_log)`` if A_log is None.
        beta_form: "weight": beta is the write strength, in [0,2]. "logits": it is
            ``sigmoid(beta)``. "logits_x2": it is ``2 sigmoid(beta)``.
        save: "nothing": all is recomputed from the inputs. "states" (on the CPU alone): saved is what
            kda_fwd saved with the same arguments, save and all.
        splits: "auto" or int. Pieces per sequence inside the card; 1 is none.
        checked: bool. Synchronise and test values too (lengths, indices, g <= 0).
    Returns:
        ``(dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias)``, each with the shape and dtype
        of what it is the gradient of; None for what is neither given nor allocated. dq and dk are
        summed over the value heads of a group, dA_log and ddt_bias over all tokens. Rows of tokens
        past cu_seqlens[-1] are zero in arrays made here, and left as they are in yours.
    Raises:
        ValueError: shape, stride, range or option.  TypeError: dtype or device.
        NotImplementedError: no kernel for this call.  RuntimeError: CUDA failure.
    Source: Kimi Team 2025, arXiv:2510.26692.
    """
    return _bwd(
        _KDA_BWD, q, k, v, g, beta, d_o, initial_state, d_final_state, cu_seqlens, A_log, dt_bias,
        saved, dq, dk, dv, dg, dbeta, d_initial_state, dA_log, ddt_bias, workspace, scale,
        lower_bound, qk_l2norm, gate, beta_form, save, splits, checked,
    )  # fmt: skip

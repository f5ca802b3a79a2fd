"""Gradients and affine maps of spans, as float64 loops over tokens from the last to the first; part of reference.py.

The chain rule of one token, with S after it, P = exp(g) S_before, e = v - P^T k, u = beta e, and D the gradient of S:

    D += scale q do^T;  dq = scale S do;  dk = D u;     du = D^T k;    (o = scale S^T q;  S = P + k u^T)
    dbeta = du.e;       de = beta du;     dv = de;      dk -= P de;    (u = beta e;       e = v - P^T k)
    dP = D - k de^T;    dg = sum_v P dP;  D = exp(g) dP                (P = exp(g) S_before)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._reference_inputs import Array, Inputs, as_float64, sigmoid, spans_of, token

_BLOCK = 64  # tokens whose states are held at a time


class Gradients(NamedTuple):
    dq: Array  # [B,T,H,K]
    dk: Array  # [B,T,H,K]
    dv: Array  # [B,T,HV,V]
    dg: Array  # [B,T,HV] or [B,T,HV,K]
    dbeta: Array  # [B,T,HV]
    d_initial_state: Array  # [N,HV,K,V]
    dA_log: Array | None  # [HV]
    ddt_bias: Array | None  # [HV] or [HV,K]


class Segment(NamedTuple):
    M: Array  # [N,HV,K,K]
    h: Array  # [N,HV,K,V]


class Merged(NamedTuple):
    states: Array  # [R,N,HV,K,V]
    final_state: Array  # [N,HV,K,V]


def _times(S: Array, x: Array) -> Array:
    """S x for every head: [HV,K,V] and [HV,V]."""
    return np.einsum("hkv,hv->hk", S, x)


def _transposed_times(S: Array, x: Array) -> Array:
    """S^T x for every head: [HV,K,V] and [HV,K]."""
    return np.einsum("hkv,hk->hv", S, x)


def _outer(x: Array, y: Array) -> Array:
    return x[:, :, None] * y[:, None, :]


def _reverse(x: Inputs, span: tuple[int, int, int], S: Array, D: Array, do: Array, d: Any) -> Array:
    """Adds the gradients of one sequence to the arrays of `d`, per value head; returns that of its first state."""
    b, first, length = span
    marks = []
    for t in range(length):
        if t % _BLOCK == 0:
            marks.append(S)
        q, k, v, decay, beta = (a[0] for a in x.tokens([b], [first], t))
        S, _, _ = token(S, q, k, v, decay, beta, x.scale)
    for block in reversed(range(len(marks))):
        states = [marks[block]]
        tokens = range(block * _BLOCK, min((block + 1) * _BLOCK, length))
        for t in tokens:
            q, k, v, decay, beta = (a[0] for a in x.tokens([b], [first], t))
            states.append(token(states[-1], q, k, v, decay, beta, x.scale)[0])
        for t in reversed(tokens):
            q, k, v, decay, beta = (a[0] for a in x.tokens([b], [first], t))
            at = (b, first + t)
            S = states.pop()
            P = decay[:, :, None] * states[-1]
            e = v - _transposed_times(P, k)
            u = beta[:, None] * e
            D = D + x.scale * _outer(q, do[at])
            d["q"][at] = x.scale * _times(S, do[at])
            du = _transposed_times(D, k)
            d["beta"][at] = (du * e).sum(-1)
            d["v"][at] = de = beta[:, None] * du
            d["k"][at] = _times(D, u) - _times(P, de)
            dP = D - _outer(k, de)
            dg = (P * dP).sum(-1)
            d["g"][at] = dg if x.g.ndim == 4 else dg.sum(-1)
            D = decay[:, :, None] * dP
    return D


def _gate_gradients(
    g: Array,
    log_decay: Array,
    dg: Array,
    gate: str,
    A_log: Any,
    dt_bias: Any,
    lower_bound: float | None,
    used: Array,
) -> tuple[Array, Array | None, Array | None]:
    """Gradients of the raw gate input, A_log and dt_bias; `used` [B,T] marks the tokens of a sequence."""
    if gate == "none":
        return dg, None, None
    x = g if dt_bias is None else g + as_float64(dt_bias)
    amplitude = np.ones(g.shape[2]) if A_log is None else np.exp(as_float64(A_log))
    amplitude = amplitude.reshape(-1, *[1] * (g.ndim - 3))
    if gate == "softplus":
        dx = -amplitude * sigmoid(x) * dg
        # 0 for a full reset, where the log decay is -inf and its gradient 0
        log_amplitude = dg * np.where(dg == 0, 0.0, log_decay)
    else:
        s, below = sigmoid(amplitude * x), sigmoid(-amplitude * x)
        dx = dg * float(lower_bound or 0.0) * amplitude * s * below
        log_amplitude = dx * np.where(dx == 0, 0.0, x)
    dx = np.where(used.reshape(*used.shape, *[1] * (g.ndim - 2)), dx, 0.0)
    log_amplitude = np.where(dx == 0, 0.0, log_amplitude)
    axes = (0, 1, 3) if g.ndim == 4 else (0, 1)
    return (
        dx,
        None if A_log is None else log_amplitude.sum(axes),
        None if dt_bias is None else dx.sum((0, 1)),
    )


def _unit_gradient(x: Array, dy: Array) -> Array:
    """Through x / sqrt(sum x^2 + 1e-6)."""
    r = 1.0 / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    return r * dy - r**3 * x * (x * dy).sum(-1, keepdims=True)


def _bwd(
    family: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    d_o: Any,
    *,
    initial_state: Any = None,
    d_final_state: Any = None,
    cu_seqlens: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
) -> Gradients:
    x = Inputs(
        family, q, k, v, g, beta,
        A_log=A_log, dt_bias=dt_bias, scale=scale, lower_bound=lower_bound,
        qk_l2norm=qk_l2norm, gate=gate, beta_form=beta_form, heads=None,
    )  # fmt: skip
    B, T, HV, _ = x.out_shape
    H, K = x.k.shape[2:]
    do = as_float64(d_o)
    spans = spans_of(B, T, cu_seqlens)
    zeros = np.zeros((len(spans), *x.state_shape))
    start = zeros if initial_state is None else as_float64(initial_state)
    end = zeros if d_final_state is None else as_float64(d_final_state)
    d = {name: np.zeros((B, T, HV, K)) for name in ("q", "k")}
    d |= {"v": np.zeros(x.out_shape), "g": np.zeros(x.g.shape), "beta": np.zeros((B, T, HV))}
    d_start, used = zeros.copy(), np.zeros((B, T), bool)
    for n, (b, first, length) in enumerate(spans):
        d_start[n] = _reverse(x, spans[n], start[n], end[n], do, d)
        used[b, first : first + length] = True

    raw = {name: as_float64(a) for name, a in (("q", q), ("k", k), ("g", g), ("beta", beta))}
    dq, dk = (d[name].reshape(B, T, H, HV // max(H, 1), K).sum(3) for name in ("q", "k"))
    if qk_l2norm:
        dq, dk = _unit_gradient(raw["q"], dq), _unit_gradient(raw["k"], dk)
    dbeta = d["beta"]
    if beta_form != "weight":
        top = 2.0 if beta_form == "logits_x2" else 1.0
        dbeta = dbeta * top * sigmoid(raw["beta"]) * sigmoid(-raw["beta"])
    dg, dA_log, ddt_bias = _gate_gradients(
        raw["g"], x.g, d["g"], gate, A_log, dt_bias, lower_bound, used
    )
    return Gradients(dq, dk, d["v"], dg, dbeta, d_start, dA_log, ddt_bias)


def gdn_bwd(q: Any, k: Any, v: Any, g: Any, beta: Any, d_o: Any, **options: Any) -> Gradients:
    """Every gradient of gdn_fwd, from those of its outputs."""
    return _bwd("gdn", q, k, v, g, beta, d_o, **options)


def kda_bwd(q: Any, k: Any, v: Any, g: Any, beta: Any, d_o: Any, **options: Any) -> Gradients:
    """Every gradient of kda_fwd, from those of its outputs."""
    return _bwd("kda", q, k, v, g, beta, d_o, **options)


def _segment(
    family: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    d_o: Any = None,
    cu_seqlens: Any = None,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    qk_l2norm: bool = False,
    gate: str = "none",
    beta_form: str = "weight",
    direction: str = "forward",
) -> Segment:
    """The product of the tokens' matrices A = (1 - beta k k^T) diag(exp(g)), and what the span adds."""
    x = Inputs(
        family, q, k, v, g, beta,
        A_log=A_log, dt_bias=dt_bias, scale=scale, lower_bound=lower_bound,
        qk_l2norm=qk_l2norm, gate=gate, beta_form=beta_form, heads=None,
    )  # fmt: skip
    B, T = x.v.shape[:2]
    spans = spans_of(B, T, cu_seqlens)
    eye = np.eye(x.k.shape[-1])
    do = None if d_o is None else as_float64(d_o)
    M = np.tile(eye, (len(spans), x.v.shape[2], 1, 1))
    h = np.zeros((len(spans), *x.state_shape))
    for n, (b, first, length) in enumerate(spans):
        for t in range(length) if do is None else reversed(range(length)):
            q_t, k_t, v_t, decay, beta_t = (a[0] for a in x.tokens([b], [first], t))
            A = (eye - beta_t[:, None, None] * _outer(k_t, k_t)) * decay[:, None, :]
            if direction == "forward":
                h[n] = A @ h[n] + beta_t[:, None, None] * _outer(k_t, v_t)
            elif do is not None:
                A = A.transpose(0, 2, 1)
                h[n] = A @ (h[n] + x.scale * _outer(q_t, do[b, first + t]))
            M[n] = A @ M[n]
    return Segment(M, h)


def gdn_segment(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Segment:
    """The affine map of a span of tokens, S_out = M S_in + h; backward (with ``d_o``), dS_in = M dS_out + h."""
    return _segment("gdn", q, k, v, g, beta, **options)


def kda_segment(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Segment:
    """The affine map of a span of tokens, S_out = M S_in + h; backward (with ``d_o``), dS_in = M dS_out + h."""
    return _segment("kda", q, k, v, g, beta, **options)


def segment_merge(
    M: Any, h: Any, *, initial_state: Any = None, direction: str = "forward"
) -> Merged:
    """The state before each segment and after the last; backward, from the last segment to the first."""
    M, h = as_float64(M), as_float64(h)
    S = np.zeros(h.shape[1:]) if initial_state is None else as_float64(initial_state)
    states = np.zeros(h.shape)
    order = range(len(M)) if direction == "forward" else reversed(range(len(M)))
    for r in order:
        states[r] = S
        S = M[r] @ S + h[r]
    return Merged(states, S)

"""torch: functions with FLA's names and arguments, with gradients, torch.compile and torch.export.

Each op of the library is a torch op, `torch.ops.pylinattn.gdn_fwd` and so on, with a fake kernel
and without an autograd formula: the formula is an autograd.Function around it, which costs less
and is left out where no input needs a gradient. docs/from-fla.md says what differs from FLA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from . import _fla_args as fla
from . import ops
from ._fla_args import Arrays, Options
from ._fla_backend import register_fla, unregister_fla
from ._lib import LinattnUnsupportedError, LinattnValueError
from ._transformers import patch_transformers, unpatch_transformers

__all__ = [
    "chunk_gated_delta_rule", "chunk_gdn", "chunk_kda", "fused_gdn_gate", "fused_kda_gate",
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "fused_recurrent_kda",
    "patch_transformers", "register_fla", "unpatch_transformers", "unregister_fla",
]  # fmt: skip

DECODE_TOKENS = 16  # of a sequence, on average; a recurrent call with more takes the forward op

_STATES = (torch.float32, torch.bfloat16, torch.float64)


# ---- the ops


def _strided(x: Tensor) -> Tensor:
    """x, or a copy where the library takes no such strides."""
    on_gpu = x.is_cuda
    if not on_gpu and x.is_contiguous():
        return x
    if x.stride(-1) != 1 or 0 in x.stride():
        return x.contiguous()
    if on_gpu:  # TMA: addresses and strides in units of 16 bytes
        unit = 16 // x.element_size()
        if any(stride % unit for stride in x.stride()[:-1]) or x.data_ptr() % 16:
            return x.clone(memory_format=torch.contiguous_format)
    return x


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _known(x: Tensor | None, v_first: bool = False) -> Tensor | None:
    """A state or parameter in a dtype that the library has, and a state as ``[N,HV,K,V]``."""
    if x is None:
        return None
    x = x if x.dtype in _STATES else x.float()
    return x.transpose(2, 3) if v_first else x


def _new_states(x: Arrays, v_first: bool) -> Tensor:
    N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    K, V = x.q.shape[3], x.v.shape[3]
    sizes = (V, K) if v_first else (K, V)
    return x.q.new_empty((N, x.v.shape[2], *sizes), dtype=_wide(x.q))


def _tensors(x: Arrays) -> tuple[Tensor, ...]:
    return _strided(x.q), _strided(x.k), _strided(x.v), x.g, x.beta


def _keywords(x: Arrays, options: Options) -> dict[str, Any]:
    """What forward, decode and backward take besides their tensors and states."""
    return {
        "cu_seqlens": x.cu_seqlens,
        "A_log": _known(x.A_log),
        "dt_bias": _known(x.dt_bias),
        "scale": options.scale,
        "lower_bound": options.lower_bound or None,
        "qk_l2norm": options.qk_l2norm,
        "gate": options.gate,
        "beta_form": options.beta_form,
    }


def _forward(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*given: Any) -> tuple[Tensor, Tensor]:
        x, options, output_final_state = Arrays(*given[:9]), Options(*given[9:-1]), given[-1]
        final = _new_states(x, options.v_first) if output_final_state else None
        done = function(
            *_tensors(x),
            initial_state=_known(x.initial_state, options.v_first),
            final_state=_known(final, options.v_first),
            **_keywords(x, options),
        )
        return done.o, x.q.new_empty(0) if final is None else final

    return run


def _decode(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*given: Any) -> tuple[Tensor, Tensor]:
        x, options, output_final_state = Arrays(*given[:9]), Options(*given[9:-1]), given[-1]
        state = _new_states(x, options.v_first)
        if x.initial_state is None:
            state.zero_()
        else:
            state.copy_(x.initial_state)
        o = function(*_tensors(x), _known(state, options.v_first), **_keywords(x, options))
        return o, state if output_final_state else x.q.new_empty(0)

    return run


def _fake_forward(*given: Any) -> tuple[Tensor, Tensor]:
    x, options, output_final_state = Arrays(*given[:9]), Options(*given[9:-1]), given[-1]
    final = _new_states(x, options.v_first) if output_final_state else x.q.new_empty(0)
    return x.v.new_empty(x.v.shape), final


def _backward(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    def run(*given: Any) -> tuple[Tensor, ...]:
        x, (d_o, d_final), options = Arrays(*given[:9]), given[9:11], Options(*given[11:])
        made = function(
            *_tensors(x),
            _strided(d_o),
            initial_state=_known(x.initial_state, options.v_first),
            d_final_state=_known(d_final, options.v_first),
            **_keywords(x, options),
        )
        made = made._replace(d_initial_state=_known(made.d_initial_state, options.v_first))
        return tuple(x.q.new_empty(0) if y is None else y.contiguous() for y in made)

    return run


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    x = Arrays(*given[:9])
    of = (*x[:5], _known(x.initial_state), _known(x.A_log), _known(x.dt_bias))
    return tuple(x.q.new_empty(0) if y is None else y.new_empty(y.shape) for y in of)


_library = torch.library.Library("pylinattn", "DEF")  # the ops last as long as this object


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    _library.define(f"{name}{schema}")
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"pylinattn::{name}", fake, lib=_library)
    return getattr(torch.ops.pylinattn, name).default


_gdn_fwd = _define("gdn_fwd", fla.FORWARD, _forward(ops.gdn_fwd), _fake_forward)
_kda_fwd = _define("kda_fwd", fla.FORWARD, _forward(ops.kda_fwd), _fake_forward)
_gdn_decode = _define("gdn_decode", fla.FORWARD, _decode(ops.gdn_decode), _fake_forward)
_kda_decode = _define("kda_decode", fla.FORWARD, _decode(ops.kda_decode), _fake_forward)
_gdn_bwd = _define("gdn_bwd", fla.BACKWARD, _backward(ops.gdn_bwd), _fake_backward)
_kda_bwd = _define("kda_bwd", fla.BACKWARD, _backward(ops.kda_bwd), _fake_backward)


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_channel: bool, *given: Any) -> tuple[Tensor, Tensor]:
        o, final = (_kda_fwd if per_channel else _gdn_fwd)(*given)
        ctx.save_for_backward(*given[:9])
        ctx.per_channel, ctx.options = per_channel, given[9:-1]
        ctx.set_materialize_grads(False)
        if not given[-1]:
            ctx.mark_non_differentiable(final)
        return o, final

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
        x = Arrays(*ctx.saved_tensors)
        if d_o is None:
            d_o = torch.zeros_like(x.v)
        op = _kda_bwd if ctx.per_channel else _gdn_bwd
        *of_tensors, d_initial, dA_log, ddt_bias = op(*x, d_o, d_final, *ctx.options)
        return (
            None, *of_tensors, _as(d_initial, x.initial_state), None, _as(dA_log, x.A_log),
            _as(ddt_bias, x.dt_bias), *(None,) * (len(ctx.options) + 1),
        )  # fmt: skip


def _as(gradient: Tensor, x: Tensor | None) -> Tensor | None:
    return None if x is None else gradient.to(x.dtype)


def records(x: Iterable[Tensor | None]) -> bool:
    """Would a call with these tensors record a gradient?"""
    return torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x)


def _run(
    per_channel: bool, recurrent: bool, x: Arrays, options: Options, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    if records(x):
        o, final = _Delta.apply(per_channel, *x, *options, output_final_state)
    else:
        T = x.q.shape[1]
        N = 1 if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
        if recurrent and T <= DECODE_TOKENS * N:
            op = _kda_decode if per_channel else _gdn_decode
        else:
            op = _kda_fwd if per_channel else _gdn_fwd
        o, final = op(*x, *options, output_final_state)
    return o, final if output_final_state else None


# ---- GDN


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over whole sequences, as FLA's function of this name.

    Further keywords: use_gate_in_kernel, A_log, dt_bias, chunk_size, and transpose_state_layout,
    the old name of state_v_first. cu_seqlens_cpu, chunk_indices and chunk_size change nothing here.

    Returns:
        ``(o, final_state)``: o in the dtype of q, final_state float32 (float64 for float64 q), or
        None unless asked for.
    """
    name = "chunk_gated_delta_rule"
    v_first = fla.old_names(
        name, kwargs, ("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size"), state_v_first
    )
    fla.no_context_parallel(name, cp_context)
    fla.chunk_size(name, kwargs, (16, 32, 64))
    return _gdn(
        name, False, q, k, v, g, beta, kwargs.get("use_gate_in_kernel", False),
        kwargs.get("A_log"), kwargs.get("dt_bias"), scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, v_first, cu_seqlens,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule token by token, as FLA's function of this name, and with gradients.

    gk makes it a KDA call; gv is refused. A call without gradients and of at most DECODE_TOKENS
    tokens per sequence takes the decode op, every other the forward op.

    Returns:
        ``(o, final_state)``, as chunk_gated_delta_rule.
    """
    name = "fused_recurrent_gated_delta_rule"
    v_first = fla.old_names(name, kwargs, (), state_v_first)
    if gv is not None:
        raise LinattnUnsupportedError(f"{name}: gv is given; a decay per value channel has no op")
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    if use_gate_in_kernel and g is None:
        raise LinattnValueError(f"{name}: g is None; use_gate_in_kernel=True needs it")
    if g is None and gk is None:
        g = torch.zeros_like(v[..., 0], dtype=_wide(v))
    if gk is not None:
        if g is not None:
            if use_gate_in_kernel:
                g = fused_gdn_gate(g, fla.need_A_log(name, A_log), dt_bias, _wide(g))
            gk = gk + g[..., None]
        return fused_recurrent_kda(
            q, k, v, gk, beta, None, None, scale, initial_state, output_final_state,
            use_qk_l2norm_in_kernel, False, use_beta_sigmoid_in_kernel, allow_neg_eigval, None,
            v_first, cu_seqlens,
        )  # fmt: skip
    return _gdn(
        name, True, q, k, v, g, beta, use_gate_in_kernel, A_log, dt_bias, scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        v_first, cu_seqlens,
    )  # fmt: skip


def _gdn(
    name: str, recurrent: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor,
    gate_inside: bool, A_log: Tensor | None, dt_bias: Tensor | None, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, qk_l2norm: bool, sigmoid: bool,
    neg_eigval: bool, v_first: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    fla.shapes(name, q, k, v, g, beta, initial_state, cu_seqlens, v_first, False)
    heads = (v.shape[2],)
    if gate_inside:
        A_log = fla.parameter(name, "A_log", fla.need_A_log(name, A_log), heads)
        dt_bias = fla.parameter(name, "dt_bias", dt_bias, heads)
    else:
        A_log = dt_bias = None
    options = Options(
        fla.scale(scale, q), 0.0, bool(qk_l2norm), "softplus" if gate_inside else "none",
        fla.beta_form(name, sigmoid, neg_eigval), v_first,
    )  # fmt: skip
    if not q.dtype == k.dtype == v.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    x = Arrays(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    return _run(False, recurrent, x, options, bool(output_final_state))


# ---- KDA


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi delta attention over whole sequences, as FLA's function of this name.

    Further keywords: A_log, dt_bias, chunk_size, and transpose_state_layout, the old name of
    state_v_first. disable_recompute, cu_seqlens_cpu, use_graph, max_num_seqs and chunk_size change
    nothing here: every call can be captured. return_intermediate_states reads the lengths on the
    host.

    Returns:
        ``(o, final_state)``, as chunk_gated_delta_rule; with return_intermediate_states also the
        state before every 64 tokens of each sequence, ``[B,NT,HV,K,V]`` in the dtype of k.
    """
    name = "chunk_kda"
    v_first = fla.old_names(name, kwargs, ("A_log", "dt_bias", "chunk_size"), state_v_first)
    fla.no_context_parallel(name, cp_context)
    size = fla.chunk_size(name, kwargs, (32, 64))
    fla.safe_gate(name, safe_gate, use_gate_in_kernel, lower_bound)
    x, options = _kda(
        name, q, k, v, g, beta, use_gate_in_kernel, kwargs.get("A_log"), kwargs.get("dt_bias"),
        scale, initial_state, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound, v_first, cu_seqlens,
    )  # fmt: skip
    if not return_intermediate_states:
        return _run(True, False, x, options, bool(output_final_state))
    if size != fla.CHECKPOINT:
        raise LinattnUnsupportedError(
            f"{name}: return_intermediate_states with chunk_size={size}; states are kept every "
            f"{fla.CHECKPOINT} tokens"
        )
    if records(x):
        raise LinattnValueError(f"{name}: return_intermediate_states records no gradient")
    o, final = _run(True, False, x, options, bool(output_final_state))
    return o, final, _states_between(x, options)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention token by token, as FLA's function of this name, and with gradients.

    Returns:
        ``(o, final_state)``, as chunk_gated_delta_rule.
    """
    name = "fused_recurrent_kda"
    v_first = fla.old_names(name, kwargs, (), state_v_first)
    x, options = _kda(
        name, q, k, v, g, beta, use_gate_in_kernel, A_log, dt_bias, scale, initial_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        v_first, cu_seqlens,
    )  # fmt: skip
    return _run(True, True, x, options, bool(output_final_state))


def _kda(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate_inside: bool,
    A_log: Tensor | None, dt_bias: Tensor | None, scale: float | None,
    initial_state: Tensor | None, qk_l2norm: bool, sigmoid: bool, neg_eigval: bool,
    lower_bound: float | None, v_first: bool, cu_seqlens: Tensor | None,
) -> tuple[Arrays, Options]:  # fmt: skip
    fla.shapes(name, q, k, v, g, beta, initial_state, cu_seqlens, v_first, True)
    gate = fla.kda_gate(name, gate_inside, A_log, lower_bound)
    if gate == "none":
        A_log = dt_bias = None
    A_log = fla.parameter(name, "A_log", A_log, (v.shape[2],))
    dt_bias = fla.parameter(name, "dt_bias", dt_bias, tuple(g.shape[2:]))
    options = Options(
        fla.scale(scale, q), float(lower_bound or 0.0) if gate == "bounded" else 0.0, bool(qk_l2norm),
        gate, fla.beta_form(name, sigmoid, neg_eigval), v_first,
    )  # fmt: skip
    if not q.dtype == k.dtype == v.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    x = Arrays(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    return x, options


def _states_between(x: Arrays, options: Options) -> Tensor:
    done = ops.kda_fwd(
        *_tensors(x),
        initial_state=_known(x.initial_state, options.v_first),
        checkpoint_every=fla.CHECKPOINT,
        **_keywords(x, options),
    )
    return fla.states_between(x, done.checkpoints, options.v_first)


# ---- gates


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``-exp(A_log) softplus(g + dt_bias)`` over ``[...,HV]``, computed in float32 or wider."""
    name, heads = "fused_gdn_gate", tuple(g.shape[-1:])
    A_log = fla.need_A_log(name, A_log)
    return _gate(name, g, A_log, heads, dt_bias, heads, None).to(output_dtype)


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``-exp(A_log) softplus(g + dt_bias)`` over ``[...,HV,K]``, computed in float32 or wider.

    With lower_bound ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``, with 1 for ``exp(A_log)``
    if A_log is None.
    """
    name, (HV, K) = "fused_kda_gate", g.shape[-2:]
    fla.kda_gate(name, True, A_log, lower_bound)
    return _gate(name, g, A_log, (HV, 1), dt_bias, (HV, K), lower_bound).to(output_dtype)


def _gate(
    name: str, g: Tensor, A_log: Tensor | None, A_shape: tuple[int, ...], dt_bias: Tensor | None,
    bias_shape: tuple[int, ...], lower_bound: float | None,
) -> Tensor:  # fmt: skip
    x = g.to(_wide(g))
    if dt_bias is not None:
        x = x + fla.parameter(name, "dt_bias", dt_bias, bias_shape).to(x.dtype)
    A = fla.parameter(name, "A_log", A_log, A_shape)
    A = 1.0 if A is None else A.to(x.dtype).exp()
    return -A * softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(A * x)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

"""torch: functions with FLA's names and arguments, with gradients, torch.compile and torch.export.

The functions check FLA's arguments and put them in the library's terms; _torch_ops.py has the ops.
docs/from-fla.md says what differs from FLA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from . import _fla_args as fla
from . import ops
from ._fla_args import Arrays, Options
from ._fla_backend import register_fla, unregister_fla
from ._lib import LinattnUnsupportedError, LinattnValueError
from ._torch_ops import checked, keywords_of, known, records, run, tensors_of, wide_dtype
from ._transformers import patch_transformers, unpatch_transformers

__all__ = [
    "chunk_gated_delta_rule", "chunk_gdn", "chunk_kda", "fused_gdn_gate", "fused_kda_gate",
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "fused_recurrent_kda",
    "patch_transformers", "register_fla", "unpatch_transformers", "unregister_fla",
]  # fmt: skip

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
    tokens per sequence decodes, every other takes the forward op.

    Returns:
        ``(o, final_state)``, as chunk_gated_delta_rule.
    """
    name = "fused_recurrent_gated_delta_rule"
    v_first = fla.old_names(name, kwargs, (), state_v_first) if kwargs else bool(state_v_first)
    if gv is not None:
        raise LinattnUnsupportedError(f"{name}: gv is given; a decay per value channel has no op")
    if beta is None:
        beta = torch.ones_like(fla.tensor(name, "v", v)[..., 0])
    if use_gate_in_kernel and g is None:
        raise LinattnValueError(f"{name}: g is None; use_gate_in_kernel=True needs it")
    if g is None and gk is None:
        g = torch.zeros_like(fla.tensor(name, "v", v)[..., 0], dtype=wide_dtype(v))
    if gk is not None:
        fla.per_channel(name, "gk", gk, q, v)
        if g is not None:
            if use_gate_in_kernel:
                g = fused_gdn_gate(g, fla.need_A_log(name, A_log), dt_bias, wide_dtype(g))
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
    if gate_inside:
        fla.need_A_log(name, A_log)
    else:
        A_log = dt_bias = None
    options = (
        fla.scale(name, scale, q), 0.0, bool(qk_l2norm), "softplus" if gate_inside else "none",
        fla.beta_form(name, sigmoid, neg_eigval), v_first,
    )  # fmt: skip
    x = (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    return run(name, False, recurrent, x, options, bool(output_final_state))


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
        return run(name, True, False, x, options, bool(output_final_state))
    if size != fla.CHECKPOINT:
        raise LinattnUnsupportedError(
            f"{name}: return_intermediate_states with chunk_size={size}; states are kept every "
            f"{fla.CHECKPOINT} tokens"
        )
    if records(x):
        raise LinattnValueError(f"{name}: return_intermediate_states records no gradient")
    arrays = checked(name, True, Arrays(*x), Options(*options))
    o, final = run(name, True, False, arrays, options, bool(output_final_state))
    return o, final, _states_between(arrays, Options(*options))


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
    v_first = fla.old_names(name, kwargs, (), state_v_first) if kwargs else bool(state_v_first)
    x, options = _kda(
        name, q, k, v, g, beta, use_gate_in_kernel, A_log, dt_bias, scale, initial_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound,
        v_first, cu_seqlens,
    )  # fmt: skip
    return run(name, True, True, x, options, bool(output_final_state))


def _kda(
    name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, gate_inside: bool,
    A_log: Tensor | None, dt_bias: Tensor | None, scale: float | None,
    initial_state: Tensor | None, qk_l2norm: bool, sigmoid: bool, neg_eigval: bool,
    lower_bound: float | None, v_first: bool, cu_seqlens: Tensor | None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    gate = fla.kda_gate(name, gate_inside, A_log, lower_bound)
    if gate == "none":
        A_log = dt_bias = None
    bound = float(lower_bound or 0.0) if gate == "bounded" else 0.0
    form = fla.beta_form(name, sigmoid, neg_eigval)
    options = (fla.scale(name, scale, q), bound, bool(qk_l2norm), gate, form, v_first)
    return (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias), options


def _states_between(x: Arrays, options: Options) -> Tensor:
    done = ops.kda_fwd(
        *tensors_of(x),
        initial_state=known(x.initial_state, options.v_first),
        checkpoint_every=fla.CHECKPOINT,
        **keywords_of(x, options),
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
    name = "fused_gdn_gate"
    heads = tuple(fla.tensor(name, "g", g).shape[-1:])
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
    name = "fused_kda_gate"
    if fla.tensor(name, "g", g).ndim < 2:
        raise LinattnValueError(f"{name}: g has shape {tuple(g.shape)}; [...,HV,K] is expected")
    HV, K = g.shape[-2:]
    fla.kda_gate(name, True, A_log, lower_bound)
    return _gate(name, g, A_log, (HV, 1), dt_bias, (HV, K), lower_bound).to(output_dtype)


def _gate(
    name: str, g: Tensor, A_log: Tensor | None, A_shape: tuple[int, ...], dt_bias: Tensor | None,
    bias_shape: tuple[int, ...], lower_bound: float | None,
) -> Tensor:  # fmt: skip
    x = g.to(wide_dtype(g))
    if dt_bias is not None:
        x = x + fla.parameter(name, "dt_bias", dt_bias, bias_shape).to(x.dtype)
    A = fla.parameter(name, "A_log", A_log, A_shape)
    A = 1.0 if A is None else A.to(x.dtype).exp()
    return -A * softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(A * x)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

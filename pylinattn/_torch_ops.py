"""The ops of the library as torch ops, their gradients, and which way a call of FLA's functions takes.

Each is a torch op, `torch.ops.pylinattn.gdn_fwd` and so on, with a fake kernel and without an autograd formula: the formula is
an autograd.Function around it, which costs less and is left out where no input needs a gradient. Where nobody watches a
call, it is no torch op either but goes straight to the library (_direct.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _fla_args as fla
from . import ops
from ._direct import Direct, decodes, watched
from ._fla_args import Arrays, Options
from ._lib import LinattnUnsupportedError

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


def wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def known(x: Tensor | None, v_first: bool = False) -> Tensor | None:
    """A state or parameter in a dtype that the library has, and a state as ``[N,HV,K,V]``."""
    if x is None:
        return None
    x = x if x.dtype in _STATES else x.float()
    return x.transpose(2, 3) if v_first else x


def _new_states(x: Arrays, v_first: bool) -> Tensor:
    N = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    K, V = x.q.shape[3], x.v.shape[3]
    sizes = (V, K) if v_first else (K, V)
    return x.q.new_empty((N, x.v.shape[2], *sizes), dtype=wide_dtype(x.q))


def tensors_of(x: Arrays) -> tuple[Tensor, ...]:
    return _strided(x.q), _strided(x.k), _strided(x.v), x.g, x.beta


def keywords_of(x: Arrays, options: Options) -> dict[str, Any]:
    """What forward, decode and backward take besides their tensors and states."""
    return {
        "cu_seqlens": x.cu_seqlens,
        "A_log": known(x.A_log),
        "dt_bias": known(x.dt_bias),
        "scale": options.scale,
        "lower_bound": options.lower_bound or None,
        "qk_l2norm": options.qk_l2norm,
        "gate": options.gate,
        "beta_form": options.beta_form,
    }


def _forward(family: str) -> Callable[..., tuple[Tensor, Tensor]]:
    name = f"{family}_fwd"
    function = ops.OPS[name].function

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        done = _direct[family](name, False, given[:9], given[9:-1], given[-1])
        if done is not None:
            return done[0], given[0].new_empty(0) if done[1] is None else done[1]
        x, options, output_final_state = Arrays(*given[:9]), Options(*given[9:-1]), given[-1]
        final = _new_states(x, options.v_first) if output_final_state else None
        done = function(
            *tensors_of(x),
            initial_state=known(x.initial_state, options.v_first),
            final_state=known(final, options.v_first),
            **keywords_of(x, options),
        )
        return done.o, x.q.new_empty(0) if final is None else final

    return run


def _decode(family: str) -> Callable[..., tuple[Tensor, Tensor]]:
    name = f"{family}_decode"
    function = ops.OPS[name].function

    def run(*given: Any) -> tuple[Tensor, Tensor]:
        done = _direct[family](name, True, given[:9], given[9:-1], given[-1])
        if done is not None:
            return done[0], given[0].new_empty(0) if done[1] is None else done[1]
        x, options, output_final_state = Arrays(*given[:9]), Options(*given[9:-1]), given[-1]
        state = _new_states(x, options.v_first)
        if x.initial_state is None:
            state.zero_()
        else:
            state.copy_(x.initial_state)
        o = function(*tensors_of(x), known(state, options.v_first), **keywords_of(x, options))
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
            *tensors_of(x),
            _strided(d_o),
            initial_state=known(x.initial_state, options.v_first),
            d_final_state=known(d_final, options.v_first),
            **keywords_of(x, options),
        )
        made = made._replace(d_initial_state=known(made.d_initial_state, options.v_first))
        return tuple(x.q.new_empty(0) if y is None else y.contiguous() for y in made)

    return run


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    x = Arrays(*given[:9])
    of = (*x[:5], known(x.initial_state), known(x.A_log), known(x.dt_bias))
    return tuple(x.q.new_empty(0) if y is None else y.new_empty(y.shape) for y in of)


_library = torch.library.Library("pylinattn", "DEF")  # the ops last as long as this object


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    _library.define(f"{name}{schema}")
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"pylinattn::{name}", fake, lib=_library)
    return getattr(torch.ops.pylinattn, name).default


_gdn_fwd = _define("gdn_fwd", fla.FORWARD, _forward("gdn"), _fake_forward)
_kda_fwd = _define("kda_fwd", fla.FORWARD, _forward("kda"), _fake_forward)
_gdn_decode = _define("gdn_decode", fla.FORWARD, _decode("gdn"), _fake_forward)
_kda_decode = _define("kda_decode", fla.FORWARD, _decode("kda"), _fake_forward)
_gdn_backward, _kda_backward = _backward(ops.gdn_bwd), _backward(ops.kda_bwd)
_gdn_bwd = _define("gdn_bwd", fla.BACKWARD, _gdn_backward, _fake_backward)
_kda_bwd = _define("kda_bwd", fla.BACKWARD, _kda_backward, _fake_backward)


# ---- how a call goes


def checked(function: str, per_channel: bool, x: Arrays, options: Options) -> Arrays:
    """The arguments of FLA's function as the ops take them; raises what is wrong with them."""
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = x
    fla.shapes(function, q, k, v, g, beta, initial_state, cu_seqlens, options.v_first, per_channel)
    A_log = fla.parameter(function, "A_log", A_log, (v.shape[2],))
    dt_bias = fla.parameter(function, "dt_bias", dt_bias, tuple(g.shape[2:]))
    for name, y in (("q", q), ("k", k), ("v", v), ("initial_state", initial_state)):
        fla.floating(function, name, y)
    if not q.dtype == k.dtype == v.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    return Arrays(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)


def _taken_as_it_is(
    function: str, per_channel: bool, given: tuple[Any, ...], options: tuple[Any, ...]
) -> bool:
    """Needs a right call no tensor but its own? Raises what is wrong with another."""
    x = Arrays(*given)
    made = tensors_of(checked(function, per_channel, x, Options(*options)))
    states = (x.initial_state, x.A_log, x.dt_bias)
    return all(mine is given for mine, given in zip(made, x[:5], strict=True)) and all(
        y is None or y.dtype in _STATES for y in states
    )


def _direct_of(family: str, per_channel: bool) -> Callable[..., tuple[Tensor, Any] | None]:
    fwd, decode = (ops.OPS[f"{family}_{name}"].op for name in ("fwd", "decode"))
    return Direct(torch, fwd, decode, per_channel, _taken_as_it_is)


_watched = watched(torch)
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by is_grads_batched
_direct = {"gdn": _direct_of("gdn", False), "kda": _direct_of("kda", True)}


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: str, per_channel: bool, *given: Any) -> tuple[Tensor, Any]:
        _remember(ctx, per_channel, given)
        if not torch.compiler.is_compiling():
            direct = _direct["kda" if per_channel else "gdn"]
            done = direct(function, False, given[:9], ctx.options, given[-1])
            if done is not None:
                return done
        o, final = (_kda_fwd if per_channel else _gdn_fwd)(*given)
        if not given[-1]:
            ctx.mark_non_differentiable(final)
        return o, final

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
        given = _given_back(ctx, d_o, d_final)
        op = _kda_bwd if ctx.per_channel else _gdn_bwd
        if not torch.compiler.is_compiling() and _unseen(*given):
            op = _kda_backward if ctx.per_channel else _gdn_backward
        return _slopes(ctx, op(*given, *ctx.options))


class _Transformed(torch.autograd.Function):
    """The same under a transform of torch.func, which asks for the context apart, and in forward mode, which is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: str, per_channel: bool, *given: Any) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = (_kda_fwd if per_channel else _gdn_fwd)(*given)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _remember(ctx, inputs[1], inputs[2:])
        if not ctx.has_final:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
        given = _given_back(ctx, d_o, d_final)
        return _slopes(ctx, _Slope.apply(ctx.per_channel, *given, *ctx.options))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative("kda_fwd" if ctx.per_channel else "gdn_fwd", "forward-mode derivative")


class _Slope(torch.autograd.Function):
    """The backward there: a transform always asks for a graph of it, which ends here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(per_channel: bool, *given: Any) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = (_kda_bwd if per_channel else _gdn_bwd)(*given)
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.per_channel = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise _no_derivative("kda_bwd" if ctx.per_channel else "gdn_bwd", "gradient")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative("kda_bwd" if ctx.per_channel else "gdn_bwd", "forward-mode derivative")


def _no_derivative(op: str, what: str) -> LinattnUnsupportedError:
    return LinattnUnsupportedError(
        f"{op}: it has no {what}; gdn_fwd and kda_fwd have gradients, in reverse mode and once"
    )


def _transformed() -> bool:
    """Is the call inside a transform that wants derivatives or maps? torch.compile asks when it traces."""
    of_values = torch._C._functorch.TransformType.Functionalize
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(x.key() != of_values for x in levels)


_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _remember(ctx: Any, per_channel: bool, given: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*given[:9])
    ctx.per_channel, ctx.options, ctx.has_final = per_channel, Options(*given[9:-1]), given[-1]
    ctx.set_materialize_grads(False)


def _given_back(ctx: Any, d_o: Tensor | None, d_final: Tensor | None) -> tuple[Any, ...]:
    """The tensors of the backward op."""
    x = Arrays(*ctx.saved_tensors)
    # A compiled backward gives zeros for an output that has no gradient: here an empty final state.
    return (*x, torch.zeros_like(x.v) if d_o is None else d_o, d_final if ctx.has_final else None)


def _slopes(ctx: Any, made: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """A gradient, or None, for each argument of the autograd.Function."""
    x = Arrays(*ctx.saved_tensors)
    *of_tensors, d_initial, dA_log, ddt_bias = made
    return (
        None, None, *of_tensors, _as(d_initial, x.initial_state), None, _as(dA_log, x.A_log),
        _as(ddt_bias, x.dt_bias), *(None,) * (len(ctx.options) + 1),
    )  # fmt: skip


def _as(gradient: Tensor, x: Tensor | None) -> Tensor | None:
    return None if x is None else gradient.to(x.dtype)


def _unseen(*tensors: Tensor | None) -> bool:
    """May the op's function be called without torch's dispatcher?"""
    plain = (Tensor, torch.nn.Parameter)
    return (
        not _watched()
        and not records(tensors)
        and all(x is None or (type(x) in plain and not x.is_neg()) for x in tensors)
        and not any(x is not None and _is_batched(x) for x in tensors[-2:])  # the gradients alone
    )


def _has_lengths(q: Any, cu_seqlens: Any) -> bool:
    """Have arguments that nobody has checked yet the form that tells how many tokens there are?"""
    of_tokens = isinstance(q, Tensor) and q.ndim == 4
    return of_tokens and (
        cu_seqlens is None or (isinstance(cu_seqlens, Tensor) and cu_seqlens.ndim == 1)
    )


def records(x: Iterable[Tensor | None]) -> bool:
    """Would a call with these tensors record a gradient?"""
    return torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in x)


def run(
    function: str, per_channel: bool, recurrent: bool, given: tuple[Any, ...],
    given_options: tuple[Any, ...], output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A call of FLA's `function`, with its tensors and options in the order of Arrays and Options, as they are given."""
    if not torch.compiler.is_compiling():
        direct = _direct["kda" if per_channel else "gdn"]
        decode = recurrent and _has_lengths(given[0], given[6]) and decodes(given[0], given[6])
        done = direct(function, decode, given, given_options, output_final_state)
        if done is not None:
            return done
    options = Options(*given_options)
    x = checked(function, per_channel, Arrays(*given), options)
    compiling = torch.compiler.is_compiling()
    if _transformed() and (torch.is_grad_enabled() or not compiling):
        if compiling:  # which would trace the op alone, without its gradient
            raise LinattnUnsupportedError(
                f"{function}: it cannot be traced by torch.compile inside a transform of torch.func"
            )
        o, final = _Transformed.apply(function, per_channel, *x, *options, output_final_state)
    elif records(x):
        o, final = _Delta.apply(function, per_channel, *x, *options, output_final_state)
    else:
        if recurrent and decodes(x.q, x.cu_seqlens):
            op = _kda_decode if per_channel else _gdn_decode
        else:
            op = _kda_fwd if per_channel else _gdn_fwd
        o, final = op(*x, *options, output_final_state)
    return o, final if output_final_state else None

"""Calls by FLA's names that nothing watches go straight to the library, not through torch's dispatcher.

That costs a fraction of the time. It needs plain tensors and nobody who records, traces or transforms the call. What FLA's
checks say depends on layouts and options alone, so that they run once for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._exchange import FLAT, ROWS, SAME, SWAP, exchanges
from ._layout import keep
from ._lib import BETA_FORMS, GATES

DECODE_TOKENS = 16  # of a sequence, on average; a recurrent call with more takes the forward op
FEW_TOKENS = 4  # with no more a GPU's forward op decodes too, from one state to another


def decodes(q: Any, cu_seqlens: Any) -> bool:
    """Does a recurrent call without gradients take the decode op?"""
    N = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return bool(q.size(1) <= DECODE_TOKENS * N)


def watched(torch: Any) -> Callable[[], bool]:
    """A function that tells whether torch would see a call: modes, transforms, traces, forward gradients."""
    try:
        of_dispatch = torch._C._len_torch_dispatch_stack
        of_functions = torch._C._len_torch_function_stack
        interpreter = torch._C._functorch.peek_interpreter_stack
        trace = torch._C._get_tracing_state
        forward_ad = torch.autograd.forward_ad
        _ = forward_ad._current_level
    except AttributeError:  # a torch that cannot be asked
        return lambda: True

    def is_watched() -> bool:
        return (
            of_dispatch() > 0
            or of_functions() > 0
            or interpreter() is not None
            or trace() is not None
            or forward_ad._current_level >= 0
        )

    return is_watched


class Direct:
    """Forward and decode of one family.

    `examine` raises what is wrong with the arguments of FLA's function, or tells whether they can be taken as they are.
    """

    def __init__(
        self, torch: Any, forward: Any, decode: Any, per_channel: bool, examine: Callable[..., bool]
    ) -> None:
        self._forward, self._decode = forward, decode
        self._per_channel, self._examine = per_channel, examine
        self._tensor = torch.Tensor
        self._float32, self._float64 = torch.float32, torch.float64
        self._known: tuple[dict[int, bool], dict[int, bool]] = ({}, {})  # forward, decode
        self._watched = watched(torch)
        bias = ROWS if per_channel else FLAT
        self._forward_views, self._decode_views = [], []
        for state in (SAME, SWAP):  # by v_first
            inputs = [SAME] * 5 + [state, SAME, FLAT, bias]
            self._forward_views.append(bytes([*inputs, SAME, SAME, SAME, SAME, state, *[SAME] * 3]))
            self._decode_views.append(bytes([*inputs, *[SAME] * 4]))

    def __call__(
        self, function: str, decode: bool, x: tuple[Any, ...], options: tuple[Any, ...],
        output_final_state: bool,
    ) -> tuple[Any, Any] | None:  # fmt: skip
        """``(o, final_state)``; None if this is not a plain call that nobody watches.

        `x` and `options` are the fields of fla.Arrays and fla.Options, the former as they are given.
        """
        exchange = exchanges.get(self._tensor)
        if exchange is None or self._watched():
            return None
        if exchange.records_gradients() and exchange.any_requires_grad(*x):
            return None
        q, k, v, g, beta, initial, cu, A_log, dt_bias = x
        plain = exchange.types
        if not (
            type(q) in plain
            and type(v) in plain
            and (initial is None or type(initial) in plain)
            and (cu is None or (type(cu) in plain and cu.ndim == 1 and cu.size(0) > 0))
            and not (k is None or g is None or beta is None)
            and q.ndim == v.ndim == 4
            and (q.is_cuda or q.is_cpu)
        ):
            return None
        scale, lower_bound, l2norm, gate, beta_form, v_first = options
        B, T, HV, V = v.shape
        o = exchange.empty(q, (B, T, HV, V), (T * HV * V, HV * V, V, 1), q.dtype)
        options_of_op = (scale, lower_bound, l2norm, GATES[gate], BETA_FORMS[beta_form], 0)
        writes = decode or output_final_state  # also where decode becomes a forward
        copies = decode and initial is not None
        if copies:
            wide = self._float64 if q.dtype is self._float64 else self._float32
            if initial.dtype is not wide or not initial.is_contiguous():
                return None
            if q.is_cuda and cu is None and T <= FEW_TOKENS:
                decode = copies = False
        if copies:
            final = initial.clone()
        elif writes:
            K, N = q.size(3), B if cu is None else cu.size(0) - 1
            final = exchange.states(q, N, HV, *((V, K) if v_first else (K, V)))
            if decode:
                final.zero_()
        else:
            final = None
        scalars: tuple[Any, ...]
        arrays: tuple[Any, ...]
        if decode:
            op, views = self._decode, self._decode_views[v_first]
            arrays = (q, k, v, g, beta, final, cu, A_log, dt_bias, None, None, o, None)
            scalars = (*options_of_op, cu is not None, 0)
        else:
            op, views = self._forward, self._forward_views[v_first]
            arrays = (
                q, k, v, g, beta, initial, cu, A_log, dt_bias, None, None, None, o, final, None,
                None, None,
            )  # fmt: skip
            scalars = (*options_of_op, 0, 0, 0, cu is not None)
        key, args = exchange.borrow(op, arrays, scalars, views)
        if (
            not key
            or (q.is_neg() or k.is_neg() or v.is_neg() or g.is_neg() or beta.is_neg())
            or (initial is not None and initial.is_neg())
            or (A_log is not None and A_log.is_neg())
            or (dt_bias is not None and dt_bias.is_neg())
        ):
            return None
        known = self._known[decode]
        taken = known.get(key)
        if taken is None:
            taken = keep(known, key, self._examine(function, self._per_channel, x, options))
        if not taken:
            return None
        exchange.launch(op, key, args, arrays)
        return o, final if output_final_state else None

"""FLA's arguments in this library's terms: names, options and shapes checked, nothing computed."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from ._dlpack import type_name
from ._layout import Caller
from ._lib import LinattnTypeError, LinattnUnsupportedError, LinattnValueError

CHECKPOINT = 64  # tokens of a chunk, after which chunk_kda can return its state


class Arrays(NamedTuple):
    """The arrays of an op, in the order of its schema."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    initial_state: Any
    cu_seqlens: Any
    A_log: Any
    dt_bias: Any


class Options(NamedTuple):
    """The options of an op after its arrays, in the order of its schema."""

    scale: float
    lower_bound: float  # 0 where the gate has none
    qk_l2norm: bool
    gate: str
    beta_form: str
    v_first: bool


_ARRAYS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? A_log, Tensor? dt_bias"
)
_OPTIONS = "float scale, float lower_bound, bool qk_l2norm, str gate, str beta_form, bool v_first"
FORWARD = f"({_ARRAYS}, {_OPTIONS}, bool output_final_state) -> (Tensor, Tensor)"
BACKWARD = (
    f"({_ARRAYS}, Tensor d_o, Tensor? d_final_state, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def old_names(function: str, kwargs: dict[str, Any], known: tuple[str, ...], v_first: bool) -> bool:
    """state_v_first, also by the name it had; a keyword that FLA does not read either is refused."""
    if not kwargs:
        return bool(v_first)
    unknown = set(kwargs).difference(known, ("transpose_state_layout",))
    if unknown:
        raise LinattnTypeError(
            f"{function}: unexpected keyword argument {', '.join(sorted(unknown))}"
        )
    if "transpose_state_layout" not in kwargs:
        return bool(v_first)
    if v_first:
        raise LinattnValueError(
            f"{function}: state_v_first and transpose_state_layout are both given; the latter is "
            f"the old name of the former"
        )
    warnings.warn(
        "transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3
    )
    return bool(kwargs["transpose_state_layout"])


def beta_form(function: str, sigmoid: bool, neg_eigval: bool) -> str:
    if neg_eigval and not sigmoid:
        raise LinattnValueError(
            f"{function}: allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True"
        )
    return ("logits_x2" if neg_eigval else "logits") if sigmoid else "weight"


def no_context_parallel(function: str, cp_context: Any) -> None:
    if cp_context is not None:
        raise LinattnUnsupportedError(
            f"{function}: cp_context is given; context parallelism is not supported here, None is"
        )


def chunk_size(function: str, kwargs: dict[str, Any], accepted: tuple[int, ...]) -> int:
    """It changes FLA's kernels, not what they compute."""
    size: int = kwargs.get("chunk_size", CHECKPOINT)
    if size not in accepted:
        raise LinattnValueError(f"{function}: chunk_size is {size}; accepted are {accepted}")
    return size


def safe_gate(function: str, safe: bool, gate_inside: bool, lower_bound: float | None) -> None:
    if not (safe and gate_inside):
        return
    if lower_bound is None or not -5 <= lower_bound < 0:
        raise LinattnValueError(
            f"{function}: lower_bound is {lower_bound}; safe_gate=True with "
            f"use_gate_in_kernel=True takes one in [-5, 0)"
        )


def tensor(function: str, name: str, x: Any) -> Any:
    if not hasattr(x, "requires_grad"):
        raise LinattnTypeError(
            f"{function}: {name} is a {type_name(type(x))}; a torch tensor is expected"
        )
    return x


def scale(function: str, given: float | None, q: Any) -> float:
    if given is None:
        try:
            return float(q.size(-1) ** -0.5)
        except (AttributeError, IndexError, TypeError, ZeroDivisionError):
            tensor(function, "q", q)
            return 1.0  # of no size; told below
    return given if type(given) is float else Caller(function).number("scale", given)


def need_A_log(function: str, A_log: Any) -> Any:
    if A_log is None:
        raise LinattnValueError(f"{function}: A_log is None; use_gate_in_kernel=True needs it")
    return A_log


def kda_gate(function: str, inside: bool, A_log: Any, lower_bound: float | None) -> str:
    if not inside:
        return "none"
    if lower_bound is not None:
        return "bounded"
    if A_log is None:
        raise LinattnValueError(
            f"{function}: A_log is None; use_gate_in_kernel=True needs it where lower_bound is "
            f"not given"
        )
    return "softplus"


def shapes(
    function: str, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any,
    cu_seqlens: Any, v_first: bool, per_channel: bool,
) -> None:  # fmt: skip
    """What FLA checks, and the shapes that its kernels take for granted."""
    given = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    for name, x in given.items():
        if x is not None or name in ("q", "k", "v", "g", "beta"):
            tensor(function, name, x)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise LinattnValueError(
                f"{function}: {name} has shape {tuple(x.shape)}; [B,T,heads,size] is expected"
            )
    if q.shape != k.shape:
        raise LinattnValueError(
            f"{function}: q has shape {tuple(q.shape)} and k {tuple(k.shape)}; they must be equal"
        )
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if H == 0 or HV % H:
        raise LinattnValueError(
            f"{function}: v has HV={HV} heads, which is no multiple of the H={H} heads of q and k"
        )
    gates = (B, T, HV, K) if per_channel else (B, T, HV)
    for name, x, expected in (("v", v, (B, T, HV, V)), ("g", g, gates), ("beta", beta, gates[:3])):
        if x.shape != expected:
            raise LinattnValueError(
                f"{function}: {name} has shape {tuple(x.shape)}; {expected} is expected"
            )
    N = B
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            raise LinattnValueError(
                f"{function}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; [N+1] is expected"
            )
        if B != 1:
            raise LinattnValueError(
                f"{function}: the batch size is {B}; with cu_seqlens it is 1, the sequences one "
                f"after another"
            )
        N = cu_seqlens.shape[0] - 1
    state = (N, HV, V, K) if v_first else (N, HV, K, V)
    if initial_state is not None and initial_state.shape != state:
        raise LinattnValueError(
            f"{function}: initial_state has shape {tuple(initial_state.shape)}; {state} is "
            f"expected for {N} sequences with state_v_first={v_first}"
        )


def floating(function: str, name: str, x: Any) -> None:
    """What is cast to another dtype may not lose what it is."""
    if x is not None and not x.is_floating_point():
        raise LinattnTypeError(
            f"{function}: {name} has dtype {x.dtype}; a floating one is expected"
        )


def per_channel(function: str, name: str, x: Any, q: Any, v: Any) -> None:
    floating(function, name, tensor(function, name, x))
    q, v = tensor(function, "q", q), tensor(function, "v", v)
    expected = (*v.shape[:3], *q.shape[3:])
    if x.shape != expected:
        raise LinattnValueError(
            f"{function}: {name} has shape {tuple(x.shape)}; {expected} is expected"
        )


def parameter(function: str, name: str, x: Any, shape: tuple[int, ...]) -> Any:
    """A_log or dt_bias, given in any shape that has its elements."""
    if x is None:
        return None
    floating(function, name, tensor(function, name, x))
    elements = 1
    for size in shape:
        elements *= size
    if x.numel() != elements:
        raise LinattnValueError(
            f"{function}: {name} has {x.numel()} elements, in shape {tuple(x.shape)}; {elements} "
            f"are expected"
        )
    return x.reshape(shape)


def states_between(x: Arrays, checkpoints: Any, v_first: bool) -> Any:
    """The state before every chunk: the initial one, then the checkpoints of the sequence."""
    B, T, _, K = x.q.shape
    HV, V = x.v.shape[2:]
    lengths = [T] * B if x.cu_seqlens is None else x.cu_seqlens.diff().tolist()
    chunks = [-(-length // CHECKPOINT) for length in lengths]
    states = x.k.new_zeros(sum(chunks), HV, K, V)
    row = checkpoint = 0
    for n, (length, count) in enumerate(zip(lengths, chunks)):
        if count and x.initial_state is not None:
            initial = x.initial_state[n]
            states[row] = initial.transpose(1, 2) if v_first else initial
        if count > 1:
            states[row + 1 : row + count] = checkpoints[checkpoint : checkpoint + count - 1]
        row += count
        checkpoint += length // CHECKPOINT
    states = states.view(B, row // max(B, 1), HV, K, V)
    return states.transpose(3, 4).contiguous() if v_first else states

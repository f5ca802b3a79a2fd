"""Calls whose arrays have shapes but no memory yet, as a tracing framework has them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._call import Call
from ._dlpack import DTYPE_NAMES, Array
from ._layout import NOT_GIVEN, Borrowed, Caller, make_layout
from ._lib import BETA_FORMS, DIRECTIONS, GATES, ffi, raise_status
from .ops import OPS

_DTYPES = {name: code for code, name in DTYPE_NAMES.items()}
_CHOICES = {"gate": GATES, "beta_form": BETA_FORMS, "direction": DIRECTIONS}
_ALIGNMENT = 256  # bytes, of the addresses that a query invents


def field_names(op: str) -> list[str]:
    return [name for name, _ in ffi.typeof(f"linattn_{op}_args").fields]


def workspace_bytes(
    op: str, device_type: int, given: dict[str, Any], options: dict[str, Any]
) -> int:
    """Bytes of workspace; raises what the library says against these shapes, dtypes and options."""
    caller, entry, address = Caller(op), OPS[op].op, 1 << 40
    borrowed: dict[str, Borrowed] = {}
    for key, x in given.items():
        strides = tuple(math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim))
        for name in key.split("+"):
            dtype = _DTYPES.get(x.dtype.name)
            if dtype is None:
                raise caller.dtype_error(name, x.dtype)
            layout = make_layout(caller, name, x.shape, strides, dtype, device_type, 0)
            borrowed[name] = (address, layout)
        address += (8 * math.prod(x.shape) // _ALIGNMENT + 1) * _ALIGNMENT
    fields: list[Any] = []
    for name, field in ffi.typeof(f"linattn_{op}_args").fields[1:]:
        if field.type.cname == "linattn_tensor":
            fields.extend(borrowed.get(name, NOT_GIVEN))
        else:
            fields.append(options.get(name, 0))
    answer = ffi.new("uint64_t *")
    status = entry.query(entry.pack(entry.size, *fields[:-1], 0), answer)
    if status:
        raise_status(status)
    return int(answer[0])


class _Options(Call):
    """The checks of options, for a call whose arrays have no addresses yet."""

    __slots__ = ()

    def __init__(self, op: str) -> None:
        Caller.__init__(self, op)


def _scalars(op: str, **values: Any) -> tuple[tuple[str, Any], ...]:
    check = _Options(op)
    for name, value in values.items():
        if name in _CHOICES:
            values[name] = check.choice(name, value, _CHOICES[name])
        elif name == "splits":
            values[name] = check.splits(value)
        elif name == "checkpoint_every":
            values[name] = check.integer(name, value)
        elif name in ("qk_l2norm", "checked"):
            values[name] = int(bool(value))
        elif name == "lower_bound" and value is None:
            values[name] = 0.0
        elif value is not None:
            values[name] = check.number(name, value)
    return tuple(values.items())


class Config(NamedTuple):
    """What is fixed when a call is traced."""

    op: str
    options: tuple[tuple[str, Any], ...]  # scalars of the argument struct
    output_final_state: bool = False
    in_place: bool = False  # final_state is initial_state itself
    keep: bool = True  # of verify


class Traced(NamedTuple):
    """A call: what is fixed, the pools that it updates, and the other arrays given."""

    config: Config
    pools: dict[str, Array]
    arrays: dict[str, Array]


_REQUIRED = {"q", "k", "v", "g", "beta", "state", "u", "accepted", "M", "h"}


def _traced(config: Config, *groups: dict[str, Array | None]) -> Traced:
    caller = Caller(config.op)
    for group in groups:
        for name, x in group.items():
            if (x is None and name in _REQUIRED) or not (x is None or hasattr(x, "dtype")):
                raise caller.type_error(name, f"is {x!r}; an array is expected")
    pools, arrays = ({n: x for n, x in group.items() if x is not None} for group in groups)
    return Traced(config, pools, arrays)


def fwd(
    op: str, q: Array, k: Array, v: Array, g: Array, beta: Array, initial_state: Array | None,
    cu_seqlens: Array | None, A_log: Array | None, dt_bias: Array | None,
    read_indices: Array | None, write_indices: Array | None, checkpoint_indices: Array | None,
    final_state: Array | None, checkpoints: Array | None, scale: float | None,
    lower_bound: float | None, qk_l2norm: bool, gate: str, beta_form: str, checkpoint_every: int,
    splits: int | str, checked: bool, output_final_state: bool,
) -> Traced:  # fmt: skip
    options = _scalars(
        op, scale=scale, lower_bound=lower_bound, qk_l2norm=qk_l2norm, gate=gate,
        beta_form=beta_form, checkpoint_every=checkpoint_every, splits=splits, checked=checked,
    )  # fmt: skip
    in_place = final_state is not None and final_state is initial_state
    config = Config(op, options, bool(output_final_state), in_place)
    state = {"initial_state": initial_state}
    pools = {"checkpoints": checkpoints} | (state if in_place else {"final_state": final_state})
    arrays = dict(
        q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        read_indices=read_indices, write_indices=write_indices,
        checkpoint_indices=checkpoint_indices,
    )  # fmt: skip
    return _traced(config, pools, arrays if in_place else arrays | state)


def decode(
    op: str, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array,
    cu_seqlens: Array | None, A_log: Array | None, dt_bias: Array | None,
    read_indices: Array | None, write_indices: Array | None, scale: float | None,
    lower_bound: float | None, qk_l2norm: bool, gate: str, beta_form: str, checked: bool,
) -> Traced:  # fmt: skip
    options = _scalars(
        op, scale=scale, lower_bound=lower_bound, qk_l2norm=qk_l2norm, gate=gate,
        beta_form=beta_form, checked=checked,
    )  # fmt: skip
    arrays = dict(
        q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        read_indices=read_indices, write_indices=write_indices,
    )  # fmt: skip
    return _traced(Config(op, options), {"state": state}, arrays)


def verify(
    op: str, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array,
    A_log: Array | None, dt_bias: Array | None, read_indices: Array | None,
    write_indices: Array | None, parents: Array | None, scale: float | None,
    lower_bound: float | None, qk_l2norm: bool, gate: str, beta_form: str, keep: bool, checked: bool,
) -> Traced:  # fmt: skip
    options = _scalars(
        op, scale=scale, lower_bound=lower_bound, qk_l2norm=qk_l2norm, gate=gate,
        beta_form=beta_form, checked=checked,
    )  # fmt: skip
    arrays = dict(
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, read_indices=read_indices,
        write_indices=write_indices, parents=parents,
    )  # fmt: skip
    pool = {"state": state}
    pools, rest = ({}, arrays | pool) if write_indices is None else (pool, arrays)
    return _traced(Config(op, options, keep=bool(keep)), pools, rest)


def segment(
    op: str, q: Array, k: Array, v: Array, g: Array, beta: Array, d_o: Array | None,
    cu_seqlens: Array | None, A_log: Array | None, dt_bias: Array | None, scale: float | None,
    lower_bound: float | None, qk_l2norm: bool, gate: str, beta_form: str, direction: str,
    checked: bool,
) -> Traced:  # fmt: skip
    options = _scalars(
        op, scale=scale, lower_bound=lower_bound, qk_l2norm=qk_l2norm, gate=gate,
        beta_form=beta_form, direction=direction, checked=checked,
    )  # fmt: skip
    arrays = dict(
        q=q, k=k, v=v, g=g, beta=beta, d_o=d_o, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    return _traced(Config(op, options), {}, arrays)


def merge(
    op: str, M: Array, h: Array, initial_state: Array | None, direction: str, checked: bool
) -> Traced:
    options = _scalars(op, direction=direction, checked=checked)
    return _traced(Config(op, options), {}, dict(M=M, h=h, initial_state=initial_state))


def commit(
    op: str, state: Array, k: Array, u: Array, g: Array, accepted: Array, path: Array | None,
    read_indices: Array | None, write_indices: Array | None, checked: bool,
) -> Traced:  # fmt: skip
    arrays = dict(
        k=k, u=u, g=g, accepted=accepted, path=path, read_indices=read_indices,
        write_indices=write_indices,
    )  # fmt: skip
    return _traced(Config(op, _scalars(op, checked=checked)), {"state": state}, arrays)

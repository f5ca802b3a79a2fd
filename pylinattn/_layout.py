"""The part of a linattn_tensor behind its data pointer."""

from __future__ import annotations

import operator
import struct
from typing import Any, TypeVar

from ._lib import LinattnTypeError, LinattnValueError

# shape[5], strides[5], ndim, dtype, device_type, device_id, flags, reserved
_FIELDS = struct.Struct("<10q4i2I")
LAYOUT_BYTES = _FIELDS.size
MAX_NDIM = 5
_KEPT = 4096  # entries of a cache; beyond it all are dropped
T = TypeVar("T")


class Layout(bytes):
    """The bytes themselves, ready to be packed, with what the ops ask of them."""

    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()  # in elements
    dtype = 0
    device_type = 0
    device_id = 0
    row_major = False


Borrowed = tuple[int, Layout]  # address of the first element, layout
NOT_GIVEN: Borrowed = (0, Layout(LAYOUT_BYTES))


class Caller:
    """Who borrows or reads options: the op, for messages, and what must live until it returns."""

    __slots__ = ("lenders", "op_name", "written")

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name
        self.lenders: tuple[Any, ...] = ()
        self.written: tuple[Any, ...] = ()  # arrays whose library is told of it

    def value_error(self, name: str, text: str) -> LinattnValueError:
        return LinattnValueError(f"{self.op_name}: {name} {text}")

    def type_error(self, name: str, text: str) -> LinattnTypeError:
        return LinattnTypeError(f"{self.op_name}: {name} {text}")

    def dtype_error(self, name: str, dtype: object) -> LinattnTypeError:
        return self.type_error(
            name,
            f"has dtype {dtype}, which this package does not know; "
            f"float32, float64, bfloat16, float16, int32, int64 and uint8 are",
        )

    def number(self, name: str, value: Any) -> float:
        if isinstance(value, (str, bytes, bytearray)):
            raise self.type_error(name, f"is {value!r}; a number is expected")
        if getattr(value, "requires_grad", False):
            raise self.type_error(
                name, f"requires grad, and has no gradient; give float({name}.detach())"
            )
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.type_error(name, f"is {value!r}; a number is expected") from None
        except OverflowError:
            raise self.value_error(name, "is larger than any float64") from None

    def integer(self, name: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise self.type_error(name, f"is {value!r}; an integer is expected") from None
        if not -(2**31) <= number < 2**31:
            raise self.value_error(name, f"is {value}, which does not fit in 32 bits")
        return number


def keep(cache: dict[Any, T], key: Any, value: T) -> T:
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = value
    return value


def make_layout(
    caller: Caller,
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: int,
    device_type: int,
    device_id: int,
    flags: int = 0,
) -> Layout:
    """Layout of an array; strides in elements."""
    ndim = len(shape)
    if not 1 <= ndim <= MAX_NDIM:
        raise caller.value_error(name, f"has {ndim} axes; arrays of 1 to {MAX_NDIM} are accepted")
    pad = (0,) * (MAX_NDIM - ndim)
    layout = Layout(
        _FIELDS.pack(*shape, *pad, *strides, *pad, ndim, dtype, device_type, device_id, flags, 0)
    )
    layout.shape, layout.strides = tuple(shape), tuple(strides)
    layout.dtype, layout.device_type, layout.device_id = dtype, device_type, device_id
    layout.row_major = True
    step = 1
    for axis in reversed(range(ndim)):
        layout.row_major &= strides[axis] == step or shape[axis] <= 1
        step *= shape[axis]
    return layout


def parse_layout(caller: Caller, name: str, raw: bytes) -> Layout:
    """Layout of a linattn_tensor that the library filled in, without its data pointer."""
    *sizes, ndim, dtype, device_type, device_id, flags, _ = _FIELDS.unpack(raw)
    shape, strides = tuple(sizes[:ndim]), tuple(sizes[MAX_NDIM : MAX_NDIM + ndim])
    return make_layout(caller, name, shape, strides, dtype, device_type, device_id, flags)


def element_strides(
    caller: Caller, name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Strides in elements of strides in bytes."""
    for size, stride in zip(shape, strides, strict=True):
        if size > 1 and stride % itemsize:
            raise caller.value_error(
                name,
                f"has a stride of {stride} bytes, which is not a multiple of its elements of "
                f"{itemsize} bytes; copy it first",
            )
    return tuple(stride // itemsize for stride in strides)

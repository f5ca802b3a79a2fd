"""Every array of a call at once, by the DLPack C exchange API of their library: the way of plain calls with torch tensors.

Whatever is not plain is left to the way by attributes in _borrow.py, which also knows why it is refused: other types, a
gradient to record, a lazily negated view, memory or a dtype that the library does not have.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._dlpack import Array, capsule_address
from ._lib import BETA_FORMS, GATES, ffi, lib, library_path, raise_status

if TYPE_CHECKING:
    from ._call import Op

_NUMBERS = (float, int)
_CAPSULE = b"dlpack_exchange_api"
_MAJOR = 1
# Where CPython keeps the items of a tuple, and the type of an object.
_ITEMS_AT = tuple.__basicsize__
_TYPE_AT = object.__basicsize__ - ffi.sizeof("void *")

SAME, SWAP = lib.LINATTN_VIEW_SAME, lib.LINATTN_VIEW_SWAP
FLAT, ROWS = lib.LINATTN_VIEW_FLAT, lib.LINATTN_VIEW_ROWS


def _memory_is_as_expected() -> bool:
    if sys.implementation.name != "cpython":
        return False
    item = object()
    pair = (item, None)
    word = ctypes.c_void_p.from_address
    found = [word(id(pair) + _ITEMS_AT + at).value for at in (0, ffi.sizeof("void *"))]
    return found == [id(item), id(None)] and word(id(item) + _TYPE_AT).value == id(object)


def _open() -> Any:
    """linattn_exchange_borrow, called with the GIL held; None where it cannot be used."""
    if not _memory_is_as_expected():
        return None
    borrow = getattr(ctypes.PyDLL(str(library_path)), "linattn_exchange_borrow", None)
    if borrow is not None:
        borrow.restype = ctypes.c_uint64
        borrow.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, *[ctypes.c_void_p] * 2]
    return borrow


_borrow = _open()


def _api(cls: Any) -> int:
    """Address of the exchange API of a type; 0 without one of a version that is known."""
    address: int = capsule_address(getattr(cls, "__dlpack_c_exchange_api__", None), _CAPSULE)
    while address:
        major = ctypes.c_uint32.from_address(address).value
        if major == _MAJOR:
            break
        address = ctypes.c_void_p.from_address(address + 8).value or 0  # an older one
    return address


class Exchange:
    """torch's arrays, and what else a call needs of torch, by the shortest ways."""

    def __init__(self, torch: Any, api: int, fresh: Any) -> None:
        self.torch = torch
        self.types = (torch.Tensor, torch.nn.Parameter)
        cast = ffi.cast
        self._struct = ffi.new("linattn_exchange *")
        self._struct.api = cast("void *", api)
        self._struct.types = [cast("void *", id(cls)) for cls in self.types]
        self._struct.none = cast("void *", id(None))
        self._struct.type_at = _TYPE_AT
        self._address = int(cast("uintptr_t", self._struct))
        # Then the call is left as one that breaks the graph.
        self.is_compiling = torch.compiler.is_compiling
        self.records_gradients = torch.is_grad_enabled
        self.any_requires_grad = torch._C._any_requires_grad
        self.wrote = torch._C._increment_version  # see Torch.wrote
        self._fresh = fresh
        # What torch's compiler allocates with: it parses no keywords and dispatches nothing.
        self._empty_cpu = torch._C._dynamo.guards._empty_strided_cpu
        self._empty_cuda = torch._C._dynamo.guards._empty_strided_cuda
        self._one_device: bool | None = None

    def run(
        self, op: Op, arrays: tuple[Any, ...], given: Sequence[Any], scale: Any, lower_bound: Any,
        qk_l2norm: bool, gate: Any, beta_form: Any, *more: Any,
    ) -> bool:  # fmt: skip
        """Run an op on the tensors of its struct, the workspace last; False if it is not a plain call.

        `given` are those of the caller's tensors that it writes, `more` the scalars behind beta_form but for the stream; None for
        one that is not plain.
        """
        try:
            if scale is None:
                scale = arrays[0].shape[3] ** -0.5
            if lower_bound is None:
                lower_bound = 0.0
            if not (isinstance(scale, _NUMBERS) and isinstance(lower_bound, _NUMBERS)):
                return False
            scalars = (
                scale,
                lower_bound,
                1 if qk_l2norm else 0,
                GATES[gate],
                BETA_FORMS[beta_form],
                *more,
            )
        except Exception:  # the other way says what is wrong
            return False
        key, args = self.borrow(op, arrays, scalars)
        if not key or self.any_negated(arrays):
            return False
        if self.records_gradients() and self.any_requires_grad(*arrays):
            return False
        self.launch(op, key, args, arrays)
        if given and op.launches:
            self.wrote(given)
        return True

    def borrow(
        self, op: Op, arrays: tuple[Any, ...], scalars: tuple[Any, ...], views: bytes | None = None
    ) -> tuple[int, bytes]:
        """A hash of layouts and scalars, and the argument struct; 0 if this is not a plain call.

        Gradients to record and negated views are left to the caller to ask for.
        """
        try:
            args = op.pack_scalars(op.size, *scalars, 0)
            # These bytes are new and nobody else's, so that they can be filled in.
            key = _borrow(self._address, id(arrays) + _ITEMS_AT, op.tensors, views, args)
        except Exception:  # of a scalar that is none, or of torch
            return 0, b""
        return key, args

    @staticmethod
    def any_negated(arrays: tuple[Any, ...]) -> bool:
        """Is one a view that only remembers its sign?"""
        for x in arrays:  # noqa: SIM110  half the time of any()
            if x is not None and x.is_neg():
                return True
        return False

    def launch(self, op: Op, key: int, args: bytes, arrays: tuple[Any, ...]) -> None:
        try:
            workspace = op.workspaces[key]
        except KeyError:
            workspace = op.ask_workspace(key, args)
        if workspace is not None and arrays[-1] is None:
            scratch = self.empty(arrays[0], workspace.shape, (1,), self.torch.uint8)
            args = op.with_workspace(args, (scratch.data_ptr(), workspace))
        status = op.run(args)
        if status:
            raise_status(status)

    # ---- outputs

    def empty(
        self, like: Array, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any
    ) -> Array:
        """A new array on the device of `like`."""
        if not like.is_cuda:
            return self._fresh(self._empty_cpu(shape, strides, dtype))
        if self._one_device is None:
            self._one_device = self.torch.cuda.device_count() == 1
        if self._one_device or like.get_device() == self.torch.cuda.current_device():
            return self._empty_cuda(shape, strides, dtype)
        return self.torch.empty_strided(shape, strides, dtype=dtype, device=like.device)

    def output(self, q: Array, v: Array) -> Array | None:
        """A new row-major array with the shape of `v` and the dtype of `q`; None if that is no matter of course."""
        if type(v) not in self.types or v.ndim != 4 or not (q.is_cuda or q.is_cpu):
            return None
        B, T, HV, V = v.shape
        return self.empty(q, (B, T, HV, V), (T * HV * V, HV * V, V, 1), q.dtype)

    def final_state(
        self, q: Array, v: Array, initial: Array | None, cu_seqlens: Array | None,
        table: Array | None,
    ) -> Array | None:  # fmt: skip
        """New states ``[N,HV,K,V]``; None where their form is no matter of course."""
        if table is not None or q.ndim != 4 or not self.has_axes(v, 4):
            return None
        if initial is not None:
            plain = type(initial) in self.types and initial.is_contiguous()
            return self.like(initial) if plain else None
        if cu_seqlens is None:
            rows = q.shape[0]
        elif self.has_axes(cu_seqlens, 1) and cu_seqlens.shape[0]:
            rows = cu_seqlens.shape[0] - 1
        else:
            return None
        return self.states(q, rows, v.shape[2], q.shape[3], v.shape[3])

    def has_axes(self, x: Any, count: int) -> bool:
        return type(x) in self.types and x.ndim == count

    def states(self, q: Array, rows: int, HV: int, a: int, b: int) -> Array:
        return self.empty(q, (rows, HV, a, b), (HV * a * b, a * b, b, 1), self.wide_dtype(q))

    def wide_dtype(self, q: Array) -> Any:
        """The dtype of states, and of what is kept for delta_commit, of a call with this q."""
        torch = self.torch
        return torch.float64 if q.dtype is torch.float64 else torch.float32

    def wide(self, q: Array, x: Array) -> Array | None:
        """A new row-major array with the shape of `x`; None if that has none."""
        try:
            return self.torch.empty(x.shape, dtype=self.wide_dtype(q), device=q.device)
        except RuntimeError:  # of a nested tensor
            return None

    def like(self, x: Array, zeros: bool = False) -> Array:
        """A new row-major array with the shape and dtype of `x`."""
        make = self.torch.zeros_like if zeros else self.torch.empty_like
        fresh = (
            make(x) if x.is_contiguous() else make(x, memory_format=self.torch.contiguous_format)
        )
        return fresh if fresh.is_cuda else self._fresh(fresh)

    def all_plain(self, *arrays: Any) -> bool:
        return all(x is None or type(x) in self.types for x in arrays)


exchanges: dict[type, Exchange] = {}  # by the type of an array


def register(torch: Any, fresh: Any) -> None:
    """From now on plain torch tensors come by their exchange API, if this torch has it."""
    api = _borrow and _api(torch.Tensor)
    if not api:
        return
    try:
        exchange = Exchange(torch, api, fresh)
    except AttributeError:  # of a torch that has no such shortcut
        return
    for cls in exchange.types:
        exchanges[cls] = exchange

"""One call of the library: packs the argument struct, allocates what was not given, launches."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from typing import Any

from ._borrow import libraries, recognise
from ._dlpack import LEGACY_DEFAULT_STREAM, Array
from ._layout import (
    LAYOUT_BYTES,
    NOT_GIVEN,
    Borrowed,
    Caller,
    Layout,
    keep,
    make_layout,
    parse_layout,
)
from ._lib import (
    CUDA,
    F32,
    F64,
    U8,
    ffi,
    lib,
    raise_status,
)

_TENSOR = struct.Struct(f"<Q{LAYOUT_BYTES}s")
_FORMATS = {
    "linattn_tensor": f"Q{LAYOUT_BYTES}s",
    "uint64_t": "Q",
    "void *": "Q",
    "double": "d",
    "int32_t": "i",
}
_FIRST_LAYOUT = slice(16, 16 + LAYOUT_BYTES)  # behind the struct's size and the tensor's address
_new_bytes_needed = ffi.typeof("uint64_t *")


class Op:
    """An op of the library: its functions, and its struct, packed as the header has it."""

    __slots__ = (
        "_tensor_fields",
        "_workspace_at",
        "_workspace_bytes",
        "launches",
        "name",
        "pack",
        "pack_scalars",
        "query",
        "query_saved",
        "run",
        "size",
        "tensors",
        "workspaces",
    )

    def __init__(self, name: str) -> None:
        args = ffi.typeof(f"linattn_{name}_args")
        formats = [_FORMATS[field.type.cname] for _, field in args.fields]
        packer = struct.Struct("<" + "".join(formats))
        self.name = name
        self.launches = True  # or is it only asked whether it would?
        self.size = ffi.sizeof(args)
        if packer.size != self.size:
            raise ImportError(
                f"pylinattn: linattn_{name}_args has {self.size} bytes in C, but {packer.size} "
                f"as it is packed here"
            )
        self.pack = packer.pack
        self.query: Callable[[bytes, Any], int] = getattr(lib, f"linattn_{name}_workspace")
        self.run: Callable[[bytes], int] = getattr(lib, f"linattn_{name}")
        self.query_saved: Any = getattr(lib, f"linattn_{name}_saved", None)  # of a forward
        # Right behind the size, the workspace last.
        self.tensors = formats.count(_FORMATS["linattn_tensor"])
        self._tensor_fields = 2 * self.tensors
        self._workspace_at = ffi.offsetof(args, "workspace")
        self._workspace_bytes: dict[Any, int] = {}
        # Size, scalars and stream, with zeros for the tensors.
        scalars = "".join(formats[1 + self.tensors :])
        self.pack_scalars = struct.Struct(f"<Q{self.tensors * _TENSOR.size}x{scalars}").pack
        self.workspaces: dict[int, Layout | None] = {}  # by what linattn_exchange_borrow returns

    def without_launch(self) -> Op:
        """The same op, whose calls end with the checks of the workspace query."""
        op = copy.copy(self)
        op.launches = False
        op.run = lambda args: self.query(args, ffi.new(_new_bytes_needed))
        return op

    def workspace_bytes(self, args: bytes, fields: tuple[Any, ...]) -> int:
        """Depends on layouts and options alone, so that the library is asked once for each."""
        # all but the addresses, and the stream at the end
        key = (fields[1 : self._tensor_fields : 2], fields[self._tensor_fields : -1])
        needed = self._workspace_bytes.get(key)
        if needed is None:
            answer = ffi.new(_new_bytes_needed)
            status = self.query(args, answer)
            if status:
                raise_status(status)
            needed = keep(self._workspace_bytes, key, answer[0])
        return needed

    def ask_workspace(self, key: int, args: bytes) -> Layout | None:
        """Layout of the workspace of a call, kept under its key; None if it needs none."""
        answer = ffi.new(_new_bytes_needed)
        status = self.query(args, answer)
        if status:
            raise_status(status)
        needed = int(answer[0])
        caller = Caller(self.name)
        q = parse_layout(caller, "q", args[_FIRST_LAYOUT])
        place = (U8, q.device_type, q.device_id)
        layout = make_layout(caller, "workspace", (needed,), (1,), *place) if needed else None
        return keep(self.workspaces, key, layout)

    def with_workspace(self, args: bytes, workspace: Borrowed) -> bytes:
        at = self._workspace_at
        return args[:at] + _TENSOR.pack(*workspace) + args[at + _TENSOR.size :]


class Call(Caller):
    """The first array of a call decides its library, device and stream."""

    __slots__ = ("_borrow", "_cls", "_library", "_made", "_on_gpu", "_x", "first", "op", "stream")

    def __init__(self, op: Op, x: Array, name: str, write: bool = False) -> None:
        self.op = op
        self.op_name = op.name
        self.lenders = self.written = ()
        self._x = x
        self._made: tuple[Array, ...] = ()
        self._cls = cls = type(x)
        self._library = library = libraries.get(cls) or recognise(x, self, name)
        self._borrow = library.borrow
        self.first = library.borrow(x, self, name, write)
        layout = self.first[1]
        self._on_gpu = layout.device_type == CUDA
        self.stream = library.stream(layout.device_id) if self._on_gpu else 0

    def take(self, x: Array | None, name: str, write: bool = False) -> Borrowed:
        if x is None:
            return NOT_GIVEN
        if type(x) is self._cls:
            return self._borrow(x, self, name, write)
        library = libraries.get(type(x)) or recognise(x, self, name)
        if library is self._library or not self._on_gpu:
            return library.borrow(x, self, name, write)
        stream = self.stream or LEGACY_DEFAULT_STREAM
        return library.borrow_on(x, self, name, write, stream)

    def make(self, shape: tuple[int, ...], dtype: int, kind: str = "empty") -> Array:
        """A new array in the library and on the device of the call; kind "empty" or "zeros"."""
        return self._note(self._library.make(kind, self._x, shape, dtype))

    def make_like(self, x: Array, layout: Layout) -> Array:
        """A new row-major array with the shape of `x` and the dtype of the call's first array."""
        dtype = self.first[1].dtype
        if layout.row_major and layout.dtype == dtype and libraries.get(type(x)) is self._library:
            return self._note(self._library.like(x, layout))
        return self.make(layout.shape, dtype)

    def make_states(self, rows: int, k: Layout, v: Layout, like: Layout, kind: str) -> Array:
        """``[rows,HV,K,V]`` in dtype and stride order of `like`; without one wide and K-first."""
        HV, V = v.shape[2:]
        K = k.shape[3]
        dtype = like.dtype or self.wide
        if len(like.shape) == 4 and like.strides[2] == 1 and like.strides[3] != 1:
            return self._note(self._library.swap_last(self.make((rows, HV, V, K), dtype, kind)))
        return self.make((rows, HV, K, V), dtype, kind)

    @property
    def wide(self) -> int:
        """Dtype of states and of what is kept for delta_commit."""
        return F64 if self.first[1].dtype == F64 else F32

    def _note(self, x: Array) -> Array:
        if self._library.copies_back:
            self._made = (*self._made, x)
        return x

    def run(self, workspace: Array | None, *fields: Any) -> None:
        """The fields after size: address and layout of each tensor, then the rest, stream last."""
        op = self.op
        args = op.pack(op.size, *fields)
        if workspace is None:
            needed = op.workspace_bytes(args, fields)
            if needed:
                workspace = self.make((needed,), U8)
                args = op.with_workspace(args, self.take(workspace, "workspace", True))
        status = op.run(args)
        if status:
            raise_status(status)
        if op.launches:
            for x in self.written:
                libraries[type(x)].wrote(x)
        if self._on_gpu:
            self._library.finish(self.first[1].device_id)

    def make_saved(self, *fields: Any) -> Array:
        """The buffer that save "states" fills, for the fields of run() without it."""
        answer = ffi.new(_new_bytes_needed)
        status = self.op.query_saved(self.op.pack(self.op.size, *fields), answer)
        if status:
            raise_status(status)
        return self.make((answer[0],), U8)

    def result(self, x: Array) -> Array:
        """An output as the caller gets it."""
        if self._made and any(x is made for made in self._made):
            return self._library.hand_back(x, self._x)
        return x

    # Options, from Python's form to that of the struct.

    def scale(self, scale: float | None) -> float:
        if scale is not None:
            return self.number("scale", scale)
        shape = self.first[1].shape
        return shape[-1] ** -0.5 if shape[-1] else 1.0

    def choice(self, name: str, value: str, choices: dict[str, int]) -> int:
        code = choices.get(value) if isinstance(value, str) else None
        if code is None:
            accepted = ", ".join(f'"{choice}"' for choice in choices)
            raise self.value_error(name, f"is {value!r}; accepted are {accepted}")
        return code

    def splits(self, value: int | str) -> int:
        if value == "auto":
            return 0
        if isinstance(value, str) or self.integer("splits", value) < 1:
            raise self.value_error("splits", f'is {value!r}; "auto" or a number from 1 is accepted')
        return self.integer("splits", value)

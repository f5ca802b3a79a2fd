"""Arrays of any library as linattn_tensor structs: no copy, no import that the caller has not made.

torch, NumPy and CuPy are read by their attributes, which is quicker than a DLPack capsule. The
layout of an array depends on its shape, strides, dtype and device alone, and is kept from call to
call.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

from . import _exchange
from ._dlpack import DTYPE_NAMES, Array, Jax, Library, type_name
from ._layout import Borrowed, Caller, Layout, element_strides, keep, make_layout
from ._lib import BF16, CPU, CUDA, READ_ONLY, LinattnTypeError

_HUGE_PAGES_FROM = 1 << 22  # bytes; what NumPy does for its own arrays of this size and more
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone


def _fresh(x: Array) -> Array:
    """A new CPU tensor, of huge pages if it is big: faulting small ones in costs a quarter of a forward."""
    if _MADV_HUGEPAGE is not None and x.nbytes >= _HUGE_PAGES_FROM:
        page = mmap.PAGESIZE
        first = -(-x.data_ptr() // page) * page
        size = (x.data_ptr() + x.nbytes) // page * page - first
        # Advice: where the kernel does not take it, small pages will do.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_int(_MADV_HUGEPAGE)
        )
    return x


class Torch(Library):
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.native = {code: getattr(torch, name) for code, name in DTYPE_NAMES.items()}
        self.dtypes = {native: code for code, native in self.native.items()}
        self.layouts: dict[Any, Layout] = {}
        self.records_gradients = torch.is_grad_enabled
        # The same answer without a Stream object, which takes microseconds to make.
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        _exchange.register(torch, _fresh)

    def borrow(self, x: Array, caller: Caller, name: str, write: bool) -> Borrowed:
        try:
            key = (x.shape, x.stride(), x.dtype, x.device)
            layout = self.layouts.get(key)
            if layout is None:
                layout = keep(self.layouts, key, self._describe(x, caller, name))
            if x.requires_grad and self.records_gradients():
                raise caller.type_error(
                    name,
                    "requires grad, and this function records no gradient; "
                    f"call it under torch.no_grad(), or give {name}.detach()",
                )
            if x.is_neg():
                raise caller.type_error(
                    name, f"is a lazily negated view; give {name}.resolve_neg()"
                )
            if write:
                caller.written = (*caller.written, x)
            return x.data_ptr(), layout
        except RuntimeError as error:  # sparse, or inside a functorch transform
            raise caller.type_error(
                name, f"is a torch tensor without strided memory: {error}"
            ) from error

    def _describe(self, x: Array, caller: Caller, name: str) -> Layout:
        if x.dtype not in self.dtypes:
            raise caller.dtype_error(name, x.dtype)
        if x.device.type not in ("cpu", "cuda"):
            raise caller.type_error(
                name, f"is on device {x.device}; the CPU and CUDA devices are accepted"
            )
        device_type = CUDA if x.device.type == "cuda" else CPU
        return make_layout(
            caller,
            name,
            tuple(x.shape),
            x.stride(),
            self.dtypes[x.dtype],
            device_type,
            x.device.index or 0,
        )

    def stream(self, device_id: int) -> int:
        if self.raw_stream is None:
            return int(self.torch.cuda.current_stream(device_id).cuda_stream)
        return int(self.raw_stream(device_id))

    def make(self, kind: str, like: Array, shape: tuple[int, ...], dtype: int) -> Array:
        x = getattr(self.torch, kind)(shape, dtype=self.native[dtype], device=like.device)
        return x if kind != "empty" or x.is_cuda else _fresh(x)

    def like(self, x: Array, layout: Layout) -> Array:
        fresh = self.torch.empty_like(x)
        return fresh if fresh.is_cuda else _fresh(fresh)

    def swap_last(self, x: Array) -> Array:
        return x.transpose(2, 3)

    def wrote(self, x: Array) -> None:
        # Autograd then finds a tensor that it saved before and that is no longer the same.
        self.torch.autograd.graph.increment_version(x)

    def check_type(self, cls: Any, caller: Caller, name: str) -> None:
        """Refuses subclasses that only stand for memory (fake, distributed and wrapper tensors)."""
        if cls.__torch_dispatch__ is not self.torch.Tensor.__torch_dispatch__:
            raise caller.type_error(
                name, f"is a {type_name(cls)}, which has no memory of its own; give a plain tensor"
            )


class _ByteStrided(Library):
    """NumPy and CuPy: one set of attributes, strides in bytes."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.native: dict[int, Any] = {c: xp.dtype(n) for c, n in DTYPE_NAMES.items() if c != BF16}
        self.dtypes = {native: code for code, native in self.native.items()}
        self.layouts: dict[Any, Layout] = {}

    def _dtype_code(self, dtype: Any, caller: Caller, name: str) -> int:
        code = self.dtypes.get(dtype)
        if code is None:
            # ml_dtypes registers its bfloat16 with NumPy; known by name, so it need not be imported
            if (dtype.kind, dtype.isnative, dtype.name) != ("V", True, "bfloat16"):
                raise caller.dtype_error(name, dtype)
            self.native[BF16], self.dtypes[dtype] = dtype, BF16
            code = BF16
        return code

    def _describe(
        self, x: Array, caller: Caller, name: str, device: tuple[int, int], flags: int
    ) -> Layout:
        code = self._dtype_code(x.dtype, caller, name)
        strides = element_strides(caller, name, x.shape, x.strides, x.dtype.itemsize)
        return make_layout(caller, name, x.shape, strides, code, *device, flags)

    def _native(self, dtype: int) -> Any:
        if dtype not in self.native:
            if "ml_dtypes" not in sys.modules:
                raise LinattnTypeError(
                    "a bfloat16 output needs ml_dtypes: this library has none of its own"
                )
            self.native[BF16] = self.xp.dtype(sys.modules["ml_dtypes"].bfloat16)
        return self.native[dtype]

    def like(self, x: Array, layout: Layout) -> Array:
        return self.xp.empty_like(x, subok=False)

    def swap_last(self, x: Array) -> Array:
        return x.swapaxes(2, 3)


class NumPy(_ByteStrided):
    def check_type(self, cls: type, caller: Caller, name: str) -> None:
        masked = sys.modules.get("numpy.ma")
        if masked is not None and issubclass(cls, masked.MaskedArray):
            raise caller.type_error(
                name, f"is a {type_name(cls)}, whose mask no op reads; give {name}.filled(...)"
            )

    def borrow(self, x: Array, caller: Caller, name: str, write: bool) -> Borrowed:
        address, read_only = x.__array_interface__["data"]
        key = (x.shape, x.strides, x.dtype, read_only)
        layout = self.layouts.get(key)
        if layout is None:
            flags = READ_ONLY if read_only else 0
            layout = keep(self.layouts, key, self._describe(x, caller, name, (CPU, 0), flags))
        return address, layout

    def borrow_on(self, x: Array, caller: Caller, name: str, write: bool, stream: int) -> Borrowed:
        return self.borrow(x, caller, name, write)

    def make(self, kind: str, like: Array, shape: tuple[int, ...], dtype: int) -> Array:
        return getattr(self.xp, kind)(shape, self._native(dtype))


class CuPy(_ByteStrided):
    def borrow(self, x: Array, caller: Caller, name: str, write: bool) -> Borrowed:
        memory = x.data
        key = (x.shape, x.strides, x.dtype, memory.device_id)
        layout = self.layouts.get(key)
        if layout is None:
            layout = keep(
                self.layouts, key, self._describe(x, caller, name, (CUDA, memory.device_id), 0)
            )
        return memory.ptr, layout

    def stream(self, device_id: int) -> int:
        return int(self.xp.cuda.get_current_stream(device_id).ptr)

    def make(self, kind: str, like: Array, shape: tuple[int, ...], dtype: int) -> Array:
        with like.device:
            return getattr(self.xp, kind)(shape, self._native(dtype))

    def like(self, x: Array, layout: Layout) -> Array:
        with x.device:
            return self.xp.empty_like(x)


libraries: dict[type, Library] = {}  # by the type of an array
_by_module: dict[str, Library] = {}


def recognise(x: Array, caller: Caller, name: str) -> Library:
    """The library of an array of a type not seen before."""
    loaded = sys.modules.get
    cls = type(x)
    known: tuple[tuple[str, str, Any], ...] = (
        ("torch", "Tensor", Torch),
        ("numpy", "ndarray", NumPy),
        ("cupy", "ndarray", CuPy),
    )
    library: Library | None = None
    for module_name, array_name, kind in known:
        module = loaded(module_name)
        if module is not None and isinstance(x, getattr(module, array_name, ())):
            library = _by_module.get(module_name) or _by_module.setdefault(
                module_name, kind(module)
            )
            library.check_type(cls, caller, name)
            break
    else:
        jax = loaded("jax")
        if jax is not None and isinstance(x, jax.Array):
            if isinstance(x, jax.core.Tracer):
                raise caller.type_error(
                    name,
                    "is traced by jax (jit, grad or vmap); only arrays with values are accepted",
                )
            library = _by_module.get("jax") or _by_module.setdefault("jax", Jax())
        elif hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
            library = _by_module.get("") or _by_module.setdefault("", Library())
    if library is None:
        raise caller.type_error(
            name,
            f"is a {type_name(cls)}; an array of NumPy, CuPy, torch, JAX or anything else that "
            f"speaks DLPack is expected",
        )
    libraries[cls] = library
    return library

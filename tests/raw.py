"""Calls through the C structs themselves, every field within reach: for wrong calls that Python would never make."""

from __future__ import annotations

import header
import numpy as np
from arrays import Buffer, Placed

from pylinattn._lib import ffi, lib

DTYPES = {
    "f32": lib.LINATTN_F32, "f64": lib.LINATTN_F64, "bf16": lib.LINATTN_BF16, "f16": lib.LINATTN_F16,
    "i32": lib.LINATTN_I32, "i64": lib.LINATTN_I64, "u8": lib.LINATTN_U8,
}  # fmt: skip
STATUS = {
    lib.LINATTN_OK: "ok", lib.LINATTN_ERR_VALUE: "value", lib.LINATTN_ERR_TYPE: "type",
    lib.LINATTN_ERR_UNSUPPORTED: "unsupported", lib.LINATTN_ERR_RUNTIME: "runtime",
}  # fmt: skip
OPS = ["gdn_fwd", "kda_fwd", "gdn_decode", "kda_decode", "gdn_verify", "kda_verify", "delta_commit"]
# on the CPU alone so far
BACKWARD_OPS = ["gdn_bwd", "kda_bwd", "gdn_segment", "kda_segment", "segment_merge"]
# S, W and the rows of pools are whatever the caller has
SIZES = dict(T=7, H=2, HV=4, K=16, V=32, N=3, P=6, F=5, C=4, M=2, S=8, W=4096, R=2)
DEVICES = {"cuda": lib.LINATTN_CUDA, "cpu": lib.LINATTN_CPU}


def sizes_of(op, **changes):
    """One size per letter; packed where the op takes lengths."""
    packed = any(f.name == "cu_seqlens" for f in header.ops()[op])
    return SIZES | {"B": 1 if packed else 3} | changes


def dims(field, sizes, alternative=0):
    found = []
    for word in field.shapes[alternative]:
        name, _, plus = word.partition("+")
        found.append(sizes[name] + int(plus or 0))
    return found


def dtypes_of(field, q="f32", state="f32"):
    """(the dtype used here, all that the header accepts); `=q` follows q."""
    if field.dtypes.startswith("="):
        return q, [q]
    accepted = field.dtypes.split("|")
    if field.name in ("q", "k") and q in accepted:
        return q, accepted
    return (state if state in accepted else accepted[0]), accepted


TABLES = ("read_indices", "write_indices")
QUIET = (
    "saved",
    "A_log",
    "dt_bias",
    "dA_log",
    "ddt_bias",
)  # not given in a right call that neither saves nor activates gates


def good_values(name, sizes):
    """Values that make a call right, for the fields that are looked at."""
    T, N, P, F = (sizes[x] for x in "TNPF")
    if name == "cu_seqlens":
        return (
            [0, T // 3, T // 3, T][: N + 1]
            if N == 3
            else [T * n // max(N, 1) for n in range(N + 1)]
        )
    return {
        "read_indices": [(2 * n) % P for n in range(N)],
        "write_indices": [(2 * n) % F for n in range(N)],
        "verify_write": np.full((sizes["B"], T), -1),
        "checkpoint_indices": np.full((N, sizes["M"]), -1),
        "accepted": [min(n, T) for n in range(sizes["B"])],
        "parents": np.tile(np.arange(T) - 1, (sizes["B"], 1)),
        "path": np.tile(np.arange(T), (sizes["B"], 1)),
    }.get(name)


SCALARS = {"scale": 0.25, "checkpoint_every": 64, "direction": lib.LINATTN_BACKWARD}


class RawCall:
    """A right call of an op with nearly every tensor given, to be spoiled field by field."""

    def __init__(self, op, device, leave=(), sizes=None, q="f32", state="f32"):
        self.op, self.device = op, device
        self.sizes = sizes or sizes_of(op)
        if "commit" in op or "verify" in op:
            self.sizes = self.sizes | {"N": self.sizes["B"]}
        self.fields = {f.name: f for f in header.ops()[op]}
        self.args = ffi.new(f"linattn_{op}_args *")
        self.args.size = ffi.sizeof(f"linattn_{op}_args")
        self.placed = {}
        for field in self.fields.values():
            if field.is_tensor and field.name not in (*QUIET, *leave):
                self.give(field.name, dims(field, self.sizes), dtypes_of(field, q, state)[0])
            elif not field.is_tensor and field.name in SCALARS:
                setattr(self.args, field.name, SCALARS[field.name])
        if "checkpoints" in leave:
            self.args.checkpoint_every = 0

    def give(self, name, shape, dtype, values=None, strides=None):
        shape = [max(n, 0) for n in shape]
        if values is None and dtype in ("i32", "i64"):
            values = good_values(self.name_of_table(name), self.sizes)
            values = np.zeros(shape) if values is None else fit(np.asarray(values), shape)
        elif values is None and not self.fields[name].direction.startswith("out"):
            values = np.full(shape, -0.25)
        buffer = Buffer(shape, dtype, strides, values)
        self.placed[name] = Placed(self.device, buffer)
        self.describe(name, self.placed[name].array, buffer)

    def name_of_table(self, name):
        return "verify_write" if name == "write_indices" and "verify" in self.op else name

    def describe(self, name, array, buffer):
        tensor = getattr(self.args, name)
        tensor.data = ffi.cast("void *", address(array))
        tensor.ndim, tensor.dtype = len(buffer.shape), DTYPES[buffer.dtype]
        tensor.device_type = DEVICES[self.device.kind]
        tensor.device_id, tensor.flags, tensor.reserved = self.device.index, 0, 0
        for axis in range(5):
            inside = axis < len(buffer.shape)
            tensor.shape[axis] = buffer.shape[axis] if inside else 0
            tensor.strides[axis] = buffer.strides[axis] if inside else 0

    def omit(self, name):
        ffi.memmove(
            ffi.addressof(self.args, name),
            bytes(ffi.sizeof("linattn_tensor")),
            ffi.sizeof("linattn_tensor"),
        )

    def tensor(self, name):
        return getattr(self.args, name)

    def __call__(self):
        """(status word, sentence)"""
        status = getattr(lib, f"linattn_{self.op}")(ffi.cast("const char *", self.args))
        self.device.synchronize()
        return STATUS[status], ffi.string(lib.linattn_last_error()).decode()

    def workspace_bytes(self):
        count = ffi.new("uint64_t *")
        status = getattr(lib, f"linattn_{self.op}_workspace")(
            ffi.cast("const char *", self.args), count
        )
        return STATUS[status], int(count[0])

    def nothing_written(self):
        return all(placed.untouched() for placed in self.placed.values())


def fit(values, shape):
    """Values of a table cut or repeated to another shape, for calls that are wrong on purpose."""
    if values.ndim != len(shape):
        return np.zeros(shape)
    for axis, n in enumerate(shape):
        values = (
            np.take(values, np.minimum(np.arange(n), values.shape[axis] - 1), axis)
            if values.size
            else np.zeros(shape)
        )
    return values


def address(array):
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    if hasattr(array, "__cuda_array_interface__"):
        return array.data.ptr
    return array.__array_interface__["data"][0]

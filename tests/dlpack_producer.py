"""An array of no known library: lends a NumPy array's memory by DLPack, in any of the ways the protocol allows."""

from __future__ import annotations

import ctypes


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# A prototype of its own: JAX sets the argument types of ctypes.pythonapi.PyCapsule_New for the whole process.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR)(
    ("PyCapsule_New", ctypes.pythonapi)
)
CODES = {"i": 0, "u": 1, "f": 2}
_lent = {}  # address of a capsule -> what it points to


@DESTRUCTOR
def _give_back(capsule):
    _lent.pop(capsule, None)
    Producer.alive = len(_lent)


class Producer:
    """The array behind a capsule. `strides=None` leaves them out; `strides_of_ones` are those of axes of size 1 or 0."""

    alive = 0  # capsules that nobody has dropped

    def __init__(
        self,
        array,
        versioned=True,
        accepts_max_version=True,
        device=(1, 0),
        code=None,
        bits=None,
        lanes=1,
        flags=0,
        major=1,
        byte_offset=0,
        strides="given",
        strides_of_ones=None,
    ):
        self.array, self.versioned, self.device = array, versioned, device
        self.accepts_max_version = accepts_max_version
        self.code = CODES[array.dtype.kind] if code is None else code
        self.bits = array.dtype.itemsize * 8 if bits is None else bits
        self.lanes, self.flags, self.major, self.byte_offset = lanes, flags, major, byte_offset
        steps = [s // array.dtype.itemsize for s in array.strides]
        if strides_of_ones is not None:
            steps = [strides_of_ones if n <= 1 else s for n, s in zip(array.shape, steps)]
        self.strides = None if strides is None else steps

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        if options and not self.accepts_max_version:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        n = self.array.ndim
        axes = ctypes.c_int64 * n
        tensor = DLTensor(
            self.array.ctypes.data - self.byte_offset,
            *self.device,
            n,
            self.code,
            self.bits,
            self.lanes,
            axes(*self.array.shape),
            None if self.strides is None else axes(*self.strides),
            self.byte_offset,
        )
        if self.versioned:
            managed, name = (
                ManagedVersioned(self.major, 0, None, None, self.flags, tensor),
                b"dltensor_versioned",
            )
        else:
            managed, name = Managed(tensor, None, None), b"dltensor"
        capsule = _new_capsule(ctypes.addressof(managed), name, _give_back)
        _lent[id(capsule)] = (managed, self.array)
        Producer.alive = len(_lent)
        return capsule

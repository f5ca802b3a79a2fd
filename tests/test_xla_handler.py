"""The XLA handlers called as XLA calls them, by hand: what they say at registration, and the GPU's stream and device."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p

import pytest
from harness import check

from pylinattn._lib import library_path

ERROR_CREATE = ctypes.CFUNCTYPE(c_void_p, c_void_p)
INVALID_ARGUMENT, UNIMPLEMENTED = 3, 12


def struct(name, *fields):
    return type(name, (Structure,), {"_fields_": list(fields)})


HEAD = (("size", c_size_t), ("extension", c_void_p))
Version = struct("Version", *HEAD, ("major", c_int), ("minor", c_int))
Metadata = struct("Metadata", ("size", c_size_t), ("version", Version), ("traits", c_uint32))
Extension = struct(
    "Extension", ("size", c_size_t), ("type", c_int), ("next", c_void_p),
    ("metadata", POINTER(Metadata)),
)  # fmt: skip
Buffers = struct("Buffers", *HEAD, ("count", c_int64), ("types", c_void_p), ("items", c_void_p))
Attributes = struct(
    "Attributes", *HEAD, ("count", c_int64), ("types", c_void_p), ("names", c_void_p),
    ("items", c_void_p),
)  # fmt: skip
Api = struct(
    "Api", *HEAD, ("version", Version), ("internal", c_void_p), ("error_create", ERROR_CREATE),
    ("skipped", c_void_p * 3), ("stream_get", ERROR_CREATE), ("more", c_void_p * 12),
    ("ordinal_get", ERROR_CREATE),
)  # fmt: skip
Call = struct(
    "Call", *HEAD, ("api", POINTER(Api)), ("context", c_void_p), ("stage", c_int),
    ("arguments", Buffers), ("results", Buffers), ("attributes", Attributes),
)  # fmt: skip
ErrorCreate = struct("ErrorCreate", *HEAD, ("message", ctypes.c_char_p), ("code", c_int))
StreamGet = struct("StreamGet", *HEAD, ("context", c_void_p), ("stream", c_void_p))
OrdinalGet = struct("OrdinalGet", *HEAD, ("context", c_void_p), ("ordinal", c_int32))


def handler(op, platform):
    function = getattr(ctypes.CDLL(str(library_path)), f"linattn_xla_{op}_{platform}", None)
    if function is None:
        pytest.skip("the library was built without its XLA handlers")
    function.restype, function.argtypes = c_void_p, [c_void_p]
    return function


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("op", ["gdn_fwd", "kda_decode", "delta_commit", "segment_merge"])
def test_registration(op, platform):
    """Written for interface 0.1; on a GPU the call may be recorded in a command buffer."""
    metadata = Metadata(size=ctypes.sizeof(Metadata), traits=99)
    extension = Extension(size=ctypes.sizeof(Extension), type=1, metadata=ctypes.pointer(metadata))
    call = Call(size=ctypes.sizeof(Call), extension=ctypes.addressof(extension))
    check(handler(op, platform)(byref(call)) is None, "registration is answered with an error")
    check((metadata.version.major, metadata.version.minor) == (0, 1), "another version")
    check(metadata.traits == (platform == "cuda"), f"traits are {metadata.traits}")


def run(platform, api_size=None):
    """A call without buffers: (message, code) of its error, and what it asked XLA for."""
    errors, asked = [], []

    def error_create(args):
        given = ErrorCreate.from_address(args)
        errors.append((given.message.decode(), given.code))
        return 1

    def stream_get(args):
        asked.append("stream")
        StreamGet.from_address(args).stream = 0x5EED
        return None

    def ordinal_get(args):
        asked.append("ordinal")
        OrdinalGet.from_address(args).ordinal = 3
        return None

    api = Api(
        size=ctypes.sizeof(Api) if api_size is None else api_size,
        error_create=ERROR_CREATE(error_create),
        stream_get=ERROR_CREATE(stream_get),
        ordinal_get=ERROR_CREATE(ordinal_get),
    )
    call = Call(size=ctypes.sizeof(Call), api=ctypes.pointer(api), stage=3)
    check(handler("gdn_fwd", platform)(byref(call)) == 1, "no error for a call without buffers")
    return errors, asked


def test_a_call_without_buffers():
    for platform, wanted in (("cpu", []), ("cuda", ["stream", "ordinal"])):
        errors, asked = run(platform)
        check(asked == wanted, f"{platform}: asked for {asked}")
        check(len(errors) == 1 and errors[0][1] == INVALID_ARGUMENT, f"{errors}")
        check(errors[0][0].startswith("gdn_fwd: q"), f"{errors}")


def test_an_interface_that_does_not_tell_the_device():
    errors, asked = run("cuda", api_size=Api.ordinal_get.offset)
    check(asked == ["stream"], f"asked for {asked}")
    check(errors[0][1] == UNIMPLEMENTED and "which GPU" in errors[0][0], f"{errors}")

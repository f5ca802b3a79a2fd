"""Gated delta-rule linear attention: GDN (Gated DeltaNet) and KDA (Kimi Delta Attention).

Arrays of NumPy, CuPy, torch, JAX and anything else that speaks DLPack go in; what is made comes
back in the library and on the device of the first one. `python -m pylinattn` prints what this
machine can do.
"""

from __future__ import annotations

from ._lib import (
    LinattnError,
    LinattnRuntimeError,
    LinattnTypeError,
    LinattnUnsupportedError,
    LinattnValueError,
    lib,
    text_of,
)
from ._support import (
    Support,
    get_cmake_dir,
    get_include,
    get_library_dir,
    last_path,
    supports,
)
from .ops import (
    Forward,
    Gradients,
    Merged,
    Segment,
    Verify,
    delta_commit,
    gdn_bwd,
    gdn_decode,
    gdn_fwd,
    gdn_segment,
    gdn_verify,
    kda_bwd,
    kda_decode,
    kda_fwd,
    kda_segment,
    kda_verify,
    segment_merge,
)

__version__ = text_of(lib.linattn_version())

__all__ = [
    "Forward", "Gradients", "LinattnError", "LinattnRuntimeError", "LinattnTypeError",
    "LinattnUnsupportedError", "LinattnValueError", "Merged", "Segment", "Support", "Verify",
    "delta_commit", "gdn_bwd", "gdn_decode", "gdn_fwd", "gdn_segment", "gdn_verify",
    "get_cmake_dir", "get_include", "get_library_dir", "kda_bwd", "kda_decode", "kda_fwd",
    "kda_segment", "kda_verify", "last_path", "segment_merge", "supports",
]  # fmt: skip

"""One function per op of the C library: the same name, the same arguments in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import _bwd, _decode, _fwd, _segment, _verify
from ._bwd import Gradients, gdn_bwd, kda_bwd
from ._call import Op
from ._decode import gdn_decode, kda_decode
from ._fwd import Forward, gdn_fwd, kda_fwd
from ._segment import Merged, Segment, gdn_segment, kda_segment, segment_merge
from ._verify import Verify, delta_commit, gdn_verify, kda_verify

__all__ = [
    "Forward", "Gradients", "Merged", "Segment", "Verify", "delta_commit", "gdn_bwd", "gdn_decode",
    "gdn_fwd", "gdn_segment", "gdn_verify", "kda_bwd", "kda_decode", "kda_fwd", "kda_segment",
    "kda_verify", "segment_merge",
]  # fmt: skip


class Entry(NamedTuple):
    function: Callable[..., Any]
    body: Callable[..., Any]  # takes the op, then the function's arguments in order
    op: Op


OPS = {
    entry.op.name: entry
    for entry in (
        Entry(gdn_fwd, _fwd._fwd, _fwd._GDN_FWD),
        Entry(kda_fwd, _fwd._fwd, _fwd._KDA_FWD),
        Entry(gdn_decode, _decode._decode, _decode._GDN_DECODE),
        Entry(kda_decode, _decode._decode, _decode._KDA_DECODE),
        Entry(gdn_verify, _verify._verify, _verify._GDN_VERIFY),
        Entry(kda_verify, _verify._verify, _verify._KDA_VERIFY),
        Entry(delta_commit, _verify._commit, _verify._DELTA_COMMIT),
        Entry(gdn_bwd, _bwd._bwd, _bwd._GDN_BWD),
        Entry(kda_bwd, _bwd._bwd, _bwd._KDA_BWD),
        Entry(gdn_segment, _segment._segment, _segment._GDN_SEGMENT),
        Entry(kda_segment, _segment._segment, _segment._KDA_SEGMENT),
        Entry(segment_merge, _segment._merge, _segment._SEGMENT_MERGE),
    )
}

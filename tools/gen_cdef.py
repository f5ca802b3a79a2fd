"""Generate the cffi binding of linattn.h: python tools/gen_cdef.py <linattn.h> <_cdef.py>

Out-of-line ABI mode: the result is a plain Python module that knows every declaration and opens the
library by path.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi


def cdef_of(header: str) -> str:
    """The declarations between the two marker lines, as cffi's parser takes them."""
    marked = re.search(r"/\* \[cdef\.begin\].*?\*/(.*)/\* \[cdef\.end\] \*/", header, re.S)
    if marked is None:
        raise SystemExit("gen_cdef: the header has no [cdef.begin] .. [cdef.end]")
    text = re.sub(r"/\*.*?\*/", "", marked[1], flags=re.S)
    text = text.replace("LINATTN_API ", "")
    # Ops take their struct as packed bytes, so that a call needs no cffi allocation.
    text = re.sub(r"const linattn_\w+_args \*args", "const char *args", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return "struct DLTensor;\n" + re.sub(r"\n{3,}", "\n\n", text)


def main(header: str, out: str) -> None:
    ffi = cffi.FFI()
    ffi.cdef(cdef_of(Path(header).read_text()))
    ffi.set_source("pylinattn._cdef", None)
    ffi.emit_python_code(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2])

"""Reads linattn.h: the one list of ops, arguments, shapes and dtypes, in the fixed comment form that the header describes."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import NamedTuple

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
FIELD = re.compile(
    r"^\s+(?P<ctype>linattn_tensor |double |int32_t |void \*)(?P<name>\w+);\s*"
    r"/\* (?P<direction>in\??|out\??|inout)\s+(?P<shape>\S+)\s+(?P<dtypes>\S+)\s+(?P<doc>.*?) \*/$",
    re.M,
)
STRUCT = re.compile(
    r"/\*(?P<doc>(?:(?!\*/).)*)\*/\ntypedef struct \{\n(?P<body>[^{}]*)\} linattn_(?P<op>\w+)_args;",
    re.S,
)
C_ONLY = ("zero_tail", "reserved", "stream")  # fields without a Python argument
PYTHON_ONLY = {
    "gdn_fwd": ("output_final_state",),
    "kda_fwd": ("output_final_state",),
    "gdn_verify": ("keep",),
    "kda_verify": ("keep",),
}


class Field(NamedTuple):
    name: str
    ctype: str
    direction: str
    shape: str
    dtypes: str
    doc: str

    @property
    def is_tensor(self):
        return self.ctype == "linattn_tensor"

    @property
    def optional(self):
        return self.direction.endswith("?")

    @property
    def written(self):
        return self.direction.startswith("out") or self.direction == "inout"

    @property
    def shapes(self):
        """Alternatives, each a list of size names such as "T" or "N+1"."""
        return [alternative.strip("[]").split(",") for alternative in self.shape.split("|")]


def header_path():
    """The installed header, or that of a source tree."""
    import pylinattn

    installed = pathlib.Path(pylinattn.get_include()) / "linattn.h"
    return installed if installed.exists() else REPOSITORY / "cuda" / "include" / "linattn.h"


@functools.cache
def text():
    return header_path().read_text()


@functools.cache
def ops():
    """op -> list of Field, in order, without the leading size."""
    found = {}
    for match in STRUCT.finditer(text()):
        lines = [line for line in match["body"].splitlines() if line.strip()]
        fields = [
            Field(**{key: value.strip() for key, value in m.groupdict().items()})
            for m in FIELD.finditer(match["body"])
        ]
        if len(fields) != len(lines) - 1 or "uint64_t size;" not in lines[0]:
            raise ValueError(
                f"linattn.h: {match['op']} has a field whose comment is not in the fixed form"
            )
        found[match["op"]] = fields
    return found


@functools.cache
def doc(op):
    return next(m["doc"] for m in STRUCT.finditer(text()) if m["op"] == op)


def declared_functions():
    return sorted(set(re.findall(r"LINATTN_API [^;(]*?\*?(linattn_\w+)\(", text())))


def declared_ops():
    return sorted(set(re.findall(r"linattn_status linattn_(\w+)\(const linattn_\1_args", text())))


def python_parameters(op):
    """Names the Python function of an op must have, in order."""
    names = [f.name for f in ops()[op] if f.name not in C_ONLY]
    return names, PYTHON_ONLY.get(op, ())

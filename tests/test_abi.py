"""One contract, pinned: header, cdef, signatures, docstrings, README, include rules, and the errors the header implies."""

from __future__ import annotations

import inspect
import itertools
import pathlib
import re

import header
import pytest
from arrays import CPU
from harness import check
from raw import BACKWARD_OPS, OPS, RawCall

import pylinattn
from pylinattn._lib import ffi, lib

REPOSITORY = header.REPOSITORY
IN_REPOSITORY = (REPOSITORY / "cuda" / "include" / "linattn.h").exists()
needs_repository = pytest.mark.skipif(not IN_REPOSITORY, reason="no source tree beside the tests")


# ---- header, cdef, signature, docstring, README


def test_every_declared_op_is_known_here():
    check(
        header.declared_ops() == sorted(OPS + BACKWARD_OPS),
        "tests/raw.py does not list the ops of linattn.h",
    )
    check(set(header.ops()) == set(OPS + BACKWARD_OPS), "an op of linattn.h has no args struct")


@needs_repository
def test_installed_header_is_the_source():
    if not pathlib.Path(pylinattn.get_include()).exists():
        pytest.skip("pylinattn is used from its source folder, not installed")
    installed = pathlib.Path(pylinattn.get_include(), "linattn.h").read_bytes()
    check(
        installed == (REPOSITORY / "cuda/include/linattn.h").read_bytes(),
        "the installed linattn.h is another one",
    )


@pytest.mark.parametrize("op", OPS + BACKWARD_OPS)
def test_cdef_has_the_fields_of_the_header(op):
    fields = [name for name, _ in ffi.typeof(f"linattn_{op}_args").fields]
    check(
        fields == ["size", *(f.name for f in header.ops()[op])],
        f"the cdef of {op} differs from the header",
    )
    check(
        sorted(set(header.declared_functions()) - set(dir(lib))) == [],
        "functions missing in the cdef or library",
    )


def test_struct_sizes_follow_from_the_fields():
    check(ffi.sizeof("linattn_tensor") == 8 + 5 * 8 + 5 * 8 + 6 * 4, "linattn_tensor is padded")
    for op in OPS + BACKWARD_OPS:
        size = {"linattn_tensor": 112, "double": 8, "int32_t": 4, "void *": 8}
        expected = 8 + sum(size[f.ctype] for f in header.ops()[op])
        check(
            ffi.sizeof(f"linattn_{op}_args") == expected,
            f"linattn_{op}_args has padding: {expected}",
        )


@pytest.mark.parametrize("op", OPS + BACKWARD_OPS)
def test_signature_is_the_struct(op):
    """Same names, same order; optional in C is None in Python; q, k, v, g, beta (state) positional, all else by keyword."""
    names, extra = header.python_parameters(op)
    parameters = inspect.signature(getattr(pylinattn, op)).parameters
    mine = [name for name in parameters if name not in extra]
    check(mine == names, f"{op}: Python has {mine}, the header {names}")
    check(set(extra) <= set(parameters), f"{op}: {extra} missing")
    for field in header.ops()[op]:
        if field.name in header.C_ONLY:
            continue
        parameter = parameters[field.name]
        required = field.is_tensor and field.direction in ("in", "inout")
        check((parameter.default is parameter.empty) == required, f"{op}: default of {field.name}")
        if required:
            check(
                parameter.kind == parameter.POSITIONAL_OR_KEYWORD,
                f"{op}: {field.name} must be positional",
            )
        else:
            check(
                parameter.kind == parameter.KEYWORD_ONLY, f"{op}: {field.name} must be keyword-only"
            )
        if field.is_tensor and not required:
            check(parameter.default is None, f"{op}: {field.name} must default to None")


@pytest.mark.parametrize("op", OPS + BACKWARD_OPS)
def test_docstring_carries_shapes_and_dtypes(op):
    doc = inspect.getdoc(getattr(pylinattn, op))
    for field in header.ops()[op]:
        if field.name in header.C_ONLY:
            continue
        line = re.search(rf"^\s+{field.name}: (.*(?:\n\s{{8,}}.*)*)", doc, re.M)
        check(line is not None, f"{op}: the docstring has no line for {field.name}")
        if field.is_tensor:
            for shape in field.shape.split("|"):
                check(shape in line[1], f"{op}: the line of {field.name} lacks {shape}: {line[1]}")
            dtypes = field.dtypes.replace("=", "dtype of ")
            check(dtypes in line[1], f"{op}: the line of {field.name} lacks {dtypes}: {line[1]}")


DTYPE_WORDS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "fp64": "f64"}


def readme_table():
    """op -> {column: cell}"""
    table = re.search(
        r"<!-- support-table.begin -->\n(.*?)<!-- support-table.end -->",
        (REPOSITORY / "README.md").read_text(),
        re.S,
    )
    check(table is not None, "README.md has no table between the support-table marks")
    lines = [line.strip("|").split("|") for line in table[1].strip().splitlines()]
    lines = [[cell.strip(" `") for cell in line] for line in lines]
    columns = [cell.lower().split()[0] for cell in lines[0]]
    return {line[0]: dict(zip(columns, line)) for line in lines[2:]}


def claims(cell, op):
    """(dtype, K, V, answer) that a cell of the table promises."""
    words = re.findall(r"\w+", cell)
    for word, dtype in DTYPE_WORDS.items():
        if op in ("delta_commit", "segment_merge"):
            continue  # its cell names the dtypes of the call before it; what that gives is fp32 or fp64
        if "K, V <= 256" in cell:
            sizes = ((1, 256), (256, 1), (128, 128)), ((257, 64), (64, 257))
        elif "K = V = 64, 128" in cell:
            sizes = ((64, 64), (128, 128)), ((64, 128), (96, 96), (256, 256))
        else:
            sizes = (), ((64, 64), (128, 128))
        yield from ((dtype, K, V, word in words) for K, V in sizes[0])
        yield from ((dtype, K, V, False) for K, V in sizes[1])


@needs_repository
def test_readme_support_table_is_what_the_library_answers(device):
    table = readme_table()
    check(set(table) == set(OPS + BACKWARD_OPS), f"README's table has the ops {sorted(table)}")
    for op, row in table.items():
        cell = row["cpu" if device.kind == "cpu" else "cuda"]
        for dtype, K, V, answer in claims(cell, op):
            support = pylinattn.supports(op, device=device.kind, dtype=dtype, K=K, V=V)
            check(bool(support) == answer, f"README on {op} {dtype} K={K} V={V}: {support!r}")


# ---- who may include and import whom


def _matches(folder, pattern, suffixes):
    for path in sorted((REPOSITORY / folder).rglob("*")):
        if path.suffix in suffixes:
            for line in path.read_text().splitlines():
                if found := re.match(pattern, line):
                    yield path.relative_to(REPOSITORY), found[1]


INCLUDE, SOURCES = r'\s*#\s*include\s*[<"]([^>"]+)[>"]', {".cpp", ".cu", ".cuh", ".h"}


@needs_repository
def test_include_rules():
    for path, included in _matches("cuda", INCLUDE, SOURCES):
        where, parts = f"{path} includes {included}", path.parts
        check(not re.search(r"torch|Python\.h|cute/|cutlass", included), where)
        if included.endswith("linattn.h"):
            check(path.name in ("api.cpp", "check.h", "linattn.h"), where)
        ours = (REPOSITORY / path).parent / included
        if not (ours.exists() or (REPOSITORY / "cuda" / included).exists()):
            continue  # a header of the system or of CUDA
        if "ptx" in parts:
            check(
                re.fullmatch(r"(ptx/|\.\./ptx/)?\w+\.cuh", included) is not None
                and "common" not in included,
                where,
            )
        if "cpu" in parts:
            check(re.search(r"(^|/)(ptx|common|recurrent|gdn|kda)/", included) is None, where)
        for family, other in (("gdn", "kda"), ("kda", "gdn")):
            if family in parts:
                check(f"{other}/" not in included, where)


@needs_repository
def test_import_rules():
    allowed = {
        "torch": {"torch.py", "_torch_ops.py"},
        "jax": {"jax.py"},
        "cffi": {"_lib.py", "_cdef.py"},
        "cupy": set(),
        "ml_dtypes": set(),
    }
    for path, module in _matches("pylinattn", r"\s*(?:import|from)\s+(\w+)", {".py"}):
        if module in allowed:
            check(path.name in allowed[module], f"{path} imports {module}")


@needs_repository
def test_files_stay_short():
    files = itertools.chain(
        *((REPOSITORY / f).rglob("*") for f in ("cuda", "pylinattn", "tests", "bench", "examples"))
    )
    for path in files:
        if path.suffix in SOURCES | {".py", ".c"} and path.name not in ("_cdef.py", "linattn.h"):
            check(
                len(path.read_text().splitlines()) <= 520,
                f"{path} has more than 500 lines: give it one job",
            )


# ---- what the library says of itself


def test_versions_and_devices():
    check(
        lib.linattn_abi_version() == lib.LINATTN_ABI_VERSION, "library and header have another ABI"
    )
    version = ffi.string(lib.linattn_version()).decode()
    check(version == pylinattn.__version__, f"library {version}, package {pylinattn.__version__}")
    check(ffi.string(lib.linattn_build_info()) != b"", "no build information")
    count = ffi.new("int32_t *", 7)
    status = lib.linattn_device_count(count)
    if status != lib.LINATTN_OK:
        check(
            status == lib.LINATTN_ERR_RUNTIME and count[0] == 0,
            f"device_count gives {status}, {count[0]}",
        )
        check(
            ffi.string(lib.linattn_last_error()) != b"", "no reason is given for having no devices"
        )
    info = ffi.new("linattn_device_info *")
    check(
        lib.linattn_device_query(4096, info) == lib.LINATTN_ERR_RUNTIME, "device 4096 was described"
    )
    check(lib.linattn_device_count(ffi.NULL) == lib.LINATTN_ERR_VALUE, "a NULL count was taken")
    check(lib.linattn_device_query(0, ffi.NULL) == lib.LINATTN_ERR_VALUE, "a NULL info was taken")


def test_gpu_ops_name_what_they_do_not_take():
    for op in OPS + BACKWARD_OPS:
        support = pylinattn.supports(op, device="cuda", dtype="bf16", K=96, V=96)
        check(not support and op in support.reason, f"{op}, K = V = 96 on a GPU: {support!r}")


def test_supports():
    for dtype, K, V, answer in (
        ("f32", 1, 256, True),
        ("f64", 256, 1, True),
        ("bf16", 128, 128, True),
    ):
        for op in OPS + BACKWARD_OPS:
            support = pylinattn.supports(op, device="cpu", dtype=dtype, K=K, V=V)
            check(bool(support) == answer, f"{op} {dtype} {K} {V}")
    for op in OPS + BACKWARD_OPS:
        support = pylinattn.supports(op, device="cpu", dtype="f32", K=257, V=64)
        check(not support and "257" in support.reason, f"{op}: K = 257 is {support}")
        check(op in support.reason, f"the reason does not name {op}: {support.reason}")
    with pytest.raises(ValueError, match="no_such_op"):
        pylinattn.supports("no_such_op", device="cpu", dtype="f32", K=64, V=64)


@pytest.mark.parametrize("op", OPS + BACKWARD_OPS)
def test_null_struct_and_wrong_size(op):
    call = getattr(lib, f"linattn_{op}")
    check(call(ffi.NULL) == lib.LINATTN_ERR_VALUE, "NULL was taken")
    for wrong in (-8, 8, 1 << 40):
        args = RawCall(op, CPU)
        args.args.size += wrong
        status, sentence = args()
        check(status == "value" and "size" in sentence, f"{status}: {sentence}")
        check(args.nothing_written(), "something was written")

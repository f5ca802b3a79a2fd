"""The library as a file, the installed package, its command line, and the examples of README and examples/."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import header
import pytest
from harness import check

import pylinattn
from pylinattn._lib import library_path

GLIBC_LIMIT = (2, 28)
INSTALLED = pathlib.Path(pylinattn.get_include(), "linattn.h").exists()
needs_install = pytest.mark.skipif(
    not INSTALLED, reason="pylinattn is used from its source folder, not installed"
)
needs_repository = pytest.mark.skipif(
    not (header.REPOSITORY / "README.md").exists(), reason="no source tree beside the tests"
)
LIBRARY = str(library_path)


# ---- the library file


def elf():
    elffile = pytest.importorskip("elftools.elf.elffile")
    return elffile.ELFFile(open(LIBRARY, "rb"))


def test_exported_symbols_are_ours_and_all_of_them():
    symbols = elf().get_section_by_name(".dynsym").iter_symbols()
    exported = {
        s.name
        for s in symbols
        if s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["bind"] != "STB_LOCAL"
    }
    exported -= {"LINATTN_1"}  # the version node itself
    check(all(name.startswith("linattn_") for name in exported), f"exported: {sorted(exported)}")
    missing = set(header.declared_functions()) - exported
    check(not missing, f"declared in linattn.h but not exported: {sorted(missing)}")
    extra = exported - set(header.declared_functions())
    extra = {name for name in extra if not name.startswith("linattn_xla_")}  # for XLA alone
    check(not extra, f"exported but not declared in linattn.h: {sorted(extra)}")


@needs_install
def test_symbol_versions():
    """Nothing newer than glibc 2.28 and the libstdc++ of manylinux_2_28."""
    section = elf().get_section_by_name(".gnu.version_r")
    limits = {"GLIBC": GLIBC_LIMIT, "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0)}
    for _, versions in section.iter_versions():
        for version in versions:
            word, _, number = version.name.partition("_")
            if word in limits and number[:1].isdigit():
                found = tuple(map(int, number.split(".")))
                check(found <= limits[word], f"the library needs {version.name}")


def test_the_library_needs_only_the_system():
    dynamic = elf().get_section_by_name(".dynamic")
    tags = list(dynamic.iter_tags())
    needed = {t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"}
    allowed = r"lib(c|m|pthread|dl|rt|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-x86-64\.so\.2"
    odd = [n for n in needed if not re.fullmatch(allowed, n)]
    check(not odd, f"the library needs {odd}")
    paths = [t.entry.d_tag for t in tags if t.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
    check(not paths, "the library carries a run-time search path")


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_no_executable_stack_and_no_text_relocations():
    out = subprocess.run(
        ["readelf", "-lWd", LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    stack = next(line for line in out.splitlines() if "GNU_STACK" in line)
    check("RWE" not in stack, f"executable stack: {stack}")
    check("TEXTREL" not in out, "text relocations")


# ---- the package


@needs_install
def test_folders():
    check(pathlib.Path(pylinattn.get_include(), "linattn.h").is_file(), "get_include")
    check(pathlib.Path(pylinattn.get_library_dir(), "liblinattn.so").is_file(), "get_library_dir")
    check(
        pathlib.Path(pylinattn.get_cmake_dir(), "pylinattnConfig.cmake").is_file(), "get_cmake_dir"
    )


@needs_install
def test_metadata():
    from importlib.metadata import version

    check(
        version("pylinattn") == pylinattn.__version__, "metadata and library have another version"
    )


def test_cdef_is_the_header():
    """The generated binding compared with the declarations of the header."""
    from pylinattn._lib import ffi, lib

    for name in header.declared_functions():
        check(hasattr(lib, name), f"{name} is not in the binding")
    numbers = dict(re.findall(r"\b(LINATTN_[A-Z0-9_]+) = (\d+)", header.text()))
    for name, value in numbers.items():
        check(
            getattr(lib, name) == int(value),
            f"{name} is {getattr(lib, name)}, the header says {value}",
        )
    check(ffi.sizeof("linattn_device_info") == 128 + 8 + 6 * 4, "linattn_device_info is padded")


def command(*words, **environment):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=120
    )


def test_python_dash_m():
    done = command("-m", "pylinattn")
    check(done.returncode == 0, done.stderr)
    for word in ("cpu", pylinattn.__version__, "gdn_fwd", "1.0"):
        check(word.lower() in done.stdout.lower(), f"{word} is not in the report:\n{done.stdout}")


@pytest.mark.slow
def test_demo():
    done = command("-m", "pylinattn", "demo")
    check(done.returncode == 0, done.stdout + done.stderr)
    for word in ("gdn", "kda", "ms"):
        check(word in done.stdout, f"{word} is not in the table:\n{done.stdout}")


def test_unknown_command():
    done = command("-m", "pylinattn", "no_such_command")
    check(done.returncode != 0 and "no_such_command" in done.stderr + done.stdout, done.stderr)
    check("Traceback" not in done.stderr, done.stderr)


def test_missing_and_foreign_library(tmp_path):
    """A library that is not there, or is none, gives an ImportError with a sentence."""
    for place, what in ((tmp_path / "absent.so", "absent"), (tmp_path / "text.so", "text")):
        if what == "text":
            place.write_text("no library")
        done = command("-c", "import pylinattn", PYLINATTN_LIBRARY=str(place))
        check(done.returncode != 0, f"{what}: imported")
        check(f"ImportError: pylinattn: {place}" in done.stderr, done.stderr)


# ---- examples


def blocks(language):
    text = (header.REPOSITORY / "README.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


@needs_repository
def test_first_example_of_the_readme():
    names = {}
    exec(blocks("python")[0], names)
    check(names["o"].shape == (1, 1024, 8, 128), "the example's output has another shape")
    check(names["o1"].shape == (1, 1, 8, 128), "the example's decode has another shape")


@pytest.mark.gpu
@needs_repository
def test_gpu_examples_of_the_readme():
    names = {}
    first, *others = blocks("python")
    exec(first, names)
    for block in others:
        module = re.search(r"^import (cupy|torch)", block, re.M)
        if module:
            pytest.importorskip(module[1])
            exec(block, dict(names))


@needs_repository
@needs_install
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_c_example(tmp_path):
    """examples/*.c built as C99 against the installed header and library through pkg-config, then run."""
    sources = sorted((header.REPOSITORY / "examples").glob("*.c"))
    check(sources, "examples/ has no C program")
    folder = pylinattn.get_library_dir()
    env = os.environ | {"PKG_CONFIG_PATH": f"{folder}/pkgconfig", "LD_LIBRARY_PATH": folder}
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "pylinattn"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for source in sources:
        program = tmp_path / source.stem
        warnings = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
        built = subprocess.run(
            ["cc", *warnings, str(source), "-o", str(program), *flags, "-lm"],
            capture_output=True,
            text=True,
        )
        check(built.returncode == 0, built.stderr)
        ran = subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=60)
        check(ran.returncode == 0, f"{source.name}: {ran.stdout}{ran.stderr}")


@needs_repository
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("standard", ["-std=c99", "-std=c11", "-xc++"])
def test_the_header_compiles_alone(tmp_path, standard):
    source = tmp_path / "alone.c"
    source.write_text(
        '#include "linattn.h"\nlinattn_gdn_fwd_args a;\nint main(void) { return a.size != 0; }\n'
    )
    flags = [standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    done = subprocess.run(
        ["cc", *flags, f"-I{header.header_path().parent}", str(source)],
        capture_output=True,
        text=True,
    )
    check(done.returncode == 0, done.stderr)


def test_runs_in_a_source_tree(tmp_path):
    """`pip install . && python -m pylinattn`: Python takes the package of the current folder, which has no library."""
    here = pathlib.Path(pylinattn.__file__).parent
    shutil.copytree(
        here,
        tmp_path / "pylinattn",
        ignore=shutil.ignore_patterns("_cdef.py", "lib", "__pycache__"),
    )
    cdef = pathlib.Path(sys.modules["pylinattn._cdef"].__file__).parent
    installed = tmp_path / "installed" / "pylinattn"
    installed.mkdir(parents=True)
    shutil.copy(cdef / "_cdef.py", installed)
    (installed / "__init__.py").touch()
    paths = [str(tmp_path), str(installed.parent), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-m", "pylinattn"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "PYLINATTN_LIBRARY": str(library_path)},
    )
    check(done.returncode == 0 and "gdn_fwd" in done.stdout, done.stdout + done.stderr)


@needs_repository
@pytest.mark.parametrize("name", ["numpy_gdn.py", "torch_gdn.py", "cupy_gdn.py"])
def test_python_examples(name):
    """Those of seconds; tiny_lm.py trains for minutes, and test_torch.py covers what it calls."""
    path = header.REPOSITORY / "examples" / name
    done = command(str(path))
    text = done.stdout + done.stderr
    if done.returncode and re.search("No module named|no usable|needs a GPU", text):
        pytest.skip(text.strip().splitlines()[-1])
    check(done.returncode == 0, text)

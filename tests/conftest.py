"""Devices to run every test on, and the child process that turns a hang into a failure."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

# JAX takes three quarters of a card at its first array, and tests beside it in other processes then find no memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

TESTS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

import arrays  # noqa: E402

MARKERS = (
    "gpu: needs an NVIDIA Hopper GPU",
    "slow: takes more than a few seconds",
    "xdist_group: in one process of pytest-xdist, where that is installed",
)


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """GPU tests skip where there is no GPU, and say why; with PYLINATTN_REQUIRE_GPU=1 that is an error."""
    items = [item for item in items if item.get_closest_marker("gpu")]
    reason = arrays.why_no_gpu() if items else None
    if reason and os.environ.get("PYLINATTN_REQUIRE_GPU") == "1":
        pytest.exit(f"PYLINATTN_REQUIRE_GPU is set, but: {reason}", 3)
    for item in items if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU through NumPy, and the GPU through torch or CuPy."""
    return arrays.CPU if request.param == "cpu" else arrays.gpu_device()


@pytest.fixture
def gpu():
    return arrays.gpu_device()


@pytest.fixture
def watchdog():
    """Runs Python text in a child process, in this folder, with a time limit; a hang or a crash fails the test."""

    def run(code, seconds=60, flags=(), **environment):
        paths = [str(TESTS), *filter(None, sys.path)]
        env = (
            os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
            | environment
        )
        try:
            done = subprocess.run(
                [sys.executable, *flags, "-c", code],
                env=env,
                cwd=TESTS,
                timeout=seconds,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{code}")
        if done.returncode != 0:
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    return run

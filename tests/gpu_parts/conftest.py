"""The parts library: $PYLINATTN_PARTS, or built here when nvcc is on the PATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from gpu_parts import build
from gpu_parts.library import Library


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The library, on a machine with or without a card."""
    if path := os.environ.get("PYLINATTN_PARTS"):
        return Library(Path(path).resolve())
    if shutil.which("nvcc") is None:
        pytest.skip("PYLINATTN_PARTS is not set and there is no nvcc to build the parts with")
    path = tmp_path_factory.mktemp("parts") / "libparts.so"
    build.build(path)
    return Library(path)


@pytest.fixture(scope="session")
def card(parts: Library) -> Library:
    """The library, where it can run its kernels."""
    if parts.device_count() == 0:
        pytest.skip("no CUDA device")
    return parts


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240613)

"""prebuilt/manifest.json: what the library beside it was built from and by, and what its kernels use."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read(root: Path = ROOT) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((root / "prebuilt/manifest.json").read_text())
    return data


def stale(root: Path = ROOT) -> str:
    """Why prebuilt/liblinattn.so is not the library of these sources: one sentence, empty when it is."""
    library = root / "prebuilt/liblinattn.so"
    if not library.is_file() or not (root / "prebuilt/manifest.json").is_file():
        return "There is no prebuilt/liblinattn.so."
    recorded = read(root)
    if sha256(library) != recorded["library"]["sha256"]:
        return "prebuilt/liblinattn.so is not the file that prebuilt/manifest.json describes."
    for name, digest in recorded["sources"].items():
        source = root / name
        if not source.is_file():
            return f"prebuilt/liblinattn.so is stale: {name} is gone since it was built."
        if sha256(source) != digest:
            return f"prebuilt/liblinattn.so is stale: {name} changed since it was built."
    return ""


def write(
    root: Path,
    library: Path,
    sources: list[str],
    toolchain: dict[str, str],
    kernels: dict[str, dict[str, Any]],
) -> None:
    prebuilt = root / "prebuilt"
    prebuilt.mkdir(exist_ok=True)
    (prebuilt / "liblinattn.so").write_bytes(library.read_bytes())
    data = {
        "library": {"sha256": sha256(library), "bytes": library.stat().st_size},
        "toolchain": toolchain,
        "kernels": {name: kernels[name] for name in sorted(kernels)},
        "sources": {name: sha256(root / name) for name in sorted(sources)},
    }
    (prebuilt / "manifest.json").write_text(json.dumps(data, indent=1) + "\n")

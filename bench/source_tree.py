"""What a result was measured on: the git tree id of cuda/ from its files alone, so that a copy without .git has it too."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

BUILT = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")


def _object_id(kind: str, data: bytes) -> bytes:
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).digest()


def _git(root: Path, *args: str) -> str | None:
    """What git says of this checkout; None of a copy, be it inside another checkout."""

    def ask(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return ask(*args) if Path(ask("rev-parse", "--show-toplevel")) == root.resolve() else None
    except (OSError, subprocess.CalledProcessError):
        return None


def _files(root: Path, folder: str) -> list[Path]:
    """Files tracked, or untracked and not ignored; without git, everything but caches."""
    listed = _git(root, "ls-files", "-co", "--exclude-standard", "--", folder)
    if listed:
        found = [root / line for line in listed.splitlines()]
    else:
        found = [p for p in (root / folder).rglob("*") if not set(p.parts) & set(BUILT)]
    return [p for p in found if p.is_symlink() or p.is_file()]


def _tree(files: list[Path], base: Path) -> bytes:
    entries: dict[str, tuple[bytes, bytes]] = {}  # name -> mode, id
    below: dict[str, list[Path]] = {}
    for path in files:
        name, *rest = path.relative_to(base).parts
        if rest:
            below.setdefault(name, []).append(path)
        elif path.is_symlink():
            entries[name] = b"120000", _object_id("blob", os.readlink(path).encode())
        else:
            mode = (
                b"100755" if os.access(path, os.X_OK) and path.stat().st_mode & 0o100 else b"100644"
            )
            entries[name] = mode, _object_id("blob", path.read_bytes())
    for name, inner in below.items():
        entries[name] = b"40000", _tree(inner, base / name)
    # git sorts a folder as if its name ended in a slash
    order = sorted(entries, key=lambda n: (n + "/" if n in below else n).encode())
    return _object_id(
        "tree", b"".join(entries[n][0] + b" " + n.encode() + b"\0" + entries[n][1] for n in order)
    )


def tree_id(root: Path, folder: str) -> str:
    """What `git rev-parse HEAD:folder` gives once the files of ``root/folder`` are committed."""
    return _tree(_files(root, folder), root / folder).hex()


def commit_id(root: Path) -> str:
    """HEAD, with a mark where the working tree differs from it; "unknown" without git."""
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return "unknown"
    return f"{head}+changes" if _git(root, "status", "--porcelain") else head


def provenance(root: Path) -> dict[str, str]:
    """Commit, tree of cuda/ and date. LINATTN_COMMIT and LINATTN_CUDA_TREE name what git cannot."""
    return {
        "commit": os.environ.get("LINATTN_COMMIT") or commit_id(root),
        "cuda_tree": os.environ.get("LINATTN_CUDA_TREE") or tree_id(root, "cuda"),
        "date": datetime.date.today().isoformat(),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")

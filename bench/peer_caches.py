"""The caches of what the peers compile, as archives that another machine can use: for warm_peers.py.

The archive `tuned` holds which of Triton's configurations were the fastest, where a GPU has timed them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import re
import sys
import tarfile
from pathlib import Path

VARIABLES = {
    "triton": "TRITON_CACHE_DIR",
    "tilelang": "TILELANG_CACHE_DIR",
    "flashinfer": "FLASHINFER_WORKSPACE_BASE",
}
# archive: the cache, and which of its files a hit reads
KEPT = {
    "tuned": ("triton", r"\.autotune\.json$"),
    "triton": ("triton", r"(\.cubin|\.so|(?<!\.autotune)\.json)$"),
    "tilelang": ("tilelang", r"/kernels/"),
    "flashinfer": ("flashinfer", r"(\.o|/meta\.json|/sources\.json)$"),
}
PACKAGES = {
    "tilelang": ("tilelang", "flash-qla"),
    "flashinfer": ("flashinfer-python", "nvidia-cutlass-dsl-libs-core", "apache-tvm-ffi", "torch"),
}
KEYS = "keys.json"


def keys() -> dict[str, str]:
    """What has to be the same on the other machine, cache by cache."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        found["triton"] = hashlib.sha256(triton_key().encode()).hexdigest()
    for cache, packages in PACKAGES.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[cache] = " ".join(f"{x} {importlib.metadata.version(x)}" for x in packages)
    return found


def pack(caches: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (caches / KEYS).write_text(json.dumps(keys()))
    for name, (cache, pattern) in KEPT.items():
        files = [x for x in sorted((caches / cache).rglob("*")) if re.search(pattern, str(x))]
        if not files:
            continue
        archive = folder / f"{name}.tar.xz"
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            for path in (caches / KEYS, *files):
                tar.add(path, path.relative_to(caches))
        print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB, {len(files)} files")


def unpack(caches: Path, archives: list[Path]) -> None:
    """Triton's and FlashInfer's caches name places of the machine that they come from: those are changed."""
    here = keys()
    for archive in archives:
        with tarfile.open(archive) as tar:
            tar.extractall(caches, filter="data")
        there, cache = json.loads((caches / KEYS).read_text()), KEPT[archive.name.split(".")[0]][0]
        for key in ("python", cache):
            if there.get(key) != here.get(key):
                print(f"{archive.name}: {key} was {there.get(key)}, is {here.get(key)}: no hits")
    for group in (caches / "triton").glob("*/__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        places = {name: str(group.parent / name) for name in names}
        group.write_text(json.dumps({"child_paths": places}))
    for cache, name in VARIABLES.items():  # first: they hold whatever becomes of FlashInfer's
        print(f"export {name}={caches / cache}", flush=True)
    claim_flashinfer(caches / "flashinfer")


def claim_flashinfer(cache: Path) -> None:
    """Its kernels are void when torch was installed by another tool, or the sources lie elsewhere; here versions
    and contents have to agree."""
    from pretend_gpu import SOURCES, digest

    found = [path for path in cache.rglob("meta.json") if (path.parent / SOURCES).exists()]
    if not found:  # or all compiled here
        return
    try:
        from flashinfer.jit import cute_dsl_core
    except ImportError as error:
        print(f"flashinfer: {error}: no hits")
        return

    here, site = cute_dsl_core._get_cute_dsl_version(), Path(cute_dsl_core.__file__).parents[2]
    versions = functools.partial(re.sub, ":[0-9a-f]{64}", "")
    for path in found:
        meta, sources = (json.loads((path.parent / x).read_text()) for x in (path.name, SOURCES))
        same = all((site / x).exists() and digest(site / x) == sources[x] for x in sources)
        if not same or versions(meta["cute_dsl_version"]) != versions(here):
            print(f"{path.parent.name}: not compiled from what is here")
            continue
        meta["cute_dsl_version"] = here
        meta["source_sha256"] = cute_dsl_core._hash_source_files(
            tuple(str(site / x) for x in sources)
        )
        path.write_text(json.dumps(meta, indent=2))

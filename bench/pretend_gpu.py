"""An H200 for the peers' compilers where there is none: kernels are compiled and cached as there, and not run.

Tensors are on the CPU. Where a key of a compiler's cache asks about the device, the answer is an H200's: capability, name,
multiprocessors, shared memory. Pointers are aligned to 16 bytes as there, and sizes are real, so that Triton specialises alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

NAME, CAPABILITY = "NVIDIA H200", (9, 0)
DLPACK_CUDA = 2
SOURCES = "sources.json"  # what a module of FlashInfer's cache was compiled from
PROPERTIES = {
    "multiprocessor_count": 132,
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "warpSize": 32,
    "sm_clock_rate": 1980000,
    "mem_clock_rate": 3201000,
    "mem_bus_width": 6144,
}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _driver_library() -> None:
    """A libcuda.so.1 without functions: Triton links its launchers to it, and loads them."""
    os.environ["TRITON_LIBCUDA_PATH"] = folder = tempfile.mkdtemp()
    library = Path(folder, "libcuda.so.1")
    command = ["gcc", "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(library)], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    sys.setdlopenflags(os.RTLD_LAZY)  # functions are looked up at a call, of which there is none


def _torch() -> None:
    properties = types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=PROPERTIES["multiprocessor_count"],
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=PROPERTIES["max_shared_mem"],
        shared_memory_per_multiprocessor=233472,
        total_memory=150754820096,
        L2_cache_size=62914560,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": NAME,
        "get_device_capability": CAPABILITY,
        "get_device_properties": properties,
        "device": contextlib.nullcontext(),
        "synchronize": None,
        "is_current_stream_capturing": False,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *a, answer=answer, **k: answer)
    torch._C._cuda_getCurrentRawStream = lambda device: 0


def _triton() -> None:
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build, cache
    from triton.runtime.driver import driver

    compile_module = nvidia.compile_module_from_src

    def compile_for_both(src: str, name: str, **options: Any) -> Any:
        """The key asks for the platform, which Python describes by `file`, where that is installed."""
        module = compile_module(src, name, **options)
        binary, platform = Path(module.__file__), build.platform_key().split(",")[:-1]
        for linkage in ("ELF", ""):
            key = hashlib.sha256((src + ",".join([*platform, linkage])).encode()).hexdigest()
            manager = cache.get_cache_manager(key)
            if not manager.has_file(binary.name):
                manager.put(binary.read_bytes(), binary.name)
        return module

    nvidia.compile_module_from_src = compile_for_both

    class Launcher(nvidia.CudaLauncher):
        """Compiled and loaded, never called."""

        def __call__(self, *args: Any) -> None:
            pass

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.launcher_cls = Launcher
            self.utils.get_device_properties = lambda device: PROPERTIES
            self.utils.load_binary = lambda *args: (0, 0, 0, 0, 1024)  # the last: threads a block

        def get_benchmarker(self) -> Any:
            """Every configuration is compiled, all are as fast."""

            def once(call: Any, quantiles: Any, **options: Any) -> list[float]:
                call()
                return [1.0] * len(quantiles)

            return once

    driver.set_active(Driver())


def _tilelang() -> None:
    try:
        from tilelang import tvm
        from tilelang.contrib import nvcc
        from tilelang.jit.adapter.tvm_ffi import TVMFFIKernelAdapter as Adapter
    except ImportError:
        return
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    version_of = nvcc.get_target_compute_version
    nvcc.get_target_compute_version = lambda of=None: version_of(of or target)
    Adapter.get_exportable_executable = Adapter._get_executable
    Adapter._get_executable = lambda self: lambda *args: None


def _flashinfer() -> None:
    """CuTe DSL asks the tensors where they are: on the GPU, as far as it can see."""
    try:
        from cutlass.base_dsl.compiler import CompileCallable
        from cutlass.cute.runtime import _Tensor as Tensor
        from flashinfer import utils
        from flashinfer.gdn_kernels import device_target
        from flashinfer.jit import cute_dsl_core
    except ImportError:
        return
    site = Path(utils.__file__).parent.parent
    Spec, hash_of, sources = cute_dsl_core.JitSpecCuteDsl, cute_dsl_core._hash_source_files, {}
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    load, build, compile_kernel = Tensor.load_dltensor, Spec.build, CompileCallable.__call__

    def load_on_gpu(self: Any) -> None:
        self.__dict__.pop("_tvm_ffi_tensor", None)  # is asked first
        if self._dltensor_wrapper is None:  # DLTensor: data, then device_type
            place = pointer_of(self._dlpack_data, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
            ctypes.c_int32.from_address(place).value = DLPACK_CUDA
        load(self)

    def hash_and_note(paths: tuple[str, ...]) -> str:
        sources[hash_of(paths)] = paths
        return hash_of(paths)

    def build_whole(self: Any) -> None:
        CompileCallable.__call__ = compile_kernel
        build(self)
        CompileCallable.__call__ = nothing
        paths = sources[self.expected_meta["source_sha256"]]
        content = {str(Path(x).relative_to(site)): digest(Path(x)) for x in paths}
        (self.module_dir / SOURCES).write_text(json.dumps(content))

    def nothing(*args: Any, **keywords: Any) -> Any:
        return lambda *args, **keywords: None

    Tensor.load_dltensor = load_on_gpu
    cute_dsl_core._hash_source_files = hash_and_note
    Spec.build, Spec._load_from_disk = build_whole, nothing
    CompileCallable.__call__ = nothing  # what is not kept on disk need not be compiled
    device_target.gdn_device_target.__code__ = (lambda device: _resolve(0)).__code__  # noqa: F821
    utils.get_compute_capability.__wrapped__.__code__ = (lambda device: (9, 0)).__code__


def pretend(peer: str) -> None:
    """To be called before the peer is imported, in a process of its own."""
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    os.environ["FLA_CACHE_RESULTS"] = "0"  # these timings mean nothing
    _driver_library()
    _torch()
    _triton()
    if peer.startswith("flashinfer"):
        _flashinfer()
    elif peer != "fla":  # which FLA's dispatch imports too, where nobody forbids it
        _tilelang()

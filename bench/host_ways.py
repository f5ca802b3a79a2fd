"""Wall time of one call by every way in: C, NumPy or CuPy, torch eager, compiled and as a CUDA graph, JAX jitted.

    python bench/host_ways.py [--device cuda]

Calls in a row of one decode step and of one short forward, so that on a GPU nearly all of the time is what a call costs
on the host; on the CPU the computation is in it. Writes bench/results/host_ways_<cpu|gpu>.json and prints a table. A way
whose library is missing is a row that says so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from host_cost import recorded
from source_tree import provenance, write_result

import pylinattn
import pylinattn.torch as fla_names

ROOT = Path(__file__).resolve().parent.parent
H, HV = 16, 32


def microseconds(call: Callable[[], Any], finish: Callable[[], Any], calls: int = 50) -> float:
    """The best of 60 rounds of calls in a row, the queue empty before each round."""
    best = float("inf")
    for _ in range(60):
        finish()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    finish()
    return best


class Ways:
    """The calls of one op: `T` tokens, 16/32 heads, K = V = 128 on a GPU and 16 on the CPU, bf16 (CPU: fp32)."""

    def __init__(self, device: str, decode: bool) -> None:
        self.gpu, self.decode = device == "cuda", decode
        D, T, dtype = (128, 1 if decode else 64, torch.bfloat16 if self.gpu else torch.float32)
        if not self.gpu:
            D = 16
        random = torch.Generator().manual_seed(0)
        normal = lambda *s: torch.randn(*s, generator=random)  # noqa: E731
        q, k, v = (normal(1, T, h, D).to(device, dtype) for h in (H, H, HV))
        self.x = [q, k, v, -normal(1, T, HV).abs().to(device), torch.rand(1, T, HV).to(device)]
        self.state = normal(1, HV, D, D).to(device)
        self.o = torch.empty_like(v)
        self.op = pylinattn.gdn_decode if decode else pylinattn.gdn_fwd

    def finish(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def eager(self) -> Any:
        if self.decode:
            return self.op(*self.x, self.state, o=self.o)
        return self.op(*self.x, initial_state=self.state, o=self.o)

    def c(self) -> float:
        self.eager()
        call = recorded(self.eager)
        return microseconds(lambda: call.op.run(call.args), self.finish)

    def torch_eager(self) -> float:
        return microseconds(self.eager, self.finish)

    def layer(self) -> Any:
        q, k, v, g, beta = self.x
        name = "fused_recurrent_gated_delta_rule" if self.decode else "chunk_gated_delta_rule"
        return getattr(fla_names, name)(
            q, k, v, g, beta=beta, initial_state=self.state, output_final_state=True
        )

    @torch.no_grad()
    def torch_fla_names(self) -> float:
        return microseconds(self.layer, self.finish)

    @torch.no_grad()
    def torch_compiled(self) -> float:
        compiled = torch.compile(self.layer, fullgraph=True)
        compiled()
        return microseconds(compiled, self.finish)

    def torch_training(self) -> float:
        """Forward and backward of a call that records gradients of q, k, v, g and beta."""
        x = [y.clone().requires_grad_() for y in self.x]
        ones = torch.ones_like(self.o)

        def step() -> Any:
            name = "fused_recurrent_gated_delta_rule" if self.decode else "chunk_gated_delta_rule"
            o, _ = getattr(fla_names, name)(*x[:4], beta=x[4], initial_state=self.state)
            return torch.autograd.grad(o, x, ones)

        return microseconds(step, self.finish)

    def _graph(self, call: Callable[[], Any]) -> float:
        if not self.gpu:
            raise ImportError("CUDA graphs are for GPUs")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(48):
                call()
        return microseconds(graph.replay, self.finish) / 48

    def torch_graph(self) -> float:
        return self._graph(self.eager)

    @torch.no_grad()
    def torch_fla_names_graph(self) -> float:
        return self._graph(self.layer)

    def numpy_or_cupy(self) -> float:
        if self.gpu:
            import cupy

            lend: Callable[[Any], Any] = cupy.from_dlpack
        else:
            lend = torch.Tensor.numpy
        try:
            x, state, o = [lend(y) for y in self.x], lend(self.state), lend(self.o)
        except (BufferError, RuntimeError, TypeError) as error:
            raise ImportError(f"no bf16 here: {error}") from error
        rest = (state,) if self.decode else ()
        options = {"o": o} if self.decode else {"o": o, "initial_state": state}
        return microseconds(lambda: self.op(*x, *rest, **options), self.finish)

    def jax_jit(self) -> float:
        import jax

        import pylinattn.jax as in_jax

        x = [jax.dlpack.from_dlpack(y.contiguous()) for y in (*self.x, self.state)]
        if self.decode:
            run = jax.jit(lambda *a: in_jax.gdn_decode(*a), donate_argnums=5)
            state = x.pop()

            def call() -> Any:
                nonlocal state
                o, state = run(*x, state)
                return o
        else:
            forward = jax.jit(lambda *a: in_jax.gdn_fwd(*a[:5], initial_state=a[5]).o)

            def call() -> Any:
                return forward(*x)

        return microseconds(call, lambda: jax.block_until_ready(call()))


WAYS = (
    "c", "torch_eager", "torch_fla_names", "torch_training", "torch_compiled", "torch_graph",
    "torch_fla_names_graph", "numpy_or_cupy", "jax_jit",
)  # fmt: skip


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    rows = []
    for decode in (True, False):
        ways = Ways(options.device, decode)
        for way in WAYS:
            row: dict[str, Any] = {"op": ways.op.__name__, "way": way}
            try:
                row["wall_us"] = round(getattr(ways, way)(), 2)
            except ImportError as error:
                row["error"] = str(error)[:200]
            rows.append(row)
            print(f"{row['op']:<12}{way:<24}{row.get('wall_us', row.get('error'))}", flush=True)
    names = ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "cupy", "jax", "cffi")
    result = {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := version(name))},
        **provenance(ROOT),
        "rows": rows,
    }
    name = "h200" if gpu else "cpu"
    out = options.out or ROOT / "bench" / "results" / f"host_ways_{name}.json"
    write_result(out, result)


if __name__ == "__main__":
    main()

"""What the GPU tests share: inputs as torch tensors, calls, comparisons in bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from arrays import strides_for
from cases import make
from harness import POSITIONAL, check, check_forward

import pylinattn

torch = pytest.importorskip("torch")
FAMILIES = ["gdn", "kda"]
CUDA = "cuda"
CHUNKED = "cuda/chunked"
FORWARD_OPTIONS = {  # keywords of the call, changes of the case
    "plain": ((), {}),
    "l2norm": ((("qk_l2norm", True),), {}),
    "softplus": ((("gate", "softplus"), ("beta_form", "logits"), ("qk_l2norm", True)), {}),
    "bounded": ((("gate", "bounded"), ("lower_bound", -5.0), ("beta_form", "logits_x2")), {}),
    "f16": ((("qk_l2norm", True),), {"dtype": "f16"}),
    "no_initial": ((("scale", -0.3),), {"initial": False}),
    "bf16_states": ((), {"state_dtype": "bf16", "gate_dtype": "bf16"}),
    "checkpoints": ((("checkpoint_every", 64),), {}),
}
V_FIRST = {n: (lambda s: strides_for(s, (0, 1, 3, 2))) for n in ("initial_state", "final_state")}


def variant(case, **changes):
    return dataclasses.replace(case, **changes)


def check_chunked(case, done, inputs=None):
    check(done.path == CHUNKED, f"last_path is {done.path}")
    check_forward(case, done, inputs)


def tensors(case, extra_tokens=0, device=None):
    """The inputs of a case as plain torch tensors."""
    words = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32}
    return {
        name: torch.from_numpy(np.ascontiguousarray(x.values)).to(device or CUDA, words[x.dtype])
        for name, x in make(case, extra_tokens).items()
    }


def run(op, inputs, **options):
    arrays = dict(inputs)
    positional = [arrays.pop(n) for n in POSITIONAL[op]]
    return getattr(pylinattn, op)(*positional, **arrays, **options)


def outputs_like(case, tokens=None):
    T = tokens or sum(case.lengths)
    nan = float("nan")
    return {
        "o": torch.full((1, T, case.HV, case.V), nan, dtype=torch.bfloat16, device=CUDA),
        "final_state": torch.full((len(case.lengths), case.HV, case.K, case.V), nan, device=CUDA),
    }


def same_bits(a, b):
    """Equal bit by bit, NaN included."""
    word = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(word), b.contiguous().view(word))


def random_inputs(family, B, T, H, HV, D, generator):
    """Large inputs, made on the GPU."""
    options = dict(device=CUDA, generator=generator)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, **options)  # noqa: E731
    gates = (B, T, HV, D) if family == "kda" else (B, T, HV)
    g = torch.rand(gates, dtype=torch.bfloat16, **options).div_(-16)
    beta = torch.rand(B, T, HV, **options)
    return dict(q=normal(B, T, H, D), k=normal(B, T, H, D), v=normal(B, T, HV, D), g=g, beta=beta)


def capture(function):
    """A CUDA graph of the function, which runs once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph

"""Cases of the backward: inputs with their outputs' gradients, calls in poisoned buffers, and how errors are measured."""

from __future__ import annotations

import dataclasses

import cases
import numpy as np
from arrays import round_to
from cases import Input
from harness import PYTHON_OPTIONS_OF_REFERENCE, Call, check, expect, need_kernel

# Largest relative RMS error per sequence and head, by dtype of the gradient compared: what a loop in fp64 or fp32 leaves, and
# one rounding to nearest of a half precision.
TOLERANCE = {"f64": 1e-11, "f32": 5e-5} | cases.ROUNDING
# Of a path that multiplies in half precision (targets.md).
HALF_PRODUCTS = 1e-2
# dg and dbeta are one number a token, the sum of many products with rounded factors: where few tokens make up what is measured
# (a short span, or gates that leave one token's gradient larger than all others), that number may be small beside its terms.
HALF_PRODUCTS_FEW_NUMBERS = 1e-1
FEW = 128
SMALLEST = 1.2e-38  # of fp32: what is below counts as zero
# gradient -> the input it belongs to
OF = {
    "dq": "q", "dk": "k", "dv": "v", "dg": "g", "dbeta": "beta",
    "d_initial_state": "initial_state", "dA_log": "A_log", "ddt_bias": "dt_bias",
}  # fmt: skip
PER_TOKEN = ("dq", "dk", "dv", "dg", "dbeta")


def make(case, extra_tokens=0, final=True):
    """The forward's inputs, and gradients of o and of final_state."""
    inputs = cases.make(case, extra_tokens)
    rng = np.random.default_rng([case.seed, 7])
    do = rng.normal(size=inputs["v"].values.shape)
    inputs["d_o"] = Input(round_to(do, case.dtype), case.dtype)
    if final:
        shape = (len(case.lengths), case.HV, case.K, case.V)
        values = rng.normal(size=shape) * (1 + np.arange(case.V) / case.V)
        inputs["d_final_state"] = Input(round_to(values, case.state), case.state)
    return inputs


def op_of(case):
    return f"{case.family}_bwd"


@dataclasses.dataclass
class Backward:
    call: Call

    def __getitem__(self, name):
        return self.call.values(name)

    def bits(self, names=None):
        written = [name for name in OF if name in self.call.placed]
        return {name: self.call.bits(name) for name in names or written}


def backward_call(device, case, inputs=None, outputs=None, layouts=None, **options):
    """A prepared backward with buffers for every gradient."""
    need_kernel(device, op_of(case), case.dtype, case.K, case.V)
    inputs = make(case) if inputs is None else inputs
    N = len(case.lengths)
    default = {
        name: (inputs[source].values.shape, inputs[source].dtype)
        for name, source in OF.items()
        if source in inputs
    }
    default.setdefault("d_initial_state", ((N, case.HV, case.K, case.V), case.state))
    outputs = {name: x for name, x in (default | (outputs or {})).items() if x is not None}
    return Call(device, op_of(case), inputs, outputs, case.keywords | options, layouts)


def backward(device, case, inputs=None, outputs=None, layouts=None, **options):
    return Backward(backward_call(device, case, inputs, outputs, layouts, **options)())


def expected(case, inputs, **options):
    keywords = {
        k: v for k, v in (case.keywords | options).items() if k in PYTHON_OPTIONS_OF_REFERENCE
    }
    return expect(op_of(case), inputs, keywords)


def long_spans(case):
    return [span for span in case.spans if span[2] - span[1] >= FEW]


def limits(case, name, dtype, path):
    """(largest error, spans it holds for) of a gradient."""
    token_loop = max(TOLERANCE[dtype], TOLERANCE["f32" if case.dtype != "f64" else "f64"])
    if cases.is_token_loop(path):
        return [(token_loop, case.spans)]
    if name not in ("dg", "dbeta"):
        return [(HALF_PRODUCTS, case.spans)]
    usual = case.gates == "usual"
    return [(HALF_PRODUCTS_FEW_NUMBERS, case.spans), (HALF_PRODUCTS, long_spans(case) if usual else [])]


def worst_error(name, got, want, spans, tails=True):
    if name in PER_TOKEN:
        return cases.worst_output_error(got, want, spans, tails)
    if name == "d_initial_state":
        return cases.worst_state_error(got, want)
    return cases.relative_rms(got, want), "all heads"


def check_gradients(case, done, inputs=None, **options):
    """Every gradient against the float64 reverse loop."""
    inputs = make(case) if inputs is None else inputs
    want = expected(case, inputs, **options)
    faults = []
    for name in done.bits():
        dtype = done.call.placed[name].buffer.dtype
        values = getattr(want, name)
        if case.dtype != "f64":
            values = np.where(np.abs(values) < SMALLEST, 0.0, values)
        for limit, spans in limits(case, name, dtype, done.call.path):
            error, where = worst_error(name, done[name], values, spans, tails=limit != HALF_PRODUCTS or name not in ("dg", "dbeta"))
            if not error <= limit:
                faults.append(f"{name}: relative RMS error {error:.2e} at {where}, allowed {limit:.0e}")
    check(not faults, f"{case.id}: " + "; ".join(faults))

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
# These are sums of products with rounded factors, a few numbers in all where spans are short or decays steep, and may be small
# beside them: the error of a path that multiplies in half precision is then measured against the terms (size_of_terms).
# To 5e-2, since what cancels in the sums over K is not told apart: q . k is often a tenth of what its terms would give.
HALF_PRODUCTS_OF_TERMS = 5e-2
SUMS = ("dq", "dk", "dg", "dbeta", "dA_log", "ddt_bias")
LONG = 128  # tokens from which a sequence's numbers are many enough to be measured by themselves
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


def size_of_terms(case, inputs, name, **options):
    """Root of the sum of squares of what the columns of V, which never meet, contribute in sixteen parts."""
    if name == "ddt_bias":  # of all tokens
        return np.sqrt(np.square(size_of_terms(case, inputs, "dg", **options)).sum(axis=(0, 1)))
    total = 0.0
    for columns in np.array_split(np.arange(case.V), 16):
        cut = {
            k: x._replace(values=x.values[..., columns])
            for k, x in inputs.items()
            if k in ("v", "d_o", "initial_state", "d_final_state")
        }
        total = total + np.square(getattr(expected(case, inputs | cut, **options), name))
    return np.sqrt(total)


def worst_error(name, got, want, spans):
    if name in PER_TOKEN:
        return cases.worst_output_error(got, want, spans)
    if name == "d_initial_state":
        return cases.worst_state_error(got, want)
    return cases.relative_rms(got, want), "all heads"


def fault_of(case, inputs, name, got, want, dtype, path, **options):
    """What is wrong with a gradient, or None."""
    limit = max(TOLERANCE[dtype], TOLERANCE["f32" if case.dtype != "f64" else "f64"])
    if not cases.is_token_loop(path):
        limit = HALF_PRODUCTS
    error, where = worst_error(name, got, want, case.spans)
    if error <= limit:
        return None
    if not cases.is_token_loop(path) and name in SUMS and np.isfinite(got).all():
        if case.gates == "usual" and "gate" not in case.keywords and name in PER_TOKEN:
            for b, first, end in case.spans:
                for j in range(want.shape[2] if end - first >= LONG else 0):
                    error = cases.relative_rms(got[b, first:end, j], want[b, first:end, j])
                    if not error <= limit:
                        return f"{name}: relative RMS error {error:.2e} of a long sequence, head {j}, allowed {limit:.0e}"
        # Errors and sizes as they are, so that relative_rms divides the one by the other.
        size = np.maximum(np.abs(want), size_of_terms(case, inputs, name, **options))
        error, where = worst_error(name, size + (got - want), size, case.spans)
        limit = HALF_PRODUCTS_OF_TERMS
        if error <= limit:
            return None
    return f"{name}: relative RMS error {error:.2e} at {where}, allowed {limit:.0e}"


def check_gradients(case, done, inputs=None, **options):
    """Every gradient against the float64 reverse loop."""
    inputs = make(case) if inputs is None else inputs
    want = expected(case, inputs, **options)
    faults = []
    for name in done.bits():
        values = getattr(want, name)
        if case.dtype != "f64":
            values = np.where(np.abs(values) < SMALLEST, 0.0, values)
        dtype = done.call.placed[name].buffer.dtype
        faults.append(
            fault_of(case, inputs, name, done[name], values, dtype, done.call.path, **options)
        )
    faults = [fault for fault in faults if fault]
    check(not faults, f"{case.id}: " + "; ".join(faults))

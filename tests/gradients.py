"""Cases of the backward: inputs with their outputs' gradients, calls in poisoned buffers, and how errors are measured."""

from __future__ import annotations

import dataclasses

import cases
import numpy as np
import pytest
from arrays import round_to
from cases import Case, Input
from harness import (
    PYTHON_OPTIONS_OF_REFERENCE,
    Call,
    check,
    check_outputs,
    check_states,
    expect,
    need_kernel,
)

# Largest relative RMS error per sequence and head, by dtype of the gradient compared: what a loop in fp64 or fp32 leaves, and
# one rounding to nearest of a half precision.
TOLERANCE = {"f64": 1e-11, "f32": 5e-5} | cases.ROUNDING
# Of a path that multiplies in half precision (targets.md).
HALF_PRODUCTS = 1e-2
# These are sums of products with rounded factors, a few numbers in all where spans are short or decays steep, and may be small
# beside them. Where a path that multiplies in half precision misses the target for them, the test is an expected failure if the
# error is small against the terms (size_of_terms), and fails otherwise.
# 5e-2, since what cancels in the sums over K is not told apart: q . k is often a tenth of what its terms would give.
HALF_PRODUCTS_OF_TERMS = 5e-2
SUMS = ("dq", "dk", "dg", "dbeta", "dA_log", "ddt_bias")
LONG = 128  # tokens from which a sequence's numbers are many enough to be measured by themselves
FEW_TOKENS = 16  # sequences up to which every path goes token by token, so that all of it is held to the target
SMALLEST = 1.2e-38  # of fp32: what is below counts as zero
# gradient -> the input it belongs to
OF = {
    "dq": "q", "dk": "k", "dv": "v", "dg": "g", "dbeta": "beta",
    "d_initial_state": "initial_state", "dA_log": "A_log", "ddt_bias": "dt_bias",
}  # fmt: skip
PER_TOKEN = ("dq", "dk", "dv", "dg", "dbeta")
WITH_EMPTY = [(0, 0, 64, 0, 66), (0,), (0, 0, 0, 0)]  # lengths


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


# Sizes far from 1, that a path with operands of few exponents has to take out: what is multiplied by what.
SIZES = {
    "small_values": {"v": 1e-7, "initial_state": 1e-7},
    "small_d_o": {"d_o": 1e-9, "d_final_state": 1e-9},
    "large_values": {"v": 1e5, "initial_state": 1e5},
    "large_d_o": {"d_o": 1e6, "d_final_state": 1e6},
    "small_q": {"q": 1e-5},
    "long_q": {"q": 1e4},
    "short_k": {"k": 1e-3},
    "states_apart": {"initial_state": 1e6, "d_final_state": 1e6},
}
SHAPES_OF_SIZES = [
    *SIZES,
    "lengths",
    "last_d_o",
    "no_d_o",
    "half_of_the_columns",
    "one_large_value",
]


def make_sized(case, name):
    """Inputs with such sizes, in bf16."""
    inputs = make(case)
    x = {key: given.values.copy() for key, given in inputs.items()}
    for key, factor in SIZES.get(name, {}).items():
        if key in x:
            x[key] *= factor
    if name == "lengths":  # of rows of q and k, which l2norm takes out
        for key in ("q", "k"):
            x[key] *= 10 ** np.random.default_rng(1).uniform(-2, 2, (*x[key].shape[:3], 1))
    elif name == "last_d_o":
        for b, _, end in case.spans:
            x["d_o"][b, : end - 1] = 0.0
    elif name == "no_d_o":
        x["d_o"][...] = 0.0
    elif name == "half_of_the_columns":
        for key in ("v", "d_o"):
            x[key][..., : case.V // 2] = 0.0
    elif name == "one_large_value":
        x["v"][0, 20, 0, 7] = 1000.0
    return {key: given._replace(values=round_to(x[key], given.dtype) if given.dtype[0] != "i" else given.values)
            for key, given in inputs.items()}  # fmt: skip


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


def saving(device, case, inputs=None, layouts=None, **options):
    """The forward with save "states", and the backward that reads what it saved."""
    inputs = make(case) if inputs is None else inputs
    given = {k: x for k, x in inputs.items() if not k.startswith("d_")}
    outputs = {
        "o": (inputs["v"].values.shape, case.dtype),
        "final_state": ((len(case.lengths), case.HV, case.K, case.V), case.state),
    }
    options = case.keywords | options | {"save": "states"}
    forward = Call(device, f"{case.family}_fwd", given, outputs, options, layouts)()
    call = backward_call(device, case, inputs, None, layouts, **options)
    call.options["saved"] = forward.returned.saved
    return forward, Backward(call())


def check_forward(case, forward, inputs):
    """Outputs and final state of a forward against the float64 loop."""
    given = {k: x for k, x in inputs.items() if not k.startswith("d_")}
    want = expect(forward.op, given, case.keywords)
    check_outputs(forward.values("o"), want.o, case.dtype, case.spans, path=forward.path)
    check_states(forward.values("final_state"), want.final_state, case.state, forward.path)


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
    """What is wrong with a gradient, and whether that is a miss to be expected; None if it is right."""
    limit = max(TOLERANCE[dtype], TOLERANCE["f32" if case.dtype != "f64" else "f64"])
    if not cases.is_token_loop(path):
        limit = HALF_PRODUCTS
    error, where = worst_error(name, got, want, case.spans)
    if error <= limit:
        return None
    expected_miss = False
    few = max(case.lengths) <= FEW_TOKENS
    if not cases.is_token_loop(path) and not few and name in SUMS and np.isfinite(got).all():
        if name in PER_TOKEN:
            usual = case.gates == "usual" and "gate" not in case.keywords
            for b, first, end in case.spans:
                held = end - first <= FEW_TOKENS or (usual and end - first >= LONG)
                for j in range(want.shape[2] if held and end > first else 0):
                    whole = cases.relative_rms(got[b, first:end, j], want[b, first:end, j])
                    if not whole <= limit:
                        text = f"relative RMS error {whole:.2e} of {end - first} tokens, head {j}"
                        return f"{name}: {text}, allowed {limit:.0e}", False
        # Errors and sizes as they are, so that relative_rms divides the one by the other.
        size = np.maximum(np.abs(want), size_of_terms(case, inputs, name, **options))
        of_terms, _ = worst_error(name, size + (got - want), size, case.spans)
        expected_miss = of_terms <= HALF_PRODUCTS_OF_TERMS
    return f"{name}: relative RMS error {error:.2e} at {where}, allowed {limit:.0e}", expected_miss


def check_gradients(case, done, inputs=None, **options):
    """Every gradient against the float64 reverse loop. Comes last in a test, which a miss to be expected ends."""
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
    report(case.id, faults)


def report(what, faults):
    text = f"{what}: " + "; ".join(text for text, _ in faults)
    check(all(expected_miss for _, expected_miss in faults), text)
    if faults:
        pytest.xfail(f"few numbers, small beside their terms (docs/backward.md, Accuracy). {text}")


# ---- promises that hold on every device


def check_strong_decay(device, case):
    """Every dg against what its sum is made of, not only in the mean."""
    inputs = make(case)
    done = backward(device, case, inputs)
    want = expected(case, inputs).dg
    size = np.sqrt((want * want).mean(axis=1, keepdims=True))
    apart = np.abs(done["dg"] - want)
    error = (apart / (np.abs(want) + 1e-3 * size)).max()
    if error > 1e-2:
        # A token loop has each number right; with rounded factors, a number is as good as the terms that it is the sum of.
        of_terms = (apart / (np.abs(want) + 0.5 * size)).max()
        expected_miss = not cases.is_token_loop(done.call.path) and of_terms <= 1e-2
        report(case.id, [(f"dg is off by {error:.1e} of itself at a token", expected_miss)])


def check_first_tokens(device, case):
    dg = backward(device, case)["dg"]
    for _, first, _ in case.spans:
        check(not dg[0, first].any(), f"{case.dtype}: dg of a first token is {dg[0, first]}")


def check_saturated_gates(device, case):
    """Raw gate inputs where the activation is flat, or infinite: finite gradients, 0 where nothing passes."""
    inputs = make(case)
    g = inputs["g"].values.copy()
    g[:, 3], g[:, 7], g[:, 11], g[:, 13] = 1e4, -1e4, np.inf, -np.inf
    inputs["g"] = Input(g, inputs["g"].dtype)
    done = backward(device, case, inputs)
    for name, bits in done.bits().items():
        check(bits and np.isfinite(done[name]).all(), f"{name} is not finite")
    check_gradients(case, done, inputs)


def check_empty_sequences(device, case):
    """They pass the gradient of the state through."""
    inputs = make(case)
    done = backward(device, case, inputs)
    for n, length in enumerate(case.lengths):
        same = np.array_equal(done["d_initial_state"][n], inputs["d_final_state"].values[n])
        check(same or length, f"{case.lengths}: sequence {n} changed its state's gradient")
    if sum(case.lengths):
        check_gradients(case, done)


def check_packing(device, case, inputs):
    """Packed sequences have the bits of each alone. Returns the packed call."""
    packed = backward(device, case, inputs)
    for n, (_, first, end) in enumerate(case.spans):
        alone = dataclasses.replace(case, lengths=(end - first,))
        own = {}
        for name, x in inputs.items():
            if name in ("A_log", "dt_bias"):
                own[name] = x
            elif name in ("initial_state", "d_final_state"):
                own[name] = x._replace(values=x.values[n : n + 1])
            elif name != "cu_seqlens":
                own[name] = x._replace(values=x.values[:, first:end])
        own["cu_seqlens"] = Input(np.array([0, end - first]), "i32")
        done = backward(device, alone, own)
        for name in (*PER_TOKEN, "d_initial_state"):
            part = packed[name][n] if name == "d_initial_state" else packed[name][0, first:end]
            same = np.array_equal(done[name][0], part)
            check(same, f"{name} of sequence {n} depends on the pack")
    return packed


def check_nan_stays(device, family, K, dtype):
    """In its sequence; and rows past the end are left alone."""
    case = Case(family, (40, 30, 20), 1, 2, K, K, dtype)
    inputs = make(case, extra_tokens=9)
    clean = backward(device, case, inputs)
    spoiled = {}
    for name, x in inputs.items():
        values = x.values.copy()
        if name in ("q", "k", "v", "g", "beta", "d_o"):
            values[:, 40:70] = np.nan
            values[:, 90:] = np.nan
        spoiled[name] = x._replace(values=values)
    done = backward(device, case, spoiled)
    for name in PER_TOKEN:
        got, want = done[name], clean[name]
        check(np.array_equal(got[:, :40], want[:, :40]), f"{name}: NaN went to sequence 0")
        check(np.array_equal(got[:, 70:90], want[:, 70:90]), f"{name}: NaN went to sequence 2")
        check(np.isnan(got[:, 90:]).all(), f"{name}: rows past cu_seqlens[-1] were written")
    for n in (0, 2):
        same = np.array_equal(done["d_initial_state"][n], clean["d_initial_state"][n])
        check(same, f"NaN went to the state of sequence {n}")


def check_optional_outputs(device, case, optional):
    everything = backward(device, case)
    for left_out in optional:
        done = backward(device, case, outputs={left_out: None})
        check(done.bits(PER_TOKEN) == everything.bits(PER_TOKEN), f"{left_out} changes the others")

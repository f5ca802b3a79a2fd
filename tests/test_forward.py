"""gdn_fwd and kda_fwd against the float64 token loop: dtypes, shapes, options, hard inputs."""

from __future__ import annotations

import numpy as np
import pytest
from cases import HARD_GATES, HARD_KEYS, Case, make
from harness import (
    Forward,
    check,
    check_forward,
    check_outputs,
    check_states,
    expect,
    forward,
    forward_call,
)

import pylinattn
from pylinattn import reference

FAMILIES = ["gdn", "kda"]
RAGGED = (5, 64, 1, 130, 65)


def grid():
    """Every dtype with every head size, ragged and dense, grouped heads 1, 2, 3, 4, 8."""
    for family in FAMILIES:
        for dtype in ("f32", "f64", "bf16", "f16"):
            for K, V, H, HV in ((64, 64, 2, 4), (128, 128, 1, 2)):
                yield Case(family, RAGGED, H, HV, K, V, dtype)
        for K, V, H, HV in (
            (1, 1, 1, 1),
            (7, 5, 2, 2),
            (16, 48, 1, 3),
            (96, 33, 1, 2),
            (256, 256, 1, 1),
        ):
            yield Case(family, (70, 9), H, HV, K, V, "f32")
        for H, HV in ((3, 3), (2, 6), (1, 8), (4, 4)):
            yield Case(family, (40, 23), H, HV, 64, 64, "bf16")
        yield Case(family, (67, 67, 67), 2, 4, 64, 64, "bf16", packed=False)
        yield Case(family, (67, 67), 2, 2, 64, 64, "f32", packed=False, initial=False)
        yield Case(family, (77, 3), 1, 2, 64, 64, "bf16", state_dtype="bf16")
        yield Case(family, (77, 3), 1, 2, 64, 64, "f32", state_dtype="bf16")
        yield Case(family, (77, 3), 1, 2, 64, 64, "bf16", gate_dtype="bf16")
        yield Case(family, (77, 3), 1, 2, 64, 64, "f16", gate_dtype="f16")
        yield Case(family, (77, 3), 1, 2, 64, 64, "f16", initial=False)


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_equals_token_loop(device, case):
    check_forward(case, forward(device, case))


OPTIONS = [
    (("qk_l2norm", True),),
    (("beta_form", "logits"),),
    (("beta_form", "logits_x2"),),
    (("gate", "softplus"),),
    (("gate", "bounded"), ("lower_bound", -5.0)),
    (("scale", 1.0),),
    (("scale", -0.3),),
    (("qk_l2norm", True), ("beta_form", "logits"), ("gate", "bounded"), ("lower_bound", -5.0)),
    (("qk_l2norm", True), ("beta_form", "logits_x2"), ("gate", "softplus")),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(f"{k}={v}" for k, v in o))
@pytest.mark.parametrize("family", FAMILIES)
def test_options(device, family, options, dtype):
    """Each option, alone and together, against the loop; and an option that is on differs from one that is off."""
    case = Case(family, (66, 31), 2, 4, 64, 64, dtype, options=options)
    done = forward(device, case)
    check_forward(case, done)
    inputs = make(case)
    plain = {k: v for k, v in inputs.items() if k not in ("A_log", "dt_bias")}
    if any(k in ("qk_l2norm", "beta_form", "scale") for k, _ in options):
        gates = {k: v for k, v in case.keywords.items() if k in ("gate", "lower_bound")}
        off = expect(case.op, inputs, gates)
    else:
        plain["g"] = plain["g"]._replace(values=np.minimum(plain["g"].values, 0.0))
        off = expect(case.op, plain)
    difference = np.abs(done.o - off.o).max() / np.abs(off.o).max()
    check(difference > 0.05, f"{options} changes nothing")


@pytest.mark.parametrize("gates", ["steep", "slow"])
@pytest.mark.parametrize(
    "drop", [(), ("A_log",), ("dt_bias",), ("A_log", "dt_bias")], ids=lambda d: "no_" + "_".join(d)
)
def test_bounded_gate_without_its_parameters(device, drop, gates):
    options = (
        ("gate", "bounded"),
        ("lower_bound", -5.0),
        ("qk_l2norm", True),
        ("beta_form", "logits"),
    )
    for family in FAMILIES:
        case = Case(family, (70,), 2, 2, 64, 64, "bf16", gates=gates, options=options)
        inputs = {k: v for k, v in make(case).items() if k not in drop}
        check_forward(case, forward(device, case, inputs), inputs)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_options_equal_doing_it_by_hand(device, dtype):
    """Activations inside equal activations outside, to the accuracy of the dtype."""
    options = (("qk_l2norm", True), ("gate", "softplus"), ("beta_form", "logits_x2"))
    for family in FAMILIES:
        case = Case(family, (80,), 1, 2, 64, 64, dtype, options=options)
        inputs = make(case)
        inside = forward(device, case)
        by_hand = {k: v for k, v in inputs.items() if k not in ("A_log", "dt_bias")}
        arrays = {k: v.values for k, v in inputs.items()}
        gate = reference.activate_gate(arrays["g"], "softplus", arrays["A_log"], arrays["dt_bias"])
        beta = reference.activate_beta(arrays["beta"], "logits_x2")
        for name, values in (("g", gate), ("beta", beta)):
            by_hand[name] = by_hand[name]._replace(values=values)
        plain = Case(family, (80,), 1, 2, 64, 64, dtype)
        outside = forward(device, plain, by_hand, qk_l2norm=True)
        check_outputs(inside.o, outside.o, dtype, case.spans)
        check_states(inside.final_state, outside.final_state, case.state, inside.path)


@pytest.mark.parametrize("gates", HARD_GATES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_hard_gates(device, dtype, family, gates):
    case = Case(family, (130, 17, 64), 1, 2, 64, 64, dtype, gates=gates)
    check_forward(case, forward(device, case))


@pytest.mark.parametrize("gates", HARD_KEYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_repeated_keys(device, dtype, family, gates):
    case = Case(family, (16, 17, 64, 128), 1, 2, 64, 64, dtype, gates=gates)
    check_forward(case, forward(device, case))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_length(device, family):
    """T = 1 .. 130, each as a sequence of its own and each against the loop, final state as strictly as the outputs."""
    lengths = tuple(range(1, 131))
    case = Case(family, lengths, 1, 1, 64, 64, "bf16" if device.kind == "cuda" else "f32")
    check_forward(case, forward(device, case))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequence_without_decay(device, family):
    """Errors of a state that never forgets: 4096 tokens, one sampled head of four."""
    case = Case(family, (4096, 60), 2, 4, 128, 128, "bf16", gates="zero", initial=False)
    done = forward(device, case)
    want = expect(case.op, make(case), heads=[3])
    check_outputs(done.o[:, :, 3:], want.o, "bf16", case.spans)
    check_states(done.final_state[:, 3:], want.final_state, "f32", done.path)


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["steep", "slow", "mixed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trained_gates(device, family, gates):
    """The gates of the benchmarks, everything inside the kernel, packed as in mixed8192 at a quarter of the lengths."""
    options = (
        ("gate", "bounded"),
        ("lower_bound", -5.0),
        ("qk_l2norm", True),
        ("beta_form", "logits"),
    )
    lengths = (325, 136, 512, 240, 67, 765)
    case = Case(
        family, lengths, 4, 4, 128, 128, "bf16", gates=gates, gate_dtype="bf16", options=options
    )
    done = forward(device, case)
    want = expect(case.op, make(case), case.keywords, heads=[0, 3])
    check_outputs(done.o[:, :, [0, 3]], want.o, "bf16", case.spans)
    check_states(done.final_state[:, [0, 3]], want.final_state, "f32", done.path)


def test_same_call_twice_gives_the_same_bits(device):
    for family in FAMILIES:
        case = Case(family, (200, 3, 70), 2, 4, 128, 128, "bf16")
        call = forward_call(device, case)
        first = Forward(call()).bits()
        for _ in range(5):
            check(Forward(call()).bits() == first, f"{family}: a repeated call gave other bits")


def test_checked_takes_good_input_and_refuses_growth(device):
    case = Case("gdn", (40, 23), 1, 2, 64, 64, "bf16")
    check_forward(case, forward(device, case, checked=True))
    inputs = make(case)
    values = inputs["g"].values.copy()
    values[0, 50, 1] = 1e-3
    call = forward_call(
        device, case, inputs | {"g": inputs["g"]._replace(values=values)}, checked=True
    )
    with pytest.raises(ValueError, match=r"\bg\b"):
        call()
    call.check_nothing_written()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("g", [0.0, -1e-3, -0.7, -3.0, -11.5, -40.0])
def test_one_decay_for_all_channels(dtype, size, g):
    """KDA with one decay per token is GDN, and v of any size scales o and the state; on the CPU, whose GDN keeps S / decay."""
    rng = np.random.default_rng(3)
    T, K = 150, 32
    real = np.float32 if dtype == "f32" else np.float64
    q, k = (rng.standard_normal((1, T, 1, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, beta = rng.standard_normal((1, T, 1, K)) * size, rng.random((1, T, 1))
    gates = np.full((1, T, 1), g) * rng.uniform(0.5, 1.5, (1, T, 1))
    inputs = [x.astype(real) for x in (q, k, v, gates, beta)]
    wide = [*inputs[:3], np.repeat(inputs[3][..., None], K, axis=-1), inputs[4]]
    narrow = pylinattn.gdn_fwd(*inputs, output_final_state=True)
    for got, want in zip(narrow, pylinattn.kda_fwd(*wide, output_final_state=True)):
        error = np.linalg.norm((got - want) / size) / np.linalg.norm(want / size)
        check(error < (1e-5 if dtype == "f32" else 1e-10), f"relative error {error}")

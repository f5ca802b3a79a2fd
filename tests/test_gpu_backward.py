"""gdn_bwd and kda_bwd on a GPU: against the float64 reverse loop, and their promises."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import round_to, strides_for
from cases import HARD_GATES, HARD_KEYS, Case, Input, relative_rms
from gradients import PER_TOKEN, TOLERANCE, backward, backward_call, check_gradients, expected, make
from harness import check
from test_backward import OPTIONS, by_options

pytestmark = pytest.mark.gpu
FAMILIES = ["gdn", "kda"]
PATH = {"gdn": "cuda/chunked", "kda": "cuda/recurrent"}
RAGGED = (5, 64, 1, 130, 0, 65)


def grid():
    for family in FAMILIES:
        for D in (64, 128):
            for dtype in ("bf16", "f16"):
                yield Case(family, RAGGED, 1, 2, D, D, dtype)
        for H, HV in ((3, 3), (2, 6), (1, 8), (1, 3)):
            yield Case(family, (40, 23), H, HV, 64, 64, "bf16")
        yield Case(family, (67, 67, 67), 2, 4, 64, 64, "bf16", packed=False)
        yield Case(family, (67, 67), 2, 2, 128, 128, "f16", packed=False, initial=False)
        yield Case(family, (77, 3), 1, 2, 128, 128, "bf16", state_dtype="bf16", gate_dtype="bf16")
        yield Case(family, (1000,), 1, 2, 128, 128, "bf16")


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_equals_reverse_loop(case, gpu):
    done = backward(gpu, case)
    check_gradients(case, done)
    check(done.call.path == PATH[case.family], done.call.path)


@pytest.mark.parametrize("options", OPTIONS, ids=by_options)
@pytest.mark.parametrize("family", FAMILIES)
def test_options(gpu, family, options):
    case = Case(family, (66, 31), 2, 4, 64, 64, "bf16", options=options)
    check_gradients(case, backward(gpu, case))


@pytest.mark.parametrize("drop", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")], ids="+".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_gate_without_its_parameters(gpu, family, drop):
    options = (("gate", "bounded"), ("lower_bound", -5.0))
    case = Case(family, (70,), 2, 2, 64, 64, "bf16", options=options)
    inputs = {k: v for k, v in make(case).items() if k not in drop}
    check_gradients(case, backward(gpu, case, inputs), inputs)


@pytest.mark.parametrize("gates", HARD_GATES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("D", [64, 128])
def test_hard_gates(gpu, D, family, gates):
    case = Case(family, (130, 17, 64), 1, 2, D, D, "bf16", gates=gates)
    done = backward(gpu, case)
    check_gradients(case, done)
    g = make(case)["g"].values
    check(not done["dg"][np.isneginf(g)].any(), "dg of a full reset is not 0")


@pytest.mark.parametrize("gates", HARD_KEYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_repeated_keys(gpu, dtype, family, gates):
    case = Case(family, (16, 17, 64, 128), 1, 2, 128, 128, dtype, gates=gates)
    check_gradients(case, backward(gpu, case))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("D", [64, 128])
def test_hard_heads_beside_usual_ones(gpu, D, dtype):
    """Sequences and heads that chunks would do badly go to the token loop, alone, and are as right as all of it."""
    usual = Case("gdn", (200, 70, 130), 2, 6, D, D, dtype)
    inputs = make(usual)
    rng = np.random.default_rng(3)
    k, beta = inputs["k"].values.copy(), inputs["beta"].values.copy()
    one = rng.normal(size=D)
    k[:, 200:, 1] = one / np.sqrt((one * one).sum())
    beta[:, 200:, 3:] = 2.0
    inputs["k"], inputs["beta"] = (
        Input(round_to(k, dtype), dtype),
        Input(round_to(beta, "f32"), "f32"),
    )
    done = backward(gpu, usual, inputs)
    check(done.call.path == "cuda/chunked", done.call.path)
    check_gradients(usual, done, inputs)
    want = expected(usual, inputs)
    for first, end in ((200, 270), (270, 400)):
        for name in ("dv", "dg", "dbeta"):
            error = relative_rms(
                done[name][0, first:end, 3:], getattr(want, name)[0, first:end, 3:]
            )
            limit = TOLERANCE[dtype if name == "dv" else "f32"]
            check(error <= limit, f"{name} of the hard heads is off by {error:.1e}")
    for _ in range(5):
        check(backward(gpu, usual, inputs).bits() == done.bits(), "a repeated call: other bits")


@pytest.mark.xfail(reason="no flag: dbeta up to 2e-2 in bf16 (docs/backward.md, Accuracy)")
def test_one_key_with_usual_weights(gpu):
    case = Case("gdn", (130,), 2, 6, 64, 64, "bf16")
    inputs = make(case)
    one = np.random.default_rng(3).normal(size=64)
    k = np.broadcast_to(one / np.sqrt((one * one).sum()), inputs["k"].values.shape)
    inputs["k"] = Input(round_to(k.copy(), "bf16"), "bf16")
    check_gradients(case, backward(gpu, case, inputs), inputs)


def test_fp16_states_beyond_the_range_of_fp16(gpu):
    case = Case("gdn", (130, 64), 1, 2, 64, 64, "f16")
    inputs = make(case)
    inputs["initial_state"] = Input(round_to(2e6 * inputs["initial_state"].values, "f32"), "f32")
    inputs["d_o"] = Input(round_to(1e-4 * inputs["d_o"].values, "f16"), "f16")
    inputs["d_final_state"] = Input(round_to(1e-4 * inputs["d_final_state"].values, "f32"), "f32")
    done = backward(gpu, case, inputs)
    for name in done.bits():
        check(np.isfinite(done[name]).all(), f"{name} is not finite")
    check_gradients(case, done, inputs)


def test_rows_that_no_copy_can_take_go_token_by_token(gpu):
    case = Case("gdn", (70, 5), 1, 2, 64, 64, "bf16")
    inputs = make(case)
    shape = inputs["v"].values.shape
    done = backward(gpu, case, inputs, layouts={"v": strides_for(shape, gap=1)})
    check(done.call.path == "cuda/recurrent", done.call.path)
    check_gradients(case, done, inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_dg_token_by_token_under_strong_decay(gpu, family):
    """Gates up to A_log = log 16, every dg against what its sum is made of, not only in the mean."""
    case = Case(family, (200,), 1, 4, 64, 64, "bf16", gates="A_log_16")
    inputs = make(case)
    got, want = backward(gpu, case, inputs)["dg"], expected(case, inputs).dg
    size = np.sqrt((want * want).mean(axis=1, keepdims=True))
    # A token loop has each number right; with rounded factors, a number is as good as the terms that it is the sum of.
    error = np.abs(got - want) / (
        np.abs(want) + (1e-3 if PATH[family] == "cuda/recurrent" else 0.5) * size
    )
    check(error.max() <= 1e-2, f"dg is off by {error.max():.1e} of itself at a token")


@pytest.mark.parametrize("family", FAMILIES)
def test_first_token_without_a_state_has_no_dg(gpu, family):
    case = Case(family, (70, 1, 5), 1, 2, 64, 64, "bf16", initial=False)
    dg = backward(gpu, case)["dg"]
    for _, first, _ in case.spans:
        check(not dg[0, first].any(), f"dg of a first token is {dg[0, first]}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_saturated_raw_gates(gpu, family, gate):
    options = (("gate", gate),) + ((("lower_bound", -5.0),) if gate == "bounded" else ())
    case = Case(family, (40,), 1, 2, 64, 64, "bf16", options=options)
    inputs = make(case)
    g = inputs["g"].values.copy()
    g[:, 3], g[:, 7], g[:, 11], g[:, 13] = 1e4, -1e4, np.inf, -np.inf
    inputs["g"] = Input(g, inputs["g"].dtype)
    done = backward(gpu, case, inputs)
    for name, bits in done.bits().items():
        check(bits and np.isfinite(done[name]).all(), f"{name} is not finite")
    check_gradients(case, done, inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_length(gpu, family):
    case = Case(family, (*range(1, 67), 127, 128, 129), 1, 1, 64, 64, "bf16")
    check_gradients(case, backward(gpu, case))


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_sequences_pass_the_state_gradient_through(gpu, family):
    for lengths in ((0, 0, 64, 0, 66), (0,), (0, 0, 0, 0)):
        case = Case(family, lengths, 1, 2, 64, 64, "bf16")
        inputs = make(case)
        done = backward(gpu, case, inputs)
        for n, length in enumerate(lengths):
            same = np.array_equal(done["d_initial_state"][n], inputs["d_final_state"].values[n])
            check(same or length, f"{lengths}: sequence {n} changed its state's gradient")
        if sum(lengths):
            check_gradients(case, done)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_does_not_show_in_the_bits(gpu, family):
    options = (("qk_l2norm", True), ("gate", "softplus"))
    case = Case(family, (70, 3, 200), 2, 4, 64, 64, "bf16", options=options)
    inputs = make(case)
    packed = backward(gpu, case, inputs)
    for n, (_, first, end) in enumerate(case.spans):
        alone = Case(family, (end - first,), 2, 4, 64, 64, "bf16", options=options)
        own = {}
        for name, x in inputs.items():
            if name == "cu_seqlens":
                continue
            if name in ("A_log", "dt_bias"):
                own[name] = x
                continue
            state = name in ("initial_state", "d_final_state")
            own[name] = x._replace(values=x.values[n : n + 1] if state else x.values[:, first:end])
        own["cu_seqlens"] = Input(np.array([0, end - first]), "i32")
        done = backward(gpu, alone, own)
        for name in (*PER_TOKEN, "d_initial_state"):
            part = packed[name][n] if name == "d_initial_state" else packed[name][0, first:end]
            check(np.array_equal(done[name][0], part), f"{name} of sequence {n} knows its pack")
    for _ in range(20):
        check(backward(gpu, case, inputs).bits() == packed.bits(), "a repeated call: other bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_stays_in_its_sequence_and_rows_past_the_end_are_left_alone(gpu, family):
    case = Case(family, (40, 30, 20), 1, 2, 64, 64, "bf16")
    inputs = make(case, extra_tokens=9)
    clean = backward(gpu, case, inputs)
    spoiled = {}
    for name, x in inputs.items():
        values = x.values.copy()
        if name in ("q", "k", "v", "g", "beta", "d_o"):
            values[:, 40:70] = np.nan
            values[:, 90:] = np.nan
        spoiled[name] = x._replace(values=values)
    done = backward(gpu, case, spoiled)
    for name in PER_TOKEN:
        got, want = done[name], clean[name]
        check(np.array_equal(got[:, :40], want[:, :40]), f"{name}: NaN went to sequence 0")
        check(np.array_equal(got[:, 70:90], want[:, 70:90]), f"{name}: NaN went to sequence 2")
        check(np.isnan(got[:, 90:]).all(), f"{name}: rows past cu_seqlens[-1] were written")
    for n in (0, 2):
        same = np.array_equal(done["d_initial_state"][n], clean["d_initial_state"][n])
        check(same, f"NaN went to the state of sequence {n}")


@pytest.mark.parametrize("family", FAMILIES)
def test_optional_outputs_and_inputs(gpu, family):
    case = Case(family, (50, 9), 1, 2, 64, 64, "bf16", options=(("gate", "softplus"),))
    everything = backward(gpu, case)
    for left_out in ("d_initial_state", "dA_log", "ddt_bias"):
        done = backward(gpu, case, outputs={left_out: None})
        check(done.bits(PER_TOKEN) == everything.bits(PER_TOKEN), f"{left_out} changes the others")
    inputs = make(case, final=False)
    check_gradients(case, backward(gpu, case, inputs), inputs)
    plain = Case(family, (50, 9), 1, 2, 64, 64, "bf16", initial=False)
    inputs = make(plain)
    check_gradients(plain, backward(gpu, plain, inputs), inputs)


def test_a_call_that_fails_writes_nothing(gpu):
    case = Case("gdn", (40, 23), 1, 2, 64, 64, "bf16")
    inputs = make(case)
    values = inputs["g"].values.copy()
    values[0, 50, 1] = 1e-3
    call = backward_call(gpu, case, inputs | {"g": Input(values, "f32")}, checked=True)
    with pytest.raises(ValueError, match=r"\bg\b"):
        call()
    call.check_nothing_written()

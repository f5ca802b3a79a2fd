"""gdn_bwd and kda_bwd on a GPU: against the float64 reverse loop, and their promises."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import round_to, strides_for
from cases import HARD_GATES, HARD_KEYS, Case, Input, relative_rms
from gradients import (
    HALF_PRODUCTS,
    PER_TOKEN,
    SHAPES_OF_SIZES,
    TOLERANCE,
    WITH_EMPTY,
    backward,
    backward_call,
    check_empty_sequences,
    check_first_tokens,
    check_gradients,
    check_nan_stays,
    check_optional_outputs,
    check_packing,
    check_saturated_gates,
    check_strong_decay,
    expected,
    make,
    make_sized,
)
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
    check(done.call.path == PATH[case.family], done.call.path)
    check_gradients(case, done)


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
    g = make(case)["g"].values
    check(not done["dg"][np.isneginf(g)].any(), "dg of a full reset is not 0")
    check_gradients(case, done)


def long_ones():
    """Sequences so long and heads so few that the GDN backward cuts them, exactly or where gates forget."""
    for D in (64, 128):
        for dtype in ("bf16", "f16"):
            for gates in ("usual", "zero"):
                yield Case("gdn", (2130,), 1, 2, D, D, dtype, gates=gates)
        yield Case("gdn", (2304,), 1, 1, D, D, "bf16", gates="A_log_16", initial=False)
        yield Case("gdn", (2100, 0, 70, 5, 900, 64), 1, 2, D, D, "bf16")
        yield Case("gdn", (1200, 1, 800, 500), 1, 1, D, D, "bf16", gates="zero")
        yield Case("gdn", (2048, 2048), 1, 2, D, D, "bf16", packed=False, state_dtype="bf16")
    yield Case("gdn", (2200,), 2, 8, 128, 128, "bf16")
    options = (("qk_l2norm", True), ("gate", "softplus"), ("beta_form", "logits_x2"))
    yield Case("gdn", (2200,), 2, 4, 128, 128, "bf16", options=options)
    for gates in ("minus_20", "one_reset", "chunk_starts"):
        yield Case("gdn", (2300,), 1, 2, 128, 128, "bf16", gates=gates)


@pytest.mark.parametrize("case", list(long_ones()), ids=lambda case: case.id)
def test_cut_sequences(gpu, case):
    inputs = make(case)
    done = backward(gpu, case, inputs)
    check(done.call.path == PATH[case.family], done.call.path)
    check_cut(gpu, case, inputs, done)
    check_gradients(case, done, inputs)


def check_cut(gpu, case, inputs, done):
    """Agrees with the uncut backward, each as accurate as the other (sums over all tokens, a few numbers, apart); equal bits."""
    whole = backward(gpu, case, inputs, splits=1)
    for name in (*PER_TOKEN, "d_initial_state"):
        apart = relative_rms(done[name], whole[name])
        check(apart <= 2 * HALF_PRODUCTS, f"{name}: {apart:.1e} from that of splits = 1")
    for _ in range(3):
        check(backward(gpu, case, inputs).bits() == done.bits(), "a repeated call: other bits")


def test_a_long_sequence_is_cut_beside_short_ones(gpu):
    case = Case("gdn", (300, 300, 7400, 300), 2, 8, 128, 128, "bf16")
    inputs = make(case)
    check_cut(gpu, case, inputs, backward(gpu, case, inputs))


def test_many_heads_of_k_64_beside_a_long_sequence(gpu):
    case = Case("gdn", (4096, 192), 8, 32, 64, 64, "bf16")
    inputs = make(case)
    done = backward(gpu, case, inputs)
    check_cut(gpu, case, inputs, done)
    check_gradients(case, done, inputs)


@pytest.mark.parametrize("length", [0.5, 1.7])
def test_cut_sequences_forget_no_more_than_their_keys_allow(gpu, length):
    """Keys longer than 1 may lengthen a state faster than the gates shorten it."""
    case = Case("gdn", (2304,), 1, 2, 128, 128, "bf16", initial=False)
    inputs = make(case)
    k = inputs["k"].values
    k = length * k / np.sqrt((k * k).sum(axis=-1, keepdims=True))
    inputs["k"] = Input(round_to(k, "bf16"), "bf16")
    inputs["g"] = Input(np.full(inputs["g"].values.shape, -0.05), "f32")
    done = backward(gpu, case, inputs)
    check_gradients(case, done, inputs)


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
    check_gradients(usual, done, inputs)


def test_one_key_with_usual_weights(gpu):
    case = Case("gdn", (130,), 2, 6, 64, 64, "bf16")
    inputs = make(case)
    one = np.random.default_rng(3).normal(size=64)
    k = np.broadcast_to(one / np.sqrt((one * one).sum()), inputs["k"].values.shape)
    inputs["k"] = Input(round_to(k.copy(), "bf16"), "bf16")
    check_gradients(case, backward(gpu, case, inputs), inputs)


@pytest.mark.parametrize("size", SHAPES_OF_SIZES)
@pytest.mark.parametrize("D", [64, 128])
def test_sizes_far_from_1(gpu, D, size):
    """Operands are fp16, whose range is that of no bf16 call."""
    options = (("qk_l2norm", True),) if size == "lengths" else ()
    case = Case("gdn", (130, 70), 1, 2, D, D, "bf16", options=options)
    inputs = make_sized(case, size)
    done = backward(gpu, case, inputs)
    check(done.call.path == "cuda/chunked", done.call.path)
    check_gradients(case, done, inputs)


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
    check_strong_decay(gpu, Case(family, (200,), 1, 4, 64, 64, "bf16", gates="A_log_16"))


@pytest.mark.parametrize("family", FAMILIES)
def test_first_token_without_a_state_has_no_dg(gpu, family):
    check_first_tokens(gpu, Case(family, (70, 1, 5), 1, 2, 64, 64, "bf16", initial=False))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_saturated_raw_gates(gpu, family, gate):
    options = (("gate", gate),) + ((("lower_bound", -5.0),) if gate == "bounded" else ())
    check_saturated_gates(gpu, Case(family, (40,), 1, 2, 64, 64, "bf16", options=options))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_length(gpu, family):
    case = Case(family, (*range(1, 67), 127, 128, 129), 1, 1, 64, 64, "bf16")
    check_gradients(case, backward(gpu, case))


@pytest.mark.parametrize("lengths", WITH_EMPTY)
@pytest.mark.parametrize("family", FAMILIES)
def test_empty_sequences_pass_the_state_gradient_through(gpu, family, lengths):
    check_empty_sequences(gpu, Case(family, lengths, 1, 2, 64, 64, "bf16"))


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_does_not_show_in_the_bits(gpu, family):
    options = (("qk_l2norm", True), ("gate", "softplus"))
    case = Case(family, (70, 3, 200), 2, 4, 64, 64, "bf16", options=options)
    inputs = make(case)
    packed = check_packing(gpu, case, inputs)
    for _ in range(20):
        check(backward(gpu, case, inputs).bits() == packed.bits(), "a repeated call: other bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_stays_in_its_sequence_and_rows_past_the_end_are_left_alone(gpu, family):
    check_nan_stays(gpu, family, 64, "bf16")


@pytest.mark.parametrize("family", FAMILIES)
def test_optional_outputs(gpu, family):
    case = Case(family, (50, 9), 1, 2, 64, 64, "bf16", options=(("gate", "softplus"),))
    check_optional_outputs(gpu, case, ("d_initial_state", "dA_log", "ddt_bias"))


@pytest.mark.parametrize("left_out", ["initial_state", "d_final_state"])
@pytest.mark.parametrize("family", FAMILIES)
def test_optional_inputs(gpu, family, left_out):
    initial, final = left_out != "initial_state", left_out != "d_final_state"
    options = (("gate", "softplus"),) if initial else ()
    case = Case(family, (50, 9), 1, 2, 64, 64, "bf16", options=options, initial=initial)
    inputs = make(case, final=final)
    check_gradients(case, backward(gpu, case, inputs), inputs)


def test_a_call_that_fails_writes_nothing(gpu):
    case = Case("gdn", (40, 23), 1, 2, 64, 64, "bf16")
    inputs = make(case)
    values = inputs["g"].values.copy()
    values[0, 50, 1] = 1e-3
    call = backward_call(gpu, case, inputs | {"g": Input(values, "f32")}, checked=True)
    with pytest.raises(ValueError, match=r"\bg\b"):
        call()
    call.check_nothing_written()

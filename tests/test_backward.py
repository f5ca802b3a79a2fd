"""gdn_bwd and kda_bwd: the reference against finite differences, the library against the reference, and its promises."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from arrays import CPU, strides_for
from cases import HARD_GATES, HARD_KEYS, Case, Input
from gradients import (
    OF,
    PER_TOKEN,
    WITH_EMPTY,
    Backward,
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
    op_of,
)
from harness import DELTA, check

import pylinattn
from pylinattn import reference

FAMILIES = ["gdn", "kda"]


@pytest.fixture
def cpu():
    return CPU


RAGGED = (5, 64, 1, 130, 0, 65)
OPTIONS = [
    (),
    (("qk_l2norm", True),),
    (("beta_form", "logits"),),
    (("beta_form", "logits_x2"),),
    (("gate", "softplus"),),
    (("gate", "bounded"), ("lower_bound", -5.0)),
    (("scale", -0.3),),
    (("qk_l2norm", True), ("beta_form", "logits"), ("gate", "bounded"), ("lower_bound", -5.0)),
    (("qk_l2norm", True), ("beta_form", "logits_x2"), ("gate", "softplus")),
]


def by_options(options):
    return "+".join(f"{k}={v}" for k, v in options) or "plain"


# ---- the reference


def loss(case, arrays):
    """The number whose gradients are asked for: <o, d_o> + <final_state, d_final_state>."""
    x = {k: v for k, v in arrays.items() if k not in ("d_o", "d_final_state")}
    positional = [x.pop(name) for name in DELTA]
    done = getattr(reference, case.op)(*positional, **x, **case.keywords)
    return (done.o * arrays["d_o"]).sum() + (done.final_state * arrays["d_final_state"]).sum()


@pytest.mark.parametrize("options", OPTIONS, ids=by_options)
@pytest.mark.parametrize("family", FAMILIES)
def test_reference_is_the_slope(family, options):
    """Central differences of the float64 forward along random directions and along single elements."""
    case = Case(family, (70, 1, 0, 6), 2, 4, 5, 3, "f64", options=options)
    inputs = make(case)
    arrays = {name: x.values for name, x in inputs.items()}
    want = expected(case, inputs)
    rng = np.random.default_rng(5)
    for name, source in OF.items():
        if source not in arrays:
            continue
        gradient = getattr(want, name)
        check(gradient.shape == arrays[source].shape, f"{name} has shape {gradient.shape}")
        for trial in range(3):
            direction = rng.normal(size=gradient.shape)
            if trial:
                one = rng.integers(gradient.size)
                direction = (np.arange(gradient.size) == one).reshape(gradient.shape) * 1.0
            step = 1e-5
            up, down = (
                loss(case, arrays | {source: arrays[source] + s * direction}) for s in (step, -step)
            )
            slope, dot = (up - down) / (2 * step), (gradient * direction).sum()
            check(abs(slope - dot) <= 1e-6 * (1 + abs(slope)), f"{name}: {dot}, slope {slope}")


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_at_a_full_reset(family):
    """At g = -inf nothing before the token matters, and dg there is 0, the limit for g -> -inf."""
    case = Case(family, (9,), 1, 2, 4, 3, "f64")
    inputs = make(case)
    g, do = inputs["g"].values.copy(), inputs["d_o"].values.copy()
    do[:, :4] = 0.0
    inputs["d_o"] = Input(do, "f64")
    g[:, 4] = -np.inf
    reset = expected(case, inputs | {"g": Input(g, "f64")})
    g[:, 4] = -700.0
    limit = expected(case, inputs | {"g": Input(g, "f64")})
    for got, want in zip(reset[:6], limit[:6]):
        check(np.isfinite(got).all() and np.allclose(got, want, 1e-12, 1e-12), "not the limit")
    check(not reset.dg[:, 4].any(), "dg of a full reset is not 0")
    check(not reset.d_initial_state.any(), "a gradient went through a full reset")


# ---- the library against the reference


def grid():
    for family in FAMILIES:
        for dtype in ("f32", "f64", "bf16", "f16"):
            yield Case(family, RAGGED, 2, 4, 32, 40, dtype)
        yield Case(family, (130, 3), 1, 2, 128, 128, "f32")
        for K, V, H, HV in ((1, 1, 1, 1), (7, 5, 2, 2), (16, 48, 1, 3), (256, 256, 1, 1)):
            yield Case(family, (70, 9), H, HV, K, V, "f32")
        for H, HV in ((3, 3), (2, 6), (1, 8)):
            yield Case(family, (40, 23), H, HV, 16, 16, "bf16")
        yield Case(family, (67, 67, 67), 2, 4, 16, 24, "f32", packed=False)
        yield Case(family, (67, 67), 2, 2, 16, 24, "f64", packed=False, initial=False)
        yield Case(family, (77, 3), 1, 2, 16, 24, "bf16", state_dtype="bf16", gate_dtype="bf16")
        yield Case(family, (77, 3), 1, 2, 16, 24, "f32", state_dtype="bf16", gate_dtype="f16")


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_equals_reverse_loop(case, cpu):
    check_gradients(case, backward(cpu, case))


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS, ids=by_options)
@pytest.mark.parametrize("family", FAMILIES)
def test_options(cpu, family, options, dtype):
    case = Case(family, (66, 31), 2, 4, 16, 20, dtype, options=options)
    check_gradients(case, backward(cpu, case))


@pytest.mark.parametrize("drop", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")], ids="+".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_gate_without_its_parameters(cpu, family, drop):
    for options in ((("gate", "bounded"), ("lower_bound", -5.0)), (("gate", "softplus"),)):
        if "A_log" in drop and len(options) == 1:
            continue  # softplus needs it
        case = Case(family, (70,), 2, 2, 16, 16, "f32", options=options)
        inputs = {k: v for k, v in make(case).items() if k not in drop}
        check_gradients(case, backward(cpu, case, inputs), inputs)


@pytest.mark.parametrize("gates", HARD_GATES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_hard_gates(cpu, dtype, family, gates):
    case = Case(family, (130, 17, 64), 1, 2, 16, 24, dtype, gates=gates)
    done = backward(cpu, case)
    check_gradients(case, done)
    g = make(case)["g"].values
    check(not done["dg"][np.isneginf(g)].any(), "dg of a full reset is not 0")


@pytest.mark.parametrize("gates", HARD_KEYS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_repeated_keys(cpu, dtype, family, gates):
    case = Case(family, (16, 17, 64, 128), 1, 2, 16, 24, dtype, gates=gates)
    check_gradients(case, backward(cpu, case))


@pytest.mark.parametrize("family", FAMILIES)
def test_dg_token_by_token_under_strong_decay(cpu, family):
    """Gates up to A_log = log 16."""
    check_strong_decay(cpu, Case(family, (200,), 1, 4, 32, 32, "f32", gates="A_log_16"))


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_token_without_a_state_has_no_dg(cpu, family, dtype):
    check_first_tokens(cpu, Case(family, (70, 1, 5), 1, 2, 16, 16, dtype, initial=False))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_saturated_raw_gates(cpu, family, gate):
    options = (("gate", gate),) + ((("lower_bound", -5.0),) if gate == "bounded" else ())
    check_saturated_gates(cpu, Case(family, (40,), 1, 2, 8, 8, "f32", options=options))


def test_every_length(cpu):
    for family in FAMILIES:
        case = Case(family, (*range(1, 67), 127, 128, 129), 1, 1, 8, 8, "f32")
        check_gradients(case, backward(cpu, case))


# ---- promises


@pytest.mark.parametrize("lengths", WITH_EMPTY)
@pytest.mark.parametrize("family", FAMILIES)
def test_empty_sequences_pass_the_state_gradient_through(cpu, family, lengths):
    check_empty_sequences(cpu, Case(family, lengths, 1, 2, 8, 12, "f32"))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tokens_no_sequences_no_heads(cpu, family):
    for B, T, H, HV in ((0, 5, 1, 2), (2, 0, 1, 2), (1, 3, 0, 0)):
        q, v = np.ones((B, T, H, 4), "f4"), np.ones((B, T, HV, 3), "f4")
        g = np.zeros((B, T, HV, 4) if family == "kda" else (B, T, HV), "f4")
        A_log, beta = np.zeros(HV, "f4"), np.ones((B, T, HV), "f4")
        h0 = np.ones((B, HV, 4, 3), "f4")
        done = getattr(pylinattn, f"{family}_bwd")(
            q, q, v, g, beta, v, initial_state=h0, d_final_state=h0, gate="softplus", A_log=A_log
        )
        check(done.dq.shape == q.shape and done.dg.shape == g.shape, "shapes of nothing")
        check(not T or not H or not done.dA_log.any(), "a gradient from no tokens")
        check(T or np.array_equal(done.d_initial_state, h0), "no tokens changed the gradient")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_packing_and_threads_do_not_show_in_the_bits(cpu, family, dtype, monkeypatch):
    case = Case(family, (70, 3, 200), 2, 4, 32, 64, dtype, options=(("qk_l2norm", True),))
    inputs = make(case)
    packed = check_packing(cpu, case, inputs)
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("LINATTN_NUM_THREADS", threads)
        for _ in range(3):
            same = backward(cpu, case, inputs).bits() == packed.bits()
            check(same, f"{threads} threads give other bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_stays_in_its_sequence_and_rows_past_the_end_are_left_alone(cpu, family):
    check_nan_stays(cpu, family, 16, "f32")


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_give_the_same_bits(cpu, family, dtype):
    """Transposed heads, gaps, negative strides and V-first states, of inputs and outputs."""
    options = (("gate", "softplus"), ("beta_form", "logits"))
    case = Case(family, (66, 40), 2, 4, 16, 48, dtype, options=options)
    plain = backward(cpu, case).bits()
    states = ("initial_state", "d_final_state", "d_initial_state")
    tokens = ("q", "k", "v", "g", "beta", "d_o", *PER_TOKEN)
    layouts = {
        name: lambda shape: strides_for(shape, [0, 2, 1, *range(3, len(shape))], gap=3)
        for name in tokens
    }
    layouts |= {name: lambda shape: strides_for(shape, [0, 1, 3, 2], gap=5) for name in states}
    other = backward(cpu, case, layouts=layouts)
    check(other.bits() == plain, f"{family}: other strides give other bits")
    turned = dict.fromkeys(("q", "v", "dq", "dv"), lambda shape: [-s for s in strides_for(shape)])
    check(backward(cpu, case, layouts=turned).bits() == plain, "negative strides give other bits")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_expanded_gradients_of_the_outputs(cpu, family, dtype):
    """The d_o of a plain sum: one element seen everywhere, through strides of 0."""
    case = Case(family, (66, 9), 1, 2, 16, 24, dtype)
    inputs = make(case)
    ones = Input(np.full(inputs["d_o"].values.shape, 0.5), dtype)
    plain = backward(cpu, case, inputs | {"d_o": ones})
    expanded = backward(cpu, case, inputs | {"d_o": ones}, layouts={"d_o": [0, 0, 0, 0]})
    check(expanded.bits() == plain.bits(), "strides of 0 give other bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_optional_outputs(cpu, family):
    case = Case(family, (50, 9), 1, 2, 16, 16, "f32", options=(("gate", "softplus"),))
    check_optional_outputs(cpu, case, ("d_initial_state", "dA_log", "ddt_bias"))


@pytest.mark.parametrize("left_out", ["initial_state", "d_final_state"])
@pytest.mark.parametrize("family", FAMILIES)
def test_optional_inputs(cpu, family, left_out):
    initial, final = left_out != "initial_state", left_out != "d_final_state"
    options = (("gate", "softplus"),) if initial else ()
    case = Case(family, (50, 9), 1, 2, 16, 16, "f32", options=options, initial=initial)
    inputs = make(case, final=final)
    check_gradients(case, backward(cpu, case, inputs), inputs)


def test_gradients_are_added_up_over_a_group(cpu):
    """Value heads that share a key head against the same with keys of their own."""
    for family in FAMILIES:
        case = Case(family, (70, 9), 2, 6, 16, 16, "f64")
        inputs = make(case)
        own = dict(inputs)
        for name in ("q", "k"):
            own[name] = Input(np.repeat(inputs[name].values, 3, axis=2), "f64")
        grouped = backward(cpu, case, inputs)
        apart = backward(cpu, Case(family, (70, 9), 6, 6, 16, 16, "f64"), own)
        for name in ("dq", "dk"):
            B, T = grouped[name].shape[:2]
            total = apart[name].reshape(B, T, 2, 3, 16).sum(3)
            check(cases.relative_rms(grouped[name], total) < 1e-12, f"{name} is not the sum")


def test_what_python_allocates(cpu):
    rng = np.random.default_rng(0)
    B, T, H, HV, K, V = 1, 20, 1, 2, 8, 6
    for family in FAMILIES:
        shape = (B, T, HV, K) if family == "kda" else (B, T, HV)
        q, k = (rng.normal(size=(B, T, H, K)).astype("f4") for _ in range(2))
        v, do = (rng.normal(size=(B, T, HV, V)).astype("f4") for _ in range(2))
        g, beta = -np.abs(rng.normal(size=shape)), rng.random((B, T, HV)).astype("f2")
        h0 = rng.normal(size=(2, HV, V, K)).astype("f4").transpose(0, 1, 3, 2)  # V-first
        bwd = getattr(pylinattn, f"{family}_bwd")
        cu = np.array([0, 7, 15], "i4")
        d = bwd(q, k, v, g, beta, do, initial_state=h0, cu_seqlens=cu)
        made = {n: x for n, x in d._asdict().items() if x is not None}
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": h0}
        check(set(made) == {n for n, source in OF.items() if source in given}, f"made {set(made)}")
        for name, x in made.items():
            source = given[OF[name]]
            check(
                x.shape == source.shape and x.dtype == source.dtype, f"{name}: {x.shape} {x.dtype}"
            )
            if name in PER_TOKEN:
                check(not x[:, 15:].any() and x[:, :15].any(), f"{name}: rows past the end")
        check(d.d_initial_state.strides == h0.strides, "d_initial_state is not V-first")
        check(pylinattn.last_path().startswith("cpu/"), pylinattn.last_path())
        plain = bwd(q, k, v, g, beta, do)
        check(plain.d_initial_state is None and plain.dA_log is None, "made without being asked")
        support = pylinattn.supports(op := f"{family}_bwd", q, k, v, g, beta, do)
        check(bool(support), f"{op}: {support}")
        with pytest.raises(ValueError, match="d_o"):
            bwd(q, k, v, g, beta, do[:, :-1])
        with pytest.raises(ValueError, match="saved is required"):
            bwd(q, k, v, g, beta, do, save="states")


def test_a_call_that_fails_writes_nothing(cpu):
    case = Case("gdn", (40, 23), 1, 2, 16, 16, "f32")
    inputs = make(case)
    values = inputs["g"].values.copy()
    values[0, 50, 1] = 1e-3
    call = backward_call(cpu, case, inputs | {"g": Input(values, "f32")}, checked=True)
    with pytest.raises(ValueError, match=r"\bg\b"):
        call()
    call.check_nothing_written()
    inputs["cu_seqlens"] = Input(np.array([0, 40, 64]), "i32")
    call = backward_call(cpu, case, inputs)
    with pytest.raises(ValueError, match="cu_seqlens"):
        call()
    call.check_nothing_written()
    check(op_of(case) == "gdn_bwd" and Backward(backward_call(cpu, case)()).bits(), "a good call")

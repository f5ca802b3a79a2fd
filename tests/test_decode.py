"""Decode against a pool in place, verify with chains and trees, commit, and drift over many steps."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from arrays import decode as decode_words
from arrays import encode, round_to, strides_for
from cases import Case, Input, make
from harness import Call, check, check_outputs, check_states, expect, forward, need_kernel, rows

import pylinattn
from pylinattn import reference

FAMILIES = ["gdn", "kda"]
FULL = (
    ("qk_l2norm", True), ("gate", "bounded"), ("lower_bound", -5.0), ("beta_form", "logits"),
)  # fmt: skip
POOL_ROWS = 11


def half(device):
    return "bf16" if device.kind == "cuda" else "f32"


def kept_dtype(dtype):
    return "f64" if dtype == "f64" else "f32"


def problem(
    device, family, B, T, dtype, state="f32", options=(), HV=4, D=64, seed=0, pool=POOL_ROWS
):
    """Inputs of a decode or verify call: B sequences of T tokens against a pool of asymmetric states."""
    case = Case(
        family,
        (T,) * B,
        2,
        HV,
        D,
        D,
        dtype,
        packed=False,
        initial=False,
        options=options,
        seed=seed,
    )
    need_kernel(device, f"{family}_decode", dtype, D, D)
    inputs = make(case)
    rng = np.random.default_rng([9, seed])
    ramp = 1 + np.arange(D)[:, None] / D + 2 * np.arange(D)[None, :] / D
    inputs["state"] = Input(
        round_to(0.1 * ramp * rng.normal(size=(pool, HV, D, D)) + 0.05, state), state
    )
    return case, inputs


def decode(device, case, inputs, layouts=None, **options):
    out = {"o": (inputs["v"].values.shape, case.dtype)}
    return Call(device, f"{case.family}_decode", inputs, out, case.keywords | options, layouts)()


def verify(device, case, inputs, layouts=None, **options):
    shape = inputs["v"].values.shape
    kept = kept_dtype(case.dtype)
    out = {
        "o": (shape, case.dtype),
        "kept_k": (inputs["k"].values.shape, kept),
        "kept_u": (shape, kept),
        "kept_g": (inputs["g"].values.shape, kept),
    }
    return Call(device, f"{case.family}_verify", inputs, out, case.keywords | options, layouts)()


def commit(device, done, state, accepted, **tables):
    """Folds the kept tokens of a verify call into a pool."""
    dtype = done.placed["kept_k"].buffer.dtype
    inputs = {"state": state, "accepted": rows(accepted)}
    inputs |= {short: Input(done.values(f"kept_{short}"), dtype) for short in "kug"}
    return Call(device, "delta_commit", inputs | tables, {})()


def dense_spans(case):
    return [(b, 0, n) for b, n in enumerate(case.lengths)]


# ---- decode


@pytest.mark.parametrize("options", [(), FULL], ids=["plain", "all_inside"])
@pytest.mark.parametrize("state", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode(device, family, dtype, state, options):
    """One token per sequence at rows of a pool; the other rows keep their bits."""
    if state == "f64" and device.kind == "cuda":
        pytest.skip("fp64 states are for the CPU")
    case, inputs = problem(device, family, 5, 1, dtype, state, options)
    read = (8, 0, 3, 10, 1)
    inputs["read_indices"] = rows(read)
    done = decode(device, case, inputs)
    want = expect(done.op, inputs, case.keywords)
    check_outputs(done.values("o"), want.o, dtype, dense_spans(case))
    accuracy = state if dtype == "f64" or state != "f64" else "f32"  # fp32 sums, fp64 storage
    got, wanted = (x[list(read)] for x in (done.values("state"), want.state))
    check_states(got, wanted, accuracy, done.path, "state")
    others = [r for r in range(POOL_ROWS) if r not in read]
    np.testing.assert_array_equal(done.values("state")[others], inputs["state"].values[others])


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_several_tokens_and_no_tables(device, family, D):
    """T = 3, sequence n at row n; then packed with ragged lengths, one of them empty."""
    case, inputs = problem(device, family, 4, 3, half(device), pool=4, D=D)
    done = decode(device, case, inputs)
    want = expect(done.op, inputs)
    check_outputs(done.values("o"), want.o, case.dtype, dense_spans(case))
    check_states(done.values("state"), want.state, "f32", done.path, "state")

    ragged = Case(family, (1, 0, 3, 2), 2, 4, D, D, case.dtype, initial=False)
    packed = make(ragged) | {"state": inputs["state"]}
    done = decode(device, ragged, packed)
    want = expect(done.op, packed)
    check_outputs(done.values("o"), want.o, case.dtype, ragged.spans)
    check_states(done.values("state"), want.state, "f32", done.path, "state")
    np.testing.assert_array_equal(done.values("state")[1], inputs["state"].values[1])


@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_padding_and_write_rows(device, family, dtype):
    """Indices [3,-1,0,-1]: padded sequences change nothing and put out zeros; write rows may differ from read rows."""
    case, inputs = problem(device, family, 4, 1, half(device))
    for name in ("q", "k", "v"):
        inputs[name].values[[1, 3]] = np.nan
    inputs["read_indices"] = rows((3, -1, 0, -1), dtype=dtype)
    done = decode(device, case, inputs)
    o, state = done.values("o"), done.values("state")
    check(not o[[1, 3]].any(), "outputs of padding are not zero")
    others = [r for r in range(POOL_ROWS) if r not in (3, 0)]
    np.testing.assert_array_equal(state[others], inputs["state"].values[others])

    inputs["write_indices"] = rows((7, 2, -1, 4), dtype=dtype)
    moved = decode(device, case, inputs)
    np.testing.assert_array_equal(moved.values("o"), o)
    np.testing.assert_array_equal(moved.values("state")[7], state[3])
    others = [r for r in range(POOL_ROWS) if r != 7]
    np.testing.assert_array_equal(moved.values("state")[others], inputs["state"].values[others])


STATE_LAYOUTS = {
    "v_first": lambda s: strides_for(s, (0, 1, 3, 2)),
    "rows_padded": lambda s: strides_for(s, axis_gap={1: 160}),
    "v_first_rows_padded": lambda s: strides_for(s, (0, 1, 3, 2), axis_gap={1: 160}),
    "heads_outside": lambda s: strides_for(s, (1, 0, 2, 3)),
}


@pytest.mark.parametrize("layout", STATE_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pool_layouts(device, family, layout):
    """A pool in any layout is read and written in place with the same bits; indices are a column of a table."""
    case, inputs = problem(device, family, 3, 2, "bf16", options=FULL)
    inputs["read_indices"] = rows((5, 2, 9))
    plain = decode(device, case, inputs)
    other = decode(device, case, inputs, {"state": STATE_LAYOUTS[layout], "read_indices": [4]})
    check(other.bits("o") == plain.bits("o"), "other outputs")
    check(other.bits("state") == plain.bits("state"), "other states")
    checked = verify(device, case, inputs)
    twice = verify(device, case, inputs, {"state": STATE_LAYOUTS[layout]})
    check(
        all(checked.bits(n) == twice.bits(n) for n in ("o", "kept_k", "kept_u", "kept_g")),
        "verify differs",
    )


@pytest.mark.parametrize("T", [1, 5, 64, 65])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_decode_is_a_longer_prefill(device, family, T):
    lengths = (T + 1,)
    case = Case(family, lengths, 2, 4, 64, 64, half(device), packed=False, options=FULL)
    inputs = make(case)
    whole = forward(device, case)
    token = {
        n: Input(inputs[n].values[:, :T], inputs[n].dtype) for n in ("q", "k", "v", "g", "beta")
    }
    rest = {n: inputs[n] for n in ("A_log", "dt_bias")}
    before = forward(device, Case(family, (T,), 2, 4, 64, 64, case.dtype, packed=False, options=FULL),
                     token | rest | {"initial_state": inputs["initial_state"]})  # fmt: skip
    last = {n: Input(inputs[n].values[:, T:], inputs[n].dtype) for n in token}
    one = Case(family, (1,), 2, 4, 64, 64, case.dtype, packed=False, options=FULL)
    done = decode(device, one, last | rest | {"state": Input(before.final_state, "f32")})
    check_outputs(done.values("o"), whole.o[:, T:], case.dtype, [(0, 0, 1)], path=whole.path)
    check_states(done.values("state"), whole.final_state, "f32", whole.path)


def test_empty_decode(device):
    for family in FAMILIES:
        case, inputs = problem(device, family, 2, 1, half(device))
        none = {k: Input(v.values[:0], v.dtype) for k, v in inputs.items() if k != "state"}
        none |= {"state": inputs["state"], "read_indices": Input(np.zeros(0), "i32")}
        done = decode(device, case, none)
        check(done.placed["state"].untouched(), "a decode of no sequences wrote the pool")


# ---- verify and commit


def trees(T):
    chain = np.arange(T) - 1
    star = np.full(T, -1)
    binary = (np.arange(T) - 1) // 2
    binary[0] = -1
    two_roots = np.array([-1, -1, *(np.arange(2, T) - 2)])
    return np.stack([chain, star, binary, two_roots])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("options", [(), FULL], ids=["plain", "all_inside"])
@pytest.mark.parametrize("T", [2, 7, 16])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_verify(device, family, dtype, T, options, tree):
    """Outputs and what is kept, against the loop; the pool is not touched."""
    state = "f64" if dtype == "f64" else "f32"
    case, inputs = problem(device, family, 4, T, dtype, state, options)
    inputs["read_indices"] = rows((6, 1, -1, 10))
    if tree:
        inputs["parents"] = rows(trees(T), dtype="i64")
    done = verify(device, case, inputs)
    check(done.placed["state"].untouched(), "verify wrote the pool")
    want = expect(done.op, inputs, case.keywords)
    live = [0, 1, 3]
    check_outputs(done.values("o"), want.o, dtype, [dense_spans(case)[n] for n in live])
    check(not done.values("o")[2].any(), "outputs of padding are not zero")
    for name in ("kept_k", "kept_u", "kept_g"):
        check(not done.values(name)[2].any(), f"{name} of padding is not zero")
    for name in ("kept_k", "kept_u"):
        check_outputs(
            done.values(name)[live],
            getattr(want, name)[live],
            kept_dtype(dtype),
            dense_spans(case)[:3],
            name,
        )
    accuracy = dict(rtol=1e-10, atol=1e-12) if dtype == "f64" else dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(done.values("kept_g")[live], want.kept_g[live], **accuracy)


@pytest.mark.parametrize("options", [(), FULL], ids=["plain", "all_inside"])
@pytest.mark.parametrize("T", [1, 4, 8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_for_its_outputs_alone(device, family, T, options):
    """keep=False: nothing else comes back; on a CPU the same bits, on a GPU as accurate (test_gpu_verify.py)."""
    case, inputs = problem(device, family, 4, T, "bf16", "f32", options)
    inputs["read_indices"] = rows((6, 1, -1, 10))
    out = {"o": (inputs["v"].values.shape, "bf16")}
    keywords = case.keywords | {"keep": False}
    done = Call(device, f"{family}_verify", inputs, out, keywords)()
    check(done.placed["state"].untouched(), "verify wrote the pool")
    check(done.returned[1:] == (None, None, None), f"kept: {done.returned[1:]}")
    want = expect(done.op, inputs, case.keywords)
    check_outputs(done.values("o"), want.o, "bf16", [dense_spans(case)[n] for n in (0, 1, 3)])
    check(not done.values("o")[2].any(), "outputs of padding are not zero")
    if device == "cpu":
        check(done.bits("o") == verify(device, case, inputs).bits("o"), "other bits than with keep")
    kept = {"kept_u": (inputs["v"].values.shape, "f32")}
    with pytest.raises(ValueError, match=r"kept_u is given, and keep is False"):
        Call(device, f"{family}_verify", inputs, out | kept, keywords)()


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_writes_every_token_where_told(device, family):
    """write_indices [N,T]: the state after each token, rows that nobody reads; -1 writes nothing."""
    case, inputs = problem(device, family, 2, 3, half(device))
    inputs["read_indices"] = rows((4, 9))
    table = np.array([[0, -1, 1], [-1, 2, 7]])
    inputs["write_indices"] = rows(table)
    inputs["parents"] = rows([[-1, 0, 0], [-1, 0, 1]])
    done = verify(device, case, inputs)
    want = expect(done.op, inputs)
    written = [r for r in table.flat if r >= 0]
    check_states(done.values("state")[written], want.state[written], "f32", done.path, "state")
    others = [r for r in range(POOL_ROWS) if r not in written]
    np.testing.assert_array_equal(done.values("state")[others], inputs["state"].values[others])


@pytest.mark.parametrize("state", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_and_commit_equal_decode_in_bits(device, family, state):
    """Accepting n tokens leaves the pool as n decode steps in one call do. n = 0, some, T, and beyond, which is clamped."""
    B, T = 5, 6
    case, inputs = problem(device, family, B, T, half(device), state, FULL)
    read = (6, 1, 0, 10, 3)
    inputs["read_indices"] = rows(read)
    done = verify(device, case, inputs)
    accepted = (0, 4, 6, 7, -3)
    folded = commit(device, done, inputs["state"], accepted, read_indices=inputs["read_indices"])
    after = folded.values("state")
    want = inputs["state"].values.copy()
    for n, count in enumerate(np.clip(accepted, 0, T)):
        if count:
            few = {
                k: v if k in ("state", "A_log", "dt_bias") else Input(v.values[[n]], v.dtype)
                for k, v in inputs.items()
            }
            few = {
                k: Input(v.values[:, :count], v.dtype) if k in ("q", "k", "v", "g", "beta") else v
                for k, v in few.items()
            }
            steps = decode(device, case, few)
            want[read[n]] = steps.values("state")[read[n]]
            check(
                steps.values("o").tobytes() == done.values("o")[[n], :count].tobytes(),
                "verify and decode put out other bits",
            )
    np.testing.assert_array_equal(after, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_commit_a_path_of_a_tree(device, family):
    """The accepted tokens of a tree, root to leaf, and rows written elsewhere; against the loop and against a chain."""
    T = 7
    case, inputs = problem(device, family, 3, T, half(device), options=FULL)
    inputs["read_indices"] = rows((6, 1, 9))
    inputs["parents"] = rows(np.tile([-1, 0, 0, 1, 1, 2, 2], (3, 1)))
    done = verify(device, case, inputs)
    path = np.array([[0, 2, 5, 0, 0, 0, 0], [0, 1, 4, 9, 9, 9, 9], [0, 2, 6, -1, -1, -1, -1]])
    tables = {
        "read_indices": inputs["read_indices"],
        "write_indices": rows((2, 1, -1)),
        "path": rows(path, dtype="i64"),
    }
    after = commit(device, done, inputs["state"], (3, 2, 3), **tables).values("state")
    for n, (row, chosen) in enumerate(((2, path[0, :3]), (1, path[1, :2]))):
        chain = {
            k: Input(v.values[[n]][:, chosen], v.dtype) if k in ("q", "k", "v", "g", "beta") else v
            for k, v in inputs.items()
        }
        chain["read_indices"] = rows([(6, 1)[n]])
        chain.pop("parents")
        want = decode(device, case, chain).values("state")[(6, 1)[n]]
        np.testing.assert_array_equal(after[row], want)
    others = [r for r in range(POOL_ROWS) if r not in (2, 1)]
    np.testing.assert_array_equal(after[others], inputs["state"].values[others])


def test_commit_keeps_a_full_reset(device):
    """g = -inf inside the accepted tokens: kept per token, so nothing of the old state is left, and nothing is NaN."""
    for family in FAMILIES:
        case, inputs = problem(device, family, 2, 5, half(device))
        inputs["g"].values[:, 2] = -np.inf
        inputs["read_indices"] = rows((0, 5))
        done = verify(device, case, inputs)
        folded = commit(device, done, inputs["state"], (5, 2), read_indices=inputs["read_indices"])
        want = expect("delta_commit", folded_inputs(done, inputs, (5, 2)))
        check(np.isfinite(folded.values("state")).all(), "a reset left NaN")
        check_states(folded.values("state")[[0, 5]], want[[0, 5]], "f32", done.path, "state")


def folded_inputs(done, inputs, accepted):
    kept = {short: Input(done.values(f"kept_{short}"), "f32") for short in "kug"}
    return {
        "state": inputs["state"],
        **kept,
        "accepted": rows(accepted),
        "read_indices": inputs["read_indices"],
    }


# ---- drift


def drift(device, family, state, steps, dtype=None):
    """Relative RMS distance of a pool from the float64 loop after many decode calls, every call rounding the pool once."""
    dtype = dtype or half(device)
    case, first = problem(device, family, 2, 1, dtype, state, FULL, HV=2, pool=2)
    exact, words = first["state"].values, first["state"].values
    for step in range(steps):
        _, inputs = problem(device, family, 2, 1, dtype, state, FULL, HV=2, pool=2, seed=step)
        inputs["A_log"], inputs["dt_bias"] = first["A_log"], first["dt_bias"]
        arrays = {k: v.values for k, v in inputs.items() if k != "state"}
        positional = [arrays.pop(k) for k in ("q", "k", "v", "g", "beta")]
        name = f"{family}_decode"
        exact = getattr(reference, name)(*positional, exact, **arrays, **case.keywords).state
        done = decode(device, case, inputs | {"state": Input(words, state)})
        words = decode_words(encode(done.values("state"), state), state)
    return np.sqrt(np.mean((words - exact) ** 2) / np.mean(exact**2))


DRIFT_BF16 = 2e-2  # a bf16 pool is rounded once per call, and forgets at the rate of the gates


@pytest.mark.parametrize("steps", [100, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("state", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drift(device, family, state, steps, record_property):
    error = drift(device, family, state, steps)
    record_property("drift", f"{family} {state} pool, {steps} steps: {error:.2e}")
    limit = DRIFT_BF16 if state == "bf16" else cases.state_tolerance(state, pylinattn.last_path())
    check(
        error <= limit,
        f"a {state} pool is {error:.2e} away after {steps} steps, allowed {limit:.0e}",
    )

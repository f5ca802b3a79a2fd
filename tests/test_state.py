"""States: pools and their indices, checkpoints, layouts; splitting, packing, causality and tails; empty and padded input."""

from __future__ import annotations

import numpy as np
import pytest
import raw
from arrays import round_to, strides_for
from cases import Case, Input, is_token_loop, make, unit
from harness import (
    Forward,
    check,
    check_forward,
    check_outputs,
    check_states,
    expect,
    forward,
    forward_call,
    rows,
)

import pylinattn

FAMILIES = ["gdn", "kda"]


def half(device):
    """bf16 where only half precision has kernels, else fp32, where mistakes show most."""
    return "bf16" if device.kind == "cuda" else "f32"


def cut(inputs, first, end):
    """The tokens [first,end) of packed or dense inputs, without lengths and states."""
    kept = {}
    for name, given in inputs.items():
        if name in ("q", "k", "v", "g", "beta"):
            kept[name] = Input(given.values[:, first:end], given.dtype)
        elif name in ("A_log", "dt_bias"):
            kept[name] = given
    return kept


# ---- initial, final, packed


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("final", [True, False], ids=["final", "no_final"])
@pytest.mark.parametrize("initial", [True, False], ids=["initial", "no_initial"])
@pytest.mark.parametrize("family", FAMILIES)
def test_initial_final_packed(device, family, initial, final, packed):
    case = Case(family, (70, 70), 1, 2, 64, 64, half(device), packed=packed, initial=initial)
    call = forward_call(device, case, outputs={} if final else {"final_state": None})
    first = None
    for _ in range(100):
        done = Forward(call())
        first = first or done.bits()
        check(done.bits() == first, "a repeated call gave other bits")
    if final:
        check_forward(case, done)
    else:
        check_outputs(done.o, expect(case.op, make(case)).o, case.dtype, case.spans)


# ---- pools


POOL_ROWS, READ, WRITE = 9, (7, 0, 3), (2, 0, 8)


def pool_inputs(case, read, index_dtype="i32"):
    inputs = make(case)
    rng = np.random.default_rng(5)
    values = rng.normal(size=(POOL_ROWS, case.HV, case.K, case.V)) * 0.2
    inputs["initial_state"] = Input(round_to(values, "f32"), "f32")
    inputs["read_indices"] = rows(read, dtype=index_dtype)
    return inputs


@pytest.mark.parametrize("index_dtype", ["i32", "i64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pool_in_place(device, family, index_dtype):
    """Rows in, the same rows out; every other row keeps its bits, 0 included. The pool has a padded first stride."""
    case = Case(family, (40, 1, 65), 1, 2, 64, 64, half(device))
    inputs = pool_inputs(case, READ, index_dtype)
    padded = {"initial_state": lambda shape: strides_for(shape, axis_gap={1: 96})}
    done = forward(device, case, inputs, {"final_state": "initial_state"}, padded)
    values = done.final_state
    others = [r for r in range(POOL_ROWS) if r not in READ]
    np.testing.assert_array_equal(values[others], inputs["initial_state"].values[others])
    want = expect(case.op, inputs, final_state=None, write_indices=None)
    check_outputs(done.o, want.o, case.dtype, case.spans)
    check_states(values[list(READ)], want.final_state, "f32", done.path)


@pytest.mark.parametrize("family", FAMILIES)
def test_pool_written_elsewhere(device, family):
    """write_indices into another pool with rows of NaN; -1 is computed but not written."""
    case = Case(family, (40, 1, 65), 1, 2, 64, 64, half(device))
    for write in (WRITE, (-1, 0, 8), (-1, -1, -1)):
        inputs = pool_inputs(case, READ) | {"write_indices": rows(write, dtype="i64")}
        done = forward(device, case, inputs, {"final_state": ((POOL_ROWS, 2, 64, 64), "f32")})
        want = expect(case.op, {k: v for k, v in inputs.items() if k != "write_indices"})
        check_outputs(done.o, want.o, case.dtype, case.spans)
        for r in range(POOL_ROWS):
            if r in write:
                n = write.index(r)
                check_states(done.final_state[[r]], want.final_state[[n]], "f32", done.path)
            else:
                check(
                    np.isnan(done.final_state[r]).all(),
                    f"row {r} was written, write_indices are {write}",
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_rows(device, family):
    """read_indices [3,-1,0,-1]: padding reads nothing, writes nothing and gives zero outputs; canaries elsewhere."""
    case = Case(family, (30, 20, 66, 5), 1, 2, 64, 64, half(device))
    inputs = pool_inputs(case, (3, -1, 0, -1))
    for name in ("q", "k", "v"):  # what padding holds does not matter
        inputs[name].values[0, 30:50] = np.nan
    inputs = {k: Input(v.values.copy(), v.dtype) for k, v in inputs.items()}
    done = forward(device, case, inputs, {"final_state": "initial_state"})
    clean = dict(
        inputs, **{n: Input(np.nan_to_num(inputs[n].values), inputs[n].dtype) for n in "qkv"}
    )
    want = expect(case.op, clean)
    check(
        not done.o[0, 30:50].any() and not done.o[0, 116:].any(), "outputs of padding are not zero"
    )
    live = [case.spans[n] for n in (0, 2)]
    check_outputs(done.o, want.o, case.dtype, live)
    check_states(done.final_state[[3, 0]], want.final_state[[0, 2]], "f32", done.path)
    others = [r for r in range(POOL_ROWS) if r not in (3, 0)]
    np.testing.assert_array_equal(done.final_state[others], inputs["initial_state"].values[others])


def test_indices_as_a_column_of_a_table(device):
    case = Case("gdn", (40, 1, 65), 1, 2, 64, 64, half(device))
    inputs = pool_inputs(case, READ)
    plain = forward(device, case, inputs)
    column = {"read_indices": [5], "cu_seqlens": [3]}
    check(
        forward(device, case, inputs, layouts=column).bits() == plain.bits(),
        "strided indices give other bits",
    )


# ---- layouts


def reversed_tokens(shape):
    strides = strides_for(shape)
    strides[1] = -strides[1]
    return strides


LAYOUTS = {
    "fused": {n: (lambda s: strides_for(s, axis_gap={2: 96})) for n in ("q", "k", "v", "o")},
    "heads_first": {n: (lambda s: strides_for(s, (0, 2, 1, 3))) for n in ("q", "k", "v", "o")},
    "padded_rows": {n: (lambda s: strides_for(s, gap=8)) for n in ("q", "k", "v", "o")},
    "one_of_each": {
        "q": lambda s: strides_for(s, (0, 2, 1, 3)),
        "v": lambda s: strides_for(s, axis_gap={2: 16}),
        "o": lambda s: strides_for(s, gap=16),
    },
    "interleaved_gates": {n: (lambda s: strides_for(s, step=2)) for n in ("g", "beta")},
    "gates_heads_first": {
        n: (lambda s: strides_for(s, (0, 2, 1, *range(3, len(s))))) for n in ("g", "beta")
    },
    "v_first": {
        n: (lambda s: strides_for(s, (0, 1, 3, 2))) for n in ("initial_state", "final_state")
    },
    "v_first_in": {"initial_state": lambda s: strides_for(s, (0, 1, 3, 2))},
    "v_first_out": {"final_state": lambda s: strides_for(s, (0, 1, 3, 2))},
    "heads_outside": {
        n: (lambda s: strides_for(s, (1, 0, 2, 3))) for n in ("initial_state", "final_state")
    },
    "state_padded": {
        n: (lambda s: strides_for(s, axis_gap={1: 32})) for n in ("initial_state", "final_state")
    },
}
CPU_LAYOUTS = {
    "every_other": {n: (lambda s: strides_for(s, step=2)) for n in ("q", "k", "v", "o")},
    "reversed": dict.fromkeys(("q", "k", "v", "g", "beta", "o"), reversed_tokens),
    "odd_padding": {
        n: (lambda s: strides_for(s, gap=3)) for n in ("q", "k", "v", "o", "final_state")
    },
    "state_every_other": {
        n: (lambda s: strides_for(s, step=2)) for n in ("initial_state", "final_state")
    },
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *CPU_LAYOUTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_give_the_same_bits(device, family, layout):
    case = Case(family, (40, 65), 2, 4, 64, 64, "bf16", gate_dtype="bf16")
    plain = forward(device, case)
    call = forward_call(device, case, layouts={**LAYOUTS, **CPU_LAYOUTS}[layout])
    if device.kind == "cuda" and layout in CPU_LAYOUTS:
        with pytest.raises(ValueError, match="contiguous"):
            call()
        call.check_nothing_written()
    else:
        check(Forward(call()).bits() == plain.bits(), f"layout {layout} gives other bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_broadcast_inputs(device, family):
    """Stride 0 is legal for g and beta: one gate for all tokens."""
    case = Case(family, (65,), 1, 2, 64, 64, half(device))
    inputs = make(case)
    for name in ("g", "beta"):
        values = np.broadcast_to(inputs[name].values[:, :1], inputs[name].values.shape)
        inputs[name] = Input(values, inputs[name].dtype)
    layouts = {
        n: [0 if axis == 1 else s for axis, s in enumerate(strides_for(inputs[n].values.shape))]
        for n in ("g", "beta")
    }
    check(
        forward(device, case, inputs, layouts=layouts).bits()
        == forward(device, case, inputs).bits(),
        "broadcast gates give other bits",
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)], ids=["k_first", "v_first"])
def test_one_hot_states(device, family, order):
    """A state e_i f_j^T read by q = e_i comes out as f_j, in either layout: K and V are not mixed up."""
    case = Case(family, (1,) * 3, 2, 2, 64, 64, half(device))
    inputs = {k: Input(np.zeros_like(v.values), v.dtype) for k, v in make(case).items()}
    inputs["cu_seqlens"] = rows(0, 1, 2, 3)
    places = [(3, 60), (0, 1), (63, 17)]
    for n, (i, j) in enumerate(places):
        inputs["initial_state"].values[n, :, i, j] = n + 1.0
        inputs["q"].values[0, n, :, i] = 1.0
    done = forward(
        device, case, inputs, layouts={"initial_state": lambda s: strides_for(s, order)}, scale=1.0
    )
    want = np.zeros_like(done.o)
    for n, (_, j) in enumerate(places):
        want[0, n, :, j] = n + 1.0
    np.testing.assert_array_equal(done.o, want)
    np.testing.assert_array_equal(done.final_state, inputs["initial_state"].values)


# ---- split, pack, causality


@pytest.mark.parametrize("family", FAMILIES)
def test_split_anywhere(device, family):
    """[0,T) in one call equals [0,s) then [s,T) through the state."""
    T = 131
    case = Case(family, (T,), 1, 2, 64, 64, half(device), packed=False)
    inputs = make(case)
    whole = forward(device, case)
    for s in (
        range(1, T)
        if device.kind == "cuda"
        else (*range(1, 20), 32, 48, *range(60, 68), 96, 127, 128, 129, 130)
    ):
        head = Case(family, (s,), 1, 2, 64, 64, case.dtype, packed=False)
        tail = Case(family, (T - s,), 1, 2, 64, 64, case.dtype, packed=False)
        first = forward(
            device, head, cut(inputs, 0, s) | {"initial_state": inputs["initial_state"]}
        )
        state = Input(first.final_state, "f32")
        second = forward(device, tail, cut(inputs, s, T) | {"initial_state": state})
        joined = np.concatenate([first.o, second.o], 1)
        check_outputs(joined, whole.o, case.dtype, [(0, 0, s), (0, s, T)], f"o split at {s}")
        check_states(
            second.final_state, whole.final_state, "f32", whole.path, f"state split at {s}"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone_in_bits(device, family):
    """Each sequence alone equals itself packed, at splits = 1; short ones first, in the middle and last."""
    lengths = (1, 130, 2, 64, 1, 63, 65, 2)
    case = Case(family, lengths, 2, 4, 64, 64, half(device))
    inputs = make(case)
    packed = forward_call(device, case, splits=1)()
    o, state = packed.placed["o"].buffer, packed.placed["final_state"].buffer
    o, state = o.host(packed.placed["o"].fetch()), state.host(packed.placed["final_state"].fetch())
    for n, (_, a, b) in enumerate(case.spans):
        alone = Case(family, (b - a,), 2, 4, 64, 64, case.dtype)
        own = cut(inputs, a, b) | {"cu_seqlens": rows(0, b - a)}
        own["initial_state"] = Input(inputs["initial_state"].values[[n]], case.state)
        got = Forward(forward_call(device, alone, own, splits=1)())
        same = got.bits() == (o[:, a:b].tobytes(), state[[n]].tobytes())
        check(same, f"sequence {n} of {lengths} depends on what it is packed with")


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_in_bits(device, family):
    case = Case(family, (131,), 1, 2, 64, 64, half(device))
    inputs = make(case)
    before = forward_call(device, case)()
    was = before.placed["o"].buffer.host(before.placed["o"].fetch()).copy()
    # A product of matrices over a chunk makes NaN of 0 x NaN, and keys longer than one may overflow in it: what is in range
    # leaves earlier tokens alone, and NaN earlier chunks.
    chunk = 1 if is_token_loop(before.path) else 64
    rng = np.random.default_rng(8)
    for t in (0, 1, 15, 16, 62, 63, 64, 100, 129):
        other = dict(inputs)
        for name in ("q", "k", "v", "beta"):
            values = inputs[name].values.copy()
            values[:, t + 1 :] = rng.uniform(size=values[:, t + 1 :].shape)
            if name == "k" and chunk > 1:
                values[:, t + 1 :] = unit(values[:, t + 1 :])
            if name == "v":
                values[:, (t // chunk + 1) * chunk :] = np.nan
            other[name] = Input(values, inputs[name].dtype)
        after = forward_call(device, case, other)()
        now = after.placed["o"].buffer.host(after.placed["o"].fetch())
        check(
            now[:, : t + 1].tobytes() == was[:, : t + 1].tobytes(),
            f"outputs up to {t} depend on tokens after it",
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_nan_stays_in_its_sequence_and_past_the_end(device, family):
    """NaN in one packed sequence, and in rows past cu_seqlens[-1]: all other rows keep their bits, the rows past the end
    keep what the caller's buffer held."""
    lengths, spare = (40, 64, 65, 3), 21
    case = Case(family, lengths, 1, 2, 64, 64, half(device))
    inputs = make(case, extra_tokens=spare)
    clean = forward_call(device, case, inputs)()
    dirty = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        values = inputs[name].values.copy()
        values[:, 40:104] = np.nan
        values[:, sum(lengths) :] = np.nan
        dirty[name] = Input(values, inputs[name].dtype)
    state = inputs["initial_state"].values.copy()
    state[1] = np.nan
    dirty["initial_state"] = Input(state, case.state)
    spoiled = forward_call(device, case, dirty)()
    for name, keep in (("o", [*range(40), *range(104, sum(lengths))]), ("final_state", [0, 2, 3])):
        was, now = (c.placed[name].buffer.host(c.placed[name].fetch()) for c in (clean, spoiled))
        was, now = (x[:, keep] if name == "o" else x[keep] for x in (was, now))
        check(was.tobytes() == now.tobytes(), f"NaN of one sequence reached {name} of another")
    check(
        np.isnan(spoiled.values("o")[:, sum(lengths) :]).all(),
        "rows past cu_seqlens[-1] were written",
    )
    check_outputs(clean.values("o"), expect(case.op, inputs).o, case.dtype, case.spans)


# ---- checkpoints


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("every", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints(device, family, every, packed):
    lengths = (64, 5, 200, 63, 128) if packed else (192, 192)
    options = (("checkpoint_every", every),)
    case = Case(family, lengths, 1, 2, 64, 64, half(device), packed=packed, options=options)
    done = forward(device, case)
    check_forward(case, done)
    if every == 64 and packed:
        last = done.checkpoints[0], done.final_state[0]  # a sequence of exactly 64 tokens
        np.testing.assert_array_equal(*last)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_into_a_pool(device, family, dtype):
    """Rows through a table, -1 skipped; the pool is a slice of a larger buffer, V-first; other rows stay NaN."""
    case = Case(
        family, (130, 64, 200), 1, 2, 64, 64, half(device), options=(("checkpoint_every", 64),)
    )
    table = np.array([[4, 1, -1], [-1, -1, -1], [0, -1, 6]])
    inputs = make(case) | {"checkpoint_indices": rows(table, dtype="i64")}
    layout = {"checkpoints": lambda s: strides_for(s, (0, 1, 3, 2), axis_gap={1: 64})}
    done = forward(device, case, inputs, {"checkpoints": ((8, 2, 64, 64), dtype)}, layout)
    want = expect(case.op, inputs, {"checkpoint_every": 64}, checkpoints=np.zeros((8, 2, 64, 64)))
    written = [4, 1, 0, 6]
    check_states(done.checkpoints[written], want.checkpoints[written], dtype, done.path)
    check(
        np.isnan(done.checkpoints[[2, 3, 5, 7]]).all(),
        "a checkpoint row that no index names was written",
    )


@pytest.mark.parametrize("first", ["K", "V"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_checkpoints_that_no_sequence_has(device, family, D, dtype, first):
    """Zero where the caller asks for it (zero_tail = 2, as for arrays of ours), and nothing else is: rows of o past the end stay."""
    sizes = raw.SIZES | dict(B=1, T=200, N=3, H=2, HV=2, K=D, V=D, P=3, F=3, C=6)
    leave = ("checkpoint_indices", "read_indices", "write_indices", "workspace")
    made = raw.RawCall(f"{family}_fwd", device, leave, sizes, q=half(device), state=dtype)
    shape = [6, 2, D, D]
    orders = {"K": (0, 1, 2, 3), "V": (0, 1, 3, 2)}
    strides = strides_for(shape, orders[first], axis_gap={1: 64})
    made.give("checkpoints", shape, dtype, strides=strides)
    for name, value in ("q", 0.05), ("k", 0.05), ("beta", 0.5):  # in range
        given = made.placed[name].buffer
        made.give(name, given.shape, given.dtype, values=np.full(given.shape, value))
    made.give("cu_seqlens", [4], "i32", values=np.array([0, 100, 100, 170]))
    made.args.checkpoint_every, made.args.zero_tail = 64, 2
    status, bytes_needed = made.workspace_bytes()
    assert status == "ok"
    if bytes_needed:
        made.give("workspace", [bytes_needed], "u8")
    assert made() == ("ok", "")
    checkpoints = made.placed["checkpoints"]
    values = checkpoints.values()
    assert np.isfinite(values[:2]).all()
    assert values[:2].any(axis=(1, 2, 3)).all()
    assert (values[2:] == 0).all()
    assert checkpoints.surroundings_untouched()
    assert np.isnan(made.placed["o"].values()[:, 170:]).all()


@pytest.mark.parametrize("ends", [[0], [0, 100, 100, 170]], ids=["no_sequence", "three"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_ours_hold_nothing_of_before(family, ends, monkeypatch):
    """Where outputs are given, too, so that nothing else has the library run; `empty` gives what memory holds."""
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *a, **k: fill_nan(empty(*a, **k)))
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 200, 2, 16)).astype("f4") / 4 for _ in range(3))
    g = -rng.random((1, 200, 2, *([16] if family == "kda" else [])), dtype="f4")
    done = getattr(pylinattn, f"{family}_fwd")(
        q, k, v, g, np.ones((1, 200, 2), "f4"), o=np.zeros_like(v), checkpoint_every=64,
        cu_seqlens=np.array(ends, "i4"),
    )  # fmt: skip
    written = sum(length // 64 for length in np.diff(ends))
    assert done.checkpoints[:written].any(axis=(1, 2, 3)).all()
    assert (done.checkpoints[written:] == 0).all()


def fill_nan(x):
    if x.dtype.kind == "f":
        x.fill(np.nan)
    return x


def test_a_narrow_checkpoint_table(device):
    """Checkpoints beyond the columns of the table are dropped, and nothing past a row of it is read."""
    case = Case("gdn", (200, 50), 1, 2, 64, 64, half(device), options=(("checkpoint_every", 64),))
    inputs = make(case) | {"checkpoint_indices": rows([[1], [3]])}
    done = forward(device, case, inputs, {"checkpoints": ((5, 2, 64, 64), "f32")})
    want = expect(case.op, make(case), {"checkpoint_every": 64}).checkpoints
    check_states(done.checkpoints[[1]], want[[0]], "f32", done.path, "checkpoints")
    check(
        np.isnan(done.checkpoints[[0, 2, 3, 4]]).all(), "a row that no checkpoint has was written"
    )


# ---- empty


EMPTY = {
    "between": (0, 64, 0, 0, 66),
    "one": (0,),
    "four": (0, 0, 0, 0),
    "ends": (0, 3, 0),
}


@pytest.mark.parametrize("lengths", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("family", FAMILIES)
def test_empty_sequences(device, family, lengths):
    """An empty sequence hands its initial state on."""
    case = Case(family, lengths, 1, 2, 64, 64, half(device))
    done = forward(device, case)
    check_forward(case, done)
    for n, length in enumerate(lengths):
        if length == 0:
            np.testing.assert_array_equal(
                done.final_state[n], make(case)["initial_state"].values[n]
            )
    bare = Case(family, lengths, 1, 2, 64, 64, half(device), initial=False)
    check_forward(bare, forward(device, bare))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [0, 2], ids=["B0", "T0"])
def test_empty_batch(device, family, batch):
    """No sequences, or sequences of no tokens, dense."""
    T = 5 if batch == 0 else 0
    case = Case(family, (T,) * max(batch, 1), 1, 2, 64, 64, half(device), packed=False)
    inputs = make(case)
    if batch == 0:
        inputs = {k: Input(v.values[:0], v.dtype) for k, v in inputs.items()}
    done = forward(device, case, inputs, {"final_state": ((batch, 2, 64, 64), "f32")})
    np.testing.assert_array_equal(done.final_state, inputs["initial_state"].values)


def test_no_packed_sequences(device):
    """cu_seqlens of one entry: N = 0."""
    case = Case("gdn", (), 1, 2, 64, 64, half(device))
    done = forward(device, case, make(case, extra_tokens=3))
    check(np.isnan(done.o).all(), "rows that belong to no sequence were written")


def test_empty_calls_do_not_hang(watchdog):
    watchdog(
        "import arrays, test_state as t\n"
        "for lengths in t.EMPTY.values():\n"
        "    for family in t.FAMILIES:\n"
        "        t.forward(arrays.CPU, t.Case(family, lengths, 1, 2, 64, 64, 'f32'))\n"
    )

"""The chunked GDN forward: each way a call is cut over the card, hard keys, and both paths."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from arrays import round_to, strides_for
from cases import Case, Input, make, unit
from gpu_tools import (
    CHUNKED,
    CUDA,
    FORWARD_OPTIONS,
    V_FIRST,
    capture,
    check_chunked,
    outputs_like,
    run,
    same_bits,
    tensors,
    torch,
    variant,
)
from harness import Forward, check, forward, forward_call, rows

import pylinattn

pytestmark = pytest.mark.gpu
MIXED = (16, 65, 0, 64, 140, 23, 80)
# What one CTA gets: all columns of V, half of them, half of them of a segment, or K = V = 64.
REGIMES = {
    "wide": Case("gdn", MIXED * 6, 1, 2, 128, 128, "bf16"),
    "narrow": Case("gdn", MIXED, 1, 2, 128, 128, "bf16"),
    "cut": Case("gdn", (3500, 3, 0, 2900), 1, 2, 128, 128, "bf16"),
    "d64": Case("gdn", MIXED * 3, 1, 2, 64, 64, "bf16"),
    "cut_d64": Case("gdn", (3500,), 1, 2, 64, 64, "bf16"),
}
regimes = pytest.mark.parametrize("regime", REGIMES)


# ---- every regime with every option


@pytest.mark.parametrize("options", FORWARD_OPTIONS)
@regimes
def test_options(gpu, regime, options):
    keywords, changes = FORWARD_OPTIONS[options]
    case = variant(REGIMES[regime], options=keywords, **changes)
    check_chunked(case, forward(gpu, case, layouts=V_FIRST if options == "l2norm" else None))


@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
@pytest.mark.parametrize(("H", "HV"), [(3, 3), (2, 4), (1, 3), (1, 4), (2, 16)])
def test_heads(gpu, H, HV, dense):
    case = Case("gdn", (100,) * 3, H, HV, 128, 128, "bf16", packed=not dense)
    check_chunked(case, forward(gpu, case))


@pytest.mark.parametrize("D", [64, 128])
def test_every_tail(gpu, D):
    lengths = (*range(1, 66), *range(127, 131))
    case = Case("gdn", lengths, 1, 1, D, D, "bf16", options=(("qk_l2norm", True),))
    check_chunked(case, forward(gpu, case))


GATES = {"minus_1000": -1000.0, "minus_inf": -np.inf, "minus_20": -20.0, "saturated": -5.0}


@pytest.mark.parametrize("step", [1, 2, 64])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("regime", ["wide", "cut", "d64"])
def test_strong_gates(gpu, regime, gate, step):
    case = REGIMES[regime]
    inputs = make(case)
    inputs["g"].values[:, ::step] = GATES[gate]
    check_chunked(case, forward(gpu, case, inputs), inputs)


# ---- hard keys


def hard_inputs(case, kind, beta, g, along_keys):
    """One key for all tokens of a head, noise of 1e-2 on it, or keys of cosine 0.3; queries at random or like the keys."""
    rng = np.random.default_rng(7)
    inputs = make(case)
    shape = inputs["k"].values.shape
    base = unit(rng.normal(size=(1, 1, case.H, case.K)))

    def keys():
        noise = unit(rng.normal(size=shape))
        share = {"one": (1.0, 0.0), "near": (1.0, 1e-2), "cos_0.3": (0.3**0.5, 0.7**0.5)}[kind]
        return unit(share[0] * base + share[1] * noise)

    inputs["k"] = Input(round_to(keys(), case.dtype), case.dtype)
    if along_keys:
        inputs["q"] = Input(round_to(keys(), case.dtype), case.dtype)
    full = np.full(inputs["g"].values.shape, 1.0)
    for name, value in (("g", g), ("beta", beta)):
        inputs[name] = Input(round_to(full * value, "f32"), "f32")
    return inputs


@pytest.mark.parametrize("along_keys", [True, False], ids=["q_like_k", "q_random"])
@pytest.mark.parametrize("g", [0.0, -1e-3])
@pytest.mark.parametrize("beta", [1.0, 0.9997, 2.0])
@pytest.mark.parametrize("kind", ["one", "near", "cos_0.3"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_hard_keys(gpu, dtype, kind, beta, g, along_keys):
    """Sums over V' cancel here: one term of half precision is wrong in the second decimal place, or by everything at beta 2."""
    case = Case("gdn", (16, 17, 64, 128, 1000), 1, 2, 128, 128, dtype, initial=False)
    inputs = hard_inputs(case, kind, beta, g, along_keys)
    check_chunked(case, forward(gpu, case, inputs), inputs)


@pytest.mark.parametrize("kind", ["one", "near", "cos_0.3"])
@pytest.mark.parametrize("regime", [*REGIMES, "l2norm"])
def test_hard_keys_in_every_regime(gpu, regime, kind):
    case = REGIMES["wide"] if regime == "l2norm" else REGIMES[regime]
    if regime == "l2norm":
        case = variant(case, options=(("qk_l2norm", True),))
    inputs = hard_inputs(case, kind, 1.0, 0.0, True)
    check_chunked(case, forward(gpu, case, inputs), inputs)


@pytest.mark.parametrize("kind", ["random", "near"])
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 1e-8), ("bf16", 1e4), ("f16", 3e3)])
def test_values_of_any_size(gpu, dtype, size, kind):
    case = Case("gdn", (300, 17), 1, 2, 128, 128, dtype, initial=False)
    inputs = make(case) if kind == "random" else hard_inputs(case, "near", 1.0, 0.0, True)
    values = round_to(inputs["v"].values * size, dtype)
    inputs["v"] = Input(values, dtype)
    check_chunked(case, forward(gpu, case, inputs), inputs)


def test_what_a_token_gets_depends_on_no_later_token(gpu):
    """Correlated keys after token t switch the rest of its chunk to two terms, not what comes before."""
    case = Case("gdn", (130,), 1, 2, 128, 128, "bf16")
    inputs = make(case)
    outputs = lambda x: np.asarray(forward(gpu, case, x).o)  # noqa: E731
    was = outputs(inputs)
    for t in (0, 1, 7, 8, 15, 16, 31, 40, 62, 63, 64, 100):
        other = dict(inputs)
        for name in ("k", "beta"):
            values = inputs[name].values.copy()
            values[:, t + 1 :] = values[:, t + 1 : t + 2] if name == "k" else 1.0
            other[name] = Input(values, inputs[name].dtype)
        now = outputs(other)
        check(np.array_equal(now[:, : t + 1], was[:, : t + 1]), f"outputs up to {t} changed")
        check(not np.array_equal(now, was), "nothing changed")


@pytest.mark.parametrize("options", ["plain", "l2norm"])
@pytest.mark.parametrize("D", [64, 128])
def test_few_tokens_after_a_reset(gpu, D, options):
    """A short last chunk finds two tokens: what its queries see of S is small beside the rounding of S in half precision."""
    case = Case(
        "gdn",
        (65, 66, 67, 68, 70, 72, 65, 129),
        2,
        8,
        D,
        D,
        "bf16",
        options=FORWARD_OPTIONS[options][0],
    )
    inputs = make(case)
    for _, a, b in case.spans:
        inputs["g"].values[:, a + (b - a - 1) // 64 * 64 - 2] = -np.inf
    check_chunked(case, forward(gpu, case, inputs), inputs)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("beta", ["uniform", 0.5, 1.0])
def test_64_channels_without_decay(gpu, dtype, beta):
    """Random keys of 64 channels are twice as correlated as those of 128."""
    case = Case("gdn", (700, 64, 300), 2, 8, 64, 64, dtype, gates="zero", initial=False)
    inputs = make(case)
    if beta != "uniform":
        inputs["beta"] = Input(np.full_like(inputs["beta"].values, beta), inputs["beta"].dtype)
    check_chunked(case, forward(gpu, case, inputs), inputs)


# ---- packing, neighbours, repetition


def check_alone(gpu, case, inputs, packed, n):
    """Sequence n alone, at splits = 1: the bits that it has in `packed`."""
    _, a, b = case.spans[n]
    own = {
        k: Input(inputs[k].values[:, a:b], inputs[k].dtype) for k in ("q", "k", "v", "g", "beta")
    }
    own["initial_state"] = Input(inputs["initial_state"].values[[n]], "f32")
    own["cu_seqlens"] = rows(0, b - a)
    alone = forward(gpu, variant(case, lengths=(b - a,)), own, splits=1)
    check(np.array_equal(alone.o, packed.o[:, a:b]), f"o of sequence {n}")
    check(np.array_equal(alone.final_state, packed.final_state[[n]]), f"state of sequence {n}")


@pytest.mark.parametrize("keys", ["random", "near"])
def test_packing_and_columns_do_not_change_bits(gpu, keys):
    """At splits = 1 a sequence gives the same bits alone, on half the columns a CTA, as packed with others."""
    case = REGIMES["wide"]
    inputs = make(case) if keys == "random" else hard_inputs(case, "near", 1.0, 0.0, True)
    packed = forward(gpu, case, inputs, splits=1)
    for n in (1, 4, 6, len(case.lengths) - 1):
        check_alone(gpu, case, inputs, packed, n)


def test_one_long_sequence_among_others(gpu):
    """The lengths then ask for half the columns a CTA, where so many heads would take all. Same bits as each alone."""
    case = Case("gdn", (4100, 70), 17, 34, 128, 128, "bf16")
    inputs = make(case)
    packed = forward(gpu, case, inputs, splits=1)
    for n in range(len(case.lengths)):
        check_alone(gpu, case, inputs, packed, n)


@regimes
def test_nan_in_neighbours_and_past_the_end(gpu, regime):
    case = REGIMES[regime]
    inputs = make(case, extra_tokens=70)
    clean = forward(gpu, case, inputs, splits=1)
    bad = max(range(len(case.lengths)), key=lambda n: case.lengths[n])
    _, a, b = case.spans[bad]
    dirty = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        values = inputs[name].values.copy()
        if len(case.lengths) > 1:
            values[:, a:b] = np.nan
        values[:, sum(case.lengths) :] = np.nan
        dirty[name] = Input(values, inputs[name].dtype)
    spoiled = forward(gpu, case, dirty, splits=1)
    keep = np.ones(sum(case.lengths), bool)
    keep[a:b] = len(case.lengths) == 1
    check(np.array_equal(clean.o[:, : len(keep)][:, keep], spoiled.o[:, : len(keep)][:, keep]), "o")
    others = [n for n in range(len(case.lengths)) if n != bad or len(case.lengths) == 1]
    check(np.array_equal(clean.final_state[others], spoiled.final_state[others]), "final_state")
    check(np.isnan(spoiled.o[:, len(keep) :]).all(), "rows past cu_seqlens[-1] were written")


@pytest.mark.parametrize("keys", ["random", "near"])
@regimes
def test_a_hundred_runs(gpu, regime, keys):
    case = REGIMES[regime]
    call = forward_call(
        gpu, case, make(case) if keys == "random" else hard_inputs(case, "near", 1.0, 0.0, True)
    )
    first = Forward(call()).bits()
    arrays = call.arrays()
    positional = [arrays.pop(n) for n in ("q", "k", "v", "g", "beta")]
    for repeat in range(2, 101):
        pylinattn.gdn_fwd(*positional, **arrays, **call.options)
        check(Forward(call).bits() == first, f"other bits in run {repeat}")


def test_pool_in_place(gpu):
    """Rows in, the same rows out, one row of padding; the others keep their bits."""
    case = Case("gdn", (70, 30, 64, 129), 1, 2, 128, 128, "bf16")
    inputs = make(case)
    rng = np.random.default_rng(3)
    pool = round_to(rng.normal(size=(9, 2, 128, 128)) * 0.2, "f32")
    read = (3, -1, 0, 8)
    inputs |= {"initial_state": Input(pool, "f32"), "read_indices": rows(read)}
    done = forward(gpu, case, inputs, {"final_state": "initial_state"})
    check(done.path == CHUNKED, done.path)
    plain = dict(inputs, initial_state=Input(pool[[3, 1, 0, 8]], "f32"))
    del plain["read_indices"]
    alone = forward(gpu, case, plain)
    check(not done.o[:, 70:100].any(), "outputs of padding are not zero")
    for n in (0, 2, 3):
        _, a, b = case.spans[n]
        check(np.array_equal(done.o[:, a:b], alone.o[:, a:b]), f"o of sequence {n}")
        check(np.array_equal(done.final_state[read[n]], alone.final_state[n]), f"row {read[n]}")
    rest = [r for r in range(9) if r not in read]
    check(np.array_equal(done.final_state[rest], pool[rest]), "another row was written")


@pytest.mark.parametrize("regime", ["wide", "cut"])
def test_a_thousand_replays_with_other_lengths(regime):
    case = REGIMES[regime]
    N, T = len(case.lengths), sum(case.lengths)
    inputs, out = tensors(case), outputs_like(case)
    graph = capture(lambda: run("gdn_fwd", inputs, **out))
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, T + 1, size=(1000, N + 1)), axis=1)
    cuts[:, 0] = 0
    cuts[::7, N // 2 :] = cuts[::7, N // 2 : N // 2 + 1]
    cuts = torch.from_numpy(cuts).to(CUDA, torch.int32)
    for step in range(1000):
        inputs["cu_seqlens"].copy_(cuts[step])
        graph.replay()
        if step % 100 == 0:
            eager = outputs_like(case)
            run("gdn_fwd", inputs, **eager)
            check(same_bits(out["final_state"], eager["final_state"]), f"states of replay {step}")
            end = int(cuts[step, -1])
            check(same_bits(out["o"][:, :end], eager["o"][:, :end]), f"o of replay {step}")


# ---- the other path


def test_what_tma_cannot_address_runs_token_by_token(gpu):
    """A query for all heads (stride 0): the recurrent kernel; its copy: the chunked one. They agree."""
    case = Case("gdn", (70, 3, 64), 2, 4, 128, 128, "bf16")
    inputs = make(case)
    q = np.broadcast_to(inputs["q"].values[:, :, :1], inputs["q"].values.shape)
    inputs["q"] = Input(np.ascontiguousarray(q), "bf16")
    chunked = forward(gpu, case, inputs)
    check_chunked(case, chunked, inputs)
    given = tensors(case)
    given["q"] = given["q"][:, :, :1].expand(-1, -1, 2, -1)
    done = run("gdn_fwd", given, output_final_state=True)
    check(pylinattn.last_path() == "cuda/recurrent", f"last_path is {pylinattn.last_path()}")
    error, where = cases.worst_output_error(chunked.o, done.o.double().cpu().numpy(), case.spans)
    check(error <= cases.TOLERANCE_O["bf16"], f"o: {error:.1e} at {where}")


@pytest.mark.parametrize("part", ["fused", "heads_first"])
@regimes
def test_strided_inputs_give_the_same_bits(gpu, regime, part):
    case = REGIMES[regime]
    stride = {
        "fused": lambda s: strides_for(s, axis_gap={2: 96}),
        "heads_first": lambda s: strides_for(s, (0, 2, 1, 3)),
    }[part]
    done = forward(gpu, case, layouts=dict.fromkeys(("q", "k", "v", "o"), stride))
    check(done.path == CHUNKED and done.bits() == forward(gpu, case).bits(), "other bits")

"""The chunked KDA forward: every option, hard gates and keys, slabs, and which calls take it."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from cases import Case, Input, make
from gpu_tools import (
    CHUNKED,
    CUDA,
    FORWARD_OPTIONS,
    V_FIRST,
    capture,
    check_chunked,
    outputs_like,
    random_inputs,
    run,
    same_bits,
    tensors,
    torch,
    variant,
)
from harness import Forward, check, check_forward, forward, forward_call, rows

import pylinattn

pytestmark = pytest.mark.gpu
MIXED = (1, 70, 0, 64, 130, 31, 33, 3)
FEW = Case("kda", MIXED, 1, 2, 128, 128, "bf16")  # 64 columns of V a CTA
MANY = Case("kda", MIXED * 8, 1, 2, 128, 128, "bf16")  # all 128, more items than CTAs when 132 SMs
# K = V = 64 runs in chunks where the call itself bounds keys and beta, and token by token elsewhere.
INSIDE = (("qk_l2norm", True), ("beta_form", "logits"))
NARROW = variant(FEW, K=64, V=64, options=INSIDE)
SHAPES = {
    "few": FEW,
    "many": MANY,
    "few64": NARROW,
    "many64": variant(NARROW, lengths=MANY.lengths),
}


@pytest.fixture
def generator():
    return torch.Generator(CUDA).manual_seed(0)


OPTIONS = FORWARD_OPTIONS | {"f16": ((("qk_l2norm", True),), {"dtype": "f16", "gate_dtype": "f16"})}


def with_options(shape, keywords, **changes):
    inside = INSIDE if shape.K == 64 else ()
    return variant(shape, options=tuple((dict(keywords) | dict(inside)).items()), **changes)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_options(gpu, shape, options):
    keywords, changes = OPTIONS[options]
    case = with_options(SHAPES[shape], keywords, **changes)
    check_chunked(case, forward(gpu, case, layouts=V_FIRST if options == "l2norm" else None))


@pytest.mark.parametrize("gates", ["steep", "slow"])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("shape", [FEW, NARROW], ids=["128", "64"])
def test_activated_gates(gpu, gate, gates, shape):
    options = (("gate", gate), ("lower_bound", -5.0)) if gate == "bounded" else (("gate", gate),)
    case = with_options(shape, (*options, ("qk_l2norm", True)), lengths=(700, 33), gates=gates)
    check_chunked(case, forward(gpu, case))


@pytest.mark.parametrize("dense", [False, True], ids=["packed", "dense"])
@pytest.mark.parametrize(("H", "HV"), [(3, 3), (2, 4), (1, 3), (2, 16)])
def test_heads(gpu, H, HV, dense):
    case = Case("kda", (100,) * 3, H, HV, 128, 128, "bf16", packed=not dense)
    check_chunked(case, forward(gpu, case))


@pytest.mark.parametrize("shape", [FEW, NARROW], ids=["128", "64"])
def test_every_tail(gpu, shape):
    case = variant(shape, lengths=tuple(range(1, 67)))
    check_chunked(case, forward(gpu, case))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("gates", cases.HARD_GATES)
@pytest.mark.parametrize("shape", [FEW, NARROW], ids=["128", "64"])
def test_hard_gates(gpu, gates, dtype, shape):
    case = variant(shape, gates=gates, dtype=dtype)
    check_chunked(case, forward(gpu, case))


def at_their_ends(case):
    """Inputs with raw gates that decay by the bound, not at all, little, or as they come: whole sequences, channels, any."""
    inputs = make(case)
    shape = inputs["g"].values.shape
    some = np.random.default_rng(5).integers(4, size=shape)
    some[:, 64:128], some[:, 128:192] = 0, 1
    some[:, 192:256] = np.arange(shape[3]) % 4
    g = np.choose(some, [60.0, -200.0, -9.0, inputs["g"].values])
    inputs["g"] = Input(g, case.gate_dtype)
    return inputs


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("bound", [-5.0, -5.01, -0.1])  # beyond -5 they are taken as unbounded
@pytest.mark.parametrize("shape", [FEW, NARROW], ids=["128", "64"])
def test_bounded_gates_at_their_ends(gpu, bound, dtype, shape):
    options = (("gate", "bounded"), ("lower_bound", bound), ("qk_l2norm", True))
    lengths = (64, 64, 64, 64, 100, 17, 16, 15)
    case = with_options(shape, options, lengths=lengths, dtype=dtype, gate_dtype=dtype)
    inputs = at_their_ends(case)
    check_chunked(case, forward(gpu, case, inputs), inputs)


UNDAMPED = (
    "one key with beta 2 turns its state over at every token: what is rounded adds up (docs/kda.md)"
)
FEW_NUMBERS = "o of two last tokens, small beside the terms of S that it sums (docs/kda.md)"
MISSED = ("one_key_b2-bf16", "one_key_b2-f16", "near_key_b2-bf16")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("keys", cases.HARD_KEYS)
@pytest.mark.parametrize("shape", [FEW, NARROW], ids=["128", "64"])
def test_hard_keys(gpu, keys, dtype, shape, request):
    if shape is FEW and f"{keys}-{dtype}" in MISSED:
        request.applymarker(pytest.mark.xfail(reason=UNDAMPED))
    case = variant(shape, lengths=(16, 17, 64, 128, 200), gates=keys, dtype=dtype, initial=False)
    check_chunked(case, forward(gpu, case))


@pytest.mark.parametrize("options", [(), INSIDE[:1], INSIDE[1:]], ids=["plain", "l2norm", "logits"])
def test_narrow_without_bounds(gpu, options):
    """Keys or beta that nothing bounds: K = V = 64 goes token by token, to its accuracy."""
    case = variant(NARROW, lengths=(200, 33), gates="one_key_b2", options=options)
    done = forward(gpu, case)
    check(done.path == "cuda/recurrent", f"last_path is {done.path}")
    check_forward(case, done)


def test_slow_gates_keep_their_history(gpu):
    """bf16 would round a k times 0.9999 back to k."""
    case = variant(FEW, lengths=(3000,), H=2, HV=2)
    inputs = make(case)
    g = -1e-4 * (1 + np.arange(128) / 128) * np.ones((1, 3000, 2, 128))
    inputs["g"] = Input(np.float32(g).astype(np.float64), "f32")
    check_chunked(case, forward(gpu, case, inputs), inputs)


def test_large_and_small_rows(gpu):
    """With l2norm the length of q and k is of no consequence, within a chunk either."""
    case = variant(FEW, lengths=(96,), options=(("qk_l2norm", True),))
    inputs = make(case)
    factor = 2.0 ** (np.arange(96) % 25 - 8)[None, :, None, None]
    for name in "qk":
        inputs[name] = Input(inputs[name].values * factor, "bf16")
    check_chunked(case, forward(gpu, case, inputs), inputs)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", ["few", "many64"])
def test_values_of_any_size(gpu, shape, dtype, request):
    """A chunk's V may be far larger or smaller than that of the one before, or zero."""
    if (shape, dtype) == ("many64", "bf16"):
        request.applymarker(pytest.mark.xfail(reason=FEW_NUMBERS))
    case = with_options(SHAPES[shape], {}, dtype=dtype)
    inputs = make(case)
    tokens = inputs["v"].values.shape[1]
    sizes = np.array([1, 2.0**-14, 2.0**10, 2.0**10, 2.0**-8, 0])[np.arange(tokens) // 32 % 6]
    inputs["v"] = Input(inputs["v"].values * sizes[None, :, None, None], dtype)
    check_chunked(case, forward(gpu, case, inputs), inputs)


def test_causal_in_bits(gpu):
    """Keys that become alike later in the chunk change how it is computed, and no earlier output."""
    inputs = tensors(variant(FEW, lengths=(200,)))
    want = run("kda_fwd", inputs)
    changed = dict(inputs, k=inputs["k"].clone(), beta=inputs["beta"].clone())
    changed["k"][:, 110:] = changed["k"][:, 110:111]
    changed["beta"][:, 110:] = 1.0
    got = run("kda_fwd", changed)
    check(same_bits(got.o[:, :110], want.o[:, :110]), "an output depends on later tokens")
    check(not same_bits(got.o[:, 111:], want.o[:, 111:]), "the change did nothing")


@pytest.mark.parametrize("at", [1, 7, 8, 15, 16, 17, 24, 31, 32, 41])
def test_bounded_gates_are_causal_in_bits(gpu, at):
    case = variant(FEW, lengths=(70,), options=SLOW)
    want = run("kda_fwd", tensors(case), **case.keywords)
    changed = {n: x.clone() for n, x in tensors(case).items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, at:] = changed[name][:, at:].flip(1)
    got = run("kda_fwd", changed, **case.keywords)
    check(same_bits(got.o[:, :at], want.o[:, :at]), "an output depends on later tokens")
    check(not same_bits(got.o[:, at:], want.o[:, at:]), "the change did nothing")


def test_padding_and_pools(gpu):
    case = variant(FEW, lengths=(70, 33, 0, 64))
    inputs = make(case)
    pool = np.float32(np.random.default_rng(1).normal(size=(9, 2, 128, 128))).astype(np.float64)
    inputs["initial_state"] = Input(pool, "f32")
    inputs["read_indices"] = inputs["write_indices"] = rows(3, -1, 0, 8)
    done = Forward(forward_call(gpu, case, inputs, {"final_state": "initial_state"})())
    check(done.path == CHUNKED, f"last_path is {done.path}")
    check((done.o[:, 70:103] == 0).all(), "rows of a padding sequence are not zero")
    untouched = [1, 2, 4, 5, 6, 7]
    check((done.final_state[untouched] == pool[untouched]).all(), "other rows were written")


def test_neighbours_nan_stays_out(gpu):
    inputs = tensors(variant(FEW, lengths=(70, 70, 70)))
    want = run("kda_fwd", inputs, output_final_state=True)
    poisoned = {n: x.clone() if n in ["q", "k", "v", "g", "beta"] else x for n, x in inputs.items()}
    for name in ("q", "k", "v", "g", "beta"):
        poisoned[name][:, 70:140] = float("nan")
    got = run("kda_fwd", poisoned, output_final_state=True)
    for part in (slice(0, 70), slice(140, 210)):
        check(same_bits(got.o[:, part], want.o[:, part]), "NaN reached a neighbour")
    check(same_bits(got.final_state[::2], want.final_state[::2]), "NaN reached a neighbour's state")


def test_slabs_do_not_show(generator):
    """More chunks than the workspace holds at once: the same bits as for a few of the heads, which fit."""
    lengths = (500, 90, 50)
    inputs = random_inputs("kda", 1, sum(lengths), 1, 1024, 128, generator)
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=CUDA)
    options = dict(cu_seqlens=cu, qk_l2norm=True, output_final_state=True)
    whole = run("kda_fwd", inputs, **options)
    check(pylinattn.last_path() == CHUNKED, f"last_path is {pylinattn.last_path()}")
    heads = slice(1000, 1008)
    few = {n: x[:, :, heads] if n in ["v", "g", "beta"] else x for n, x in inputs.items()}
    part = run("kda_fwd", few, **options)
    check(same_bits(whole.o[:, :, heads], part.o), "o depends on the slabs")
    check(same_bits(whole.final_state[:, heads], part.final_state), "states depend on the slabs")


CUT = {
    "one": (3000,),
    "packed": (2000, 0, 70, 700),
    "equal": (2000, 2000, 2010),
    "tail": (2049,),
}


SLOW = (("gate", "bounded"), ("lower_bound", -5.0), ("qk_l2norm", True), ("beta_form", "logits"))
CUT_OPTIONS = {n: OPTIONS[n] for n in ("plain", "l2norm", "f16", "no_initial", "checkpoints")}
CUT_OPTIONS["slow"] = (SLOW, {"gates": "slow"})


@pytest.mark.parametrize("options", CUT_OPTIONS)
@pytest.mark.parametrize("lengths", CUT)
def test_cut_sequences(gpu, lengths, options):
    """Long sequences of few heads are cut into segments, exactly."""
    keywords, changes = CUT_OPTIONS[options]
    case = variant(FEW, lengths=CUT[lengths], H=2, HV=4, options=keywords, **changes)
    check_chunked(case, forward(gpu, case, layouts=V_FIRST if options == "l2norm" else None))


@pytest.mark.parametrize("options", ["l2norm", "f16", "checkpoints", "slow"])
@pytest.mark.parametrize("lengths", ["one", "packed"])
def test_cut_narrow(gpu, lengths, options):
    keywords, changes = CUT_OPTIONS[options]
    case = with_options(NARROW, keywords, lengths=CUT[lengths], H=2, HV=4, **changes)
    check_chunked(case, forward(gpu, case, layouts=V_FIRST if options == "l2norm" else None))


def test_cut_dense(gpu):
    case = Case("kda", (2000,) * 3, 2, 2, 128, 128, "bf16", packed=False)
    check_chunked(case, forward(gpu, case))


def test_halves_of_a_long_sequence(gpu):
    """A long one among short ones: its columns of V go to two CTAs, though not all halves fit on the card at once."""
    case = variant(FEW, lengths=(500, *(40,) * 19), H=4, HV=4)
    check_chunked(case, forward(gpu, case))


def test_cut_without_decay(gpu):
    """What an early segment leaves behind is found by the last one."""
    case = variant(FEW, lengths=(6000,), H=2, HV=2)
    inputs = make(case)
    inputs["g"] = Input(np.zeros((1, 6000, 2, 128)), "f32")
    check_chunked(case, forward(gpu, case, inputs), inputs)


def test_cut_in_place(gpu):
    """The last segment's state goes where the first one's comes from."""
    case = variant(FEW, lengths=(3000, 100), H=2, HV=2)
    inputs = make(case)
    apart = forward(gpu, case, inputs)
    done = Forward(forward_call(gpu, case, inputs, {"final_state": "initial_state"})())
    check((done.o == apart.o).all(), "o depends on where the final state goes")
    check((done.final_state == apart.final_state).all(), "so does the state")


def test_cut_slabs(generator):
    """More chunks than the workspace holds, of sequences that are cut: as close to the uncut result as roundings are."""
    lengths = (60000, 1000, 20000)
    inputs = random_inputs("kda", 1, sum(lengths), 1, 8, 128, generator)
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=CUDA)
    options = dict(cu_seqlens=cu, qk_l2norm=True, output_final_state=True)
    cut, whole = run("kda_fwd", inputs, **options), run("kda_fwd", inputs, splits=1, **options)
    for name in ("o", "final_state"):
        got, want = (getattr(x, name).float() for x in (cut, whole))
        error = ((got - want).norm() / want.norm()).item()
        check(error < 5e-3, f"{name} differs by {error:.1e}")


def test_what_is_not_taken(gpu):
    """Odd strides of g, which TMA cannot address, run token by token."""
    inputs = tensors(variant(FEW, lengths=(70,)))
    want = run("kda_fwd", inputs)
    check(pylinattn.last_path() == CHUNKED, f"last_path is {pylinattn.last_path()}")
    wide = torch.empty(1, 70, 2, 129, device=CUDA)
    wide[..., :128] = inputs["g"]
    got = run("kda_fwd", inputs | {"g": wide[..., :128]})
    check(pylinattn.last_path() == "cuda/recurrent", f"last_path is {pylinattn.last_path()}")
    error = cases.relative_rms(got.o.double().cpu().numpy(), want.o.double().cpu().numpy())
    check(error < 5e-3, f"the paths differ by {error:.1e}")


def test_graph_replay_with_other_lengths(gpu):
    case = variant(FEW, lengths=(130, 40, 30))
    inputs, outputs = tensors(case), outputs_like(case)
    call = lambda: run("kda_fwd", inputs, **outputs)  # noqa: E731
    graph = capture(call)
    for lengths in ((10, 90, 100), (200, 0, 0), (0, 1, 199)):
        inputs["cu_seqlens"].copy_(torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        o, state = outputs["o"].clone(), outputs["final_state"].clone()
        call()
        check(same_bits(o, outputs["o"]), f"o of a replay with lengths {lengths}")
        check(same_bits(state, outputs["final_state"]), f"states of a replay with {lengths}")

"""Checkpoints of the chunked forward, in either order and dtype, in every way a call is cut over the card."""

from __future__ import annotations

import numpy as np
import pytest
from cases import Case, make
from gpu_tools import (
    CHUNKED,
    CUDA,
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
from harness import check, forward

import pylinattn

pytestmark = pytest.mark.gpu
families = pytest.mark.parametrize("family", ["gdn", "kda"])
REGIMES = {
    "many": (256, 64, 0, 200, 70, 128) * 7,  # more than the card has multiprocessors
    "more": (256, 64, 0, 200, 70, 128) * 24,
    "few": (256, 64, 0, 200, 70, 128),
    "cut": (3500, 3, 0, 2900),
}
INSIDE = (("qk_l2norm", True), ("gate", "softplus"), ("beta_form", "logits"))


@pytest.mark.parametrize("every", [64, 192])
@pytest.mark.parametrize("inside", [False, True], ids=["plain", "inside"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("regime", REGIMES)
@families
def test_in_either_order(gpu, family, regime, dtype, inside, every):
    """They are right, whatever order they are stored in they have the same bits, and so has o without them."""
    options = (("checkpoint_every", every), *(INSIDE if inside else ()))
    case = Case(family, REGIMES[regime], 1, 2, 128, 128, "bf16", state_dtype=dtype, options=options)
    k_first = forward(gpu, case)
    v_first = forward(gpu, case, layouts={"checkpoints": V_FIRST["final_state"]})
    check_chunked(case, k_first)
    np.testing.assert_array_equal(k_first.checkpoints, v_first.checkpoints)
    without = forward(gpu, variant(case, options=options[1:]))
    np.testing.assert_array_equal(k_first.o, without.o)
    np.testing.assert_array_equal(k_first.final_state, without.final_state)


@families
def test_f16(gpu, family):
    case = Case(family, REGIMES["many"], 1, 2, 128, 128, "f16", options=(("checkpoint_every", 64),))
    check_chunked(case, forward(gpu, case))


@families
def test_where_the_lengths_ask_for_half_the_columns(gpu, family):
    case = Case(family, (4100, 70), 17, 34, 128, 128, "bf16", options=(("checkpoint_every", 512),))
    check_chunked(case, forward(gpu, case, splits=1))


@families
def test_equal_bits_beside_one_another(gpu, family):
    """All multiprocessors at work, a checkpoint every chunk or two: twenty times the same."""
    case = Case(family, (640,) * 6, 12, 24, 128, 128, "bf16", options=(("checkpoint_every", 64),))
    inputs = tensors(case)
    first = run(f"{family}_fwd", inputs, checkpoint_every=64)
    for _ in range(20):
        again = run(f"{family}_fwd", inputs, checkpoint_every=64)
        check(same_bits(first.checkpoints, again.checkpoints), "checkpoints differ")
        check(same_bits(first.o, again.o), "o differs")


@families
def test_the_last_one_and_the_final_state_in_one_place(gpu, family):
    """The final state stays."""
    case = Case(family, (200, 130), 1, 2, 128, 128, "bf16", options=(("checkpoint_every", 64),))
    inputs = make(case)
    pool = np.full((8, 2, 128, 128), np.nan)
    pool[[2, 5]] = inputs["initial_state"].values
    arrays = tensors(case)
    arrays["initial_state"] = torch.from_numpy(pool).to(CUDA, torch.float32)
    index = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=CUDA)  # noqa: E731
    table = index([0, 1, 2], [3, 5, -1])
    done = run(
        f"{family}_fwd", arrays, checkpoint_every=64, final_state=arrays["initial_state"], read_indices=index(2, 5),
        checkpoints=arrays["initial_state"], checkpoint_indices=table,
    )  # fmt: skip
    want = forward(gpu, variant(case, options=()))
    np.testing.assert_array_equal(done[1][[2, 5]].cpu().numpy(), want.final_state)


def test_slabs_do_not_show():
    """More chunks than KDA's workspace holds at once: the same bits as for a few of the heads, which fit."""
    generator = torch.Generator(CUDA).manual_seed(0)
    lengths = (500, 90, 50)
    inputs = random_inputs("kda", 1, sum(lengths), 1, 1024, 128, generator)
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=CUDA)
    options = dict(cu_seqlens=cu, qk_l2norm=True, checkpoint_every=64)
    whole = run("kda_fwd", inputs, **options)
    check(pylinattn.last_path() == CHUNKED, f"last_path is {pylinattn.last_path()}")
    heads = slice(1000, 1008)
    few = {n: x[:, :, heads] if n in ["v", "g", "beta"] else x for n, x in inputs.items()}
    part = run("kda_fwd", few, **options)
    check(same_bits(whole.checkpoints[:, heads], part.checkpoints), "they depend on the slabs")


@families
def test_replay_with_other_lengths(gpu, family):
    """Which rows they go to is found on the device."""
    case = Case(
        family, (300, 200, 140), 2, 4, 128, 128, "bf16", options=(("checkpoint_every", 64),)
    )
    inputs, out = tensors(case), outputs_like(case)
    out["checkpoints"] = torch.full((10, 4, 128, 128), -1.0, device=CUDA)
    graph = capture(lambda: run(f"{family}_fwd", inputs, checkpoint_every=64, **out))
    for lengths in [(300, 200, 140), (64, 63, 513), (0, 640, 0), (1, 0, 128)]:
        inputs["cu_seqlens"].copy_(torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32))
        out["checkpoints"].fill_(-1.0)
        graph.replay()
        replayed = out["checkpoints"].clone()
        out["checkpoints"].fill_(-1.0)
        run(f"{family}_fwd", inputs, checkpoint_every=64, **out)
        check(same_bits(replayed, out["checkpoints"]), f"checkpoints of {lengths}")
        rows = sum(length // 64 for length in lengths)
        check(bool((replayed[rows:] == -1.0).all()), "rows past the last one were written")
        check(bool((replayed[:rows] != -1.0).all()), "rows were left out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("regime", ["many", "more", "cut"])
@families
def test_rows_that_no_sequence_has_are_zero(gpu, family, regime, dtype):
    """In arrays of ours, whatever lay there before."""
    lengths = REGIMES[regime]
    inputs = tensors(Case(family, lengths, 1, 2, 128, 128, "bf16"))
    inputs["initial_state"] = inputs["initial_state"].to(dtype)
    rows, written = sum(lengths) // 64, sum(length // 64 for length in lengths)
    assert written < rows
    poison = [
        torch.full((rows, 2, 128, 128), float("nan"), dtype=dtype, device=CUDA) for _ in range(4)
    ]
    torch.cuda.synchronize()
    del poison
    checkpoints = run(f"{family}_fwd", inputs, checkpoint_every=64).checkpoints
    check(bool((checkpoints[written:] == 0).all()), "rows that no sequence has are not zero")
    check(bool(torch.isfinite(checkpoints).all()), "rows were left out")
    check(bool(checkpoints[:written].any(-1).any(-1).all()), "rows are zero that a sequence has")

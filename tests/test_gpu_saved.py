"""gdn_fwd and gdn_bwd with save = "states" on a GPU: outputs, states and gradients as right as without, and the same gradients
in bits where no sequence is cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from arrays import strides_for
from cases import HARD_GATES, HARD_KEYS, Case, Input
from gradients import (
    PER_TOKEN,
    SHAPES_OF_SIZES,
    WITH_EMPTY,
    backward,
    check_forward,
    check_gradients,
    make,
    make_sized,
    saving,
)
from harness import check
from test_backward import OPTIONS, by_options
from test_gpu_backward import RAGGED, long_ones

pytestmark = pytest.mark.gpu


def check_saving(gpu, case, inputs=None):
    """All of it. Comes last in a test, which a miss to be expected ends."""
    inputs = make(case) if inputs is None else inputs
    forward, done = saving(gpu, case, inputs)
    check(forward.path == done.call.path == "cuda/chunked", f"{forward.path}, {done.call.path}")
    check_forward(case, forward, inputs)
    whole, whole_saved = backward(gpu, case, inputs, splits=1), saving(gpu, case, inputs, splits=1)
    check(whole.bits() == whole_saved[1].bits(), "other gradients than with nothing saved")
    again, once_more = saving(gpu, case, inputs)
    for name in ("o", "final_state"):
        check(again.bits(name) == forward.bits(name), f"a repeated call: other bits of {name}")
    check(once_more.bits() == done.bits(), "a repeated call: other bits")
    check_gradients(case, done, inputs)


def grid():
    for D in (64, 128):
        for dtype in ("bf16", "f16"):
            yield Case("gdn", RAGGED, 1, 2, D, D, dtype)
    for H, HV in ((3, 3), (2, 6), (1, 8)):
        yield Case("gdn", (40, 23), H, HV, 64, 64, "bf16")
    yield Case("gdn", (67, 67, 67), 2, 4, 64, 64, "bf16", packed=False)
    yield Case("gdn", (128, 128), 2, 2, 128, 128, "f16", packed=False, initial=False)
    yield Case("gdn", (77, 3), 1, 2, 128, 128, "bf16", state_dtype="bf16", gate_dtype="bf16")
    yield Case("gdn", (1000,), 1, 2, 128, 128, "bf16")
    yield from long_ones()


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_forward_and_gradients(gpu, case):
    check_saving(gpu, case)


@pytest.mark.parametrize("options", OPTIONS, ids=by_options)
def test_options(gpu, options):
    check_saving(gpu, Case("gdn", (66, 31), 2, 4, 64, 64, "bf16", options=options))


@pytest.mark.parametrize("gates", [*HARD_GATES, *HARD_KEYS])
@pytest.mark.parametrize("D", [64, 128])
def test_hard_inputs(gpu, D, gates):
    check_saving(gpu, Case("gdn", (130, 17, 64), 1, 2, D, D, "bf16", gates=gates))


@pytest.mark.parametrize("size", SHAPES_OF_SIZES)
@pytest.mark.parametrize("D", [64, 128])
def test_sizes_far_from_1(gpu, D, size):
    options = (("qk_l2norm", True),) if size == "lengths" else ()
    case = Case("gdn", (130, 70), 1, 2, D, D, "bf16", options=options)
    check_saving(gpu, case, make_sized(case, size))


@pytest.mark.parametrize("lengths", WITH_EMPTY)
def test_empty_sequences(gpu, lengths):
    case = Case("gdn", lengths, 1, 2, 64, 64, "bf16")
    inputs = make(case)
    forward, done = saving(gpu, case, inputs)
    for n, length in enumerate(lengths):
        for what, got, given in (
            ("state", forward.values("final_state"), "initial_state"),
            ("gradient", done["d_initial_state"], "d_final_state"),
        ):
            same = np.array_equal(got[n], inputs[given].values[n])
            check(same or length, f"{lengths}: sequence {n} changed its {what}")
    if sum(lengths):
        check_forward(case, forward, inputs)
        check_gradients(case, done, inputs)


def test_packing_does_not_show_in_the_bits(gpu):
    case = Case("gdn", (70, 3, 200), 2, 4, 64, 64, "bf16", options=(("qk_l2norm", True),))
    inputs = make(case)
    forward, done = saving(gpu, case, inputs, splits=1)
    for n, (_, first, end) in enumerate(case.spans):
        own = {}
        for name, x in inputs.items():
            if name in ("initial_state", "d_final_state"):
                own[name] = x._replace(values=x.values[n : n + 1])
            elif name != "cu_seqlens":
                own[name] = x._replace(values=x.values[:, first:end])
        own["cu_seqlens"] = Input(np.array([0, end - first]), "i32")
        alone = dataclasses.replace(case, lengths=(end - first,))
        forward_alone, done_alone = saving(gpu, alone, own, splits=1)
        same = np.array_equal(forward_alone.values("o")[0], forward.values("o")[0, first:end])
        check(same, f"o of sequence {n} depends on the pack")
        for name in PER_TOKEN:
            same = np.array_equal(done_alone[name][0], done[name][0, first:end])
            check(same, f"{name} of sequence {n} depends on the pack")


def test_nan_stays_in_its_sequence_and_rows_past_the_end_are_left_alone(gpu):
    case = Case("gdn", (40, 30, 20), 1, 2, 64, 64, "bf16")
    inputs = make(case, extra_tokens=9)
    clean, clean_done = saving(gpu, case, inputs)
    spoiled = {}
    for name, x in inputs.items():
        values = x.values.copy()
        if name in ("q", "k", "v", "g", "beta", "d_o"):
            values[:, 40:70] = np.nan
            values[:, 90:] = np.nan
        spoiled[name] = x._replace(values=values)
    forward, done = saving(gpu, case, spoiled)
    arrays = [("o", forward.values("o"), clean.values("o"))]
    arrays += [(name, done[name], clean_done[name]) for name in PER_TOKEN]
    for name, got, want in arrays:
        check(np.array_equal(got[:, :40], want[:, :40]), f"{name}: NaN went to sequence 0")
        check(np.array_equal(got[:, 70:90], want[:, 70:90]), f"{name}: NaN went to sequence 2")
        check(np.isnan(got[:, 90:]).all(), f"{name}: rows past cu_seqlens[-1] were written")


def test_saved_is_read_twice_and_stays(gpu):
    case = Case("gdn", (200, 5), 1, 2, 64, 64, "bf16")
    inputs = make(case)
    forward, done = saving(gpu, case, inputs)
    saved = forward.returned.saved
    options = case.keywords | {"save": "states", "saved": saved}
    check(backward(gpu, case, inputs, **options).bits() == done.bits(), "a second backward differs")
    check(backward(gpu, case, inputs, **options).bits() == done.bits(), "a third backward differs")


def test_gradients_in_rows_that_no_copy_can_take_are_recomputed(gpu):
    case = Case("gdn", (70, 5), 1, 2, 64, 64, "bf16")
    inputs = make(case)
    forward, _ = saving(gpu, case, inputs)
    shape = inputs["d_o"].values.shape
    options = case.keywords | {"save": "states", "saved": forward.returned.saved}
    done = backward(gpu, case, inputs, layouts={"d_o": strides_for(shape, gap=1)}, **options)
    check(done.call.path == "cuda/recurrent", done.call.path)
    check_gradients(case, done, inputs)


def test_kda_does_not_save(gpu):
    case = Case("kda", (70,), 1, 2, 64, 64, "bf16")
    with pytest.raises(NotImplementedError, match="save"):
        saving(gpu, case)

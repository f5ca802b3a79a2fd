"""gdn_segment, kda_segment and segment_merge on a GPU: against products of matrices, and composed to whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
from cases import HARD_GATES, Case, is_token_loop
from gradients import HALF_PRODUCTS, backward, make
from harness import check, forward
from test_segments import (
    DIRECTIONS,
    FAMILIES,
    GATES_INSIDE,
    TOLERANCE,
    check_close,
    check_maps,
    cut,
    merge,
    segment,
)

from pylinattn import reference

pytestmark = pytest.mark.gpu


def grid():
    for family in FAMILIES:
        for D in (64, 128):
            for dtype in ("bf16", "f16"):
                yield Case(family, (5, 64, 0, 1, 130), 2, 4, D, D, dtype)
        yield Case(family, (67, 67), 1, 2, 64, 64, "bf16", packed=False)
        yield Case(family, (66, 31), 2, 4, 64, 64, "bf16", options=GATES_INSIDE)
        yield Case(family, (66,), 1, 1, 64, 64, "bf16", options=(("scale", -0.3),))
        for gates in HARD_GATES:
            yield Case(family, (70, 17), 1, 2, 64, 64, "bf16", gates=gates)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_map_is_the_product_of_the_tokens(gpu, case, direction):
    check_maps(case, direction, device=gpu)


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_compose_to_the_whole(gpu, family):
    bounds = [0, 64, 64, 65, 150, 200]
    whole = Case(family, (200,), 2, 4, 64, 64, "bf16", options=GATES_INSIDE)
    inputs = make(whole)
    ends = {}
    for direction, start in (("forward", "initial_state"), ("backward", "d_final_state")):
        maps = []
        for part in cut(inputs, bounds):
            tokens = part["q"].values.shape[1]
            case = Case(family, (tokens,), 2, 4, 64, 64, "bf16", options=GATES_INSIDE)
            maps.append(segment(case, direction, part, device=gpu))
        M, h = (np.stack([m.values(name) for m in maps]) for name in ("M", "h"))
        ends[direction] = merge(
            M, h, inputs[start].values, direction, "f32", state="f32", device=gpu
        )
    left_out = ("d_o", "d_final_state")
    done = forward(gpu, whole, {n: x for n, x in inputs.items() if n not in left_out})
    final = ends["forward"].values("final_state")
    check_close(final, done.final_state, 3e-3, "final_state")  # the forward may round its operands
    gradients = backward(gpu, whole, inputs)
    d_initial = ends["backward"].values("final_state")
    limit = TOLERANCE["f32"] if is_token_loop(gradients.call.path) else HALF_PRODUCTS
    check_close(d_initial, gradients["d_initial_state"], limit, "d_initial_state")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_merge(gpu, direction):
    rng = np.random.default_rng(3)
    for R, N, HV, D in ((4, 2, 3, 64), (3, 1, 2, 128), (0, 2, 2, 64), (2, 0, 2, 64)):
        M = (rng.normal(size=(R, N, HV, D, D)) / D**0.5).astype(np.float32)
        h = rng.normal(size=(R, N, HV, D, D)).astype(np.float32)
        for initial in (rng.normal(size=(N, HV, D, D)).astype(np.float32), None):
            done = merge(M, h, initial, direction, "f32", state="f32", device=gpu)
            more = {} if initial is None else {"initial_state": initial}
            want = reference.segment_merge(M, h, direction=direction, **more)
            for name in ("states", "final_state"):
                got, right = done.values(name), getattr(want, name)
                flat = (-1, HV, D, D)
                what = f"{name} of R = {R}"
                check_close(got.reshape(flat), right.reshape(flat), TOLERANCE["f32"], what)
            again = merge(M, h, initial, direction, "f32", state="f32", device=gpu)
            check(again.bits("states") == done.bits("states"), "a repeated call: other bits")

"""save = "states": the forward's outputs, the gradients, and what is refused. On a GPU: test_gpu_saved.py."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import CPU
from cases import Case
from gradients import PER_TOKEN, backward, check_forward, check_gradients, make, saving
from harness import check
from raw import RawCall

import pylinattn
from pylinattn._lib import ffi, lib

FAMILIES = ["gdn", "kda"]


def grid():
    for family in FAMILIES:
        for dtype in ("f32", "f64", "bf16"):
            yield Case(family, (5, 64, 1, 130, 0, 65), 1, 2, 16, 24, dtype)
        yield Case(family, (67, 67), 2, 4, 8, 8, "f32", packed=False, initial=False)
        yield Case(family, (128, 128), 1, 1, 8, 8, "f64", packed=False)
        options = (("qk_l2norm", True), ("beta_form", "logits_x2"), ("gate", "softplus"))
        yield Case(family, (200, 3), 2, 2, 16, 16, "f32", options=options)
        yield Case(family, (0, 0), 1, 2, 8, 8, "f32")


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_gradients_from_saved_states(case):
    inputs = make(case)
    forward, done = saving(CPU, case, inputs)
    check_forward(case, forward, inputs)
    check_gradients(case, done, inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_is_read_and_no_more(family):
    """Twice the same gradients from it, and others once it is spoiled."""
    case = Case(family, (200,), 1, 1, 8, 8, "f64")
    inputs = make(case)
    forward, done = saving(CPU, case, inputs)
    saved = forward.returned.saved
    before = saved.copy()
    options = case.keywords | {"save": "states", "saved": saved}
    again = backward(CPU, case, inputs, **options)
    check(again.bits() == done.bits(), "a second backward has other bits")
    check(np.array_equal(before, saved), "the backward wrote to saved")
    saved[:] = 0
    spoiled = backward(CPU, case, inputs, **options)
    check(spoiled.bits(PER_TOKEN) != done.bits(PER_TOKEN), "the backward does not read saved")


def arguments(family="gdn", T=130, dtype=np.float32):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(1, T, 2, 8)).astype(dtype) / 4 for _ in range(3))
    g = -rng.random((1, T, 2, 8) if family == "kda" else (1, T, 2)).astype(np.float32)
    return q, k, v, g, rng.random((1, T, 2)).astype(np.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_refusals(family):
    fwd, bwd = getattr(pylinattn, f"{family}_fwd"), getattr(pylinattn, f"{family}_bwd")
    inputs = arguments(family)
    do = np.ones_like(inputs[2])
    saved = fwd(*inputs, save="states").saved
    check(
        saved.dtype == np.uint8 and saved.size == 2 * 2 * 8 * 8 * 4, f"saved is {saved.size} bytes"
    )
    of_others = fwd(*arguments(family, T=70), save="states").saved
    spare = np.zeros(saved.size + 32, np.uint8)
    for wrong, what in (
        (None, "saved is required, 1024 bytes"),
        (of_others, "saved has 512 bytes, but of these shapes .* 1024"),
        (saved[:-1], "saved has 1023 bytes"),
        (np.zeros(saved.size + 1, np.uint8), "saved has 1025 bytes"),
        (np.zeros(2 * saved.size, np.uint8)[::2], "contiguous"),
        (spare[(1 - spare.ctypes.data) % 16 :][: saved.size], "multiple of 16"),
    ):
        with pytest.raises(ValueError, match=what):
            bwd(*inputs, do, save="states", saved=wrong)
        if wrong is not None:
            with pytest.raises(ValueError, match=what):
                fwd(*inputs, save="states", saved=wrong)
    with pytest.raises(ValueError, match='save is "nothing"'):
        bwd(*inputs, do, saved=saved)
    with pytest.raises(ValueError, match='save is "nothing"'):
        fwd(*inputs, saved=saved)
    with pytest.raises(TypeError, match="saved"):
        bwd(*inputs, do, save="states", saved=saved.view(np.float32))
    state = np.zeros((1, 2, 8, 8), np.float32)
    row = np.zeros(1, np.int32)
    for options in (
        {"initial_state": state, "read_indices": row},
        {"final_state": state, "write_indices": row},
        {"checkpoint_every": 64},
        {"initial_state": state, "final_state": state},
    ):
        with pytest.raises(ValueError, match="save"):
            fwd(*inputs, save="states", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_callers_buffer_and_frameworks(family):
    torch = pytest.importorskip("torch")
    inputs = [torch.from_numpy(x) for x in arguments(family)]
    fwd, bwd = getattr(pylinattn, f"{family}_fwd"), getattr(pylinattn, f"{family}_bwd")
    made = fwd(*inputs, save="states").saved
    check(isinstance(made, torch.Tensor) and made.dtype == torch.uint8, f"saved is {made}")
    mine = torch.zeros_like(made)
    check(
        fwd(*inputs, save="states", saved=mine).saved is mine,
        "the caller's buffer is not given back",
    )
    check(torch.equal(made, mine), "other bytes in the caller's buffer")
    do = torch.ones_like(inputs[2])
    got, want = bwd(*inputs, do, save="states", saved=mine), bwd(*inputs, do)
    for name, a, b in zip(got._fields, got, want):
        if a is not None:
            check(torch.allclose(a, b, rtol=1e-4, atol=1e-6), f"{name} differs")


@pytest.mark.parametrize("op", ["gdn_fwd", "kda_fwd"])
def test_the_query(op):
    query = getattr(lib, f"linattn_{op}_saved")
    need = ffi.new("uint64_t *", 7)
    made = RawCall(op, CPU)
    check(
        query(ffi.cast("const char *", made.args), need) == lib.LINATTN_OK and need[0] == 0,
        f"nothing: {need[0]}",
    )
    made.args.save = lib.LINATTN_SAVE_STATES
    check(
        query(ffi.cast("const char *", made.args), need) == lib.LINATTN_OK,
        ffi.string(lib.linattn_last_error()),
    )
    check(
        query(ffi.cast("const char *", made.args), ffi.NULL) == lib.LINATTN_ERR_VALUE, "NULL bytes"
    )
    check(query(ffi.NULL, need) == lib.LINATTN_ERR_VALUE, "a NULL struct")
    made.args.save = 2
    check(query(ffi.cast("const char *", made.args), need) == lib.LINATTN_ERR_VALUE, "save is 2")

"""gdn_segment, kda_segment, segment_merge: maps against products of matrices, and their composition against whole sequences."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from arrays import CPU, round_to, strides_for
from cases import HARD_GATES, HARD_KEYS, Case, Input
from gradients import backward, expected, make
from harness import Call, check, expect, forward

import pylinattn
from pylinattn import reference

FAMILIES = ["gdn", "kda"]
DIRECTIONS = ["forward", "backward"]
TOLERANCE = {"f64": 1e-9, "f32": 1e-4, "bf16": 1e-4, "f16": 1e-4}  # maps are fp32 or wider
NEGLIGIBLE = 2.0**-40  # of a map whose states are of size 1
GATES_INSIDE = (
    ("qk_l2norm", True),
    ("beta_form", "logits_x2"),
    ("gate", "bounded"),
    ("lower_bound", -5.0),
)


def segment_inputs(inputs, direction):
    """What a segment takes of a backward's inputs."""
    dropped = {"initial_state", "d_final_state"} | ({"d_o"} if direction == "forward" else set())
    return {name: x for name, x in inputs.items() if name not in dropped}


def segment(case, direction, inputs=None, layouts=None, device=CPU):
    """A call of the segment op in poisoned buffers."""
    inputs = segment_inputs(make(case) if inputs is None else inputs, direction)
    N, wide = len(case.lengths), "f64" if case.dtype == "f64" else "f32"
    outputs = {
        "M": ((N, case.HV, case.K, case.K), wide),
        "h": ((N, case.HV, case.K, case.V), wide),
    }
    options = case.keywords | {"direction": direction}
    return Call(device, f"{case.family}_segment", inputs, outputs, options, layouts)()


def merge(M, h, initial, direction, dtype, layouts=None, state="f64", device=CPU):
    inputs = {"M": Input(M, dtype), "h": Input(h, dtype)}
    if initial is not None:
        inputs["initial_state"] = Input(initial, state)
    outputs = {"states": (h.shape, dtype), "final_state": (h.shape[1:], state)}
    return Call(device, "segment_merge", inputs, outputs, {"direction": direction}, layouts)()


def check_close(got, want, limit, what):
    error, where = cases.worst_state_error(got, want)
    check(error <= limit, f"{what}: relative RMS error {error:.2e} at {where}, allowed {limit:.0e}")


def check_maps(case, direction, inputs=None, device=CPU):
    inputs = make(case) if inputs is None else inputs
    done = segment(case, direction, inputs, device=device)
    options = case.keywords | {"direction": direction}
    want = expect(f"{case.family}_segment", segment_inputs(inputs, direction), options)
    for name in ("M", "h"):
        got, right = done.values(name), getattr(want, name)
        # What decays below that may be dropped anyway; fp32 keeps few digits of a product of so many factors.
        size = np.sqrt(np.square(right).mean((2, 3)))[..., None, None]
        faded = size < (0.0 if case.dtype == "f64" else NEGLIGIBLE)
        check(
            (np.abs(got) < NEGLIGIBLE * case.K)[np.broadcast_to(faded, got.shape)].all(),
            f"{name} grows",
        )
        got, right = (np.where(faded, 0.0, x) for x in (got, right))
        check_close(got, right, TOLERANCE[case.dtype], f"{case.id} {direction} {name}")


def grid():
    for family in FAMILIES:
        for dtype in ("f32", "f64", "bf16", "f16"):
            yield Case(family, (5, 64, 0, 1, 130), 2, 4, 32, 40, dtype)
        for K, V, H, HV in ((1, 1, 1, 1), (7, 5, 2, 2), (16, 48, 1, 3), (128, 64, 1, 1)):
            yield Case(family, (70, 9), H, HV, K, V, "f32")
        yield Case(family, (67, 67), 1, 2, 16, 24, "f32", packed=False)
        yield Case(family, (66, 31), 2, 4, 16, 20, "f32", options=GATES_INSIDE)
        yield Case(family, (66, 31), 2, 4, 16, 20, "f64", options=(("gate", "softplus"),))
        yield Case(family, (66,), 1, 1, 16, 20, "f64", options=(("scale", -0.3),))
        for gates in HARD_GATES:
            yield Case(family, (70, 17), 1, 2, 16, 24, "f32", gates=gates)
        for gates in HARD_KEYS:
            yield Case(family, (64, 17), 1, 2, 16, 24, "f64", gates=gates)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.id)
def test_map_is_the_product_of_the_tokens(case, direction):
    check_maps(case, direction)


def cut(inputs, bounds):
    """The inputs of each span of tokens of one sequence."""
    tokens = ("q", "k", "v", "g", "beta", "d_o")
    for first, end in zip(bounds[:-1], bounds[1:]):
        part = {
            n: x._replace(values=x.values[:, first:end]) if n in tokens else x
            for n, x in inputs.items()
        }
        yield part | {"cu_seqlens": Input(np.array([0, end - first]), "i32")}


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("options", [(), GATES_INSIDE], ids=["plain", "all_inside"])
@pytest.mark.parametrize("family", FAMILIES)
def test_segments_compose_to_the_whole(family, options, dtype):
    """Maps of the parts, merged: the states and gradients at every border, and those of the whole sequence at its ends."""
    bounds = [0, 64, 64, 65, 150, 200]
    whole = Case(family, (200,), 2, 4, 16, 24, dtype, options=options)
    inputs = make(whole)
    wide = "f64" if dtype == "f64" else "f32"
    limit = TOLERANCE[dtype]
    ends = {}
    for direction, start in (("forward", "initial_state"), ("backward", "d_final_state")):
        maps = []
        for part in cut(inputs, bounds):
            case = Case(family, (part["q"].values.shape[1],), 2, 4, 16, 24, dtype, options=options)
            maps.append(segment(case, direction, part))
        M, h = (np.stack([m.values(name) for m in maps]) for name in ("M", "h"))
        ends[direction] = merge(M, h, inputs[start].values, direction, wide)
    done = forward(
        CPU, whole, {n: x for n, x in inputs.items() if n not in ("d_o", "d_final_state")}
    )
    check_close(ends["forward"].values("final_state"), done.final_state, limit, "final_state")
    gradients = backward(CPU, whole, inputs)
    check_close(
        ends["backward"].values("final_state"),
        gradients["d_initial_state"],
        limit,
        "d_initial_state",
    )

    # What each device of a group would then do alone: its forward and backward from the states at its borders.
    want = expected(whole, inputs)
    states, d_states = (ends[d].values("states") for d in DIRECTIONS)
    for r, part in enumerate(cut(inputs, bounds)):
        first, end = bounds[r], bounds[r + 1]
        case = Case(family, (end - first,), 2, 4, 16, 24, dtype, options=options)
        own = part | {
            "initial_state": Input(states[r], "f64"),
            "d_final_state": Input(d_states[r], "f64"),
        }
        alone = backward(CPU, case, own)
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            error, where = cases.worst_output_error(
                alone[name], getattr(want, name)[:, first:end], case.spans
            )
            allowed = {"bf16": 1e-2}.get(dtype, limit)
            check(error <= allowed, f"{name} of segment {r}: {error:.1e} at {where}")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_merge(dtype, direction):
    rng = np.random.default_rng(3)
    for R, N, HV, K, V in (
        (4, 2, 3, 16, 40),
        (1, 1, 1, 1, 1),
        (3, 1, 2, 130, 20),
        (0, 2, 2, 4, 4),
        (2, 0, 2, 4, 4),
    ):
        M, h = rng.normal(size=(R, N, HV, K, K)) / K**0.5, rng.normal(size=(R, N, HV, K, V))
        M, h = (round_to(x, dtype) for x in (M, h))
        for initial in (rng.normal(size=(N, HV, K, V)), None):
            done = merge(M, h, initial, direction, dtype)
            more = {} if initial is None else {"initial_state": initial}
            want = reference.segment_merge(M, h, direction=direction, **more)
            for name in ("states", "final_state"):
                got, right = done.values(name), getattr(want, name)
                flat = (-1, HV, K, V)
                check_close(
                    got.reshape(flat), right.reshape(flat), TOLERANCE[dtype], f"{name} of R = {R}"
                )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_threads_and_packing_give_the_same_bits(family, direction, monkeypatch):
    case = Case(family, (70, 3, 200), 2, 4, 32, 48, "f32", options=(("qk_l2norm", True),))
    inputs = make(case)
    plain = segment(case, direction, inputs)
    tokens = ("q", "k", "v", "g", "beta", "d_o")
    layouts = {n: lambda s: strides_for(s, [0, 2, 1, *range(3, len(s))], gap=3) for n in tokens}
    layouts |= {n: lambda s: strides_for(s, [0, 1, 3, 2], gap=5) for n in ("M", "h")}
    turned = segment(case, direction, inputs, layouts)
    R = {name: np.stack([plain.values(name)] * 3) for name in ("M", "h")}
    merged = merge(R["M"], R["h"], None, direction, "f32")
    back = [0, 1, 2, 4, 3]
    other = dict.fromkeys(("M", "h", "states"), lambda s: strides_for(s, back, gap=5))
    again = merge(R["M"], R["h"], None, direction, "f32", other)
    for name in ("M", "h"):
        check(turned.bits(name) == plain.bits(name), f"{name}: other strides give other bits")
    for name in ("states", "final_state"):
        check(merged.bits(name) == again.bits(name), f"{name}: other strides give other bits")
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("LINATTN_NUM_THREADS", threads)
        done = segment(case, direction, inputs)
        check(all(done.bits(n) == plain.bits(n) for n in ("M", "h")), f"{threads} threads")
        done = merge(R["M"], R["h"], None, direction, "f32")
        check(all(done.bits(n) == merged.bits(n) for n in ("states", "final_state")), "merge")
    for n, (_, first, end) in enumerate(case.spans):
        part = next(iter(cut(inputs, [first, end])))
        alone = segment(
            Case(family, (end - first,), 2, 4, 32, 48, "f32", options=case.options), direction, part
        )
        for name in ("M", "h"):
            same = np.array_equal(alone.values(name)[0], plain.values(name)[n])
            check(same, f"{name} of sequence {n} depends on the pack")


def test_what_python_allocates():
    rng = np.random.default_rng(0)
    for dtype, wide in (("f4", "f4"), ("f8", "f8"), ("f2", "f4")):
        q, k = (rng.normal(size=(1, 9, 1, 8)).astype(dtype) for _ in range(2))
        v = rng.normal(size=(1, 9, 2, 6)).astype(dtype)
        g, beta = np.zeros((1, 9, 2), "f4"), np.ones((1, 9, 2), "f4")
        cu = np.array([0, 4, 9])
        M, h = pylinattn.gdn_segment(q, k, v, g, beta, cu_seqlens=cu, qk_l2norm=True)
        check(M.shape == (2, 2, 8, 8) and h.shape == (2, 2, 8, 6), f"{M.shape} {h.shape}")
        check(M.dtype == h.dtype == wide, f"{M.dtype} {h.dtype}")
        states, final = pylinattn.segment_merge(M[None], h[None])
        check(states.shape == (1, 2, 2, 8, 6) and not states.any(), "states")
        check(final.shape == h.shape and final.dtype == wide and np.array_equal(final, h), "final")
    with pytest.raises(ValueError, match="d_o"):
        pylinattn.gdn_segment(q, k, v, g, beta, direction="backward")
    with pytest.raises(ValueError, match="direction"):
        pylinattn.gdn_segment(q, k, v, g, beta, direction="sideways")

"""Wrong calls of the backward, the segments and their merge, as test_wrong_calls.py makes them for the other ops."""

from __future__ import annotations

import numpy as np
import pytest
import test_wrong_calls as wrong
from arrays import CPU
from harness import check
from raw import BACKWARD_OPS, dims

from pylinattn._lib import lib

BWD, SEGMENT = ["gdn_bwd", "kda_bwd"], ["gdn_segment", "kda_segment"]
call = wrong.call


class Refusals(wrong.Refusals):
    def finish(self, at_least=1):
        super().finish(min(at_least, 20))  # segment_merge has few fields to spoil


@pytest.fixture
def refusals():
    return Refusals()


@pytest.fixture
def device():
    return CPU


@pytest.mark.parametrize("op", BACKWARD_OPS)
def test_right_calls(call, op):
    wrong.test_the_right_call_is_taken(call, op)


@pytest.mark.parametrize(
    "body",
    [
        wrong.test_wrong_shapes,
        wrong.test_wrong_dtypes,
        wrong.test_missing_and_misplaced,
        wrong.test_outputs_that_cannot_be_written,
        wrong.test_wrong_scalars,
        wrong.test_workspace_too_small,
    ],
    ids=lambda body: body.__name__,
)
@pytest.mark.parametrize("op", BACKWARD_OPS)
def test_wrong_calls(call, refusals, op, body):
    body(call, refusals, op)


@pytest.mark.parametrize(
    "body",
    [
        wrong.test_gates_and_their_parameters,
        wrong.test_heads_must_divide,
        wrong.test_two_rows_and_packed_lengths,
    ],
    ids=lambda body: body.__name__,
)
@pytest.mark.parametrize("op", BWD + SEGMENT)
def test_wrong_calls_of_the_recurrence(call, refusals, op, body):
    body(call, refusals, op)


@pytest.mark.parametrize("op", BWD + SEGMENT)
def test_accepted_dtypes_and_the_query(device, call, op):
    wrong.test_every_dtype_that_the_header_accepts(device, call, op)
    wrong.test_workspace_query_refuses_what_the_call_refuses(call, op)


@pytest.mark.parametrize("op", BWD)
def test_what_belongs_together_in_the_backward(call, refusals, op):
    for gradient, parameter in (("dA_log", "A_log"), ("ddt_bias", "dt_bias")):
        made = call(op)
        made.args.gate, made.args.lower_bound = lib.LINATTN_GATE_BOUNDED, -5.0
        made.give(gradient, dims(made.fields[gradient], made.sizes), "f32")
        refusals.expect(made, "value", (gradient, parameter), f"{gradient} without {parameter}")
        made.give(parameter, dims(made.fields[parameter], made.sizes), "f32")
        check(made() == ("ok", ""), f"{op}: {gradient} with {parameter} was refused")
        for step in (1, -1):
            made = call(op)
            made.args.gate, made.args.lower_bound = lib.LINATTN_GATE_BOUNDED, -5.0
            made.give(parameter, dims(made.fields[parameter], made.sizes), "f32")
            shape = dims(made.fields[gradient], made.sizes)
            made.give(gradient, [shape[0] + step, *shape[1:]], "f32")
            refusals.expect(made, "value", gradient, f"{gradient} of another length")
    made = call(op)
    made.give("saved", [8], "u8")
    refusals.expect(made, "value", ("saved", "save"), "saved without save")
    made = call(op)
    made.args.splits = 4
    refusals.expect(made, "unsupported", "splits", "splits that this version lacks")
    refusals.finish()


@pytest.mark.parametrize("op", [*SEGMENT, "segment_merge"])
def test_direction(call, refusals, op):
    for value in (-1, 2):
        made = call(op)
        made.args.direction = value
        refusals.expect(made, "value", "direction", f"direction {value}")
    if op in SEGMENT:
        refusals.expect(call(op, ("d_o",)), "value", "d_o", "backward without d_o")
        made = call(op)
        made.args.direction = lib.LINATTN_FORWARD
        refusals.expect(made, "value", "d_o", "forward with d_o")
        made = call(op)
        made.args.reserved = 1
        refusals.expect(made, "value", "reserved", "reserved set")
        made = call(op, ("d_o",))
        made.args.direction = lib.LINATTN_FORWARD
        check(made() == ("ok", ""), f"{op}: a forward map was refused")
    refusals.finish()


def test_dtypes_of_a_merge(call):
    for state in ("f32", "bf16", "f64"):
        for name in ("initial_state", "final_state"):
            made = call("segment_merge")
            made.give(name, dims(made.fields[name], made.sizes), state)
            check(made() == ("ok", ""), f"{name} {state} was refused")
    made = call("segment_merge")
    for name in ("M", "h", "states"):
        made.give(name, dims(made.fields[name], made.sizes), "f64")
    check(made() == ("ok", ""), "f64 maps were refused")


@pytest.mark.parametrize("op", BACKWARD_OPS)
def test_head_sizes_without_a_kernel(call, refusals, op):
    for sizes in (dict(K=257), dict(V=257)):
        refusals.expect(call(op, **sizes), "unsupported", "257", f"{sizes}")
    check(np.isfinite(call(op).workspace_bytes()[1]), "no workspace query")
    refusals.finish(2)

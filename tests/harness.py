"""Calls an op the hard way: every array a view inside NaN, every output NaN before, everything else unchanged after."""

from __future__ import annotations

import dataclasses

import cases
import numpy as np
import pytest
from arrays import Buffer, Placed
from cases import Input

import pylinattn
from pylinattn import reference

INOUT = {"state"}


def check(condition, message):
    """An assertion that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)


def need_kernel(device, op, dtype, K, V):
    if not pylinattn.supports(op, device=device.kind, dtype=dtype, K=K, V=V):
        pytest.skip(f"{op} has no kernel for {dtype}, K = {K}, V = {V} on {device.name}")


class Call:
    """One call of an op. `inputs` and `outputs` are by argument name: Input(values, dtype) and (shape, dtype); an output may
    also name the input whose array it is. `layouts` gives strides by argument name, or functions of the shape."""

    def __init__(self, device, op, inputs, outputs, options=None, layouts=None):
        self.device, self.op = device, op
        self.options = dict(options or {})
        layouts = layouts or {}
        self.placed, self.aliases = {}, {}

        def place(name, shape, dtype, values=None):
            strides = layouts.get(name)
            strides = strides(shape) if callable(strides) else strides
            self.placed[name] = Placed(device, Buffer(shape, dtype, strides, values))

        for name, given in inputs.items():
            place(name, given.values.shape, given.dtype, given.values)
        for name, output in outputs.items():
            if isinstance(output, str):
                self.aliases[name] = output
            else:
                place(name, *output)
        self.written = INOUT | set(outputs) | set(self.aliases.values())

    def arrays(self):
        return {name: placed.array for name, placed in self.placed.items()} | {
            name: self.placed[source].array for name, source in self.aliases.items()
        }

    def __call__(self):
        arrays = self.arrays()
        positional = [arrays.pop(name) for name in POSITIONAL[self.op]]
        self.returned = getattr(pylinattn, self.op)(*positional, **arrays, **self.options)
        self.device.synchronize()
        self.path = pylinattn.last_path()
        self.check_surroundings()
        return self

    def check_surroundings(self):
        for name, placed in self.placed.items():
            if name in self.written:
                check(
                    placed.surroundings_untouched(), f"{self.op}: memory around {name} was written"
                )
            else:
                check(placed.untouched(), f"{self.op}: the input {name} was changed")

    def check_nothing_written(self):
        for name, placed in self.placed.items():
            check(placed.untouched(), f"{self.op}: {name} was written by a call that failed")

    def values(self, name):
        return self.placed[self.aliases.get(name, name)].values()

    def bits(self, name):
        return self.placed[self.aliases.get(name, name)].bits()


DELTA = ["q", "k", "v", "g", "beta"]
POSITIONAL = {
    "gdn_fwd": DELTA, "kda_fwd": DELTA,
    "gdn_decode": [*DELTA, "state"], "kda_decode": [*DELTA, "state"],
    "gdn_verify": [*DELTA, "state"], "kda_verify": [*DELTA, "state"],
    "delta_commit": ["state", "k", "u", "g", "accepted"],
    "gdn_bwd": [*DELTA, "d_o"], "kda_bwd": [*DELTA, "d_o"],
    "gdn_segment": DELTA, "kda_segment": DELTA, "segment_merge": ["M", "h"],
}  # fmt: skip


@dataclasses.dataclass
class Forward:
    """What a forward call left in its buffers, with the raw bits for comparisons."""

    call: Call

    @property
    def o(self):
        return self.call.values("o")

    @property
    def final_state(self):
        return self.call.values("final_state")

    @property
    def checkpoints(self):
        return self.call.values("checkpoints")

    @property
    def path(self):
        return self.call.path

    def bits(self):
        return tuple(self.call.bits(n) for n in ("o", "final_state", "checkpoints") if self._has(n))

    def _has(self, name):
        return name in self.call.placed or name in self.call.aliases


def forward_call(device, case, inputs=None, outputs=None, layouts=None, **options):
    """A prepared forward call with buffers for every output of the case."""
    need_kernel(device, case.op, case.dtype, case.K, case.V)
    inputs = cases.make(case) if inputs is None else inputs
    options = case.keywords | options
    every = options.get("checkpoint_every", 0)
    default = {
        "o": (inputs["v"].values.shape, case.dtype),
        "final_state": ((len(case.lengths), case.HV, case.K, case.V), case.state),
    }
    if every:
        rows = sum(length // every for length in case.lengths)
        default["checkpoints"] = ((rows, case.HV, case.K, case.V), case.state)
    outputs = {
        name: value for name, value in (default | (outputs or {})).items() if value is not None
    }
    return Call(device, case.op, inputs, outputs, options, layouts)


def forward(device, case, inputs=None, outputs=None, layouts=None, **options):
    return Forward(forward_call(device, case, inputs, outputs, layouts, **options)())


PYTHON_OPTIONS_OF_REFERENCE = (
    "scale", "lower_bound", "qk_l2norm", "gate", "beta_form", "checkpoint_every", "heads", "sequences",
    "direction",
)  # fmt: skip


def expect(op, inputs, options=None, **more):
    """What the float64 reference says to the same arguments."""
    options = {k: v for k, v in (options or {}).items() if k in PYTHON_OPTIONS_OF_REFERENCE}
    arrays = {
        name: given.values if isinstance(given, Input) else given for name, given in inputs.items()
    }
    positional = [arrays.pop(name) for name in POSITIONAL[op]]
    return getattr(reference, op)(*positional, **arrays, **options, **more)


def check_outputs(got, want, dtype, spans, what="o", path=None):
    """Outputs of this thread's last call, or of the path that decides their accuracy."""
    error, where = cases.worst_output_error(got, want, spans)
    limit = cases.output_tolerance(dtype, path or pylinattn.last_path())
    check(
        error <= limit,
        f"{what}: relative RMS error {error:.2e} at {where}, allowed {limit:.1e} for {dtype}",
    )


def check_states(got, want, dtype, path, what="final_state"):
    error, where = cases.worst_state_error(got, want)
    limit = cases.state_tolerance(dtype, path)
    check(
        error <= limit,
        f"{what}: relative RMS error {error:.2e} at {where}, allowed {limit:.1e} for {dtype}",
    )


def check_forward(case, done, inputs=None, **more):
    """A forward against the float64 loop."""
    inputs = cases.make(case) if inputs is None else inputs
    want = expect(case.op, inputs, done.call.options, **more)
    check_outputs(done.o, want.o, case.dtype, case.spans)
    check_states(
        done.final_state, want.final_state, state_word(done.call, "final_state"), done.path
    )
    if want.checkpoints is not None:
        check_states(
            done.checkpoints,
            want.checkpoints,
            state_word(done.call, "checkpoints"),
            done.path,
            "checkpoints",
        )


def state_word(call, name):
    return call.placed[call.aliases.get(name, name)].buffer.dtype


def rows(*numbers, dtype="i32"):
    """An index table or a list of lengths."""
    return Input(
        np.asarray(numbers if len(numbers) != 1 or np.ndim(numbers[0]) == 0 else numbers[0]), dtype
    )

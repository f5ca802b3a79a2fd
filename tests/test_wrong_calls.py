"""Every wrong call that the header implies is refused with the right status and the argument's name, and writes nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest
import raw
from arrays import CPU
from harness import check
from raw import OPS, RawCall, dims, dtypes_of

from pylinattn._lib import ffi, lib

FREE_SIZES = {
    "P",
    "F",
    "C",
    "M",
    "S",
}  # rows of pools and tables: any number that the indices stay inside of
FWD = ["gdn_fwd", "kda_fwd"]
PACKED = [*FWD, "gdn_decode", "kda_decode"]
VERIFY = ["gdn_verify", "kda_verify"]
DELTA = [op for op in OPS if op != "delta_commit"]


@pytest.fixture
def call(device):
    """Builds right calls on the device, in sizes and a dtype that it has kernels for."""
    small = dict(K=64, V=64, H=2, HV=4) if device.kind == "cuda" else {}
    q = "bf16" if device.kind == "cuda" else "f32"

    def build(op, leave=(), **sizes):
        own = "f32" if op == "delta_commit" else q
        made = RawCall(op, device, leave, raw.sizes_of(op, **(small | sizes)), q=own)
        made.q = own
        return made

    return build


class Refusals:
    """Collects calls that were not refused as they should have been, so that one run shows all of them."""

    def __init__(self):
        self.faults, self.count = [], 0

    def expect(self, made, status, names, what):
        got, sentence = made()
        self.count += 1
        names = (names,) if isinstance(names, str) else names
        if got != status or not all(re.search(rf"\b{re.escape(n)}\b", sentence) for n in names):
            self.faults.append(
                f"{made.op}, {what}: expected {status} naming {names}, got {got}: {sentence}"
            )
        elif made.op not in sentence:
            self.faults.append(f"{made.op}, {what}: the sentence does not name the op: {sentence}")
        if got != "ok" and not made.nothing_written():
            self.faults.append(f"{made.op}, {what}: refused, but something was written")

    def finish(self, at_least=1):
        check(not self.faults, "\n".join(self.faults))
        check(self.count >= at_least, f"only {self.count} wrong calls were made")


@pytest.fixture
def refusals():
    return Refusals()


def tensors(made):
    return [f for f in made.fields.values() if f.name in made.placed]


@pytest.mark.parametrize("op", OPS)
def test_the_right_call_is_taken(call, op):
    for leave in ((), ("workspace",)):
        made = call(op, leave)
        if made.workspace_bytes() == ("ok", 0) or not leave:
            status, sentence = made()
            check(status == "ok" and sentence == "", f"{op}: {status}: {sentence}")


@pytest.mark.parametrize("op", OPS)
def test_wrong_shapes(call, refusals, op):
    for field in tensors(call(op)):
        if field.name == "workspace":
            continue
        shape = dims(field, call(op).sizes)
        for axis, word in enumerate(field.shapes[0]):
            for step in (1, -1):
                made = call(op)
                bad = list(shape)
                bad[axis] += step
                made.give(field.name, bad, dtypes_of(field, made.q)[0])
                free = FREE_SIZES | (
                    {"H"} if op == "delta_commit" else set()
                )  # any divisor of HV there
                if word not in free:
                    refusals.expect(made, "value", field.name, f"{field.name} {bad}")
        for bad in (shape[:-1] or [1, 1], [*shape, 1][:5] if len(shape) < 5 else shape[:-2]):
            made = call(op)
            made.give(field.name, bad, dtypes_of(field, made.q)[0])
            refusals.expect(made, "value", field.name, f"{field.name} {bad}")
        for ndim in (6, -1):
            made = call(op)
            made.tensor(field.name).ndim = ndim
            refusals.expect(made, "value", field.name, f"{field.name} with ndim {ndim}")
        made = call(op)
        made.tensor(field.name).shape[0] = -1
        refusals.expect(made, "value", field.name, f"{field.name} with a negative size")
    refusals.finish(40)


@pytest.mark.parametrize("op", OPS)
def test_wrong_dtypes(call, refusals, op):
    for field in tensors(call(op)):
        base = call(op)
        used = base.placed[field.name].buffer.dtype
        accepted = dtypes_of(field, used)[1]
        bound = field.dtypes.startswith("=") or field.name in (
            "q",
            "k",
        )  # others must be equal to it
        for dtype in raw.DTYPES:
            if dtype == used or (dtype in accepted and not bound):
                continue
            made = call(op)
            made.give(field.name, dims(field, made.sizes), dtype)
            refusals.expect(made, "type", field.name, f"{field.name} {dtype}")
        for code in (0, 8, -1):
            made = call(op)
            made.tensor(field.name).dtype = code
            refusals.expect(made, "type", field.name, f"{field.name} with dtype code {code}")
    refusals.finish(40)


@pytest.mark.parametrize("op", OPS)
def test_every_dtype_that_the_header_accepts(device, call, op):
    """Gates, states and indices in each dtype of their line."""
    for field in tensors(call(op)):
        used = call(op).placed[field.name].buffer.dtype
        if field.dtypes.startswith("=") or field.name in ("q", "k"):
            continue
        for dtype in dtypes_of(field, used)[1]:
            made = call(op)
            made.give(field.name, dims(field, made.sizes), dtype)
            status, sentence = made()
            allowed = ("ok", "unsupported") if device.kind == "cuda" and dtype == "f64" else ("ok",)
            check(status in allowed, f"{op}: {field.name} {dtype}: {status}: {sentence}")


@pytest.mark.parametrize("op", OPS)
def test_missing_and_misplaced(call, refusals, op):
    for field in tensors(call(op)):
        if field.name == "workspace":
            continue
        if not field.optional:
            made = call(op)
            made.omit(field.name)
            refusals.expect(made, "value", field.name, f"{field.name} left out")
        for device_type, device_id in ((99, 0), (3, 0), (2 if made.device.kind == "cpu" else 1, 0)):
            made = call(op)
            made.tensor(field.name).device_type, made.tensor(field.name).device_id = (
                device_type,
                device_id,
            )
            refusals.expect(made, "type", field.name, f"{field.name} on device type {device_type}")
        made = call(op)
        made.tensor(field.name).data = ffi.NULL
        refusals.expect(made, "value", field.name, f"{field.name} without data")
        if made.placed[field.name].buffer.dtype != "u8":
            made = call(op)
            made.tensor(field.name).data += 1
            refusals.expect(made, "value", field.name, f"{field.name} misaligned")
    refusals.finish(40)


@pytest.mark.parametrize("op", OPS)
def test_outputs_that_cannot_be_written(call, refusals, op):
    for field in tensors(call(op)):
        if not field.written:
            made = call(op)
            made.tensor(field.name).flags = lib.LINATTN_READ_ONLY
            status, sentence = made()
            check(status == "ok", f"{op}: a read-only {field.name} was refused: {sentence}")
            continue
        made = call(op)
        made.tensor(field.name).flags = lib.LINATTN_READ_ONLY
        refusals.expect(made, "value", field.name, f"{field.name} read-only")
        for axis, size in enumerate(dims(field, made.sizes)):
            if size > 1:
                made = call(op)
                made.tensor(field.name).strides[axis] = 0
                refusals.expect(
                    made, "value", field.name, f"{field.name} with stride 0 in axis {axis}"
                )
        for other in tensors(call(op)):
            if other.name != field.name:
                made = call(op)
                made.tensor(field.name).data = made.tensor(other.name).data
                refusals.expect(made, "value", field.name, f"{field.name} on top of {other.name}")
    refusals.finish(8)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_misaligned_rows_on_the_gpu(gpu, refusals, op):
    sizes = raw.sizes_of(op, K=64, V=64)
    for field in tensors(RawCall(op, gpu, sizes=sizes, q="bf16")):
        if field.name in (
            "q",
            "k",
            "v",
            "u",
            "o",
            "state",
            "initial_state",
            "final_state",
            "checkpoints",
            "kept_k",
        ):
            made = RawCall(op, gpu, sizes=sizes, q="f32" if op == "delta_commit" else "bf16")
            made.tensor(field.name).data += 8
            refusals.expect(made, "value", field.name, f"{field.name} 8 bytes off")
    refusals.finish(3)


BAD_SCALARS = {
    "scale": (0.0, np.nan, np.inf, -np.inf),
    "qk_l2norm": (-1, 2),
    "gate": (-1, 3),
    "beta_form": (-1, 3),
    "checkpoint_every": (-64, 1, 63, 65),
    "save": (-1, 2),
    "splits": (-1,),
    "checked": (-1, 2),
    "zero_tail": (-1, 4),
    "lower_bound": (-5.0, 1.0, np.nan),  # with gate "none"
}


@pytest.mark.parametrize("op", OPS)
def test_wrong_scalars(call, refusals, op):
    fields = call(op).fields
    for name, values in BAD_SCALARS.items():
        for value in values if name in fields else ():
            made = call(op)
            setattr(made.args, name, value)
            refusals.expect(made, "value", name, f"{name} = {value}")
    if op in FWD:
        made = call(op)
        made.args.splits = 4
        refusals.expect(made, "unsupported", "splits", "splits that this version lacks")
    refusals.finish()


@pytest.mark.parametrize("op", DELTA)
def test_gates_and_their_parameters(call, refusals, op):
    for name in ("A_log", "dt_bias"):
        made = call(op)
        made.give(name, dims(made.fields[name], made.sizes), "f32")
        refusals.expect(made, "value", name, f"{name} with gate none")
        for step in (1, -1):
            made = call(op)
            made.args.gate = lib.LINATTN_GATE_SOFTPLUS
            for each in ("A_log", "dt_bias"):
                shape = dims(made.fields[each], made.sizes)
                shape[0] += step if each == name else 0
                made.give(each, shape, "f32")
            refusals.expect(
                made, "value", name, f"{name} one too {'long' if step > 0 else 'short'}"
            )
    made = call(op)
    made.args.gate = lib.LINATTN_GATE_SOFTPLUS
    refusals.expect(made, "value", "A_log", "softplus without A_log")
    for bound in (0.0, 2.0, np.nan, -np.inf):
        made = call(op)
        made.args.gate, made.args.lower_bound = lib.LINATTN_GATE_BOUNDED, bound
        refusals.expect(made, "value", "lower_bound", f"bounded gate with lower_bound {bound}")
    made = call(op)
    made.args.gate, made.args.lower_bound = lib.LINATTN_GATE_SOFTPLUS, -5.0
    made.give("A_log", [made.sizes["HV"]], "f32")
    refusals.expect(made, "value", "lower_bound", "softplus gate with a lower_bound")
    refusals.finish()


@pytest.mark.parametrize("op", OPS)
def test_heads_must_divide(call, refusals, op):
    refusals.expect(call(op, H=2, HV=5), "value", ("HV", "H"), "HV = 5, H = 2")
    refusals.expect(call(op, H=4, HV=2), "value", ("HV", "H"), "HV = 2, H = 4")
    refusals.finish()


@pytest.mark.parametrize("op", PACKED)
def test_two_rows_and_packed_lengths(call, refusals, op):
    refusals.expect(call(op, B=2), "value", ("B", "cu_seqlens"), "B = 2 with cu_seqlens")
    for bad, what in (
        ([1, 2, 3, 7], "not from 0"),
        ([0, 5, 2, 7], "falling"),
        ([0, 2, 3, 8], "past T"),
        ([-1, 0, 3, 7], "-1"),
    ):
        for dtype in ("i32", "i64"):
            made = call(op)
            made.args.checked = 1
            made.give("cu_seqlens", [4], dtype, np.array(bad))
            refusals.expect(made, "value", "cu_seqlens", f"cu_seqlens {what}")
    refusals.finish()


@pytest.mark.parametrize("op", OPS)
def test_indices_out_of_range(call, refusals, op):
    """On the CPU always, on a GPU with `checked`."""
    fields = call(op).fields
    pools = {
        "read_indices": "P",
        "write_indices": "F" if op in FWD else "P",
        "checkpoint_indices": "C",
    }
    for name, letter in pools.items():
        for dtype in ("i32", "i64"):
            for wrong in (-2, call(op).sizes[letter], 1 << 30) if name in fields else ():
                made = call(op)
                made.args.checked = 1
                values = np.full(dims(fields[name], made.sizes), -1)
                values.flat[1] = wrong
                made.give(name, values.shape, dtype, values)
                refusals.expect(made, "value", name, f"{name} with {wrong}")
    refusals.finish()


@pytest.mark.parametrize("op", OPS)
def test_rows_that_would_race(call, refusals, op):
    """One row written by two sequences, or written by one and read by another: results would depend on timing."""
    made = call(op)
    made.args.checked = 1
    table = made.placed["write_indices"].buffer
    made.give("write_indices", table.shape, "i32", np.full(table.shape, 1))
    refusals.expect(made, "value", "write_indices", "one row written twice")
    if op in (*PACKED[2:], "delta_commit"):
        made = call(op)
        made.args.checked = 1
        made.give("read_indices", [made.sizes["N"]], "i32", np.arange(made.sizes["N"]))
        made.give("write_indices", [made.sizes["N"]], "i32", np.roll(np.arange(made.sizes["N"]), 1))
        refusals.expect(made, "value", "row", "rows read and written by different sequences")
    refusals.finish()


@pytest.mark.parametrize("op", FWD)
def test_options_that_belong_together(call, refusals, op):
    refusals.expect(
        call(op, ("initial_state",)),
        "value",
        ("read_indices", "initial_state"),
        "read_indices alone",
    )
    refusals.expect(
        call(op, ("final_state",)), "value", ("write_indices", "final_state"), "write_indices alone"
    )
    refusals.expect(
        call(op, ("checkpoints",)),
        "value",
        ("checkpoint_indices", "checkpoints"),
        "checkpoint_indices alone",
    )
    made = call(op)
    made.args.checkpoint_every = 0
    refusals.expect(
        made, "value", ("checkpoints", "checkpoint_every"), "checkpoints without checkpoint_every"
    )
    made = call(op, ("checkpoints", "checkpoint_indices"))
    made.args.checkpoint_every = 64
    refusals.expect(
        made, "value", ("checkpoints", "checkpoint_every"), "checkpoint_every without checkpoints"
    )
    made = call(op)
    made.give("saved", [8], "u8")
    refusals.expect(made, "value", ("saved", "save"), "saved without save")
    for name, table in (("initial_state", "read_indices"), ("final_state", "write_indices")):
        refusals.expect(
            call(op, (table,)), "value", name, f"{name} of another length without {table}"
        )
    for C in (1, 3):
        made = call(
            op, ("checkpoint_indices", "cu_seqlens", *raw.TABLES), B=2, T=130, N=2, P=2, F=2, C=C
        )
        refusals.expect(made, "value", "checkpoints", f"{C} checkpoint rows where 4 are needed")
    refusals.finish()


@pytest.mark.parametrize("op", [*VERIFY, "delta_commit"])
def test_drafts(call, refusals, op):
    refusals.expect(call(op, T=17), "value", "T", "17 drafted tokens")
    if op in VERIFY:
        for t, parent in ((0, 0), (3, 3), (3, 4), (6, 7), (2, -2)):
            made = call(op)
            made.args.checked = 1
            parents = np.tile(np.arange(7) - 1, (3, 1))
            parents[1, t] = parent
            made.give("parents", [3, 7], "i32", parents)
            refusals.expect(made, "value", "parents", f"parent {parent} of token {t}")
    else:
        for token in (-1, 7):
            made = call(op)
            made.args.checked = 1
            path = np.tile(np.arange(7), (3, 1))
            path[2, 1] = token
            made.give("path", [3, 7], "i32", path)
            refusals.expect(made, "value", "path", f"token {token} of 7")
    refusals.finish()


@pytest.mark.parametrize("op", OPS)
def test_workspace_too_small(call, refusals, op):
    status, bytes_needed = call(op).workspace_bytes()
    check(status == "ok", f"{op}: the workspace query gives {status}")
    if bytes_needed:
        made = call(op)
        made.give("workspace", [bytes_needed - 1], "u8")
        refusals.expect(made, "value", "workspace", "workspace one byte short")
        refusals.expect(call(op, ("workspace",)), "value", "workspace", "no workspace")
    check(
        getattr(lib, f"linattn_{op}_workspace")(ffi.cast("const char *", call(op).args), ffi.NULL),
        "NULL was taken",
    )
    refusals.finish(0)


@pytest.mark.parametrize("op", DELTA)
def test_workspace_query_refuses_what_the_call_refuses(call, op):
    made = call(op)
    made.tensor("beta").shape[2] += 1
    check(made.workspace_bytes()[0] == "value", "the query took a beta that the call refuses")
    made = call(op)
    made.omit("k")
    check(made.workspace_bytes()[0] == "value", "the query took a call without k")


def test_last_error_is_cleared_and_of_its_thread(watchdog):
    bad, good = RawCall("gdn_fwd", CPU), RawCall("gdn_fwd", CPU)
    bad.omit("k")
    check(bad()[0] == "value", "a call without k was taken")
    check(ffi.string(lib.linattn_last_error()) != b"", "no sentence after a failed call")
    watchdog(
        "import threading\n"
        "from pylinattn._lib import ffi, lib\n"
        "from raw import RawCall\n"
        "from arrays import CPU\n"
        "bad = RawCall('gdn_fwd', CPU); bad.omit('k'); bad()\n"
        "seen = []\n"
        "t = threading.Thread(target=lambda: seen.append(ffi.string(lib.linattn_last_error()))); t.start(); t.join()\n"
        "if seen != [b''] or ffi.string(lib.linattn_last_error()) == b'': raise SystemExit(f'{seen}')\n"
    )
    check(good() == ("ok", ""), "a good call leaves the sentence of an earlier one")


def test_wrong_calls_are_refused_under_dash_O(watchdog):
    """Python's -O strips assert statements: none of the checks may be one."""
    watchdog(
        "import sys, pytest\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not gpu', '-k',"
        " 'wrong_shapes or missing or scalars', 'test_wrong_calls.py', '--rootdir', '.']))\n",
        300,
        flags=("-O",),
    )

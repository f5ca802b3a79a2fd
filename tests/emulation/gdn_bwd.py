"""The chunked GDN backward in the emulation, against the float64 reverse loop. See README.md.

python gdn_bwd.py LIBRARY [part of a case's name]
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[i]) for i in (1, 2)]
from arrays import decode, encode  # noqa: E402
from cases import (  # noqa: E402
    HARD_GATES,
    HARD_KEYS,
    TOLERANCE_O,
    Case,
    state_tolerance,
    worst_output_error,
    worst_state_error,
)
from gradients import (  # noqa: E402
    FEW_TOKENS,
    OF,
    SHAPES_OF_SIZES,
    expected,
    fault_of,
    make,
    make_sized,
    worst_error,
)
from harness import expect  # noqa: E402

NUMBER = {"f32": 1, "bf16": 3, "f16": 4, "i32": 5, "i64": 6}
INPUTS = (
    "q", "k", "v", "g", "beta", "d_o", "initial_state", "d_final_state", "cu_seqlens", "A_log", "dt_bias",
)  # fmt: skip


class Plain(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64 * 5),
        ("dtype", ctypes.c_int32),
    ]


def plain(words, dtype):
    if words is None:
        return Plain()
    strides = [s // words.itemsize for s in words.strides]
    return Plain(words.ctypes.data, (ctypes.c_int64 * 5)(*strides), NUMBER[dtype])


def aligned(shape, dtype, values=None):
    words = encode(np.zeros(shape) if values is None else values, dtype)
    raw = np.empty(words.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + words.nbytes].view(words.dtype).reshape(words.shape)
    out[...] = words if values is not None else (0x7FC0 if dtype == "bf16" else np.nan)
    return out


def run(
    library, case, drop=(), multiprocessors=3, splits=0, given=None, label="", save=False, same=None
):
    given = given or make(case)
    inputs = {name: x for name, x in given.items() if name not in drop}
    arrays = {
        name: (aligned(x.values.shape, x.dtype, x.values) if x.dtype in ("f32", "bf16", "f16")
               else x.values.astype({"i32": np.int32, "i64": np.int64}[x.dtype]), x.dtype)
        for name, x in inputs.items()
    }  # fmt: skip
    outputs = {
        name: (aligned(inputs[source].values.shape, inputs[source].dtype), inputs[source].dtype)
        for name, source in OF.items()
        if source in inputs
    }
    N, HV = len(case.lengths), case.HV
    outputs.setdefault(
        "d_initial_state", (aligned((N, HV, case.K, case.V), case.state), case.state)
    )
    arguments = [arrays.get(name, (None, None)) for name in INPUTS]
    arguments += [outputs.get(name, (None, None)) for name in OF]
    forward = {}
    if save:
        forward = {"o": aligned(inputs["v"].values.shape, case.dtype),
                   "final_state": aligned((N, HV, case.K, case.V), case.state)}  # fmt: skip
    arguments += [(forward.get("o"), case.dtype), (forward.get("final_state"), case.state)]
    B, T, H, K = inputs["q"].values.shape
    sizes = (ctypes.c_int64 * 6)(B, T, H, HV, K, N)
    o = case.keywords
    items = (ctypes.c_int * 2)()
    flagged = library.emulate(
        (Plain * len(arguments))(*(plain(*x) for x in arguments)), sizes, ctypes.c_double(o.get("scale", K**-0.5)),
        int(o.get("qk_l2norm", False)), {"none": 0, "softplus": 1, "bounded": 2}[o.get("gate", "none")],
        {"weight": 0, "logits": 1, "logits_x2": 2}[o.get("beta_form", "weight")],
        ctypes.c_double(o.get("lower_bound", 0.0)), multiprocessors, splits, items,
    )  # fmt: skip
    if flagged:
        well = (
            case.gates in HARD_KEYS
            or max(case.lengths) <= FEW_TOKENS
            or label in ("states_apart", "small_q")
        )
        return print("ok " if well else "BAD", case.id, label, f"flagged {flagged}", flush=True)
    want = expected(case, inputs)
    texts, bad = [], False
    for name, (words, dtype) in outputs.items():
        values = getattr(want, name)
        values = np.where(np.abs(values) < 1.2e-38, 0, values)
        error, _ = worst_error(name, decode(words, dtype), values, case.spans)
        fault = fault_of(case, inputs, name, decode(words, dtype), values, dtype, "cuda/chunked")
        text, expected_miss = fault or (f"{name} {error:.1e}", True)
        bad = bad or not expected_miss
        texts.append(text + (", but small beside its terms" if fault and expected_miss else ""))
    cut = f", {items[0]} + {items[1]} scans" if items[0] else ""
    if save:
        forward_want = expect(
            "gdn_fwd", {k: x for k, x in inputs.items() if not k.startswith("d_")}, o
        )
        for name, worst, dtype, limit in (
            ("o", lambda x, y: worst_output_error(x, y, case.spans), case.dtype, TOLERANCE_O[case.dtype]),
            ("final_state", worst_state_error, case.state, state_tolerance(case.state, "cuda/chunked")),
        ):  # fmt: skip
            error, _ = worst(decode(forward[name], dtype), getattr(forward_want, name))
            bad = bad or not error <= limit
            texts.append(f"{name} {error:.1e}{'' if error <= limit else ' TOO LARGE'}")
        for name, (words, _) in outputs.items() if same else ():
            if not np.array_equal(words.view(np.uint8), same[name][0].view(np.uint8)):
                texts.append(f"{name} has other bits than with nothing saved")
                bad = True
    label += " saved" if save else ""
    print("BAD" if bad else "ok ", case.id, label, f"flagged {flagged}{cut}:", ", ".join(texts), flush=True)  # fmt: skip
    return outputs


def cases():
    for D in (128, 64):
        yield Case("gdn", (64,), 1, 1, D, D, "bf16", gates="zero", initial=False)
        yield Case("gdn", (70, 0, 17, 65), 1, 2, D, D, "bf16")
        yield Case(
            "gdn", (70, 33), 2, 4, D, D, "f16", options=(("qk_l2norm", True), ("scale", -0.3))
        )
        for gate in ((("gate", "softplus"),), (("gate", "bounded"), ("lower_bound", -5.0))):
            for form in ("logits", "logits_x2"):
                options = (("qk_l2norm", True), ("beta_form", form), *gate)
                yield Case("gdn", (150,), 1, 3, D, D, "bf16", options=options)
        yield Case(
            "gdn", (67, 67), 2, 2, D, D, "bf16", packed=False, state_dtype="bf16", gate_dtype="bf16"
        )
        for gates in HARD_GATES:
            yield Case("gdn", (130, 64), 1, 2, D, D, "bf16", gates=gates)
        yield Case("gdn", (67, 67, 67), 2, 4, D, D, "bf16", packed=False)


def long_ones():
    """Cut sequences, with so many multiprocessors: exactly where no gate forgets, and in one pass where they do."""
    for D in (64, 128):
        yield Case("gdn", (2500,), 1, 1, D, D, "bf16", gates="zero"), 16 * D // 64
        yield Case("gdn", (2500,), 1, 1, D, D, "bf16"), 12 * D // 64
    options = (("qk_l2norm", True), ("gate", "softplus"), ("beta_form", "logits_x2"))
    yield Case("gdn", (2500,), 1, 2, 64, 64, "bf16", options=options), 32
    yield Case("gdn", (1500, 0, 70, 700), 1, 2, 64, 64, "f16"), 60
    yield Case("gdn", (5800, 200, 150), 1, 1, 64, 64, "bf16"), 6
    yield Case("gdn", (2048, 2048), 1, 1, 64, 64, "bf16", packed=False), 20


def flagged_ones():
    """Which sequences and heads are flagged: all of these."""
    for gates in HARD_KEYS:
        yield Case("gdn", (128,), 1, 1, 128, 128, "bf16", gates=gates)
    yield Case("gdn", (1, FEW_TOKENS), 1, 2, 64, 64, "bf16")


def both(library, case, multiprocessors=3, **more):
    """With nothing saved and with states saved; the same bits where nothing is cut."""
    plain = run(library, case, multiprocessors=multiprocessors, **more)
    run(library, case, multiprocessors=multiprocessors, save=True, same=multiprocessors == 3 and plain, **more)  # fmt: skip


if __name__ == "__main__":
    loaded = ctypes.CDLL(sys.argv[1])
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    for one in cases():
        if wanted in one.id:
            both(loaded, one)
    for one, multiprocessors in long_ones():
        if wanted in one.id:
            both(loaded, one, multiprocessors=multiprocessors)
    bounded = Case(
        "gdn", (70,), 2, 2, 64, 64, "bf16", options=(("gate", "bounded"), ("lower_bound", -5.0))
    )
    for left_out in (("A_log",), ("dt_bias",), ("A_log", "dt_bias")):
        if wanted in bounded.id:
            both(loaded, bounded, drop=left_out)
    for size in SHAPES_OF_SIZES:
        for D in (64, 128):
            options = (("qk_l2norm", True),) if size == "lengths" else ()
            one = Case("gdn", (130, 70), 1, 2, D, D, "bf16", options=options)
            if wanted in one.id or wanted in size:
                both(loaded, one, given=make_sized(one, size), label=size)
    for one in flagged_ones():
        if wanted in one.id:
            run(loaded, one)

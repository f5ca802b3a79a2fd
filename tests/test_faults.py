"""Kinds of fault that users of such kernels have met, and that the other files do not show."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from arrays import CPU, Buffer, Placed, decode, encode
from cases import Case, Input, make, unit
from harness import (
    POSITIONAL,
    Forward,
    check,
    check_forward,
    check_outputs,
    check_states,
    expect,
    forward,
    forward_call,
    need_kernel,
)
from raw import RawCall, sizes_of

import pylinattn

FAMILIES = ["gdn", "kda"]


def half(device):
    return "bf16" if device.kind == "cuda" else "f32"


def arrays_of(device, inputs):
    """The inputs on a device as an op takes them; the second value keeps them alive."""
    placed = {
        n: Placed(device, Buffer(x.values.shape, x.dtype, None, x.values))
        for n, x in inputs.items()
    }
    return {n: p.array for n, p in placed.items()}, placed


def call(device, op, inputs, **options):
    arrays, _ = arrays_of(device, inputs)
    positional = [arrays.pop(n) for n in POSITIONAL[op]]
    returned = getattr(pylinattn, op)(*positional, **arrays, **options)
    device.synchronize()
    return returned


# ---- outputs that the package makes


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_outputs(device, family, dtype):
    """Made here: right values, dtype of the states by default, zero rows past cu_seqlens[-1], None where not asked for."""
    case = Case(family, (70, 3, 64), 1, 2, 64, 64, dtype, initial=False)
    need_kernel(device, case.op, dtype, 64, 64)
    inputs = make(case, extra_tokens=9)
    plain = call(device, case.op, inputs)
    check(plain[1] is None, "a final state that nobody asked for")
    done = call(device, case.op, inputs, output_final_state=True, checkpoint_every=64)
    want = expect(case.op, inputs, {"checkpoint_every": 64})
    o, state = (np.asarray(device.to_host(x), np.float64) for x in (done.o, done.final_state))
    marks = np.asarray(device.to_host(done.checkpoints), np.float64)[: len(want.checkpoints)]
    check_outputs(o, want.o, dtype, case.spans)
    check_states(state, want.final_state, case.state, pylinattn.last_path())
    check_states(marks, want.checkpoints, case.state, pylinattn.last_path())
    check(not o[:, sum(case.lengths) :].any(), "rows past cu_seqlens[-1] are not zero")
    for name, array, word in (("o", done.o, dtype), ("final_state", done.final_state, case.state)):
        kinds = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16"}
        check(
            str(array.dtype).endswith(kinds[word]),
            f"{name} is {array.dtype}, expected {kinds[word]}",
        )


@pytest.mark.parametrize("order", ["k_first", "v_first"])
@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_final_state_comes_back_as_initial_state_went_in(device, state, order):
    case = Case("gdn", (70, 3), 1, 2, 64, 64, "bf16", state_dtype=state)
    inputs = make(case)
    axes = (0, 1, 2, 3) if order == "k_first" else (0, 1, 3, 2)
    flipped = Input(inputs["initial_state"].values.transpose(axes), state)
    arrays, _keep = arrays_of(device, inputs | {"initial_state": flipped})
    if order == "v_first":
        arrays["initial_state"] = arrays["initial_state"].swapaxes(2, 3)
    positional = [arrays.pop(n) for n in POSITIONAL["gdn_fwd"]]
    done = pylinattn.gdn_fwd(*positional, **arrays, output_final_state=True)
    device.synchronize()
    check(
        done.final_state.dtype == arrays["initial_state"].dtype, "another dtype than initial_state"
    )
    inner = done.final_state.swapaxes(2, 3) if order == "v_first" else done.final_state
    contiguous = (
        inner.is_contiguous() if hasattr(inner, "is_contiguous") else inner.flags.c_contiguous
    )
    check(contiguous, f"a {order} state came back in another stride order")
    want = expect("gdn_fwd", inputs)
    got = np.asarray(device.to_host(done.final_state), np.float64)
    check_states(got, want.final_state, state, pylinattn.last_path())


def test_two_calls_give_two_memories(device):
    case = Case("gdn", (40,), 1, 2, 64, 64, half(device))
    inputs = make(case)
    first, second = (call(device, case.op, inputs, output_final_state=True) for _ in range(2))
    kept = [np.array(device.to_host(x)) for x in first[:2]]
    other = dict(inputs, v=Input(-inputs["v"].values, inputs["v"].dtype))
    call(device, case.op, other, output_final_state=True)
    for was, now, twin in zip(kept, first, second):
        check(np.array_equal(was, device.to_host(now)), "a later call changed an earlier output")
        check(np.array_equal(was, device.to_host(twin)), "equal calls, other numbers")


def test_dtypes_in_every_order(device):
    """Nothing is cached by shape alone: bf16, fp16 and fp32 of one shape after each other, in all orders."""
    words = ["bf16", "f16"] if device.kind == "cuda" else ["bf16", "f16", "f32"]
    orders = [(a, b, c) for a in words for b in words for c in words]
    first = {}
    for order in orders:
        for dtype in order:
            case = Case("kda", (33,), 1, 1, 64, 64, dtype)
            bits = forward(device, case).bits()
            check(
                first.setdefault(dtype, bits) == bits,
                f"{dtype} depends on what ran before, order {order}",
            )


# ---- long and hard


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, -1e-4])
def test_long_memory_and_automatic_splits(device, decay):
    """65536 tokens that are hardly forgotten, few heads: splits = "auto" agrees with splits = 1 and with the loop."""
    case = Case("gdn", (65536,), 1, 1, 64, 64, half(device), initial=False)
    inputs = make(case)
    inputs["g"] = Input(np.full_like(inputs["g"].values, decay), "f32")
    one, auto = (forward(device, case, inputs, splits=s) for s in (1, "auto"))
    want = expect(case.op, inputs)
    for done in (one, auto):
        check_outputs(done.o, want.o, case.dtype, case.spans)
        check_states(done.final_state, want.final_state, "f32", done.path)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_longer_than_one(device, family):
    """||k|| = 2 and beta = 1 multiply by -3 along k; with g = -log 3 nothing decays: no rule may drop the past."""
    case = Case(family, (300,), 1, 1, 64, 64, half(device))
    inputs = make(case)
    rng = np.random.default_rng(4)
    direction = 2 * unit(rng.normal(size=64))
    dtype = inputs["k"].dtype
    rounded = decode(encode(np.broadcast_to(direction, inputs["k"].values.shape), dtype), dtype)
    inputs["k"] = Input(rounded, dtype)
    inputs["beta"] = Input(np.ones_like(inputs["beta"].values), "f32")
    inputs["g"] = Input(
        decode(encode(np.full_like(inputs["g"].values, -np.log(3.05)), "f32"), "f32"), "f32"
    )
    check_forward(case, forward(device, case, inputs), inputs)


def test_gate_inputs_far_out(device):
    """Raw gate inputs of +-1000 and A_log up to log 16: no NaN, no overflow, the limits of the formulas."""
    for family in FAMILIES:
        for options in ((("gate", "softplus"),), (("gate", "bounded"), ("lower_bound", -5.0))):
            case = Case(family, (66,), 1, 2, 64, 64, half(device), options=options)
            inputs = make(case)
            values = inputs["g"].values.copy()
            values[:, ::3], values[:, 1::3] = 1000.0, -1000.0
            inputs["g"] = Input(values, "f32")
            inputs["A_log"] = Input(np.full(2, np.float32(np.log(16.0)), np.float64), "f32")
            done = forward(device, case, inputs)
            check(np.isfinite(done.o).all() and np.isfinite(done.final_state).all(), "NaN or inf")
            check_forward(case, done, inputs)


def test_beta_logits_far_out(device):
    for form in ("logits", "logits_x2"):
        case = Case("gdn", (66,), 1, 2, 64, 64, half(device), options=(("beta_form", form),))
        inputs = make(case)
        values = inputs["beta"].values.copy()
        values[:, ::2], values[:, 1::4] = 200.0, -200.0
        inputs["beta"] = Input(values, "f32")
        check_forward(case, forward(device, case, inputs), inputs)


def test_vectors_of_no_or_little_length(device):
    """qk_l2norm of zero is zero, not NaN; of a vector as short as sqrt(1e-6) it is well below 1."""
    case = Case("gdn", (70,), 1, 2, 64, 64, half(device), options=(("qk_l2norm", True),))
    inputs = make(case)
    for name in ("q", "k"):
        inputs[name].values[:, 10:30] = 0.0
        inputs[name].values[:, 30:] *= 2.0**-13  # exact in every dtype here
    inputs["v"].values[:, 5:15] = 0.0
    check_forward(case, forward(device, case, inputs), inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_short_sequences(device, family):
    """More sequences than there are threads or blocks, of one and two tokens; rows and heads are not mixed up."""
    lengths = tuple(1 + n % 2 for n in range(1500))
    case = Case(family, lengths, 1, 2, 64, 64, half(device))
    check_forward(case, forward(device, case))


def test_interleaved_gates_of_one_tensor(device):
    """beta and g as the two halves of one projection, HV/H = 1 too."""
    for H, HV in ((2, 2), (1, 4)):
        case = Case("gdn", (50, 16), H, HV, 64, 64, half(device))
        inputs = make(case)
        plain = forward(device, case)
        both = np.stack([inputs["g"].values, inputs["beta"].values], -1)
        arrays, _keep = arrays_of(device, {**inputs, "both": Input(both, "f32")})
        fused = arrays.pop("both")
        arrays["g"], arrays["beta"] = fused[..., 0], fused[..., 1]
        positional = [arrays.pop(n) for n in POSITIONAL["gdn_fwd"]]
        done = pylinattn.gdn_fwd(*positional, **arrays, output_final_state=True)
        device.synchronize()
        got = np.asarray(device.to_host(done.final_state), np.float64)
        check(np.array_equal(got, plain.final_state), "interleaved gates give other numbers")


@pytest.mark.parametrize("op", ["gdn_fwd", "kda_fwd", "gdn_decode", "kda_verify", "delta_commit"])
def test_poisoned_workspace(device, op):
    """What workspace holds before, NaN here or zeros, does not matter; nor do bytes past what was asked for."""
    sizes = sizes_of(op, K=64, V=64, T=7)
    dtype = "f32" if op == "delta_commit" or device.kind == "cpu" else "bf16"
    seen = []
    for fill in (0xFF, 0x00):
        made = RawCall(op, device, ("workspace",), sizes, q=dtype)
        status, need = made.workspace_bytes()
        check(status == "ok", f"{op}: the workspace query gives {status}")
        made.give("workspace", [need + 64], "u8", np.full(need + 64, fill))
        check(made()[0] == "ok", f"{op}: {made()[1]}")
        after = made.placed["workspace"].buffer.host(made.placed["workspace"].fetch())
        check((after[need:] == fill).all(), f"{op}: bytes past the {need} asked for were written")
        check(
            made.placed["workspace"].surroundings_untouched(), f"{op}: written around the workspace"
        )
        seen.append([p.bits() for n, p in made.placed.items() if n != "workspace"])
    check(seen[0] == seen[1], f"{op}: results depend on what the workspace held")


# ---- threads, processes, environment


def test_two_threads(device):
    """Two threads, different inputs, 200 rounds: bits of the serial calls, and each thread its own last path and error."""
    cases = [Case("gdn", (40, 9), 1, 2, 64, 64, half(device), seed=s) for s in (1, 2)]
    serial = [forward(device, case).bits() for case in cases]
    faults = []

    def work(case, want):
        try:
            prepared = forward_call(device, case)
            for _ in range(200):
                if Forward(prepared()).bits() != want:
                    faults.append(f"{case.id}: other bits in a thread")
                    return
                with pytest.raises(ValueError, match="scale"):
                    pylinattn.gdn_fwd(
                        *[prepared.arrays()[n] for n in POSITIONAL["gdn_fwd"]], scale=float("nan")
                    )
        except BaseException as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, serial)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(not faults, "\n".join(faults))


DIGEST = """
import hashlib, arrays
from cases import Case
from harness import forward
digest = hashlib.sha256()
for family in ("gdn", "kda"):
    for dtype in ("f32", "bf16"):
        for bits in forward(arrays.CPU, Case(family, (130, 1, 64, 33), 2, 4, 64, 48, dtype)).bits():
            digest.update(bits)
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_the_number_of_threads(watchdog):
    digests = {watchdog(DIGEST, LINATTN_NUM_THREADS=n).strip() for n in ("1", "2", "3", "17")}
    check(len(digests) == 1, f"{len(digests)} different results for 1, 2, 3 and 17 threads")


@pytest.mark.parametrize("threads", ["0", "-4", "lots", "999999999999999999999"])
def test_a_senseless_number_of_threads_is_no_disaster(watchdog, threads):
    """A clear error or a sensible default; never a crash or a hang."""
    watchdog(
        "import arrays, pylinattn\nfrom cases import Case\nfrom harness import forward\n"
        "try: forward(arrays.CPU, Case('gdn', (5,), 1, 1, 8, 8, 'f32'))\n"
        "except pylinattn.LinattnError as error: assert 'LINATTN_NUM_THREADS' in str(error), error\n",
        LINATTN_NUM_THREADS=threads,
    )


def test_works_after_fork(watchdog):
    """A child of a process that has called the library calls it too (as data loaders do)."""
    watchdog(
        "import os, arrays\nfrom cases import Case\nfrom harness import forward\n"
        "case = Case('gdn', (40, 30), 1, 4, 32, 32, 'f32')\n"
        "bits = forward(arrays.CPU, case).bits()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if forward(arrays.CPU, case).bits() == bits else 3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )


def test_last_path_is_of_its_thread():
    forward(CPU, Case("gdn", (5,), 1, 1, 8, 8, "f32"))
    check(pylinattn.last_path().startswith("cpu/"), f"last_path is {pylinattn.last_path()}")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(pylinattn.last_path()))
    thread.start()
    thread.join()
    check(seen == [""], f"a thread that called nothing has last_path {seen}")


def test_import_and_cpu_without_any_gpu(watchdog):
    """No driver and no GPU: import works, the CPU works, a CUDA question gets one sentence."""
    out = watchdog(
        "import numpy as np, pylinattn\n"
        "x = np.ones((1, 3, 1, 4), np.float32); g = np.zeros((1, 3, 1), np.float32)\n"
        "assert np.isfinite(pylinattn.gdn_fwd(x, x, x, g, g + 0.5, qk_l2norm=True)[0]).all()\n"
        "answer = pylinattn.supports('gdn_fwd', device='cuda', dtype='bf16', K=128, V=128)\n"
        "assert not answer and answer.reason, answer\n"
        "print(answer.reason)\n",
        CUDA_VISIBLE_DEVICES="",
    )
    check(len(out.strip().splitlines()) == 1, f"more than one line: {out}")


def small_pool_call(B=2, T=5, H=1, K=8):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, T, H, K), dtype=np.float32) for _ in range(3))
    return [
        q,
        k,
        v,
        -rng.random((B, T, H), dtype=np.float32),
        rng.random((B, T, H), dtype=np.float32),
    ]


def test_padding_of_a_draft_may_name_any_rows():
    """Nothing is written for a sequence whose read row is -1, so what its rows are does not matter."""
    pool = np.zeros((4, 1, 8, 8), np.float32)
    writes = np.array([[1, 2, 3, -1, -1], [0, 0, 0, 0, 0]], np.int32)
    o = pylinattn.gdn_verify(
        *small_pool_call(), pool, read_indices=np.array([0, -1], np.int32), write_indices=writes
    ).o
    written = [bool(x.any()) for x in (o[0], pool[1:], o[1], pool[0])]
    assert written == [True, True, False, False]
    writes[0, 1] = 1
    with pytest.raises(ValueError, match="write_indices holds row 1 more than once"):
        pylinattn.gdn_verify(
            *small_pool_call(), pool, read_indices=np.array([0, -1], np.int32), write_indices=writes
        )


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_checkpoints_that_would_race(family):
    """A row that two states go to, or that a sequence starts from while another state goes there."""
    call = small_pool_call(T=128)
    if family == "kda":
        call[3] = np.repeat(call[3][..., None], 8, -1)
    fwd = getattr(pylinattn, f"{family}_fwd")
    pool = np.zeros((6, 1, 8, 8), np.float32)

    def run(checkpoints, table, **options):
        return fwd(
            *call, checkpoint_every=64, checkpoints=checkpoints, **options,
            checkpoint_indices=None if table is None else np.array(table, np.int32),
        )  # fmt: skip

    apart = np.zeros_like(pool)
    run(apart, [[0, 1], [2, -1]])
    with pytest.raises(ValueError, match="checkpoint_indices holds row 0 more than once"):
        run(apart, [[0, 1], [0, -1]])
    rows = dict(read_indices=np.array([0, 1], np.int32), initial_state=pool)
    run(pool, [[2, 3], [4, 5]], **rows)
    for table in ([[2, 1], [4, 5]], [[0, 3], [4, 5]]):
        with pytest.raises(ValueError, match="is read by sequence"):
            run(pool, table, **rows)
    # States after the last token are the last checkpoints, and may go where those go.
    rows |= dict(
        final_state=pool, write_indices=np.array([3, 5], np.int32), output_final_state=True
    )
    run(pool, [[2, 3], [4, 5]], **rows)
    run(pool, [[2, -1], [4, -1]], **(rows | dict(write_indices=np.array([0, 1], np.int32))))
    with pytest.raises(ValueError, match="write_indices and checkpoint_indices hold row 3"):
        run(pool, [[3, 2], [4, 5]], **rows)


@pytest.mark.parametrize("stride", [2**62, -(2**62), 2**60, -(2**63) + 8])
def test_strides_beyond_all_memory(stride):
    """Offsets that no integer holds are refused, not reckoned with."""
    call = small_pool_call()
    strides = list(call[2].strides)
    strides[1] = stride
    call[2] = np.lib.stride_tricks.as_strided(call[2], call[2].shape, strides)
    with pytest.raises(ValueError, match="v reaches beyond all memory"):
        pylinattn.gdn_fwd(*call)

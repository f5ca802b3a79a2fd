"""What only a GPU shows: paths, agreement with the CPU, streams, other work on the card, CUDA graphs."""

from __future__ import annotations

import os

import cases
import numpy as np
import pytest
from arrays import CPU, gpu_device
from cases import Case
from gpu_tools import (
    CUDA,
    FAMILIES,
    capture,
    outputs_like,
    random_inputs,
    run,
    same_bits,
    tensors,
    torch,
)
from harness import Forward, check, check_forward, check_states, forward, forward_call

import pylinattn

pytestmark = pytest.mark.gpu
SLEEP = 200_000_000  # clock cycles, some 0.1 s
alone = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="free memory means nothing beside others"
)


@pytest.fixture
def generator():
    return torch.Generator(CUDA).manual_seed(0)


# ---- paths and agreement


@pytest.mark.parametrize("op", ["gdn_fwd", "kda_fwd"])
def test_last_path(gpu, op):
    done = forward(gpu, Case(op[:3], (70,), 1, 2, 64, 64, "bf16"))
    want = "cuda/chunked" if op == "gdn_fwd" else "cuda/"
    check(done.path.startswith(want), f"last_path is {done.path}")
    decoded = tensors(Case(op[:3], (1, 1), 1, 2, 64, 64, "bf16", packed=False))
    decoded["state"] = decoded.pop("initial_state")
    run(f"{op[:3]}_decode", decoded)
    check(pylinattn.last_path() == "cuda/decode", f"decode took {pylinattn.last_path()}")


@pytest.mark.parametrize("order", ["k_first", "v_first"])
@pytest.mark.parametrize("state", ["f32", "bf16"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "N", [8, 40, 300], ids="N{}".format
)  # a state over several SMs, one, several each
def test_decode_and_recurrent_kernels_agree_in_bits(gpu, generator, N, family, D, state, order):
    """A pool whose states are padded inside takes the recurrent kernel, a contiguous one another."""
    T, H, HV = 3, 2, 4
    options = dict(device=CUDA, generator=generator)
    q, k = (torch.randn(N, T, H, D, **options).bfloat16() for _ in range(2))
    v = torch.randn(N, T, HV, D, **options).bfloat16()
    g = -torch.rand(*((N, T, HV, D) if family == "kda" else (N, T, HV)), **options)
    beta = torch.rand(N, T, HV, **options)
    values = torch.randn(N, HV, D, D, **options).to(
        torch.float32 if state == "f32" else torch.bfloat16
    )
    rows = torch.randperm(N, **options)  # each row once
    rows[7] = -1

    def decoded(padding):
        pool = torch.empty(N, HV, D, D + padding, device=CUDA, dtype=values.dtype)[..., :D]
        pool = pool.transpose(2, 3) if order == "v_first" else pool
        pool.copy_(values)
        decode = getattr(pylinattn, f"{family}_decode")
        o = decode(q, k, v, g, beta, pool, read_indices=rows, qk_l2norm=True)
        return o, pool.clone(), pylinattn.last_path()

    o, pool, path = decoded(0)
    o_padded, pool_padded, path_padded = decoded(16)
    check((path, path_padded) == ("cuda/decode", "cuda/recurrent"), f"{path}, {path_padded}")
    check(same_bits(o, o_padded), "outputs differ")
    check(same_bits(pool, pool_padded), "states differ")


@pytest.mark.parametrize("order", ["k_first", "v_first"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_decode_from_cold_caches(generator, state, order):
    """States arrive late and out of order after a flush: a consumer that takes one for another's hung here."""
    N, HV, D = 48, 32, 128
    inputs = random_inputs("gdn", N, 1, 16, HV, D, generator)
    pool = torch.randn(N, HV, D, D, device=CUDA, generator=generator).to(state)
    pool = pool.transpose(2, 3) if order == "v_first" else pool
    start, o = pool.clone(), torch.empty_like(inputs["v"])
    decode = lambda: run("gdn_decode", inputs | {"state": pool}, o=o, qk_l2norm=True)  # noqa: E731
    for _ in range(12):
        decode()
    want = pool.clone(), o.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    flush = torch.empty(256 << 20, dtype=torch.int8, device=CUDA)
    pool.copy_(start)
    for _ in range(12):
        flush.zero_()
        graph.replay()
    torch.cuda.synchronize()
    check(same_bits(pool, want[0]) and same_bits(o, want[1]), "other bits from cold caches")


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_the_cpu(gpu, family, dtype, D):
    options = (
        ("qk_l2norm", True),
        ("gate", "bounded"),
        ("lower_bound", -5.0),
        ("beta_form", "logits"),
    )
    case = Case(family, (300, 1, 64, 129), 2, 4, D, D, dtype, options=options)
    if dtype == "bf16":
        pytest.importorskip("ml_dtypes", reason="NumPy has no bf16 without ml_dtypes")
    here, there = forward(CPU, case), forward(gpu, case)
    error, where = cases.worst_output_error(there.o, here.o, case.spans)
    limit = np.hypot(cases.TOLERANCE_O[dtype], cases.ROUNDING[dtype])  # the CPU's o is rounded, too
    check(error <= limit, f"o: {error:.1e} at {where}")
    check_states(there.final_state, here.final_state, "f32", there.path)


@pytest.mark.parametrize("family", FAMILIES)
def test_cupy_arrays(family):
    cupy_device = gpu_device("cupy")
    case = Case(family, (70, 3, 64), 1, 2, 64, 64, "bf16")
    check_forward(case, forward(cupy_device, case))


@pytest.mark.parametrize("family", FAMILIES)
def test_jax_arrays(family, watchdog):
    """In a process of its own: JAX takes most of the card's memory unless it is told not to."""
    pytest.importorskip("jax")
    code = f"""
import jax, jax.numpy as jnp, numpy as np, torch, pylinattn
if jax.default_backend() != "gpu":
    print("no gpu")
    raise SystemExit
rng = np.random.default_rng(0)
kda = {family!r} == "kda"
fwd, decode = (pylinattn.kda_fwd, pylinattn.kda_decode) if kda else (pylinattn.gdn_fwd, pylinattn.gdn_decode)
sizes = [(1, 70, 1, 64), (1, 70, 1, 64), (1, 70, 2, 64), (1, 70, 2, 64) if kda else (1, 70, 2), (1, 70, 2)]
arrays = [rng.standard_normal(s).astype(np.float32) for s in sizes]
arrays[3] = -abs(arrays[3])
half = lambda i: i < 3
theirs = [jnp.asarray(x, jnp.bfloat16 if half(i) else jnp.float32) for i, x in enumerate(arrays)]
mine = [torch.from_numpy(x).cuda().to(torch.bfloat16 if half(i) else torch.float32) for i, x in enumerate(arrays)]
got = fwd(*theirs, qk_l2norm=True, output_final_state=True)
want = fwd(*mine, qk_l2norm=True, output_final_state=True)
for a, b in zip(got, want):
    if not isinstance(a, jax.Array) or a.devices() != theirs[0].devices():
        raise SystemExit(f"{{type(a)}} on {{a.devices()}}")
    if not np.array_equal(np.asarray(a, np.float32), b.float().cpu().numpy()):
        raise SystemExit("JAX's and torch's results differ")
try:
    decode(*theirs, got.final_state)
except (ValueError, TypeError) as refusal:
    print("refused:", refusal)
"""
    said = watchdog(code, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if "no gpu" in said:
        pytest.skip("this JAX has no GPU")
    check("refused:" in said, said)


def test_cupy_outputs_and_stream():
    cupy = pytest.importorskip("cupy")
    inputs = tensors(Case("gdn", (70,), 1, 2, 64, 64, "f16"))
    want = run("gdn_fwd", inputs)
    torch.cuda.synchronize()
    lent = {name: cupy.from_dlpack(x) for name, x in inputs.items()}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        done = run("gdn_fwd", lent, output_final_state=True)
        stream.synchronize()
    check(isinstance(done.o, cupy.ndarray), f"o is {type(done.o)}")
    want = want.o.cpu().numpy()
    check(done.o.get().tobytes() == want.tobytes(), "other bits by CuPy")


def test_twenty_runs_under_strong_decay(gpu):
    for family in FAMILIES:
        case = Case(family, (500, 7), 2, 4, 128, 128, "bf16", gates="A_log_16")
        call = forward_call(gpu, case)
        first = Forward(call()).bits()
        check(
            all(Forward(call()).bits() == first for _ in range(19)),
            f"{family}: bits differ from run to run",
        )


# ---- streams


@pytest.mark.parametrize("op", ["gdn_fwd", "kda_decode"])
def test_runs_on_the_current_stream(op):
    """A slow producer on stream S, the op on S, a consumer on S, and nothing on any other stream."""
    decode = op.endswith("decode")
    case = Case(op[:3], (1,) * 4 if decode else (70, 9), 1, 2, 64, 64, "bf16", packed=not decode)
    inputs = tensors(case)
    if decode:
        inputs["state"] = inputs.pop("initial_state")
    ready = {n: t.clone() for n, t in inputs.items()}
    want = run(op, ready)
    want = (want if decode else want.o).clone()
    late = {n: torch.zeros_like(t) for n, t in inputs.items()}
    if "cu_seqlens" in late:
        late["cu_seqlens"].copy_(inputs["cu_seqlens"])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(4 * SLEEP)  # longer than a busy host may need for what follows
        slept = torch.cuda.Event()
        slept.record()
        for name, t in late.items():
            t.copy_(inputs[name])
        done = run(op, late)
        waited = slept.query()
        consumed = (done if decode else done.o) * 1
    stream.synchronize()
    check(not waited, "the call came back after its producer had ended: it waits for the GPU")
    check(same_bits(consumed, want), "the op did not run behind its producer")


def test_inputs_dropped_right_after_the_call():
    """The caller may forget its inputs at once: what is launched still reads them, whatever is allocated next."""
    case = Case("gdn", (300, 40), 2, 4, 64, 64, "bf16")
    want = run("gdn_fwd", tensors(case))
    for _ in range(20):
        inputs = tensors(case)
        torch.cuda._sleep(SLEEP // 20)
        done = run("gdn_fwd", inputs)
        sizes = [(x.shape, x.dtype) for x in inputs.values()]
        del inputs
        garbage = [torch.full(shape, 77, dtype=dtype, device=CUDA) for shape, dtype in sizes]
        check(same_bits(done.o, want.o), "inputs were reused before they were read")
        del garbage


def test_an_array_of_another_library_is_waited_for():
    """q of torch, k a CuPy array that CuPy's own stream is still filling."""
    cupy = pytest.importorskip("cupy")
    case = Case("gdn", (300, 40), 2, 4, 64, 64, "f16")
    inputs = tensors(case)
    want = run("gdn_fwd", inputs)
    source = cupy.from_dlpack(inputs["k"])
    late = cupy.empty(source.shape, source.dtype)
    heavy = [cupy.cuda.alloc(1 << 30) for _ in range(2)]
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(100):  # some 50 ms of copying
            heavy[0].copy_from_device_async(heavy[1], 1 << 30, stream)
        late.data.copy_from_device_async(source.data, source.nbytes, stream)
        done = run("gdn_fwd", inputs | {"k": late})
    torch.cuda.synchronize()
    check(same_bits(done.o, want.o), "the op did not wait for CuPy's stream")


@alone
def test_no_synchronisation_and_no_growing_memory():
    case = Case("gdn", (300, 40), 2, 4, 64, 64, "bf16")
    inputs, out = tensors(case), outputs_like(case)
    run("gdn_fwd", inputs, **out)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            run("gdn_fwd", inputs, **out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    check(
        torch.cuda.mem_get_info()[0] >= free,
        "device memory was allocated by a call that had all its buffers",
    )


def test_two_streams(generator):
    """Two streams, different inputs, 200 rounds: bits of the serial calls."""
    problems = [Case("gdn", (200, 9), 2, 4, 64, 64, "bf16", seed=s) for s in (1, 2)]
    inputs = [tensors(case) for case in problems]
    want = [run("gdn_fwd", x, output_final_state=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in problems]
    outs = [outputs_like(case) for case in problems]
    torch.cuda.synchronize()
    for _ in range(200):
        for x, out, stream in zip(inputs, outs, streams):
            with torch.cuda.stream(stream):
                run("gdn_fwd", x, **out)
    torch.cuda.synchronize()
    for out, (o, state, *_) in zip(outs, want):
        check(
            same_bits(out["o"], o) and same_bits(out["final_state"], state),
            "streams disturb each other",
        )


def test_busy_card(generator):
    """Other kernels on many of the SMs: results bit-equal to a quiet card."""
    case = Case("kda", (700, 30, 64), 4, 8, 128, 128, "bf16")
    inputs = tensors(case)
    quiet = run("kda_fwd", inputs, output_final_state=True)
    big = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16, generator=generator)
    sleepers = [torch.cuda.Stream() for _ in range(66)]
    mine = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in sleepers:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP // 20)
        with torch.cuda.stream(sleepers[0]):
            for _ in range(10):
                big @ big
        with torch.cuda.stream(mine):
            busy = run("kda_fwd", inputs, output_final_state=True)
        torch.cuda.synchronize()
        check(same_bits(busy.o, quiet.o), "o depends on what else runs")
        check(
            same_bits(busy.final_state, quiet.final_state), "final_state depends on what else runs"
        )


# ---- CUDA graphs


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_replay_with_other_lengths(family):
    """Captured once; replayed with other lengths, states and values in the same buffers: bits of an eager call."""
    case = Case(family, (50, 50, 50, 50), 1, 2, 64, 64, "bf16")
    inputs, out = tensors(case), outputs_like(case)
    graph = capture(lambda: run(f"{family}_fwd", inputs, **out))
    rng = np.random.default_rng(0)
    for lengths in (
        (50,) * 4,
        (200, 0, 0, 0),
        (0, 0, 0, 200),
        (1, 64, 65, 7),
        (3, 3, 3, 3),
        (0,) * 4,
        (130, 1, 68, 1),
    ):
        cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
        inputs["cu_seqlens"].copy_(cu)
        for name in ("q", "v", "initial_state"):
            inputs[name].copy_(torch.from_numpy(rng.normal(size=inputs[name].shape) / 8))
        out["o"].fill_(7.0)
        out["final_state"].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        eager = outputs_like(case)
        eager["o"].fill_(7.0)
        run(f"{family}_fwd", inputs, **eager)
        check(same_bits(out["o"], eager["o"]), f"o of a replay with lengths {lengths}")
        check(
            same_bits(out["final_state"], eager["final_state"]),
            f"final_state with lengths {lengths}",
        )
        check(
            (out["o"][:, sum(lengths) :] == 7.0).all().item(),
            "rows past cu_seqlens[-1] were written",
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_decode_replays(family, generator):
    """A decode step in a graph, 1000 replays with changing indices and padding, against eager calls on a second pool."""
    B, P = 4, 9
    inputs = random_inputs(family, B, 1, 2, 4, 64, generator)
    inputs["read_indices"] = torch.arange(B, dtype=torch.int32, device=CUDA)
    pool = torch.randn(P, 4, 64, 64, device=CUDA, generator=generator) * 0.1
    twin = pool.clone()
    o = torch.zeros_like(inputs["v"])
    options = dict(qk_l2norm=True)
    op = f"{family}_decode"
    graph = capture(lambda: run(op, inputs | {"state": pool}, o=o, **options))
    pool.copy_(twin)  # the warm-up and the capture moved it
    rng = np.random.default_rng(1)
    tables = np.stack([rng.permutation(P)[:B] for _ in range(1000)])
    tables[rng.uniform(size=tables.shape) < 0.2] = -1
    tables = torch.from_numpy(tables).to(CUDA, torch.int32)
    for step in range(1000):
        inputs["read_indices"].copy_(tables[step])
        graph.replay()
        if step % 100 == 0 or step == 999:
            kept = o.clone()
        eager = run(op, inputs | {"state": twin}, **options)
        if step % 100 == 0 or step == 999:
            check(same_bits(kept, eager), f"outputs of replay {step}")
    check(same_bits(pool, twin), "the pools differ after 1000 replays")


def test_capture_of_verify_and_commit(generator):
    inputs = random_inputs("gdn", 3, 5, 2, 4, 64, generator)
    inputs["state"] = torch.randn(6, 4, 64, 64, device=CUDA, generator=generator) * 0.1
    inputs["read_indices"] = torch.tensor([4, 0, 2], device=CUDA)
    start = inputs["state"].clone()
    accepted = torch.tensor([0, 0, 0], dtype=torch.int32, device=CUDA)
    shape = inputs["v"].shape
    kept = {
        "kept_k": torch.empty(inputs["k"].shape, device=CUDA),
        "kept_u": torch.empty(shape, device=CUDA),
        "kept_g": torch.empty(shape[:3], device=CUDA),
    }
    o = torch.empty_like(inputs["v"])

    def step():
        run("gdn_verify", inputs, o=o, **kept, qk_l2norm=True)
        pylinattn.delta_commit(
            inputs["state"], *kept.values(), accepted, read_indices=inputs["read_indices"]
        )

    graph = capture(step)
    for counts in ((0, 5, 2), (1, 9, -4), (3, 3, 3)):
        inputs["state"].copy_(start)
        accepted.copy_(torch.tensor(counts))
        graph.replay()
        got = inputs["state"].clone()
        want = start.clone()
        for n, count in enumerate(np.clip(counts, 0, 5)):
            if count:
                few = {k: inputs[k][n : n + 1, :count] for k in ("q", "k", "v", "g", "beta")}
                few |= {"state": want, "read_indices": inputs["read_indices"][n : n + 1]}
                run("gdn_decode", few, qk_l2norm=True)
        check(same_bits(got, want), f"accepted {counts}: replay and decode leave other pools")

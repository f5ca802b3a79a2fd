"""Limits on a GPU: 64-bit offsets, grid sizes, benchmark shapes, wild tables, devices and threads, host time."""

from __future__ import annotations

import os
import threading
import time

import cases
import numpy as np
import pytest
from cases import Case, make
from gpu_tools import CUDA, FAMILIES, outputs_like, random_inputs, run, same_bits, tensors, torch
from harness import check, check_states, expect, forward, rows

import pylinattn

pytestmark = pytest.mark.gpu


@pytest.fixture
def generator():
    return torch.Generator(CUDA).manual_seed(0)


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()


def relative_rms(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


# ---- sizes

much_memory = pytest.mark.xdist_group("much_memory")  # one after the other, with --dist loadgroup


@much_memory
@pytest.mark.parametrize("T", [17476, 17477])
@pytest.mark.parametrize("family", FAMILIES)
def test_offsets_beyond_two_to_the_31(family, T, generator):
    """B = 16, H = 64, K = 128: the last sample begins past 2^31 elements; bit-equal to itself alone."""
    if torch.cuda.mem_get_info()[0] < 45 << 30:
        pytest.skip("needs 45 GB of device memory")
    inputs = random_inputs(family, 16, T, 64, 64, 128, generator)
    check(inputs["q"].numel() > 2**31, "not large enough")
    o = torch.empty_like(inputs["v"])
    whole = run(f"{family}_fwd", inputs, o=o, qk_l2norm=True, output_final_state=True)
    for b in (0, 15):
        alone = run(
            f"{family}_fwd",
            {n: x[b : b + 1].clone() for n, x in inputs.items()},
            qk_l2norm=True,
            output_final_state=True,
        )
        check(same_bits(alone.o, o[b : b + 1]), f"o of sample {b} depends on the batch")
        check(
            same_bits(alone.final_state, whole.final_state[b : b + 1]), f"final_state of sample {b}"
        )


@much_memory
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
def test_pool_rows_beyond_two_to_the_31(state, v_first, generator):
    """Rows of a pool past 2^31 elements: decode, verify and forward read and write the right ones."""
    P, HV, D = 2052, 64, 128
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of device memory")
    pool = torch.zeros(P, HV, D, D, dtype=state, device=CUDA)
    pool = pool.transpose(2, 3) if v_first else pool
    far = [2051, 2047, 2048, 3]
    for r in far:
        pool[r] = torch.randn(HV, D, D, device=CUDA, generator=generator) * 0.1
    small = pool[far].clone().contiguous()
    small = small.transpose(2, 3).contiguous().transpose(2, 3) if v_first else small
    inputs = random_inputs("gdn", 4, 3, HV, HV, D, generator)
    index = torch.tensor(far, device=CUDA)
    near = run("gdn_verify", inputs | {"state": small}, qk_l2norm=True)
    seen = run("gdn_verify", inputs | {"state": pool, "read_indices": index}, qk_l2norm=True)
    check(all(same_bits(a, b) for a, b in zip(near, seen)), "verify")
    o_near = run("gdn_decode", inputs | {"state": small}, qk_l2norm=True)
    o_far = run("gdn_decode", inputs | {"state": pool, "read_indices": index}, qk_l2norm=True)
    check(same_bits(o_near, o_far) and same_bits(small, pool[far]), "decode")
    states = {"initial_state": small, "final_state": small}
    near = run("gdn_fwd", inputs, **states, qk_l2norm=True)
    states = {"initial_state": pool, "final_state": pool, "read_indices": index}
    seen = run("gdn_fwd", inputs, **states, qk_l2norm=True)
    check(same_bits(near.o, seen.o) and same_bits(small, pool[far]), "fwd")
    pool[far] = 0
    check(not pool.any().item(), "another row was written")


@pytest.mark.parametrize(("N", "H", "HV"), [(1100, 32, 64), (70000, 1, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_more_blocks_than_a_grid_axis_holds(family, N, H, HV, generator):
    """N x HV beyond 65535, decode and packed forward; sampled sequences bit-equal to themselves alone."""
    D = 64
    inputs = random_inputs(family, 1, N, H, HV, D, generator)
    cu = torch.arange(N + 1, dtype=torch.int32, device=CUDA)
    pool = torch.randn(N, HV, D, D, device=CUDA, generator=generator) * 0.1
    done = run(
        f"{family}_fwd",
        inputs | {"cu_seqlens": cu, "initial_state": pool},
        qk_l2norm=True,
        output_final_state=True,
        splits=1,
    )
    path = pylinattn.last_path()
    state = pool.clone()
    o = run(
        f"{family}_decode",
        {n: x.transpose(0, 1) for n, x in inputs.items()} | {"state": state},
        qk_l2norm=True,
    )
    for a, b, what in ((o.transpose(0, 1), done.o, "o"), (state, done.final_state, "the state")):
        equal = same_bits(a, b) if cases.is_token_loop(path) else relative_rms(a, b) <= 5e-3
        check(equal, f"decode and forward of one token differ in {what}")
    for n in (0, 1023, N - 1):
        alone = run(
            f"{family}_fwd",
            {name: x[:, n : n + 1].clone() for name, x in inputs.items()}
            | {"initial_state": pool[n : n + 1]},
            qk_l2norm=True,
            output_final_state=True,
            splits=1,
        )
        check(same_bits(alone.o, done.o[:, n : n + 1]), f"o of sequence {n}")
        check(same_bits(alone.final_state, done.final_state[n : n + 1]), f"state of sequence {n}")


@pytest.mark.parametrize("T", [1, 2, 4, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_short_sequences_alone_and_packed_have_equal_bits(family, T, generator):
    """At splits = 1, also of so few tokens that a call with them alone would decode."""
    options = dict(qk_l2norm=True, output_final_state=True, splits=1)
    inputs = random_inputs(family, 1, 3 * T + 100, 2, 4, 128, generator)
    cu = torch.tensor([0, T, 2 * T + 100, 3 * T + 100], dtype=torch.int32, device=CUDA)
    state = torch.randn(3, 4, 128, 128, device=CUDA, generator=generator) * 0.1
    packed = run(f"{family}_fwd", inputs | {"cu_seqlens": cu, "initial_state": state}, **options)
    for n, begin in ((0, 0), (2, 2 * T + 100)):
        own = {name: x[:, begin : begin + T].clone() for name, x in inputs.items()}
        own["initial_state"] = state[n : n + 1]
        for more in ({}, {"cu_seqlens": cu[:2]}):
            alone = run(f"{family}_fwd", own | more, **options)
            check(pylinattn.last_path() == "cuda/chunked", pylinattn.last_path())
            check(same_bits(alone.o, packed.o[:, begin : begin + T]), f"o of sequence {n}")
            check(same_bits(alone.final_state, packed.final_state[n : n + 1]), f"state of {n}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1x8192 h2/8", "8x1024 h2/8", "256+1500+52+6384 h2/8"])
def test_benchmark_shapes(gpu, name):
    """Shapes of the benchmarks, two sampled heads of two sequences against the loop."""
    lengths, H, HV = cases.bench_shape(name)
    case = Case("gdn", tuple(lengths), H, HV, 128, 128, "bf16")
    done = forward(gpu, case)
    heads, some = [0, HV - 1], sorted({0, len(lengths) - 1})
    want = expect(case.op, make(case), heads=heads, sequences=some)
    spans = [case.spans[n] for n in some]
    error, where = cases.worst_output_error(done.o[:, :, heads], want.o, spans)
    check(error <= cases.output_tolerance("bf16", done.path), f"o: {error:.1e} at {where}")
    check_states(done.final_state[some][:, heads], want.final_state[some], "f32", done.path)


# ---- values that only the device sees


def test_lengths_are_clamped_and_rows_outside_are_padding():
    """Unchecked, a wrong table cannot hurt: lengths are clamped to [0,T], rows outside the pool count as -1."""
    case = Case("gdn", (70, 30), 1, 2, 64, 64, "bf16")
    inputs = tensors(case)
    want = run("gdn_fwd", inputs, output_final_state=True)
    wild = inputs | {"cu_seqlens": torch.tensor([-5, 70, 10**6], dtype=torch.int32, device=CUDA)}
    done = run("gdn_fwd", wild, output_final_state=True)
    check(
        same_bits(done.o, want.o) and same_bits(done.final_state, want.final_state),
        "lengths are not clamped",
    )
    pool = inputs["initial_state"].clone()
    wrong = torch.tensor([2, -7], dtype=torch.int64, device=CUDA)
    done = run("gdn_fwd", inputs | {"initial_state": pool, "read_indices": wrong}, final_state=pool)
    check(not done.o.any().item(), "rows outside the pool were read")
    check(same_bits(pool, inputs["initial_state"]), "rows outside the pool were written")
    for name, table in (("cu_seqlens", wild["cu_seqlens"]), ("read_indices", wrong)):
        with pytest.raises(ValueError, match=name):
            run("gdn_fwd", inputs | {name: table}, checked=True)


def test_wild_tables_of_verify_and_commit(gpu, generator):
    """Write rows, accepted counts and paths out of range: no wild write, no fault."""
    inputs = random_inputs("kda", 2, 4, 2, 2, 64, generator)
    state = torch.randn(3, 2, 64, 64, device=CUDA, generator=generator)
    before = state.clone()
    wild = torch.tensor([[10**9, 3, -2, -1], [5, 7, -(10**9), 3]], device=CUDA)
    seen = run(
        "kda_verify",
        inputs | {"state": state, "read_indices": torch.tensor([0, 2], device=CUDA)},
        qk_l2norm=True,
    )
    run(
        "kda_verify",
        inputs
        | {
            "state": state,
            "read_indices": torch.tensor([0, 2], device=CUDA),
            "write_indices": wild,
        },
        qk_l2norm=True,
    )
    check(same_bits(state, before), "verify wrote at rows that do not exist")
    accepted = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device=CUDA)
    pylinattn.delta_commit(
        state, *seen[1:], accepted, read_indices=torch.tensor([0, 2], device=CUDA),
        write_indices=torch.tensor([1, 9], device=CUDA),
    )  # fmt: skip
    check(same_bits(state[[0, 2]], before[[0, 2]]), "commit wrote rows that were not named")
    torch.cuda.synchronize()


# ---- devices and threads


def test_mixed_devices_are_refused():
    inputs = tensors(Case("gdn", (9,), 1, 2, 64, 64, "bf16"))
    for name in ("k", "beta", "cu_seqlens"):
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            run("gdn_fwd", inputs | {name: inputs[name].cpu()})


def test_a_thread_that_never_set_a_device():
    case = Case("gdn", (70, 9), 1, 2, 64, 64, "bf16")
    inputs, out = tensors(case), outputs_like(case)
    want = run("gdn_fwd", inputs, output_final_state=True)
    torch.cuda.synchronize()
    faults = []

    def work():
        try:
            run("gdn_fwd", inputs, **out)
        except BaseException as error:
            faults.append(repr(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    check(not faults, str(faults))
    check(same_bits(out["o"], want.o), "another thread, other bits")


def test_current_device_is_left_alone():
    before = torch.cuda.current_device()
    case = Case("gdn", (70, 9), 1, 2, 64, 64, "bf16")
    want = run("gdn_fwd", tensors(case))
    if torch.cuda.device_count() > 1:
        done = run("gdn_fwd", tensors(case, device="cuda:1"))
        check(done.o.device.index == 1, "outputs are on another device than inputs")
        check(same_bits(done.o.to("cuda:0"), want.o.to("cuda:0")), "device 1 gives other bits")
    check(torch.cuda.current_device() == before, "the current device was changed")


def test_unsupported_shapes_say_so():
    for K, V, dtype in (
        (96, 96, torch.bfloat16),
        (64, 128, torch.bfloat16),
        (64, 64, torch.float32),
    ):
        q = torch.zeros(1, 3, 1, K, dtype=dtype, device=CUDA)
        v = torch.zeros(1, 3, 1, V, dtype=dtype, device=CUDA)
        g = torch.zeros(1, 3, 1, device=CUDA)
        with pytest.raises(NotImplementedError, match="gdn_fwd"):
            pylinattn.gdn_fwd(q, q, v, g, g)


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="host times mean nothing beside others"
)
def test_host_time_does_not_depend_on_new_lengths():
    """200 different T in one process: no call is compiled for or tuned to its length."""
    times = []
    for T in range(1, 201):
        inputs = tensors(Case("gdn", (T,), 1, 2, 64, 64, "bf16"))
        torch.cuda.synchronize()
        start = time.perf_counter()
        run("gdn_fwd", inputs)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    late = np.sort(times[20:])
    check(
        late[-4] < 20 * np.median(late) and late[-4] < 2e-3,
        f"host times from {late[0]:.1e} to {late[-1]:.1e} s",
    )


def test_index_tables_of_either_width(gpu):
    """int64 lengths and int32 rows in one call, and the other way round."""
    case = Case("gdn", (40, 65), 1, 2, 64, 64, "bf16")
    inputs = make(case)
    bits = set()
    for lengths, table in (("i32", "i64"), ("i64", "i32")):
        mixed = inputs | {
            "cu_seqlens": rows(case.cu, dtype=lengths),
            "read_indices": rows((1, 0), dtype=table),
        }
        bits.add(forward(gpu, case, mixed).bits())
    check(len(bits) == 1, "index dtypes change the bits")

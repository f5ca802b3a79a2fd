"""Every GPU kernel once or twice on small inputs, for compute-sanitizer.

    for tool in memcheck synccheck initcheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitize.py
    done

racecheck does not follow a warp's arrival by one lane: it takes a library built with -DLINATTN_EVERY_LANE_ARRIVES among
CMAKE_CUDA_FLAGS (cuda/common/pipeline.cuh), named by PYLINATTN_LIBRARY. It is slow, and what memory held before is nothing to it:
--once leaves out the second run of calls that initcheck and equal bits want twice.

Each array is an allocation of its own, so that memcheck sees every access outside of one. Results are compared with the CPU.
`python tests/sanitize.py gdn-128 kda-64-bfloat16` runs what begins so; there is {gdn,kda}-{64,128}-{float16,bfloat16}-{K,V}-first.
"""

from __future__ import annotations

import itertools
import re
import sys
import time

import cupy as cp
import ml_dtypes
import numpy as np

import pylinattn

cp.cuda.set_allocator(None)  # no pool: an array is a cudaMalloc
LENGTHS = [5, 0, 67]
H, HV = 1, 2
WORKSPACE = 64 << 20  # enough for these lengths
FILLINGS = (0xFF,) if "--once" in sys.argv else (0x00, 0xFF)
START = time.monotonic()
worst = 0.0


def pair(array, dtype):
    """The same values for the GPU, and in float64 for the CPU."""
    rounded = np.asarray(array, dtype)
    return cp.asarray(rounded), rounded.astype(np.float64)


def states(rows, D, dtype, v_first, padding=0):
    host = np.asarray(rng.standard_normal((rows, HV, D, D)), dtype)
    device = cp.zeros((rows, HV, D, D + padding), dtype)[..., :D]
    device = device.transpose(0, 1, 3, 2) if v_first else device
    device[...] = cp.asarray(host)
    return device, host.astype(np.float64)


def compare(name, device, host, limit=6e-3):
    global worst
    mine = cp.asnumpy(device).astype(np.float64)
    error = np.sqrt(np.mean((mine - host) ** 2)) / (np.sqrt(np.mean(host**2)) + 1e-30)
    worst = max(worst, error)
    if not error < limit:
        sys.exit(f"{name}: relative error {error:.1e} from the CPU, by {pylinattn.last_path()}")


def inputs(kda, B, T, D, dtype, HV=HV):
    gate = (B, T, HV, D) if kda else (B, T, HV)
    q, k = (rng.standard_normal((B, T, H, D)) for _ in range(2))
    q, k = (pair(x / np.linalg.norm(x, axis=-1, keepdims=True), dtype) for x in (q, k))
    v = pair(rng.standard_normal((B, T, HV, D)), dtype)
    return [q, k, v, pair(-rng.random(gate), np.float32), pair(rng.random((B, T, HV)), np.float32)]


def begin(name):
    print(f"{time.monotonic() - START:4.0f} s  {name}", flush=True)


def both(name, op, arrays, limit=6e-3, **options):
    """Runs op on the GPU and on the CPU; options that are pairs are split."""
    begin(name)
    calls = []
    options.setdefault("qk_l2norm", True)
    if "output_final_state" in options:  # initcheck does not see what TMA stores
        shape = arrays[2][1].shape
        options["o"] = (cp.zeros(shape, arrays[2][0].dtype), np.zeros(shape))
    for side in (0, 1):
        split = {k: v[side] if isinstance(v, tuple) else v for k, v in options.items()}
        calls.append(op(*(a[side] for a in arrays), **split))
    outputs = [c if isinstance(c, tuple) else (c,) for c in calls]
    for number, (device, host) in enumerate(zip(*outputs, strict=True)):
        if device is not None:
            compare(f"{name}, output {number}", device, host, limit)
    return calls


def twice(name, op, arrays, **options):
    """initcheck does not see what bulk copies store in the workspace, so it comes initialised, with zeros and with ones: equal bits."""
    results = []
    for byte in FILLINGS:
        workspace = cp.full(WORKSPACE, byte, cp.uint8)
        result = both(name, op, arrays, workspace=(workspace, None), **options)[0]
        results.append(result if isinstance(result, tuple) else (result,))
    for number, (zeros, ones) in enumerate(zip(results[0], results[-1], strict=True)):
        if zeros is not None and zeros.tobytes() != ones.tobytes():
            sys.exit(f"{name}, output {number}: its bits depend on what was in the workspace")


def saved_bytes(arrays, **options):
    try:
        pylinattn.gdn_fwd(*arrays, save="states", saved=cp.zeros(1, cp.uint8), **options)
    except ValueError as error:
        return int(re.search(r"it has (\d+)", str(error))[1])


def saving(name, arrays, d_o, final=None, limit=5e-2, **options):
    """The forward with save = "states" and the backward that reads it, with buffers as in twice()."""
    begin(name)
    results = []
    for byte in FILLINGS:
        made = []
        for side in (0, 1):
            mine, given = {k: v[side] for k, v in options.items()}, [a[side] for a in arrays]
            mine |= {"qk_l2norm": True, "save": "states"}
            workspace = [
                cp.full(WORKSPACE, byte, cp.uint8) if side == 0 else None for _ in range(2)
            ]
            o, saved = (cp if side == 0 else np).zeros(given[2].shape, given[2].dtype), None
            if side == 0:
                plain = {k: v for k, v in mine.items() if k != "save"}
                saved = cp.full(saved_bytes(given, **plain), byte, cp.uint8)
            done = pylinattn.gdn_fwd(
                *given, o=o, saved=saved, workspace=workspace[0], output_final_state=True, **mine
            )
            gradients = pylinattn.gdn_bwd(
                *given, d_o[side], d_final_state=final and final[side], saved=done.saved,
                workspace=workspace[1], **mine,
            )  # fmt: skip
            made.append([*done, *gradients])
        for number, (device, host) in enumerate(zip(*made, strict=True)):
            if device is not None:
                compare(f"{name}, output {number}", device, host, limit)
        results.append([x.tobytes() for x in made[0] if x is not None])
    if results[0] != results[-1]:
        sys.exit(f"{name}: bits depend on what was in the workspace or in saved")


def table(values):
    return cp.asarray(values, cp.int32), np.asarray(values, np.int32)


WANTED = tuple(x for x in sys.argv[1:] if x != "--once") or ("",)
ran = 0
for family, D, (dtype, state_dtype), v_first in itertools.product(
    ("gdn", "kda"),
    (64, 128),
    ((np.float16, np.float32), (ml_dtypes.bfloat16, ml_dtypes.bfloat16)),
    (False, True),
):
    part = f"{family}-{D}-{np.dtype(dtype).name}-{'V' if v_first else 'K'}-first"
    if not part.startswith(WANTED):
        continue
    ran += 1
    rng = np.random.default_rng(0)  # the same inputs, whatever else runs
    kda = family == "kda"
    name = f"{family}, D {D}, states {np.dtype(state_dtype)}, {'V' if v_first else 'K'}-first"
    fwd, decode, verify = (
        getattr(pylinattn, f"{family}_{op}") for op in ("fwd", "decode", "verify")
    )
    # What K = V = 64 of KDA goes in chunks with.
    inside = {"beta_form": "logits"} if kda and D == 64 else {}
    lengths = table(np.concatenate([[0], np.cumsum(LENGTHS)]))
    packed = inputs(kda, 1, sum(LENGTHS) + 3, D, dtype)
    twice(
        f"{name}, forward", fwd, packed, cu_seqlens=lengths, output_final_state=True,
        initial_state=states(3, D, state_dtype, v_first), checkpoint_every=64, **inside,
    )  # fmt: skip
    alike = list(packed)  # keys that share a direction take two terms of each operand
    shared = rng.standard_normal((1, 1, H, D)) + 0.2 * rng.standard_normal(packed[1][1].shape)
    alike[1] = pair(shared, dtype)
    twice(f"{name}, keys alike", fwd, alike, cu_seqlens=lengths, output_final_state=True, **inside)
    rows = table([2, -1, 0])
    for padding in (0, 8):  # 8: a pool that only the recurrent kernel takes
        pool = states(4, D, state_dtype, v_first, padding)
        both(f"{name}, decode", decode, [*inputs(kda, 3, 2, D, dtype), pool], read_indices=rows)
        compare(f"{name}, pool", *pool)
    everyone = states(40, D, state_dtype, v_first)  # more than a card has SMs for
    for T in (1, 3):
        both(f"{name}, decode of many", decode, [*inputs(kda, 40, T, D, dtype), everyone])
        compare(f"{name}, pool of many", *everyone)
    for T in (2, 10):
        both(f"{name}, verify of many", verify, [*inputs(kda, 40, T, D, dtype), everyone])
        bounded = {"gate": "bounded", "lower_bound": -5.0} if kda else {}
        for some in (everyone, states(3, D, state_dtype, v_first)):
            drafts = inputs(kda, len(some[1]), T, D, dtype)
            both(f"{name}, outputs alone", verify, [*drafts, some], keep=False, **bounded)
    drafts = inputs(kda, 3, 4, D, dtype)
    both(
        f"{name}, tree", verify, [*drafts, pool], read_indices=rows,
        parents=table([[-1, 0, 0, 1]] * 3), write_indices=table([[-1, 1, -1, 3], [-1] * 4, [-1] * 4]),
    )  # fmt: skip
    pool = states(4, D, state_dtype, v_first)
    kept = both(f"{name}, chain", verify, [*drafts, pool], read_indices=rows)
    for side in (0, 1):
        pylinattn.delta_commit(
            pool[side], *kept[side][1:], table([3, 4, 9])[side], read_indices=rows[side]
        )
    compare(f"{name}, committed", *pool)
    if v_first:
        continue  # what follows does not depend on the order of the strides
    for norm in (True, False):  # more items than a card has SMs; a sequence that is cut
        many = table(np.arange(0, 35 * 70, 70))
        twice(
            f"{name}, many sequences", fwd, inputs(kda, 1, 34 * 70, D, dtype, 4), cu_seqlens=many,
            output_final_state=True, qk_l2norm=norm, **inside,
        )  # fmt: skip
        twice(
            f"{name}, one long sequence", fwd, inputs(kda, 1, 1500 if kda else 2500, D, dtype),
            output_final_state=True, qk_l2norm=norm, **inside,
        )  # fmt: skip
    initial, final = (states(3, D, state_dtype, v_first) for _ in range(2))
    bias = pair(rng.random((HV, D) if kda else HV), np.float32)
    gate = {"gate": "softplus", "A_log": pair(rng.random(HV), np.float32), "dt_bias": bias}
    d_o = pair(rng.standard_normal(packed[2][1].shape), dtype)
    twice(
        f"{name}, backward", getattr(pylinattn, f"{family}_bwd"), [*packed, d_o], cu_seqlens=lengths,
        initial_state=initial, d_final_state=final, **gate,
        limit=6e-3 if kda else 5e-2,  # dA_log and the like are few numbers, see gradients.py
    )  # fmt: skip
    if not kda:  # one key for all tokens: the chunked backward leaves it to the token loop
        states_of = {"initial_state": initial, "cu_seqlens": lengths}
        saving(f"{name}, saved states", packed, d_o, final, **states_of)
        key = np.broadcast_to(rng.standard_normal((1, 1, H, D)), packed[1][1].shape)
        shape = packed[3][1].shape  # beta 2: nothing is forgotten, so that no gradient vanishes
        gates = [pair(np.full(shape, value), np.float32) for value in (-0.01, 2.0)]
        twice(
            f"{name}, backward of one key", pylinattn.gdn_bwd,
            [packed[0], pair(key, dtype), packed[2], *gates, d_o], cu_seqlens=lengths, limit=5e-2,
        )  # fmt: skip
        long = inputs(kda, 1, 2500, D, dtype)
        d_o = pair(rng.standard_normal(long[2][1].shape), dtype)
        for what in ("forgetful", "exactly"):  # how it is cut
            twice(f"{name}, backward cut {what}", pylinattn.gdn_bwd, [*long, d_o], limit=5e-2)
            saving(f"{name}, saved states cut {what}", long, d_o)
            long[3] = pair(np.zeros(long[3][1].shape), np.float32)
    maps = both(f"{name}, map", getattr(pylinattn, f"{family}_segment"), packed, cu_seqlens=lengths)
    ends = [
        pylinattn.segment_merge(M[None], h[None], initial_state=initial[side])
        for side, (M, h) in enumerate(maps)
    ]
    compare(f"{name}, merged", ends[0][1], ends[1][1])

if not ran:
    sys.exit(f"nothing is called {' or '.join(WANTED)}; gdn, kda-64 or gdn-128-float16 would be")
cp.cuda.runtime.deviceSynchronize()
print(f"every kernel ran; largest relative error from the CPU {worst:.1e}")

"""Gated DeltaNet on a GPU with CuPy: a prompt, then token after token on a stream of one's own."""

import cupy as cp

import pylinattn

B, T, H, HV, K, V = 4, 1000, 16, 32, 128, 128


def inputs(T):
    q, k, v = (cp.random.standard_normal((B, T, h, K)).astype(cp.float16) for h in (H, H, HV))
    g = -cp.random.random((B, T, HV), dtype=cp.float32)  # natural log of the decay, <= 0
    beta = cp.random.random((B, T, HV), dtype=cp.float32)  # write strength
    return q, k, v, g, beta


# Calls are launched on CuPy's current stream and return at once.
with cp.cuda.Stream(non_blocking=True) as stream:
    o, state = pylinattn.gdn_fwd(*inputs(T), qk_l2norm=True, output_final_state=True)
    print("prompt", o.shape, o.dtype, "by", pylinattn.last_path())
    for _ in range(3):
        o = pylinattn.gdn_decode(*inputs(1), state, qk_l2norm=True)
    stream.synchronize()
    print("token ", o.shape, "mean square", float((o.astype(cp.float32) ** 2).mean()))

if not cp.isfinite(o).all():
    raise SystemExit("the outputs are not finite")

"""Gated DeltaNet on the CPU with NumPy: a prompt, then token after token."""

import numpy as np

import pylinattn

B, T, H, HV, K, V = 2, 100, 2, 4, 64, 64  # value head j reads q/k head j // (HV / H)
rng = np.random.default_rng(0)


def inputs(T):
    q, k = (rng.standard_normal((B, T, H, K), np.float32) for _ in range(2))
    v = rng.standard_normal((B, T, HV, V), np.float32)
    g = -rng.random((B, T, HV), np.float32)  # natural log of the decay, <= 0
    beta = rng.random((B, T, HV), np.float32)  # write strength
    return q, k, v, g, beta


# The prompt. final_state is [B,HV,K,V] in float32.
o, state = pylinattn.gdn_fwd(*inputs(T), qk_l2norm=True, output_final_state=True)
print("prompt", o.shape, o.dtype, "by", pylinattn.last_path())

# Then one token a call; the state is updated in place.
for _ in range(3):
    o = pylinattn.gdn_decode(*inputs(1), state, qk_l2norm=True)
    print("token ", o.shape, "mean square", float((o * o).mean()))

# Splitting a sequence changes nothing: 60 tokens and then 40 are 100 tokens.
q, k, v, g, beta = inputs(T)
whole, _ = pylinattn.gdn_fwd(q, k, v, g, beta, qk_l2norm=True)
parts, state = [], None
for span in (slice(0, 60), slice(60, T)):
    x = [t[:, span] for t in (q, k, v, g, beta)]  # views, no copy
    o, state = pylinattn.gdn_fwd(*x, initial_state=state, qk_l2norm=True, output_final_state=True)
    parts.append(o)
difference = np.abs(np.concatenate(parts, axis=1) - whole).max()
print("largest difference of 60 + 40 tokens from 100:", difference)
if difference > 1e-5:
    raise SystemExit("that is too much")

"""Gated DeltaNet with PyTorch as a server runs it: packed prompts, a pool of states, batched decode.

Runs on a GPU that the library has kernels for, else on the CPU.
"""

import torch

import pylinattn

HV, H, K, V = 32, 16, 128, 128
gpu = pylinattn.supports("gdn_fwd", device="cuda", dtype=torch.bfloat16, K=K, V=V)
device = "cuda" if gpu and torch.cuda.is_available() else "cpu"
if device == "cpu":
    print("on the CPU:", gpu.reason or "this torch has no CUDA")
torch.manual_seed(0)


def inputs(B, T):
    def randn(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    # g is the raw output of the layer's projection, beta its logits: both activated inside.
    return (
        randn(B, T, H, K),
        randn(B, T, H, K),
        randn(B, T, HV, V),
        randn(B, T, HV),
        randn(B, T, HV),
    )


A_log = torch.rand(HV, device=device)
dt_bias = torch.zeros(HV, device=device)
layer = {
    "qk_l2norm": True,
    "gate": "softplus",
    "beta_form": "logits",
    "A_log": A_log,
    "dt_bias": dt_bias,
}

# Ten states; three requests own rows 7, 2 and 4. The outputs of row -1 are zero and its state is
# not written, so a batch of a fixed size can be padded.
pool = torch.zeros(10, HV, K, V, device=device)
rows = torch.tensor([7, 2, 4], dtype=torch.int32, device=device)

# Prompts of 5, 33 and 12 tokens in one call, in place in the pool.
cu_seqlens = torch.tensor([0, 5, 38, 50], dtype=torch.int32, device=device)
o, _ = pylinattn.gdn_fwd(
    *inputs(1, 50),
    initial_state=pool,
    final_state=pool,
    read_indices=rows,
    cu_seqlens=cu_seqlens,
    **layer,
)
print("prompts", tuple(o.shape), o.dtype, o.device, "by", pylinattn.last_path())

# A token for each, in a batch of four of which one is padding.
padded = torch.tensor([7, 2, 4, -1], dtype=torch.int32, device=device)
o = pylinattn.gdn_decode(*inputs(4, 1), pool, read_indices=padded, **layer)
print("decode ", tuple(o.shape), "by", pylinattn.last_path())

used = pool.flatten(1).abs().sum(1).nonzero().flatten().tolist()
print("rows of the pool in use:", used)
if used != [2, 4, 7] or o[3].any():
    raise SystemExit("the pool is not what it should be")

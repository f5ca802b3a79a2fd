"""Decode on a GPU as a model uses it: many layers in one graph, after a prefill, with drafts that are verified and rolled back."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from gpu_tools import CUDA, FAMILIES, capture, random_inputs, run, same_bits, torch
from harness import check

import pylinattn

pytestmark = pytest.mark.gpu
LAYOUTS = pytest.mark.parametrize(
    ("dtype", "order"),
    [(d, o) for d in (torch.float32, torch.bfloat16) for o in ("k_first", "v_first")],
    ids=["f32-k_first", "f32-v_first", "bf16-k_first", "bf16-v_first"],
)


@pytest.fixture
def generator():
    return torch.Generator(CUDA).manual_seed(0)


def pool_of(rows, HV, D, dtype, order, generator):
    pool = (0.1 * torch.randn(rows, HV, D, D, device=CUDA, generator=generator)).to(dtype)
    return pool.transpose(2, 3) if order == "v_first" else pool


def distance(x, want):
    return float(
        ((x.double() - want.double()).square().mean() / want.double().square().mean()) ** 0.5
    )


def test_a_loop_of_48_layers_in_a_graph(generator):
    """Three layers of four are GDN, the fourth KDA, each with a pool; the rows change from replay to replay, some are padding."""
    layers, B, P, HV, D = 48, 3, 7, 4, 64
    families = ["kda" if i % 4 == 3 else "gdn" for i in range(layers)]
    inputs = [random_inputs(f, B, 1, 2, HV, D, generator) for f in families]
    orders = ["k_first", "v_first"]
    pools = [pool_of(P, HV, D, torch.float32, orders[i % 2], generator) for i in range(layers)]
    twins = [pool.clone() for pool in pools]
    rows = torch.zeros(B, dtype=torch.int32, device=CUDA)
    outputs = [torch.zeros_like(x["v"]) for x in inputs]

    def step(states, index, outs):
        hidden = 0
        for family, x, pool, o in zip(families, inputs, states, outs, strict=True):
            x = x | {"v": x["v"] + hidden, "state": pool, "read_indices": index}
            hidden = run(f"{family}_decode", x, o=o, qk_l2norm=True)

    graph = capture(lambda: step(pools, rows, outputs))
    for pool, twin in zip(pools, twins, strict=True):
        pool.copy_(twin)  # the warm-up moved it
    rng = np.random.default_rng(1)
    eager = [torch.zeros_like(o) for o in outputs]
    for _ in range(30):
        table = torch.from_numpy(np.where(rng.random(B) < 0.2, -1, rng.permutation(P)[:B])).int()
        rows.copy_(table)
        graph.replay()
        step(twins, table.to(CUDA), eager)
        for i in range(layers):
            check(same_bits(outputs[i], eager[i]), f"outputs of layer {i}")
    for i in range(layers):
        check(same_bits(pools[i], twins[i]), f"pool of layer {i}")


@LAYOUTS
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_decode_is_a_longer_prefill(generator, family, D, dtype, order):
    B, T, n, HV = 3, 65, 4, 4
    x = random_inputs(family, B, T + n, 2, HV, D, generator)
    start = pool_of(B, HV, D, dtype, order, generator)
    options = dict(qk_l2norm=True, output_final_state=True)
    whole = run(f"{family}_fwd", x, initial_state=start, **options)
    path = pylinattn.last_path()
    before = {name: y[:, :T] for name, y in x.items()}
    done = run(f"{family}_fwd", before, initial_state=start, **options)
    pool, outputs = done.final_state, []
    check(pool.dtype == dtype and pool.stride() == start.stride(), "final_state has another layout")
    for t in range(T, T + n):
        token = {name: y[:, t : t + 1] for name, y in x.items()}
        outputs.append(run(f"{family}_decode", token | {"state": pool}, qk_l2norm=True))
    limit = max(cases.state_tolerance("bf16" if dtype == torch.bfloat16 else "f32", path), 3e-3)
    if dtype == torch.bfloat16:
        limit *= 2  # rounded n + 1 times instead of once
    error = distance(pool, whole.final_state)
    check(error <= limit, f"the state is {error:.1e} away, allowed {limit:.0e}")
    error = distance(torch.cat(outputs, 1), whole.o[:, T:])
    check(error <= max(limit, 5e-3), f"outputs are {error:.1e} away")


@LAYOUTS
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_forward_has_the_bits_of_decode(generator, family, D, dtype, order):
    """From one pool to another, where the states are laid out alike; with other states or more tokens it works in chunks."""
    HV = 4
    rows, to_rows = (
        torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([4, -1, 0], [3, -1, 1])
    )
    other = "k_first" if order == "v_first" else "v_first"
    for T in (1, 3, 4):
        x = random_inputs(family, 3, T, 2, HV, D, generator)
        pool = pool_of(5, HV, D, dtype, order, generator)
        start, final, twin = pool.clone(), torch.full_like(pool, float("nan")), pool.clone()
        tables = {"read_indices": rows, "write_indices": to_rows}
        forward = x | {"initial_state": pool, "final_state": final} | tables
        done = run(f"{family}_fwd", forward, qk_l2norm=True)
        check(pylinattn.last_path() == "cuda/decode", pylinattn.last_path())
        o = run(f"{family}_decode", x | {"state": twin} | tables, qk_l2norm=True)
        check(same_bits(done.o, o), f"outputs of {T} tokens")
        check(same_bits(pool, start), "initial_state was written")
        check(same_bits(final[[1, 3]], twin[[1, 3]]), f"states after {T} tokens")
        check(bool(final[[0, 2, 4]].isnan().all()), "a row was written that is nobody's")
    for changes in (
        {"final_state": pool_of(5, HV, D, dtype, other, generator)},
        {"final_state": final.float() if dtype == torch.bfloat16 else final.bfloat16()},
    ):
        run(f"{family}_fwd", forward | changes, qk_l2norm=True)
        check(pylinattn.last_path() != "cuda/decode", pylinattn.last_path())


@LAYOUTS
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_verified_rolled_back_and_committed(generator, family, dtype, order):
    """Rounds of verify, commit of none, some or all, and plain decode between; canaries in the rows of others stay."""
    B, P, HV, D, T = 3, 8, 4, 128, 5
    pool = pool_of(P, HV, D, dtype, order, generator)
    rows = torch.tensor([6, 0, 3], dtype=torch.int32, device=CUDA)
    others = [1, 2, 4, 5, 7]
    pool[others] = float("nan")
    start, twin = pool.clone(), pool.clone()
    counts = [(0, 0, 0), (5, 1, 3), (2, 0, 5), (0, 4, 0), (5, 5, 5)]
    for accepted in counts:
        x = random_inputs(family, B, T, 2, HV, D, generator) | {"read_indices": rows}
        before = pool.clone()
        kept = {
            "kept_k": torch.empty(x["k"].shape, device=CUDA),
            "kept_u": torch.empty(x["v"].shape, device=CUDA),
            "kept_g": torch.empty(x["g"].shape, device=CUDA),
        }
        verified = run(f"{family}_verify", x | {"state": pool}, **kept, qk_l2norm=True)
        check(same_bits(pool, before), "verify wrote the pool")
        number = torch.tensor(accepted, dtype=torch.int32, device=CUDA)
        pylinattn.delta_commit(pool, *kept.values(), number, read_indices=rows)
        for b, count in enumerate(accepted):
            if count:
                few = {k: x[k][b : b + 1, :count] for k in ("q", "k", "v", "g", "beta")}
                few |= {"state": twin, "read_indices": rows[b : b + 1]}
                o = run(f"{family}_decode", few, qk_l2norm=True)
                check(same_bits(o, verified.o[b : b + 1, :count]), f"outputs of {accepted}")
        check(same_bits(pool, twin), f"pools after {accepted}")
        token = random_inputs(family, B, 1, 2, HV, D, generator) | {"read_indices": rows}
        ours, theirs = (
            run(f"{family}_decode", token | {"state": s}, qk_l2norm=True) for s in (pool, twin)
        )
        check(same_bits(ours, theirs) and same_bits(pool, twin), f"decode after {accepted}")
    check(same_bits(pool[others], start[others]), "a canary is gone")


@LAYOUTS
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("D", [64, 128])
def test_kernels_agree_in_bits(generator, D, family, dtype, order):
    """Few and many states, few and many tokens take different kernels; padded states take the recurrent one."""
    HV = 4
    for B, T in ((1, 1), (2, 8), (2, 9), (2, 20), (20, 1), (80, 1), (20, 8), (20, 9), (20, 16)):
        pool = pool_of(B + 2, HV, D, dtype, order, generator)
        padded = torch.zeros(B + 2, HV, D, D + 16, dtype=dtype, device=CUDA)[..., :D]
        padded = padded.transpose(2, 3) if order == "v_first" else padded
        padded.copy_(pool)
        rows = torch.randperm(B + 2, device=CUDA, generator=generator)[:B].int()
        if B > 1:
            rows[1] = -1
        # a table, and none: the state is then the first load
        for table in (rows, None):
            x = random_inputs(family, B, T, 2, HV, D, generator)
            x |= {} if table is None else {"read_indices": table}
            ours = {"state": pool if table is not None else pool[:B]}
            theirs = {"state": padded if table is not None else padded[:B]}
            if T <= 16:
                kept = run(f"{family}_verify", x | ours, qk_l2norm=True)
                check(pylinattn.last_path() == "cuda/decode", f"verify: {pylinattn.last_path()}")
                want = run(f"{family}_verify", x | theirs, qk_l2norm=True)
                check(pylinattn.last_path() == "cuda/recurrent", f"padded: {pylinattn.last_path()}")
                for name in ("o", "kept_k", "kept_u", "kept_g"):
                    same = same_bits(getattr(kept, name), getattr(want, name))
                    check(same, f"verify of {B} x {T}: {name} differs")
                check(same_bits(pool, padded), f"verify of {B} x {T} wrote the pool")
            o, want = (run(f"{family}_decode", x | s, qk_l2norm=True) for s in (ours, theirs))
            check(same_bits(o, want), f"decode of {B} x {T}: o differs")
            check(same_bits(pool, padded), f"decode of {B} x {T}: states differ")

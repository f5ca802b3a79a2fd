"""Verify for its outputs alone on a GPU: the chunk of a draft against the loop over its tokens in float64."""

from __future__ import annotations

import pytest
from gpu_tools import CUDA, FAMILIES, capture, same_bits, torch
from harness import check

import pylinattn

pytestmark = pytest.mark.gpu
D = 128
LAYOUTS = pytest.mark.parametrize(
    ("dtype", "order"),
    [(d, o) for d in (torch.float32, torch.bfloat16) for o in ("k_first", "v_first")],
    ids=["f32-k_first", "f32-v_first", "bf16-k_first", "bf16-v_first"],
)
LIMITS = {torch.bfloat16: 2.5e-3, torch.float16: 1e-3}  # of o; rounding it alone is 1.7e-3, 2e-4
NO_LIMIT = -5.0 * 16  # of T times lower_bound: beyond, the loop over tokens takes the call
KINDS = {
    "gdn": ("activated", "softplus", "no decay", "forgets", "logits_x2"),
    "kda": ("bounded", "saturated", "open", "no bias", "float gates"),
}


class Draft:
    """Inputs of one call, and what its gates, beta and norms come to."""

    def __init__(self, family, B, T, H, HV, dtype, order, kind, seed, half=torch.bfloat16):
        options = dict(device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))
        normal = lambda *shape: torch.randn(*shape, **options)  # noqa: E731
        self.op, self.half, P = getattr(pylinattn, f"{family}_verify"), half, B + 3
        shape = (B, T, HV, D) if family == "kda" else (B, T, HV)
        q, k, v, g, beta = normal(B, T, H, D), normal(B, T, H, D), normal(B, T, HV, D), normal(*shape), normal(B, T, HV)  # fmt: skip
        hard = kind in ("no decay", "saturated", "open")
        if hard:  # keys that share a direction, with strong writes
            k = 1 + 0.1 * k
        self.norm = kind != "activated"
        if not self.norm:
            q, k = 0.1 * q, 0.1 * k
        self.options = {"qk_l2norm": self.norm}
        A_log, bias = 0.3 * normal(HV), 0.3 * normal(*shape[2:])
        weight = torch.where(beta > 0, 2.0, 1.0) if hard else beta.sigmoid()
        if family == "gdn":
            if kind in ("softplus", "logits_x2"):
                self.options |= {"gate": "softplus", "A_log": A_log, "dt_bias": bias}
                self.decay = -A_log.exp() * torch.nn.functional.softplus(g + bias)
            else:
                g = -torch.rand(*shape, **options) * (kind != "no decay")
                if kind == "forgets":
                    chance = torch.rand(*shape, **options)
                    g[chance < 0.3], g[chance < 0.15] = -1000.0, float("-inf")
                self.decay = g
        else:
            g += {"saturated": 30, "open": -30}.get(kind, 0)
            if kind != "float gates":
                g = g.to(half)
            bound = -5.0 if T > 8 else NO_LIMIT / max(T, 8)
            self.options |= {"gate": "bounded", "lower_bound": bound, "A_log": A_log}
            raw = g.float()
            if kind != "no bias":
                self.options["dt_bias"], raw = bias, raw + bias
            self.decay = bound * (A_log.exp()[:, None] * raw).sigmoid()
        if kind in ("softplus", "bounded", "logits_x2"):
            weight = beta.sigmoid() * (2 if kind == "logits_x2" else 1)
            self.options["beta_form"] = "logits_x2" if kind == "logits_x2" else "logits"
        else:
            beta = weight
        self.weight = weight
        self.given = [q.to(half), k.to(half), v.to(half), g, beta]
        pool = normal(P, HV, D, D).to(dtype)
        self.pool = pool.transpose(2, 3) if order == "v_first" else pool
        self.rows = torch.randperm(P, **options)[:B].int()
        others = torch.ones(P, dtype=torch.bool, device=CUDA)
        others[self.rows.long()] = False
        self.pool[others] = float("nan")
        self.start = self.pool.clone()

    def __call__(self, part=slice(None), **more):
        given, rows = [x[part] for x in self.given], self.rows[part]
        return self.op(*given, self.pool, read_indices=rows, **self.options | more)

    def outputs(self, **more):
        done = self(keep=False, **more)
        check(done[1:] == (None, None, None), "something was kept")
        check(same_bits(self.pool, self.start), "the pool was written")
        return done.o

    def expected(self):
        q, k, v = (x.double() for x in self.given[:3])
        if self.norm:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        decay = self.decay.double().exp()
        decay = decay[..., None] if decay.ndim == 4 else decay[..., None, None]
        S, out = self.pool[self.rows.clamp(0).long()].double(), []
        for t in range(v.shape[1]):
            S = S * decay[:, t]
            u = v[:, t] - torch.einsum("nhkv,nhk->nhv", S, k[:, t])
            u = self.weight[:, t, :, None].double() * u
            S = S + k[:, t, :, :, None] * u[:, :, None]
            out.append(D**-0.5 * torch.einsum("nhkv,nhk->nhv", S, q[:, t]))
        return torch.stack(out, 1)

    def check(self, name):
        o, want = self.outputs(), self.expected()
        live = self.rows >= 0
        error = (o[live] - want[live]).square().mean() / want[live].square().mean()
        limit = LIMITS[self.half]
        check(float(error**0.5) <= limit, f"{name}: o is {float(error**0.5):.1e} away, allowed {limit:.0e}")  # fmt: skip
        check(bool((o[~live] == 0).all()), f"{name}: padding is not zero")
        return o


@LAYOUTS
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("T", range(1, 17))
def test_outputs_alone(family, T, dtype, order):
    """Few and many states, grouped heads, padding, every gate and form of beta, hard keys, f16."""
    for seed, (B, H, HV) in enumerate([(1, 2, 4), (3, 1, 4), (3, 16, 64), (40, 4, 8), (70, 4, 4)]):
        for number, kind in enumerate(KINDS[family]):
            if B > 3 and number != (T + seed) % 5:  # one kind of the large ones
                continue
            half = torch.float16 if (number + seed) % 3 == 2 else torch.bfloat16
            draft = Draft(family, B, T, H, HV, dtype, order, kind, 100 * T + seed, half)
            if B > 1 and number % 2:
                draft.rows[1] = -1
            draft.check(f"{kind}, {B} x {T}, {half}")
            check(pylinattn.last_path() == "cuda/decode", pylinattn.last_path())


@LAYOUTS
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_repeat_and_do_not_depend_on_the_batch(family, dtype, order):
    for T in (2, 4, 7, 16):
        for B in (3, 40):
            draft = Draft(family, B, T, 2, 8, dtype, order, KINDS[family][1], T)
            o = draft.outputs()
            for _ in range(20):
                check(same_bits(draft.outputs(), o), "another run, other bits")
            graph_o = torch.zeros_like(o)
            graph = capture(lambda d=draft, out=graph_o: d(keep=False, o=out))
            graph_o.fill_(float("nan"))
            graph.replay()
            check(same_bits(graph_o, o), "in a graph: other bits")
            for part in (
                slice(0, 1),
                slice(1, B - 1),
            ):  # few states have a form of the kernel of their own
                check(same_bits(draft(part, keep=False).o, o[part]), f"{part} of {B}: other bits")


@pytest.mark.parametrize("family", FAMILIES)
def test_strides_that_tensor_copies_do_not_take(family):
    """One q for all sequences, at stride 0: other copies, the same bits."""
    for T in (4, 16):
        draft = Draft(family, 40, T, 2, 8, torch.bfloat16, "k_first", KINDS[family][1], T)
        draft.given[0] = draft.given[0][:1].expand(40, -1, -1, -1)
        o = draft.check(f"{T} tokens")
        draft.given[0] = draft.given[0].contiguous()
        check(same_bits(draft.outputs(), o), f"{T} tokens: other bits")


@LAYOUTS
@pytest.mark.parametrize("family", FAMILIES)
def test_nan_stays_in_its_row_and_after_its_token(family, dtype, order):
    for B in (2, 40):
        for T in (3, 8, 16):
            draft = Draft(family, B, T, 2, 8, dtype, order, KINDS[family][0], T)
            clean, given = draft.outputs(), [x.clone() for x in draft.given]
            for token in (T - 1, T // 2):
                for which in (None, *range(5)):  # in all of q, k, v, g and beta, or one
                    for i, x in enumerate(draft.given):
                        x.copy_(given[i])
                        if which in (None, i):
                            x[1, token] = float("nan")
                    o = draft.outputs()
                    check(same_bits(o[1, :token], clean[1, :token]), "an earlier token has changed")
                    check(same_bits(o[0], clean[0]), "another sequence has changed")
                    check(bool(o[1, token].isnan().all()), "NaN was lost")
                    if which != 0:  # but for q it goes into the state
                        check(bool(o[1, token:].isnan().all()), "NaN was lost later")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_chunk_does_not_take(family):
    """Trees, K = 64 and KDA's unbounded or very steep gates: outputs alone have then the bits of a call that keeps."""
    draft = Draft(family, 3, 5, 2, 4, torch.float32, "k_first", KINDS[family][0], 1)
    tree = torch.tensor([[-1, 0, 0, 1, 2]] * 3, dtype=torch.int32, device=CUDA)
    check(same_bits(draft.outputs(parents=tree), draft(parents=tree).o), "a tree")
    if family == "kda":
        steep = {"lower_bound": -17.0}
        check(same_bits(draft.outputs(**steep), draft(**steep).o), "steep gates")
        draft.options = {"qk_l2norm": True}
        draft.given[3] = -draft.given[3].abs()
        check(same_bits(draft.outputs(), draft().o), "activated gates")

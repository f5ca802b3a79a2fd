"""What is right: the recurrence in float64 on the device, for a sample of sequences and heads.

Long sequences go in chunks of C tokens, S the state before the chunk, G the decay since then:

    u = (I + A)^-1 beta (v - (G k) S),   A_ij = beta_i (G_i k_i) . (k_j / G_j), j < i
    o = scale ((G q) S + tril((G q) (k / G)^T) u),   S' = G_C (S + (k / G)^T u)

C is small enough for G and 1/G to stay inside float64's range, so that this form loses nothing
against the token loop.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from workloads import Inputs, Workload

MAX_EXPONENT = 600.0  # exp of it is in range, and so is the product of two such and the inputs


@dataclasses.dataclass
class Expected:
    sequences: list[int]
    heads: list[int]
    o: list[torch.Tensor]  # per sequence [T,heads,V]
    state: torch.Tensor  # [sequences,heads,K,V]


def sample(w: Workload, x: Inputs) -> tuple[list[int], list[int]]:
    """First, longest, shortest, last sequence; first, last, middle head and one without decay."""
    by_length = sorted(range(w.N), key=lambda n: w.lengths[n])
    sequences = {0, w.N - 1, by_length[0], by_length[-1]}
    heads = {0, w.HV - 1, w.HV // 2 + 1 if w.HV > 2 else 0}
    if x.gate == "none" and x.g.dim() == 3:
        quiet = (x.g[0].amin(0) == 0).nonzero().flatten().tolist()
        heads |= set(quiet[:1])
    if w.kind != "fwd":  # short: look at more of them
        sequences |= set(range(0, w.N, max(1, w.N // 12)))
        heads |= set(range(0, w.HV, max(1, w.HV // 6)))
    return sorted(sequences), sorted(heads)


def log_decay(x: Inputs, g: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """Gate activation in float64; g [T,heads] or [T,heads,K]."""
    g = g.double()
    if x.gate == "none":
        return g
    amplitude = x.A_log[heads].double().exp()
    bias = x.dt_bias[heads].double()
    if g.dim() == 3:
        amplitude = amplitude[:, None]
    if x.gate == "softplus":
        return -amplitude * F.softplus(g + bias, threshold=700.0)
    return x.lower_bound * torch.sigmoid(amplitude * (g + bias))


def _l2norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    S: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, g [T,h,K]; v [T,h,V]; beta [T,h]; S [h,K,V]. Returns o [T,h,V] and the last state."""
    T = q.shape[0]
    steepest = -g.amin().item()
    C = 64
    while C > 1 and C * steepest > MAX_EXPONENT:
        C //= 2
    if C * steepest > MAX_EXPONENT:
        return _token_loop(q, k, v, g, beta, S, scale)
    chunks = math.ceil(T / C)

    def cut(t: torch.Tensor) -> torch.Tensor:
        """[T,h,..] to [h,chunks,C,..]; tokens of zeros at the end change no state."""
        t = F.pad(t, [0, 0] * (t.dim() - 1) + [0, chunks * C - T])
        return t.unflatten(0, (chunks, C)).movedim(2, 0)

    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta)[..., None]
    G = cut(g).cumsum(2)
    k_in, k_out, q_in = G.exp() * k, (-G).exp() * k, G.exp() * q
    k_end = (G[:, :, -1:] - G).exp() * k
    decay = G[:, :, -1, :, None].exp()  # [h,chunks,K,1]
    A = (beta * (k_in @ k_out.mT)).tril(-1)
    solved = torch.linalg.solve_triangular(
        A + torch.eye(C, dtype=A.dtype, device=A.device),
        torch.cat([beta * v, beta * k_in], -1),
        upper=False,
    )
    u0, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    before, u = torch.empty(chunks, *S.shape, dtype=S.dtype, device=S.device), torch.empty_like(u0)
    for c in range(chunks):
        before[c] = S
        u[:, c] = torch.baddbmm(u0[:, c], w[:, c], S, alpha=-1)
        S = torch.baddbmm(decay[:, c] * S, k_end[:, c].mT, u[:, c])
    o = scale * (q_in @ before.movedim(0, 1) + (q_in @ k_out.mT).tril() @ u)
    return o.movedim(0, 2).flatten(0, 1)[:T], S


def _token_loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    S: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence itself; q, k, g [T,..,K]; v [T,..,V]; beta [T,..]; S [..,K,V]."""
    o = torch.empty_like(v)
    for t in range(q.shape[0]):
        S = g[t].exp()[..., None] * S
        u = beta[t][..., None] * (v[t] - (k[t][..., None, :] @ S)[..., 0, :])
        S = S + k[t][..., None] * u[..., None, :]
        o[t] = scale * (q[t][..., None, :] @ S)[..., 0, :]
    return o, S


def expect(w: Workload, x: Inputs) -> Expected:
    """Outputs and last states of the sample."""
    sequences, heads = sample(w, x)
    key_heads = [h // (w.HV // w.H) for h in heads]
    outputs, states = [], []

    def tokens(n: int) -> tuple[torch.Tensor, ...]:
        first = sum(w.lengths[:n])
        at = (0, slice(first, first + w.lengths[n])) if w.kind == "fwd" else (n, slice(None))
        q, k = (t[at][:, key_heads].double() for t in (x.q, x.k))
        if x.qk_l2norm:
            q, k = _l2norm(q), _l2norm(k)
        g = log_decay(x, x.g[at][:, heads], heads)
        g = g.expand_as(k) if g.dim() == 3 else g[..., None].expand_as(k)
        beta = x.beta[at][:, heads].double()
        return (
            q,
            k,
            x.v[at][:, heads].double(),
            g,
            beta.sigmoid() if x.beta_form == "logits" else beta,
        )

    if w.kind == "fwd":
        for n in sequences:
            o, S = _chunked(*tokens(n), x.state[n, heads].double(), x.scale)
            outputs.append(o)
            states.append(S)
    else:
        stacked = [
            torch.stack(parts, 1) for parts in zip(*(tokens(n) for n in sequences), strict=True)
        ]
        o, S = _token_loop(*stacked, x.state[sequences][:, heads].double(), x.scale)
        outputs, states = list(o.unbind(1)), list(S.unbind(0))
    return Expected(sequences, heads, outputs, torch.stack(states))


def _worst(got: torch.Tensor, want: torch.Tensor, axes: tuple[int, ...]) -> float:
    """Largest RMS of the difference over RMS of what is wanted; inf where one is not finite."""
    got = got.double()
    if not torch.isfinite(got).all():
        return math.inf
    error = (got - want).square().mean(axes).sqrt() / want.square().mean(axes).sqrt().clamp_min(
        1e-300
    )
    return error.max().item()


def output_error(w: Workload, expected: Expected, o: torch.Tensor) -> float:
    """err_o: the worst relative RMS error over the sample; o is [B,T,HV,V]."""
    worst = 0.0
    for n, want in zip(expected.sequences, expected.o, strict=True):
        first = sum(w.lengths[:n])
        row = o[0, first : first + w.lengths[n]] if w.kind == "fwd" else o[n]
        worst = max(worst, _worst(row[:, expected.heads], want, (0, 2)))
    return worst


def state_error(expected: Expected, state: torch.Tensor) -> float:
    """err_state, the same of the last states; state is [N,HV,K,V]."""
    return _worst(state[expected.sequences][:, expected.heads], expected.state, (2, 3))

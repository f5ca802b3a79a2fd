"""What is timed: the rows of the result table and their inputs. tests/cases.py has the shapes."""

from __future__ import annotations

import dataclasses
import math
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from cases import GDN_HEADS, GDN_LENGTHS, KDA_HEADS, KDA_LENGTHS, bench_name, kda_parameters

OPS = ("gdn_fwd", "kda_fwd", "gdn_decode", "kda_decode", "gdn_verify", "kda_verify")
ELSEWHERE = ("gdn_bwd", "kda_bwd")  # backward.py times them
KDA_GATES = ("steep", "slow", "mixed")
DECODE_BATCHES = (1, 4, 16, 64, 256, 1024)
VERIFY_TOKENS = (2, 4, 8, 16)
MAIN_LENGTHS = {*GDN_LENGTHS, *KDA_LENGTHS}  # of the rows that means over a table are taken of
KEPT = ((64, 4), (64, 16), (256, 4))  # batch, tokens
VARIANTS = ("fp16", "d64", "vfirst", "pool", "ckpt", "softplus")
LOWER_BOUND = -5.0
CHECKPOINT_EVERY = 256
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

# A few rows of every kind, for a first look in little time.
QUICK = {
    "gdn_fwd": ("1x2048 h8/32", "8x1024 h8/32"),
    "kda_fwd": ("1x2048 h8", "8x1024 h32"),
    "gdn_decode": (
        "B1 h16/32 fp32state",
        "B64 h16/32 fp32state",
        "B64 h16/32 bf16state",
        "B256 h16/32 fp32state",
    ),
    "kda_decode": (
        "B1 h32 fp32state",
        "B64 h32 fp32state",
        "B64 h32 bf16state",
        "B256 h32 fp32state",
    ),
    "gdn_verify": ("B16 T4 h16/32 fp32state",),
    "kda_verify": ("B16 T4 h32 fp32state",),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One row of the table. Forward: packed sequences; else a batch of equal lengths."""

    op: str
    case: str
    gate: str
    H: int
    HV: int
    lengths: tuple[int, ...]
    D: int = 128
    dtype: str = "bf16"
    state: str = "f32"
    variant: str = ""

    @property
    def family(self) -> str:
        return self.op.split("_")[0]

    @property
    def kind(self) -> str:
        return self.op.split("_")[1]

    @property
    def N(self) -> int:
        return len(self.lengths)

    @property
    def T(self) -> int:
        """Tokens along the second axis of q."""
        return sum(self.lengths) if self.kind == "fwd" else self.lengths[0]

    @property
    def B(self) -> int:
        return 1 if self.kind == "fwd" else self.N

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.case, self.gate


def _varied(base: Workload, variant: str) -> Workload:
    changes = {"fp16": {"dtype": "f16"}, "d64": {"D": 64}, "softplus": {"gate": "softplus"}}.get(
        variant, {}
    )
    return dataclasses.replace(base, case=f"{base.case} {variant}", variant=variant, **changes)


def _fwd(
    op: str, lengths: str | list[int], heads: tuple[int, int], gate: str, name: str = ""
) -> Workload:
    table = GDN_LENGTHS if op == "gdn_fwd" else KDA_LENGTHS
    run = table[lengths] if isinstance(lengths, str) else lengths
    return Workload(op, bench_name(name or str(lengths), *heads), gate, *heads, tuple(run))


def _gdn_fwd() -> list[Workload]:
    rows = [_fwd("gdn_fwd", n, h, "none") for h in GDN_HEADS for n in GDN_LENGTHS]
    rows += [_fwd("gdn_fwd", [131072], h, "none", "1x131072") for h in ((2, 8), (8, 32))]
    rows += [_fwd("gdn_fwd", [128] * 256, (16, 64), "none", "256x128")]
    rows += [_fwd("gdn_fwd", [t], (8, 32), "none", f"1x{t}") for t in (64, 128, 256, 512)]
    bases = [
        _fwd("gdn_fwd", "8x1024", (16, 64), "none"),
        _fwd("gdn_fwd", "1x8192", (8, 32), "none"),
    ]
    return rows + [_varied(base, v) for base in bases for v in VARIANTS]


def _kda_fwd() -> list[Workload]:
    rows = [
        _fwd("kda_fwd", n, (h, h), gate)
        for gate in KDA_GATES
        for h in KDA_HEADS
        for n in KDA_LENGTHS
    ]
    for gate in KDA_GATES:
        rows += [
            _fwd("kda_fwd", [t], (h, h), gate, f"1x{t}")
            for h, t in ((8, 65536), (8, 131072), (32, 65536))
        ]
        rows += [_fwd("kda_fwd", [128] * 256, (32, 32), gate, "256x128")]
    bases = [_fwd("kda_fwd", "8x1024", (32, 32), "slow"), _fwd("kda_fwd", "1x8192", (8, 8), "slow")]
    return rows + [_varied(base, v) for base in bases for v in VARIANTS]


def _steps(op: str, tokens: tuple[int, ...]) -> list[Workload]:
    gdn = op.startswith("gdn")
    rows = []
    for heads in ((16, 32), (16, 64)) if gdn else ((32, 32),):
        for state in ("f32", "bf16"):
            for T in tokens:
                for B in DECODE_BATCHES:
                    run = f"B{B}" if op.endswith("decode") else f"B{B} T{T}"
                    name = f"{bench_name(run, *heads)} {state.replace('f32', 'fp32')}state"
                    gate = "softplus" if gdn else "steep"
                    rows.append(Workload(op, name, gate, *heads, (T,) * B, state=state))
    if op.endswith("verify"):  # with what delta_commit needs; the others are outputs alone
        rows += [_varied(w, "kept") for w in rows if w.HV == 32 and (w.N, w.T) in KEPT]
    return rows


def workloads(op: str) -> list[Workload]:
    """Every row of an op."""
    table = {
        "gdn_fwd": _gdn_fwd,
        "kda_fwd": _kda_fwd,
        "gdn_decode": lambda: _steps("gdn_decode", (1,)),
        "kda_decode": lambda: _steps("kda_decode", (1,)),
        "gdn_verify": lambda: _steps("gdn_verify", VERIFY_TOKENS),
        "kda_verify": lambda: _steps("kda_verify", VERIFY_TOKENS),
    }
    return table[op]()


@dataclasses.dataclass
class Inputs:
    """Tensors of one row; what an implementation or an option needs beyond them is made there."""

    q: torch.Tensor  # [B,T,H,K]
    k: torch.Tensor  # [B,T,H,K]
    v: torch.Tensor  # [B,T,HV,V]
    g: torch.Tensor  # [B,T,HV] or [B,T,HV,K]
    beta: torch.Tensor  # [B,T,HV]
    state: torch.Tensor  # [N,HV,K,V]
    cu_seqlens: torch.Tensor | None  # [N+1]
    A_log: torch.Tensor | None  # [HV]
    dt_bias: torch.Tensor | None  # [HV] or [HV,K]
    gate: str  # "none", "softplus" or "bounded"
    beta_form: str
    qk_l2norm: bool

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def lower_bound(self) -> float | None:
        return LOWER_BOUND if self.gate == "bounded" else None


def make(w: Workload, device: str = "cuda") -> Inputs:
    """The same values every time for the same row."""
    seed = zlib.crc32(f"{w.family}{w.H}/{w.HV}{w.lengths}{w.D}{w.gate}".encode())
    source = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[w.dtype]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=source)

    q, k = (randn(w.B, w.T, w.H, w.D) for _ in range(2))
    v = randn(w.B, w.T, w.HV, w.D).to(dtype)
    # asymmetric, so that states with K and V mixed up differ
    ramp = torch.arange(w.D, device=device) / w.D
    shape = 1 + ramp[:, None] + 2 * ramp[None, :]
    state = (
        randn(w.N, w.HV, w.D, w.D)
        .mul_(0.1 * shape if w.kind == "fwd" else shape)
        .to(DTYPES[w.state])
    )
    cu = (
        torch.tensor([0, *np.cumsum(w.lengths)], dtype=torch.int32, device=device)
        if w.kind == "fwd"
        else None
    )
    x = Inputs(q, k, v, v, v, state, cu, None, None, "none", "weight", False)
    if w.gate == "none":  # GDN activated outside: slow decays, a quarter of the heads without any
        x.q, x.k = (F.normalize(t, dim=-1) for t in (q, k))
        x.g = F.logsigmoid(randn(w.B, w.T, w.HV)) / 16
        quiet = torch.randperm(w.HV, generator=torch.Generator().manual_seed(seed))[: w.HV // 4]
        x.g[:, :, quiet.to(device)] = 0.0
        x.beta = randn(w.B, w.T, w.HV).sigmoid()
    else:
        x.qk_l2norm, x.beta_form = True, "logits"
        x.gate = "softplus" if w.gate == "softplus" else "bounded"
        x.g = randn(w.B, w.T, w.HV, *([w.D] if w.family == "kda" else [])).to(dtype)
        x.beta = randn(w.B, w.T, w.HV).to(dtype)
        kind = w.gate if w.gate in KDA_GATES else "slow"
        A_log, dt_bias = kda_parameters(np.random.default_rng(seed), w.HV, w.D, kind)
        if (
            w.family == "gdn"
        ):  # exp(A_log) in 1..16; the bias makes decays of some hundredths a token
            A_log, dt_bias = kda_parameters(np.random.default_rng(seed), w.HV, w.D, "steep")
            dt_bias = dt_bias[:, 0] - 5.0
        x.A_log, x.dt_bias = (
            torch.tensor(t, dtype=torch.float32, device=device) for t in (A_log, dt_bias)
        )
    x.q, x.k = x.q.to(dtype), x.k.to(dtype)
    return x


def floor_bytes(w: Workload, x: Inputs) -> int:
    """Every input read once, every output written once."""

    def size(*tensors: torch.Tensor | None) -> int:
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    total = size(
        x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.v, x.state
    )  # v twice: o is of its size
    if w.kind != "verify":
        total += size(x.state)
    elif w.variant == "kept":  # kept_k, kept_u, kept_g in fp32
        total += 4 * (x.k.numel() + x.v.numel() + x.g.numel())
    if w.variant == "ckpt":
        rows = sum(math.floor(n / CHECKPOINT_EVERY) for n in w.lengths)
        total += rows * size(x.state) // w.N
    return total

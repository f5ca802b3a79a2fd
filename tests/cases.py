"""Shapes, inputs and tolerances, one place for tests and benchmarks.

Inputs are float64 NumPy arrays already rounded to the dtype they will have on the device, so the reference sees what the
kernel sees. Names of the large shapes ("1x8192 h2/8") are those of the benchmarks.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import NamedTuple

import numpy as np
from arrays import round_to

GDN_LENGTHS = {
    "1x32768": [32768], "1x8192": [8192], "1x2048": [2048], "4x8192": [8192] * 4, "8x1024": [1024] * 8,
    "1024+7168": [1024, 7168], "256+1500+52+6384": [256, 1500, 52, 6384],
}  # fmt: skip
KDA_LENGTHS = {
    "1x8192": [8192], "mixed8192": [1300, 547, 2048, 963, 271, 3063], "8x1024": [1024] * 8,
    "1x32768": [32768], "1x2048": [2048],
}  # fmt: skip
GDN_HEADS = [(2, 8), (8, 32), (16, 64)]
KDA_HEADS = [8, 12, 32, 64, 96]
DECODE_BATCHES = [1, 16, 64, 256]
DECODE_HEADS = (16, 32)  # H, HV of the GDN decode rows; KDA has HV heads of each


def bench_name(lengths_name, H, HV):
    """ "1x8192 h2/8" for grouped heads, "1x8192 h8" for equal ones."""
    return f"{lengths_name} h{H}" if H == HV else f"{lengths_name} h{H}/{HV}"


def bench_shape(name):
    """(lengths, H, HV) of a benchmark name."""
    lengths_name, heads = name.split(" h")
    H, _, HV = heads.partition("/")
    lengths = {**GDN_LENGTHS, **KDA_LENGTHS}[lengths_name]
    return lengths, int(H), int(HV or H)


# The largest relative RMS error allowed, per sequence, head and tail block, by dtype of the array compared. Never loosened in
# one test: a path that needs more gets a row with its reason.
TOLERANCE_O = {"f64": 1e-10, "f32": 1e-5, "bf16": 5e-3, "f16": 3e-3}
TOLERANCE_STATE = {"f64": 1e-10, "f32": 1e-5, "bf16": 3e-3}
# A path that multiplies in half precision keeps an fp32 state to this; token loops to the rows above.
TOLERANCE_STATE_HALF_PRODUCTS = 3e-3
# The same in bf16: rounding it adds 1.7e-3, independently.
TOLERANCE_STATE_BF16_HALF_PRODUCTS = 3.5e-3
# The token loops of the GPU take exp from the special function unit: 2 units in the last place of fp32 a token.
TOLERANCE_STATE_RECURRENT = 5e-5
# Token loops keep fp32 up to the end: what is left is one rounding to nearest, some 2^-8 / sqrt(3) / mantissa for bf16.
ROUNDING = {"bf16": 2.8e-3, "f16": 3.5e-4}


def is_token_loop(path):
    return path.startswith("cpu/") or path in ("cuda/recurrent", "cuda/decode")


def output_tolerance(dtype, path):
    return ROUNDING.get(dtype, TOLERANCE_O[dtype]) if is_token_loop(path) else TOLERANCE_O[dtype]


def state_tolerance(dtype, path):
    if dtype in ROUNDING and is_token_loop(path):
        return ROUNDING[dtype]
    if dtype == "bf16":
        return TOLERANCE_STATE_BF16_HALF_PRODUCTS
    if dtype != "f32" or path.startswith("cpu/"):
        return TOLERANCE_STATE[dtype]
    return TOLERANCE_STATE_RECURRENT if is_token_loop(path) else TOLERANCE_STATE_HALF_PRODUCTS


class Input(NamedTuple):
    values: np.ndarray  # float64, exact in dtype; or int64
    dtype: str


@dataclasses.dataclass(frozen=True)
class Case:
    """One forward problem. `gates` names the inputs (see `make`), `options` are keywords of the op."""

    family: str
    lengths: tuple
    H: int
    HV: int
    K: int
    V: int
    dtype: str = "f32"
    packed: bool = True
    state_dtype: str = "f32"
    initial: bool = True
    gates: str = "usual"
    gate_dtype: str = "f32"
    options: tuple = ()
    seed: int = 0

    @property
    def op(self):
        return f"{self.family}_fwd"

    @property
    def id(self):
        runs = (
            "+".join(map(str, self.lengths))
            if self.packed
            else f"{len(self.lengths)}x{self.lengths[0]}"
        )
        if len(runs) > 30:
            runs = f"{len(self.lengths)}seq{sum(self.lengths)}"
        parts = [self.family, runs, f"h{self.H}/{self.HV}", f"d{self.K}x{self.V}", self.dtype]
        parts += [self.gates] if self.gates != "usual" else []
        parts += ["" if self.initial else "no_h0", "" if self.packed else "dense"]
        parts += [f"S{self.state_dtype}"] if self.state_dtype != "f32" else []
        parts += [f"{k}={v}" for k, v in self.options]
        return "-".join(p for p in parts if p)

    @property
    def cu(self):
        return np.cumsum([0, *self.lengths])

    @property
    def spans(self):
        """(batch row, first token, end) of every sequence."""
        if not self.packed:
            return [(b, 0, length) for b, length in enumerate(self.lengths)]
        return [(0, int(a), int(b)) for a, b in zip(self.cu[:-1], self.cu[1:])]

    @property
    def keywords(self):
        return dict(self.options)

    @property
    def state(self):
        """dtype of the states: fp64 with fp64 inputs, unless a narrower one than fp32 is asked for."""
        return "f64" if (self.dtype, self.state_dtype) == ("f64", "f32") else self.state_dtype


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def usual_gates(rng, shape):
    """Slow decays with a quarter of the heads not decaying at all."""
    g = log_sigmoid(rng.normal(size=shape)) / 16
    quiet = rng.permutation(shape[2])[: max(shape[2] // 4, 1 if shape[2] > 1 else 0)]
    g[:, :, quiet] = 0.0
    return g


def kda_parameters(rng, HV, K, kind):
    """A_log [HV] and dt_bias [HV,K]: steep gates forget within some 16 tokens, slow ones remember thousands."""
    steep = np.log(rng.uniform(1, 16, size=HV)), 0.1 * rng.normal(size=(HV, K))
    slow = np.zeros(HV), rng.uniform(-7, -2, size=(HV, K))
    if kind == "mixed":
        pick = np.arange(HV) % 2 == 0
        return np.where(pick, steep[0], slow[0]), np.where(pick[:, None], steep[1], slow[1])
    return {"steep": steep, "slow": slow}[kind]


def _hard_gates(rng, name, shape):
    """Log decays at the edges of what is legal; [B,T,HV] or [B,T,HV,K]."""
    g = np.zeros(shape)
    T = shape[1]
    if name == "zero":
        return g
    if name == "minus_5":
        return g - 5.0
    if name == "minus_20":
        return g - 20.0
    if name == "decay_1e-12":
        return g + np.log(1e-12)
    if name == "half_minus_1000":
        g[:, rng.permutation(T)[: T // 2]] = -1000.0
    elif name == "one_reset":
        g += usual_gates(rng, shape)
        g[:, T // 2] = -np.inf
    elif name == "resets_by_channel":
        g += usual_gates(rng, shape)
        g[rng.uniform(size=shape) < 0.02] = -np.inf
    elif name == "chunk_starts":
        g[:, ::64] = -100.0
    elif name == "A_log_16":
        return -np.exp(rng.uniform(0, np.log(16), size=shape)) * np.logaddexp(
            0, rng.normal(size=shape)
        )
    else:
        raise KeyError(name)
    return g


HARD_GATES = [
    "zero", "minus_5", "minus_20", "decay_1e-12", "half_minus_1000", "one_reset", "resets_by_channel", "chunk_starts", "A_log_16",
]  # fmt: skip
# key for all tokens, noise on it, beta, g
HARD_KEYS = {
    "one_key": (0.0, 1.0, 0.0),
    "one_key_b0.9997": (0.0, 0.9997, -1e-3),
    "near_key": (1e-2, 1.0, 0.0),
    "near_key_b0.9997": (1e-2, 0.9997, -1e-3),
    "one_key_b2": (0.0, 2.0, -1e-3),
    "near_key_b2": (1e-2, 2.0, -1e-3),
}


def make(case, extra_tokens=0):
    """Inputs of a case by argument name. `extra_tokens` lie past cu_seqlens[-1]."""
    rng = np.random.default_rng(
        [case.seed, zlib.crc32(f"{case.family}{case.lengths}{case.gates}".encode())]
    )
    B, T = (
        (1, sum(case.lengths) + extra_tokens)
        if case.packed
        else (len(case.lengths), case.lengths[0])
    )
    N, H, HV, K, V = len(case.lengths), case.H, case.HV, case.K, case.V
    options = case.keywords
    gate_shape = (B, T, HV, K) if case.family == "kda" else (B, T, HV)

    x = {name: rng.normal(size=(B, T, H, K)) for name in ("q", "k")}
    x["v"] = rng.normal(size=(B, T, HV, V))
    x["beta"] = rng.normal(size=(B, T, HV))
    if case.gates in HARD_KEYS:
        noise, beta, g = HARD_KEYS[case.gates]
        x["k"] = np.broadcast_to(rng.normal(size=(1, 1, H, K)), (B, T, H, K))
        x["k"] = unit(x["k"]) + noise * unit(rng.normal(size=(B, T, H, K)))
        x["g"], x["beta"] = np.full(gate_shape, g), np.full((B, T, HV), beta)
    elif options.get("gate", "none") != "none":
        x["g"] = rng.normal(size=gate_shape)
    elif case.gates == "usual":
        x["g"] = usual_gates(rng, gate_shape)
    else:
        x["g"] = _hard_gates(rng, case.gates, gate_shape)
    if not options.get("qk_l2norm"):
        x["q"], x["k"] = unit(x["q"]), unit(x["k"])
    if options.get("beta_form", "weight") == "weight" and case.gates not in HARD_KEYS:
        x["beta"] = 1 / (1 + np.exp(-x["beta"]))
    if options.get("gate", "none") != "none":
        kind = case.gates if case.gates in ("steep", "slow", "mixed") else "mixed"
        A_log, dt_bias = kda_parameters(rng, HV, K, kind)
        x["A_log"], x["dt_bias"] = A_log, dt_bias if case.family == "kda" else dt_bias[:, 0].copy()
    if case.initial:
        # asymmetric: a mix-up of K and V, or of heads, shows
        ramp = 1 + np.arange(K)[:, None] / K + 2 * np.arange(V)[None, :] / V
        x["initial_state"] = 0.1 * ramp * rng.normal(size=(N, HV, K, V)) + 0.05

    wide = case.dtype in ("f32", "f64")
    dtypes = dict.fromkeys(("q", "k", "v"), case.dtype)
    dtypes |= dict.fromkeys(("g", "beta"), case.dtype if case.dtype == "f64" else case.gate_dtype)
    dtypes |= dict.fromkeys(("A_log", "dt_bias"), case.dtype if wide else "f32")
    dtypes["initial_state"] = case.state
    inputs = {name: Input(round_to(v, dtypes[name]), dtypes[name]) for name, v in x.items()}
    if case.packed:
        inputs["cu_seqlens"] = Input(case.cu, "i32")
    return inputs


def relative_rms(got, want):
    """RMS of the difference over RMS of what is wanted; inf where their NaN and infinite entries differ."""
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return np.inf
    difference, size = (
        np.sqrt(np.mean(np.square(x[finite]))) if finite.any() else 0.0 for x in (got - want, want)
    )
    return difference if size == 0 else difference / size


def worst_output_error(got, want, spans):
    """Largest error of o over sequences, heads, and (apart) each sequence's last block of 64; with where it is."""
    worst = (0.0, "nowhere")
    for n, (b, first, end) in enumerate(spans):
        tail = first + max(0, (end - first - 1) // 64 * 64)
        for part, a in (("whole", first), ("tail", tail)):
            for j in range(got.shape[2]):
                if end > a:
                    error = relative_rms(got[b, a:end, j], want[b, a:end, j])
                    if not error <= worst[0]:
                        worst = (error, f"sequence {n}, head {j}, {part}")
    return worst


def worst_state_error(got, want):
    """Largest error over rows and heads of a state [rows,HV,K,V]; with where it is."""
    worst = (0.0, "nowhere")
    for row in range(got.shape[0]):
        for j in range(got.shape[1]):
            error = relative_rms(got[row, j], want[row, j])
            if not error <= worst[0]:
                worst = (error, f"row {row}, head {j}")
    return worst

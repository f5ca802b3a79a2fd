"""The other implementations: how each is imported and called, its conversions left untimed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from impls import Implementation, Prepared, Unsupported
from workloads import LOWER_BOUND, Inputs, Workload

# FLA hands its calls on to other packages where it finds them; its row is for its own kernels.
for _switch in ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG"):
    os.environ.setdefault(_switch, "0")


@functools.cache
def _find(module: str, *names: str) -> tuple[Any, ...]:
    found = importlib.import_module(module)
    missing = [name for name in names if getattr(found, name, None) is None]
    if missing:
        raise ImportError(f"{module} has no {', '.join(missing)} here")
    return tuple(getattr(found, name) for name in names)


def _version(package: str, module: str) -> Callable[[], str]:
    def version() -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(module), "__version__", "unknown"))

    return version


def _pair(result: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return result[0], result[1]


def _v_first(state: torch.Tensor) -> torch.Tensor:
    """[N,HV,K,V] as the [N,HV,V,K] array that some peers keep."""
    return state.mT.contiguous()


def _named(path: str) -> Callable[[], str]:
    return lambda: path


# ---- flash-linear-attention (Triton)


def _fla_gdn_fwd(w: Workload, x: Inputs) -> Prepared:
    (op,) = _find("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    keywords = {
        "scale": x.scale,
        "initial_state": x.state,
        "output_final_state": True,
        "cu_seqlens": x.cu_seqlens,
    }
    return Prepared(
        lambda: op(x.q, x.k, x.v, x.g, x.beta, **keywords), _pair, _named("chunk_gated_delta_rule")
    )


def _fla_kda_fwd(w: Workload, x: Inputs) -> Prepared:
    (op,) = _find("fla.ops.kda", "chunk_kda")
    keywords = {
        "scale": x.scale,
        "initial_state": _v_first(x.state),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": LOWER_BOUND,
        "A_log": x.A_log,
        "dt_bias": x.dt_bias.flatten(),
        "cu_seqlens": x.cu_seqlens,
        "state_v_first": True,
    }
    return Prepared(
        lambda: op(x.q, x.k, x.v, x.g, x.beta, **keywords),
        lambda result: (result[0], result[1].mT),
        _named("chunk_kda"),
    )


def _fla_steps(w: Workload, x: Inputs) -> Prepared:
    """Decode and verify: writes new states beside the old ones, in fp32; none for verify."""
    keywords = {
        "beta": x.beta,
        "scale": x.scale,
        "initial_state": x.state,
        "output_final_state": w.kind == "decode",
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": x.A_log,
        "dt_bias": x.dt_bias.flatten(),
    }
    if w.family == "gdn":
        name = "fused_recurrent_gated_delta_rule"
        (op,) = _find("fla.ops.gated_delta_rule", name)
    else:
        name = "fused_recurrent_kda"
        (op,) = _find("fla.ops.kda", name)
        keywords["lower_bound"] = LOWER_BOUND
    return Prepared(lambda: op(x.q, x.k, x.v, x.g, **keywords), _pair, _named(name))


# ---- FlashQLA (TileLang, compiled at the first call)


def _flash_qla(w: Workload, x: Inputs) -> Prepared:
    (op,) = _find("flash_qla", "chunk_gated_delta_rule_fwd")
    keywords = {
        "scale": x.scale,
        "initial_state": x.state,
        "output_final_state": True,
        "output_h": False,
        "cu_seqlens": x.cu_seqlens,
    }
    # returns g, A, o, h, final_state, cache
    return Prepared(
        lambda: op(x.q, x.k, x.v, x.g, x.beta, **keywords),
        lambda result: (result[2], result[4]),
        _named("chunk_gated_delta_rule_fwd"),
    )


# ---- FlashInfer (CuTe DSL, compiled at the first call): linear decays, int64 lengths, V-first
# states. Its decode calls zero the output that they allocate, so they are given one.


def _flashinfer_gdn_fwd(context_parallel: bool) -> Callable[[Workload, Inputs], Prepared]:
    def prepare(w: Workload, x: Inputs) -> Prepared:
        name = "cp_delta_rule_dsl_sm90" if context_parallel else "chunk_gated_delta_rule_sm90"
        (op,) = _find("flashinfer.gdn_kernels.delta_rule_dsl", name)
        q, k, v, alpha, beta = x.q[0], x.k[0], x.v[0], x.g[0].exp(), x.beta[0]
        lengths, before = x.cu_seqlens.long(), _v_first(x.state)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            o, after = torch.empty_like(v), torch.empty_like(before)
            if context_parallel:
                op(
                    o,
                    after,
                    q,
                    k,
                    v,
                    alpha,
                    beta,
                    lengths,
                    x.scale,
                    initial_state=before,
                    max_seqlen=max(w.lengths),
                )
            else:
                op(o, after, q, k, v, before, alpha, beta, lengths, x.scale)
            return o, after

        return Prepared(call, lambda result: (result[0][None], result[1].mT), _named(name))

    return prepare


def _flashinfer_gdn_steps(w: Workload, x: Inputs) -> Prepared:
    """V-first pools, fp32 or bf16; one token updates the pool, several (verify) leave it."""
    pool, rows = _v_first(x.state), torch.arange(w.N, dtype=torch.int32, device=x.q.device)
    common = {
        "A_log": x.A_log,
        "a": x.g,
        "dt_bias": x.dt_bias,
        "b": x.beta,
        "scale": x.scale,
        "use_qk_l2norm": True,
        "initial_state": pool,
        "initial_state_indices": rows,
        "output": torch.empty_like(x.v),
    }
    if w.kind == "verify":
        common["disable_state_update"] = True
    if w.kind == "verify" and w.state == "f32":
        name = "gated_delta_rule_mtp"
    else:
        name = "gated_delta_rule_decode_pretranspose"
        common |= {"state": None, "backend": "flashinfer"}
    (op,) = _find("flashinfer.gdn_decode", name)
    return Prepared(
        lambda: op(x.q, x.k, x.v, **common),
        lambda result: (result[0], pool.mT if w.kind == "decode" else None),
        _named(name),
    )


def _flashinfer_gdn_decode_k_first(w: Workload, x: Inputs) -> Prepared:
    if w.state != "f32":
        raise Unsupported("gated_delta_rule_decode takes fp32 states only")
    (op,) = _find("flashinfer.gdn_decode", "gated_delta_rule_decode")
    pool = x.state.clone()
    common = {
        "A_log": x.A_log,
        "a": x.g,
        "dt_bias": x.dt_bias,
        "b": x.beta,
        "scale": x.scale,
        "use_qk_l2norm": True,
        "output": torch.empty_like(x.v),
        "backend": "flashinfer",
    }
    return Prepared(
        lambda: op(x.q, x.k, x.v, pool, **common),
        lambda result: (result[0], pool),
        _named("gated_delta_rule_decode"),
    )


def _flashinfer_kda_steps(w: Workload, x: Inputs) -> Prepared:
    if w.state != "bf16":
        raise Unsupported("recurrent_kda decodes with bf16 states only")
    (op,) = _find("flashinfer", "recurrent_kda")
    pool = _v_first(x.state)
    common = {
        "A_log": x.A_log,
        "dt_bias": x.dt_bias.flatten(),
        "scale": x.scale,
        "use_gate_in_kernel": True,
        "lower_bound": LOWER_BOUND,
        "beta_is_logit": True,
        "backend": "cute-dsl",
        "output": torch.empty_like(x.v),
    }
    if w.kind == "decode":
        common |= {"initial_state": pool, "output_final_state": True}
    else:
        rows = torch.arange(w.N, dtype=torch.int32, device=x.q.device)
        common |= {
            "initial_state_source": pool,
            "initial_state_indices": rows,
            "disable_state_update": True,
        }
    return Prepared(
        lambda: op(x.q, x.k, x.v, x.g, x.beta, **common),
        lambda result: (result[0], pool.mT if w.kind == "decode" else None),
        _named("recurrent_kda"),
    )


# ---- cuDNN frontend (NVRTC, compiled at the first call): fp32 gates and betas, V-first states


def _cudnn_kda_fwd(w: Workload, x: Inputs) -> Prepared:
    (op,) = _find("cudnn.linear_attention.ops", "kimi_delta_attention")
    q, k, v, g, beta, before = (
        x.q[0],
        x.k[0],
        x.v[0],
        x.g[0].float(),
        x.beta[0].float(),
        _v_first(x.state),
    )
    keywords = {
        "scale": x.scale,
        "initial_state": before,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "gate_lower_bound": LOWER_BOUND,
        "a_log": x.A_log,
        "dt_bias": x.dt_bias,
    }
    return Prepared(
        lambda: op(q, k, v, g, beta, x.cu_seqlens, **keywords),
        lambda result: (result[0][None], result[1].mT),
        _named("kimi_delta_attention"),
    )


# ---- FlashKDA (CUTLASS), where somebody has built it: int64 lengths, V-first states


def _flash_kda(w: Workload, x: Inputs) -> Prepared:
    (op,) = _find("flash_kda", "fwd")
    lengths, before = x.cu_seqlens.long(), _v_first(x.state)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        o, after = torch.empty_like(x.v), torch.empty_like(before)
        op(
            x.q,
            x.k,
            x.v,
            x.g,
            x.beta,
            x.scale,
            o,
            x.A_log,
            x.dt_bias,
            LOWER_BOUND,
            initial_state=before,
            final_state=after,
            cu_seqlens=lengths,
        )
        return o, after

    return Prepared(call, lambda result: (result[0], result[1].mT), _named("flash_kda.fwd"))


_fla = _version("fla-core", "fla")
_qla = _version("flash-qla", "flash_qla")
_flashinfer = _version("flashinfer-python", "flashinfer")
_cudnn = _version("nvidia-cudnn-frontend", "cudnn")

SLOW_TO_COMPILE = ("flash_qla",)
PEERS = {
    "gdn_fwd": [
        Implementation("fla", _fla, _fla_gdn_fwd),
        Implementation("flashinfer", _flashinfer, _flashinfer_gdn_fwd(False)),
        Implementation("flashinfer_cp", _flashinfer, _flashinfer_gdn_fwd(True)),
        Implementation("flash_qla", _qla, _flash_qla),
    ],
    "kda_fwd": [
        Implementation("fla", _fla, _fla_kda_fwd),
        Implementation("cudnn", _cudnn, _cudnn_kda_fwd),
    ],
    "gdn_decode": [
        Implementation("fla", _fla, _fla_steps),
        Implementation("flashinfer", _flashinfer, _flashinfer_gdn_steps),
        Implementation("flashinfer_kfirst", _flashinfer, _flashinfer_gdn_decode_k_first),
    ],
    "kda_decode": [
        Implementation("fla", _fla, _fla_steps),
        Implementation("flashinfer", _flashinfer, _flashinfer_kda_steps),
    ],
    "gdn_verify": [
        Implementation("fla", _fla, _fla_steps),
        Implementation("flashinfer", _flashinfer, _flashinfer_gdn_steps),
    ],
    "kda_verify": [
        Implementation("fla", _fla, _fla_steps),
        Implementation("flashinfer", _flashinfer, _flashinfer_kda_steps),
    ],
}
if importlib.util.find_spec("flash_kda"):
    PEERS["kda_fwd"].append(
        Implementation("flash_kda", _version("flash-kda", "flash_kda"), _flash_kda)
    )


def peers_of(w: Workload) -> list[Implementation]:
    """The peers of a row; a row that varies an option is compared with our plain row alone."""
    return [] if w.variant else PEERS[w.op]

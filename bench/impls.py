"""How an implementation is called for one row, and pylinattn's own calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from workloads import CHECKPOINT_EVERY, Inputs, Workload


class Unsupported(Exception):
    """This implementation has no call for this row."""


@dataclasses.dataclass
class Prepared:
    """``call`` is what is timed; every conversion has been done before. ``outputs`` turns what it
    returned into o [B,T,HV,V] and the last states [N,HV,K,V], None where the call keeps none."""

    call: Callable[[], Any]
    outputs: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]]
    path: Callable[[], str]


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    version: Callable[[], str]
    prepare: Callable[[Workload, Inputs], Prepared]


def _keywords(x: Inputs) -> dict[str, Any]:
    return {
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "scale": x.scale,
        "lower_bound": x.lower_bound,
        "qk_l2norm": x.qk_l2norm,
        "gate": x.gate,
        "beta_form": x.beta_form,
    }


def _forward(w: Workload, x: Inputs) -> Prepared:
    import pylinattn

    op = getattr(pylinattn, w.op)
    more: dict[str, Any] = {"initial_state": x.state, "output_final_state": True}
    rows = None
    if w.variant == "vfirst":
        more["initial_state"] = x.state.mT.contiguous().mT
    elif w.variant == "ckpt":
        more["checkpoint_every"] = CHECKPOINT_EVERY
    elif w.variant == "pool":
        # twice the rows, every second one in use, in reverse order, updated in place
        rows = torch.arange(2 * w.N - 1, 0, -2, dtype=torch.int32, device=x.q.device)
        pool = x.state.new_zeros(2 * w.N, *x.state.shape[1:])
        pool[rows.long()] = x.state
        more |= {"initial_state": pool, "final_state": pool, "read_indices": rows}

    def outputs(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, state = result
        return o, state if rows is None else state[rows.long()]

    return Prepared(
        lambda: op(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens, **_keywords(x), **more),
        outputs,
        pylinattn.last_path,
    )


def _decode(w: Workload, x: Inputs) -> Prepared:
    import pylinattn

    op, pool = getattr(pylinattn, w.op), x.state.clone()
    return Prepared(
        lambda: op(x.q, x.k, x.v, x.g, x.beta, pool, **_keywords(x)),
        lambda o: (o, pool),
        pylinattn.last_path,
    )


def _verify(w: Workload, x: Inputs) -> Prepared:
    import pylinattn

    op, pool, keep = getattr(pylinattn, w.op), x.state.clone(), w.variant == "kept"

    def outputs(kept: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The states that committing every token gives, for what was kept is half of the result."""
        if not torch.equal(pool, x.state):
            raise RuntimeError(f"{w.op} changed the pool, which it must leave as it was")
        if not keep:
            return kept.o, None
        committed = pool.float()
        accepted = torch.full((w.N,), w.T, dtype=torch.int32, device=pool.device)
        pylinattn.delta_commit(committed, kept.kept_k, kept.kept_u, kept.kept_g, accepted)
        return kept.o, committed

    # the path is asked for after `outputs` too, and is then delta_commit's
    paths: list[str] = []

    def call() -> Any:
        result = op(x.q, x.k, x.v, x.g, x.beta, pool, **_keywords(x), keep=keep)
        if not paths:
            paths.append(pylinattn.last_path())
        return result

    return Prepared(call, outputs, lambda: paths[0])


def _version() -> str:
    import pylinattn

    return pylinattn.__version__


def _prepare(w: Workload, x: Inputs) -> Prepared:
    return {"fwd": _forward, "decode": _decode, "verify": _verify}[w.kind](w, x)


OURS = Implementation("pylinattn", _version, _prepare)

"""The ops in JAX: eager, under ``jit``, ``vmap`` and ``shard_map``, and with gradients where there is a backward.

Each call is one XLA custom call, which liblinattn.so answers itself (cuda/xla_ffi.c). Arguments and
options are those of the functions of the same name in `pylinattn`, with two differences. JAX arrays
never change, so a pool of states that a call updates goes in and comes back as a result, in the same
memory where it is donated; nothing else can be given as a buffer. Options are Python values, fixed
when a call is traced.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from . import _traced
from ._dlpack import Array
from ._lib import (
    CPU,
    CUDA,
    LinattnRuntimeError,
    LinattnTypeError,
    LinattnUnsupportedError,
    library_path,
)
from ._traced import Config, Traced, field_names, workspace_bytes
from .ops import Forward, Merged, Segment

__all__ = [
    "Forward", "Merged", "Segment", "Verify", "delta_commit", "gdn_decode", "gdn_fwd",
    "gdn_segment", "gdn_verify", "kda_decode", "kda_fwd", "kda_segment", "kda_verify",
    "segment_merge",
]  # fmt: skip

_TARGETS = (
    "gdn_fwd", "kda_fwd", "gdn_decode", "kda_decode", "gdn_verify", "kda_verify", "delta_commit",
    "gdn_bwd", "kda_bwd", "gdn_segment", "kda_segment", "segment_merge",
)  # fmt: skip


class Verify(NamedTuple):
    o: Array
    kept_k: Array | None
    kept_u: Array | None
    kept_g: Array | None
    state: Array  # as given, or with the rows of write_indices written


def _register() -> None:
    library = ctypes.CDLL(os.fspath(library_path))
    for op in _TARGETS:
        for platform in ("cpu", "cuda"):
            handler = getattr(library, f"linattn_xla_{op}_{platform}", None)
            if handler is None:
                raise ImportError(
                    f"pylinattn.jax: {library_path} was built without its XLA handlers; install "
                    f"the package anew (pip install .), or unset PYLINATTN_LIBRARY"
                )
            jax.ffi.register_ffi_target(
                f"linattn_{op}",
                jax.ffi.pycapsule(handler),
                platform=platform if platform == "cpu" else "CUDA",
            )


_register()
jax.tree_util.register_pytree_node(
    Forward,
    lambda done: ((*done, done.checkpoints), None),
    lambda _, children: _forward(*children),
)


def _forward(o: Array, final_state: Array | None, checkpoints: Array | None) -> Forward:
    done = Forward(o, final_state)
    if checkpoints is not None:
        done.checkpoints = checkpoints
    return done


# ---- one custom call


def _varying_axes(x: Array) -> frozenset[str]:
    """Mesh axes over which shard_map knows that x differs, where JAX is new enough to track it."""
    aval = jax.typeof(x) if hasattr(jax, "typeof") else None
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)


def _vary(arrays: dict[str, Array], axes: frozenset[str]) -> dict[str, Array]:
    """The same arrays, varying over all of the axes: a custom call wants one type of them."""
    varied = {}
    for name, x in arrays.items():
        missing = tuple(axes - _varying_axes(x))
        if missing and hasattr(jax.lax, "pcast"):
            x = jax.lax.pcast(x, missing, to="varying")
        elif missing:
            x = jax.lax.pvary(x, missing)
        varied[name] = x
    return varied


def _workspace_bytes(op: str, given: dict[str, Any], options: dict[str, Any]) -> int:
    """Enough for the devices of this process. A call that any of them takes is left to run."""
    needed, refusals = [], []
    for device_type in (CUDA, CPU) if jax.default_backend() == "gpu" else (CPU,):
        try:
            needed.append(workspace_bytes(op, device_type, given, options))
        except (LinattnUnsupportedError, LinattnTypeError, LinattnRuntimeError) as error:
            refusals.append(error)
    if not needed:
        raise refusals[0]
    return max(needed)


def _invoke(
    op: str, options: dict[str, Any], inputs: dict[str, Array], results: dict[str, Any]
) -> dict[str, Array]:
    """One custom call. A result with the name of an input is that input, updated in place.

    A name a+b is one array that is two of the op's tensors.
    """
    if options.get("scale", 0.0) is None:
        last = inputs["q"].shape[-1:]
        options["scale"] = last[0] ** -0.5 if last and last[0] else 1.0
    order = field_names(op)
    inputs = dict(sorted(inputs.items(), key=lambda item: order.index(item[0].partition("+")[0])))
    keys = list(inputs)
    owners = {name: position for position, key in enumerate(keys) for name in key.split("+")}
    aliases = {owners[name]: place for place, name in enumerate(results) if name in owners}
    needed = _workspace_bytes(
        op, inputs | {n: x for n, x in results.items() if n not in owners}, options
    )
    if needed:
        results = results | {"workspace": jax.ShapeDtypeStruct((needed,), np.uint8)}
    # An axis that vmap adds can become part of the first axis of every array, unless an array has
    # no row for each sequence, or numbers rows, or scratch was measured for one element.
    folds = needed == 0 and op != "segment_merge" and not owners.keys() & {
        "cu_seqlens", "A_log", "dt_bias", "read_indices", "write_indices", "checkpoint_indices",
    }  # fmt: skip
    call = jax.ffi.ffi_call(
        f"linattn_{op}",
        list(results.values()),
        vmap_method="broadcast_all" if folds else "sequential",
        input_output_aliases=aliases,
    )
    scalars = {
        name: np.float64(value) if isinstance(value, float) else np.int32(value)
        for name, value in options.items()
    }
    axes = frozenset().union(*map(_varying_axes, inputs.values()))
    inputs = _vary(inputs, axes)
    made = call(*inputs.values(), inputs=",".join(keys), results=",".join(results), **scalars)
    return _vary(dict(zip(results, made)), axes)


def _like(x: Array, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype)


def _wide(q: Array) -> Any:
    return np.dtype(np.float64 if q.dtype == np.float64 else np.float32)


# ---- what each op takes and gives, inside a trace


def _run_fwd(config: Config, arrays: dict[str, Array]) -> dict[str, Array]:
    inputs, options = dict(arrays), dict(config.options)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    every = options["checkpoint_every"]
    results: dict[str, Any] = {"o": _like(v, q.dtype)}
    options["zero_tail"] = int("cu_seqlens" in inputs)
    initial, final = inputs.get("initial_state"), inputs.get("final_state")
    if config.in_place:
        inputs = {n + "+final_state" * (n == "initial_state"): x for n, x in inputs.items()}
        final = initial
    if final is not None:
        results["final_state"] = _like(final)
    if "checkpoints" in inputs:
        results["checkpoints"] = _like(inputs["checkpoints"])
    if k.ndim == v.ndim == 4:  # of arrays of another rank no shape can be derived
        (B, T, HV, V), K = v.shape, k.shape[3]
        dtype = _wide(q) if initial is None else initial.dtype
        made: dict[str, tuple[int, bool]] = {}  # rows, and whether some may stay unwritten
        padded, packed = "read_indices" in inputs, "cu_seqlens" in inputs
        if final is None and config.output_final_state and "write_indices" not in inputs:
            N = max(inputs["cu_seqlens"].size - 1, 0) if packed else B
            made["final_state"] = (N, padded)
        if every > 0 and not inputs.keys() & {"checkpoints", "checkpoint_indices"}:
            made["checkpoints"] = (B * (T // every), padded)
            options["zero_tail"] |= 2 * (packed and not padded)  # rows that no sequence has
        for name, (rows, zeroed) in made.items():
            results[name] = jax.ShapeDtypeStruct((rows, HV, K, V), dtype)
            if zeroed:
                inputs[name] = jax.numpy.zeros((rows, HV, K, V), dtype)
    return _invoke(config.op, options, inputs, results)


def _run_decode(config: Config, arrays: dict[str, Array]) -> dict[str, Array]:
    options = dict(config.options) | {"zero_tail": int("cu_seqlens" in arrays)}
    results = {"o": _like(arrays["v"], arrays["q"].dtype), "state": _like(arrays["state"])}
    return _invoke(config.op, options, arrays, results)


def _run_verify(config: Config, arrays: dict[str, Array]) -> dict[str, Array]:
    results = {"o": _like(arrays["v"], arrays["q"].dtype)}
    if "write_indices" in arrays:
        results["state"] = _like(arrays["state"])
    elif config.keep:
        for name in ("k", "v", "g"):
            kept = "kept_u" if name == "v" else f"kept_{name}"
            results[kept] = _like(arrays[name], _wide(arrays["q"]))
    return _invoke(config.op, dict(config.options), arrays, results)


def _run_commit(config: Config, arrays: dict[str, Array]) -> dict[str, Array]:
    return _invoke(config.op, dict(config.options), arrays, {"state": _like(arrays["state"])})


def _run_segment(config: Config, arrays: dict[str, Array]) -> dict[str, Array]:
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    results: dict[str, Any] = {"M": _like(k, _wide(q)), "h": _like(v, _wide(q))}
    if k.ndim == v.ndim == 4:  # of arrays of another rank no shape can be derived
        (B, _, HV, V), K, cu = v.shape, k.shape[3], arrays.get("cu_seqlens")
        N = B if cu is None else max(cu.size - 1, 0)
        results["M"] = jax.ShapeDtypeStruct((N, HV, K, K), _wide(q))
        results["h"] = jax.ShapeDtypeStruct((N, HV, K, V), _wide(q))
    return _invoke(config.op, dict(config.options), arrays, results)


def _run_merge(config: Config, arrays: dict[str, Array]) -> dict[str, Array]:
    h = arrays["h"]
    initial = arrays.get("initial_state")
    state = jax.ShapeDtypeStruct(h.shape[1:], h.dtype if initial is None else initial.dtype)
    results = {"states": _like(h), "final_state": state}
    return _invoke(config.op, dict(config.options), arrays, results)


_BODIES = {
    "fwd": _run_fwd, "decode": _run_decode, "verify": _run_verify, "commit": _run_commit,
    "segment": _run_segment, "merge": _run_merge,
}  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(config: Config, arrays: dict[str, Array]) -> dict[str, Array]:
    return _BODIES[config.op.rpartition("_")[2]](config, arrays)


def _apply_fwd(config: Config, arrays: dict[str, Array]) -> tuple[dict[str, Array], Any]:
    kind = config.op.rpartition("_")[2]
    if kind != "fwd":
        raise LinattnUnsupportedError(
            f"{config.op}: it has no gradient; gdn_fwd and kda_fwd have one"
        )
    for name in ("read_indices", "write_indices", "checkpoints", "checkpoint_indices"):
        if name in arrays:
            raise LinattnUnsupportedError(
                f"{config.op}: {name} is given, but the backward takes a row of states for each "
                f"sequence and no checkpoints; gather the rows before the call"
            )
    if dict(config.options)["checkpoint_every"]:
        raise LinattnUnsupportedError(
            f"{config.op}: checkpoint_every is given, but checkpoints have no gradient; call "
            f"without it"
        )
    return _apply(config, arrays), arrays


def _apply_bwd(config: Config, arrays: dict[str, Array], d_done: dict[str, Array]) -> Any:
    op = config.op.replace("_fwd", "_bwd")
    options = dict(config.options)
    del options["checkpoint_every"]
    inputs = {n: x for n, x in arrays.items() if n != "final_state"} | {"d_o": d_done["o"]}
    if "final_state" in d_done:
        inputs["d_final_state"] = d_done["final_state"]
    names = {
        "q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta",
        "initial_state": "d_initial_state", "A_log": "dA_log", "dt_bias": "ddt_bias",
    }  # fmt: skip
    results = {names[n]: _like(x) for n, x in arrays.items() if n in names}
    if "cu_seqlens" in arrays:  # tokens past the last sequence are not written
        tokens = ("q", "k", "v", "g", "beta")
        inputs |= {names[n]: jax.numpy.zeros_like(arrays[n]) for n in tokens}
    made = _invoke(op, options, inputs, results)
    return ({n: made[names[n]] if n in names else None for n in arrays},)


_apply.defvjp(_apply_fwd, _apply_bwd)


def _run(config: Config, pools: dict[str, Array], arrays: dict[str, Array]) -> dict[str, Array]:
    arrays = arrays | pools
    # outside of _apply: the gradient of an array that all devices share is then summed over them
    axes = frozenset().union(*map(_varying_axes, arrays.values()))
    return _apply(config, _vary(arrays, axes))


# One compiled call for each configuration and set of shapes; the second gives the pools away.
_jit = jax.jit(_run, static_argnums=0)
_jit_donating = jax.jit(_run, static_argnums=0, donate_argnums=1)


# ---- the ops


def _call(traced: Traced, donate: bool) -> dict[str, Array]:
    run = _jit_donating if donate and traced.pools else _jit
    return run(*traced)


def _fwd(traced: Traced, donate: bool) -> Forward:
    made = _call(traced, donate)
    return _forward(made["o"], made.get("final_state"), made.get("checkpoints"))


def _decode(traced: Traced, donate: bool) -> tuple[Array, Array]:
    made = _call(traced, donate)
    return made["o"], made["state"]


def _verify(traced: Traced, state: Array, donate: bool) -> Verify:
    made = _call(traced, donate)
    kept_k, kept_u, kept_g = (made.get(name) for name in ("kept_k", "kept_u", "kept_g"))
    return Verify(made["o"], kept_k, kept_u, kept_g, made.get("state", state))


def _segment(traced: Traced) -> Segment:
    made = _call(traced, False)
    return Segment(made["M"], made["h"])


def gdn_fwd(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, initial_state: Array | None = None,
    cu_seqlens: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
    read_indices: Array | None = None, write_indices: Array | None = None,
    checkpoint_indices: Array | None = None, final_state: Array | None = None,
    checkpoints: Array | None = None, scale: float | None = None, lower_bound: float | None = None,
    qk_l2norm: bool = False, gate: str = "none", beta_form: str = "weight",
    checkpoint_every: int = 0, splits: int | str = "auto", checked: bool = False,
    output_final_state: bool = False, donate: bool = False,
) -> Forward:  # fmt: skip
    """Gated delta rule over whole sequences: `pylinattn.gdn_fwd` as a JAX function.

    Args:
        final_state: A pool to write into; the one with these rows written is in the result. May be
            initial_state itself.
        checkpoints: Likewise.
        donate: bool. Give the memory of the pools that are updated to this call, which then writes
            in place; the arrays given are deleted. For eager calls: under jit, donate there.
        All others: as in `pylinattn.gdn_fwd`.
    Returns:
        ``(o, final_state)``, with the further attribute ``checkpoints``, as `pylinattn.gdn_fwd`.
        Differentiable where linattn_gdn_bwd has a kernel, without index tables and checkpoints.
    Raises:
        As `pylinattn.gdn_fwd` when the call is traced. What depends on values (lengths, indices) is
        found when it runs, and raised by JAX with the same sentence.
    """
    return _fwd(_traced.fwd(
        "gdn_fwd", q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, checkpoint_indices, final_state, checkpoints, scale, lower_bound, qk_l2norm,
        gate, beta_form, checkpoint_every, splits, checked, output_final_state,
    ), donate)  # fmt: skip


def kda_fwd(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, initial_state: Array | None = None,
    cu_seqlens: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
    read_indices: Array | None = None, write_indices: Array | None = None,
    checkpoint_indices: Array | None = None, final_state: Array | None = None,
    checkpoints: Array | None = None, scale: float | None = None, lower_bound: float | None = None,
    qk_l2norm: bool = False, gate: str = "none", beta_form: str = "weight",
    checkpoint_every: int = 0, splits: int | str = "auto", checked: bool = False,
    output_final_state: bool = False, donate: bool = False,
) -> Forward:  # fmt: skip
    """Kimi delta attention over whole sequences: as gdn_fwd, with one decay per key channel."""
    return _fwd(_traced.fwd(
        "kda_fwd", q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, checkpoint_indices, final_state, checkpoints, scale, lower_bound, qk_l2norm,
        gate, beta_form, checkpoint_every, splits, checked, output_final_state,
    ), donate)  # fmt: skip


def gdn_decode(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *,
    cu_seqlens: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
    read_indices: Array | None = None, write_indices: Array | None = None,
    scale: float | None = None, lower_bound: float | None = None, qk_l2norm: bool = False,
    gate: str = "none", beta_form: str = "weight", checked: bool = False, donate: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Gated delta rule, a few tokens per sequence against a pool of states: `pylinattn.gdn_decode`.

    Args:
        donate: bool. As in gdn_fwd: update state in place, and delete the array given.
        All others: as in `pylinattn.gdn_decode`.
    Returns:
        ``(o, state)``: state with the rows of write_indices written.
    """
    return _decode(_traced.decode(
        "gdn_decode", q, k, v, g, beta, state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, scale, lower_bound, qk_l2norm, gate, beta_form, checked,
    ), donate)  # fmt: skip


def kda_decode(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *,
    cu_seqlens: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
    read_indices: Array | None = None, write_indices: Array | None = None,
    scale: float | None = None, lower_bound: float | None = None, qk_l2norm: bool = False,
    gate: str = "none", beta_form: str = "weight", checked: bool = False, donate: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Kimi delta attention, a few tokens per sequence against a pool of states: as gdn_decode."""
    return _decode(_traced.decode(
        "kda_decode", q, k, v, g, beta, state, cu_seqlens, A_log, dt_bias, read_indices,
        write_indices, scale, lower_bound, qk_l2norm, gate, beta_form, checked,
    ), donate)  # fmt: skip


def gdn_verify(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *,
    A_log: Array | None = None, dt_bias: Array | None = None, read_indices: Array | None = None,
    write_indices: Array | None = None, parents: Array | None = None, scale: float | None = None,
    lower_bound: float | None = None, qk_l2norm: bool = False, gate: str = "none",
    beta_form: str = "weight", keep: bool = True, checked: bool = False, donate: bool = False,
) -> Verify:  # fmt: skip
    """Gated delta rule, outputs of 1 to 16 drafted tokens per sequence: `pylinattn.gdn_verify`.

    Args:
        donate: bool. As in gdn_fwd, where write_indices says that state is written.
        All others: as in `pylinattn.gdn_verify`.
    Returns:
        ``(o, kept_k, kept_u, kept_g, state)``. With write_indices state has these rows written and
        nothing is kept; without, state is the array given and what is kept, unless keep is False, is
        for delta_commit.
    """
    return _verify(_traced.verify(
        "gdn_verify", q, k, v, g, beta, state, A_log, dt_bias, read_indices, write_indices,
        parents, scale, lower_bound, qk_l2norm, gate, beta_form, keep, checked,
    ), state, donate)  # fmt: skip


def kda_verify(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, *,
    A_log: Array | None = None, dt_bias: Array | None = None, read_indices: Array | None = None,
    write_indices: Array | None = None, parents: Array | None = None, scale: float | None = None,
    lower_bound: float | None = None, qk_l2norm: bool = False, gate: str = "none",
    beta_form: str = "weight", keep: bool = True, checked: bool = False, donate: bool = False,
) -> Verify:  # fmt: skip
    """Kimi delta attention, outputs of 1 to 16 drafted tokens per sequence: as gdn_verify."""
    return _verify(_traced.verify(
        "kda_verify", q, k, v, g, beta, state, A_log, dt_bias, read_indices, write_indices,
        parents, scale, lower_bound, qk_l2norm, gate, beta_form, keep, checked,
    ), state, donate)  # fmt: skip


def delta_commit(
    state: Array, k: Array, u: Array, g: Array, accepted: Array, *, path: Array | None = None,
    read_indices: Array | None = None, write_indices: Array | None = None, checked: bool = False,
    donate: bool = False,
) -> Array:  # fmt: skip
    """Fold the first ``accepted[n]`` drafted tokens into the states: `pylinattn.delta_commit`.

    Args:
        donate: bool. As in gdn_fwd: update state in place, and delete the array given.
        All others: as in `pylinattn.delta_commit`.
    Returns:
        state with the rows of write_indices written.
    """
    return _call(_traced.commit(
        "delta_commit", state, k, u, g, accepted, path, read_indices, write_indices, checked,
    ), donate)["state"]  # fmt: skip


def gdn_segment(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, d_o: Array | None = None,
    cu_seqlens: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
    scale: float | None = None, lower_bound: float | None = None, qk_l2norm: bool = False,
    gate: str = "none", beta_form: str = "weight", direction: str = "forward",
    checked: bool = False,
) -> Segment:  # fmt: skip
    """Gated delta rule, the affine map of a span of tokens: `pylinattn.gdn_segment`."""
    return _segment(_traced.segment(
        "gdn_segment", q, k, v, g, beta, d_o, cu_seqlens, A_log, dt_bias, scale, lower_bound,
        qk_l2norm, gate, beta_form, direction, checked,
    ))  # fmt: skip


def kda_segment(
    q: Array, k: Array, v: Array, g: Array, beta: Array, *, d_o: Array | None = None,
    cu_seqlens: Array | None = None, A_log: Array | None = None, dt_bias: Array | None = None,
    scale: float | None = None, lower_bound: float | None = None, qk_l2norm: bool = False,
    gate: str = "none", beta_form: str = "weight", direction: str = "forward",
    checked: bool = False,
) -> Segment:  # fmt: skip
    """Kimi delta attention, the affine map of a span of tokens: `pylinattn.kda_segment`."""
    return _segment(_traced.segment(
        "kda_segment", q, k, v, g, beta, d_o, cu_seqlens, A_log, dt_bias, scale, lower_bound,
        qk_l2norm, gate, beta_form, direction, checked,
    ))  # fmt: skip


def segment_merge(
    M: Array, h: Array, *, initial_state: Array | None = None, direction: str = "forward",
    checked: bool = False,
) -> Merged:  # fmt: skip
    """The state before each of R segments, and after the last: `pylinattn.segment_merge`."""
    made = _call(_traced.merge("segment_merge", M, h, initial_state, direction, checked), False)
    return Merged(made["states"], made["final_state"])

"""This library as a backend of flash-linear-attention's own dispatch, 0.5.x and 0.6.x."""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from typing import Any, NamedTuple

from ._lib import LinattnRuntimeError
from ._support import Support, supports

ENVIRONMENT = "FLA_PYLINATTN"  # "0" switches the backend off, whenever it is set
PRIORITY = 1  # lower comes first: FlashQLA and FlashKDA have 3
_FUNCTIONS = {"chunk_gated_delta_rule": "gdn", "chunk_kda": "kda"}
_OPERATIONS = {"chunk_gated_delta_rule": "gated_delta_rule", "chunk_kda": "kda"}
_KEYWORDS = frozenset(
    ("use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "transpose_state_layout")
)

_backends: list[tuple[Any, Any]] = []  # (registry, backend)


def register_fla() -> None:
    """Put this library ahead of FLA's other backends of chunk_gated_delta_rule and chunk_kda.

    Calls that it does not take go where they went before; FLA logs the reason. The environment
    variable FLA_PYLINATTN=0 switches it off.

    Raises:
        RuntimeError: FLA is not there, or has another way of dispatch.
    """
    if _backends:
        return
    try:
        new = _registries()
    except (ImportError, AttributeError, KeyError) as error:
        raise LinattnRuntimeError(
            f"register_fla: no dispatch of flash-linear-attention 0.5 or 0.6 was found: "
            f"{type(error).__name__}: {error}"
        ) from error
    base, registries = new
    backend = _backend_class(base)()
    for registry in registries:
        registry.register(backend)
        _backends.append((registry, backend))


def unregister_fla() -> None:
    """Take this library out of FLA's dispatch again."""
    while _backends:
        registry, backend = _backends.pop()
        if registry._backends.get(backend.backend_type) is backend:
            del registry._backends[backend.backend_type]


def _registries() -> tuple[Any, list[Any]]:
    """FLA's base class of backends, and the registries that its two functions ask."""
    try:
        dispatch = importlib.import_module("fla.backends")  # 0.6
    except ModuleNotFoundError as error:
        if error.name not in ("fla.backends",):
            raise
        dispatch = importlib.import_module("fla.ops.backends")  # 0.5
        by_name = dispatch.BackendRegistry._registries
        for operation in _OPERATIONS.values():
            dispatch.BackendRegistry.ensure_initialized(operation)
        return dispatch.BaseBackend, [by_name[name] for name in _OPERATIONS.values()]
    registries = []
    for function, operation in _OPERATIONS.items():
        module = importlib.import_module(f"fla.ops.{operation}.chunk")
        entry = inspect.unwrap(getattr(module, function))
        # a function may have a registry of its own, or ask that of its operation
        registry = dispatch._function_registries.get(entry)
        registries.append(registry or dispatch._operation_registries[operation])
    registries.append(dispatch._operation_registries["kda"])  # of fused_recurrent_kda_fwd
    return dispatch.BaseBackend, registries


def _backend_class(base: Any) -> Any:
    from . import torch as ours  # imports torch, and this module

    members: dict[str, Any] = {
        "__doc__": "Kernels compiled ahead of time, on the CPU and on Hopper GPUs.",
        "backend_type": "pylinattn",
        "package_name": "pylinattn",
        "env_var": ENVIRONMENT,
        "default_enable": True,
        "priority": PRIORITY,
    }
    for name, family in _FUNCTIONS.items():
        function = getattr(ours, name)
        members[name] = staticmethod(function)
        members[f"{name}_verifier"] = staticmethod(_verifier(function, family))
    members["fused_recurrent_kda_fwd"] = staticmethod(_recurrent)
    members["fused_recurrent_kda_fwd_verifier"] = staticmethod(_recurrent_verifier)
    return type("PylinattnBackend", (base,), members)


def _recurrent(
    *args: Any,
    inplace_final_state: bool = True,
    ssm_state_indices: Any = None,
    num_accepted_tokens: Any = None,
    out: Any = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """What FLA's fused_recurrent_kda calls, by keywords; its outputs have no gradient."""
    from . import torch as ours

    with ours.torch.no_grad():
        return ours.fused_recurrent_kda(*args, **kwargs)


def _recurrent_verifier(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    from . import torch as ours

    if args:
        return False, "pylinattn takes the arguments of fused_recurrent_kda_fwd by keyword alone"
    if kwargs.get("inplace_final_state", True):
        return False, "pylinattn takes no inplace_final_state=True; its own kda_decode has a pool"
    for name in ("ssm_state_indices", "num_accepted_tokens", "out"):
        if kwargs.get(name) is not None:
            return False, f"pylinattn takes no {name} here; its own kda_decode and kda_verify do"
    own = ("inplace_final_state", "ssm_state_indices", "num_accepted_tokens", "out")
    rest = {name: value for name, value in kwargs.items() if name not in own}
    if rest["beta"].ndim != 3:
        return False, "pylinattn takes one beta per head"
    with ours.torch.no_grad():
        reason = refusal(_parameters(ours.fused_recurrent_kda), "kda", (), rest)
    return reason is None, reason


class _Parameters(NamedTuple):
    """Of a function, without its further keywords."""

    names: tuple[str, ...]
    required: frozenset[str]


@lru_cache
def _parameters(function: Any) -> _Parameters:
    named = [
        p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD
    ]
    required = frozenset(p.name for p in named if p.default is p.empty)
    return _Parameters(tuple(p.name for p in named), required)


def _verifier(function: Any, family: str) -> Any:
    parameters = _parameters(function)

    def verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        reason = refusal(parameters, family, args, kwargs)
        return reason is None, reason

    return verify


def refusal(
    parameters: _Parameters, family: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why a call of FLA's function is not taken; None if it is."""
    from . import torch as ours

    given = dict(zip(parameters.names, args, strict=False))
    twice = given.keys() & kwargs.keys()
    given |= kwargs
    missing = parameters.required - given.keys()
    if missing or twice or len(args) > len(parameters.names):
        names = ", ".join(sorted(missing or twice))
        return f"pylinattn: arguments that are missing, given twice or too many: {names}"
    unknown = given.keys() - parameters.names - _KEYWORDS
    if unknown:
        return f"pylinattn knows no argument {', '.join(sorted(unknown))}"
    q, k, v = given["q"], given["k"], given["v"]
    if given.get("cp_context") is not None:
        return "pylinattn has no context parallelism over cards in FLA's form"
    if not q.dtype == k.dtype == v.dtype:
        return f"pylinattn takes q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
    if q.device.type not in ("cpu", "cuda"):
        return f"pylinattn runs on the CPU and on CUDA devices, not on {q.device}"
    shape = (q.device, q.dtype, q.shape[-1], v.shape[-1])
    for op in (f"{family}_fwd", f"{family}_decode"):
        support = _supports(op, *shape)
        if not support:
            return support.reason
    if ours.torch.is_grad_enabled() and any(
        getattr(x, "requires_grad", False) for x in given.values()
    ):
        if given.get("return_intermediate_states"):
            return "pylinattn records no gradient with return_intermediate_states"
        support = _supports(f"{family}_bwd", *shape)
        if not support:
            return support.reason
    if given.get("return_intermediate_states") and given.get("chunk_size", 64) != 64:
        return "pylinattn keeps intermediate states every 64 tokens"
    return None


@lru_cache(maxsize=256)
def _supports(op: str, device: Any, dtype: Any, K: int, V: int) -> Support:
    return supports(op, device=str(device), dtype=str(dtype), K=K, V=V)

"""The gated-delta and KDA functions of transformers' models, replaced by this library's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ._lib import LinattnValueError

# Of each model's module the functions that its layers call, by name, and FLA's name for them.
_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "chunk_kda",
    "recurrent_kimi_delta_attention": "fused_recurrent_kda",
}
_MODELS = (
    "bailing_hybrid", "glm5_next", "kimi_linear", "lara_mini", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "qwen4_exp",
)  # fmt: skip
_replaced: dict[tuple[str, str], Any] = {}


def patch_transformers(models: str | Iterable[str] | None = None) -> tuple[str, ...]:
    """Let models of the transformers library compute their linear attention with this library.

    Existing models change too: their layers look these functions up at every call.

    Args:
        models: One or more names of model folders, such as "qwen3_next"; all that are known here
            and in the installed version if None.
    Returns:
        The names of the models patched.
    Raises:
        ValueError: a named model is not there, or has none of the functions.
        ImportError: the transformers library is not there.
    """
    importlib.import_module("transformers")
    if isinstance(models, str):
        models = (models,)
    done = []
    for model in _MODELS if models is None else models:
        module = _module(model)
        found = [name for name in _FUNCTIONS if hasattr(module, name)]
        if found:
            done.append(model)
        elif models is not None:
            raise LinattnValueError(
                f"patch_transformers: models has {model!r}, in which none of "
                f"{', '.join(_FUNCTIONS)} was found"
            )
        for name in found:
            key = (module.__name__, name)
            if key not in _replaced:
                _replaced[key] = getattr(module, name)
                setattr(module, name, _in_place_of(_FUNCTIONS[name], _replaced[key]))
    return tuple(done)


def unpatch_transformers() -> None:
    """Give every patched model its own functions back."""
    while _replaced:
        (module, name), own = _replaced.popitem()
        setattr(sys.modules[module], name, own)


def _module(model: str) -> Any:
    try:
        return importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ImportError:
        return None


def _in_place_of(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    from . import torch as ours  # imports torch, and this module

    function = getattr(ours, name)

    def replacement(
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Any = None,
        **_: Any,  # of the layer's call; the model's own functions read nothing else either
    ) -> tuple[Any, Any]:
        result: tuple[Any, Any] = function(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )
        return result

    replacement.__name__ = replacement.__qualname__ = own.__name__
    return replacement

"""``apply``, ``remove`` and ``report``: the KV cache of a transformers model becomes a KittyCache, and back."""

import functools
import inspect
import logging
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.huggingface import attention, generation, hooks, support
from kitty_compile.huggingface.decode_graph import DecodeGraph
from kitty_compile.huggingface.hooks import ATTACHMENT
from kitty_compile.layers import LayerPlan
from kitty_compile.reporting import report

__all__ = ["apply", "remove", "report"]

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)


def apply(model: Model, config: KittyConfig | str | None = None, *, compile: str | bool = "auto") -> Model:  # noqa: A002
    """Move a causal language model onto a KittyCache; ``generate()`` and ``forward()`` use it from now on.

    Args:
        model: a transformers causal language model; changed in place.
        config: a ``KittyConfig``, a preset's name, or None for "kitty".
        compile: "auto" runs decode steps on a CUDA device as one CUDA graph, False never does.

    Returns:
        The same model.

    Raises:
        TypeError, ValueError: the model or an argument cannot be served, with the reason.
    """
    if compile is not False and compile != "auto":
        raise ValueError(f'compile must be "auto" or False, got {compile!r}')
    resolved = resolve_config(config)
    checked = _checked(model)
    plans = tuple(support.layer_plans(checked.config))
    unknown = [layer for layer in resolved.skip_layers if layer >= len(plans)]
    if unknown:
        raise ValueError(f"skip_layers must name layers of the model (0 to {len(plans) - 1}), got {unknown}")
    _attach(checked, resolved, plans, graphed=compile == "auto")
    _log(checked)
    return model


def remove(model: Model) -> Model:
    """Undo ``apply``; caches made meanwhile can no longer be used with the model's fused attention."""
    if not isinstance(model, PreTrainedModel) or ATTACHMENT not in vars(model):
        raise ValueError(f"model must have a KittyCache applied, got a {type(model).__name__} without")
    attachment: hooks.Attachment = vars(model).pop(ATTACHMENT)
    for handle in attachment.handles:
        handle.remove()
    for name in ("_prepare_cache_for_generation", *generation.CONTINUOUS_BATCHING_METHODS):
        vars(model).pop(name, None)
    graph = vars(model).get("forward")
    if isinstance(graph, DecodeGraph):
        del vars(model)["forward"]
        if graph.previous is not None:
            vars(model)["forward"] = graph.previous
    if model.config._attn_implementation == attachment.implementation:
        model.config._attn_implementation_internal = attachment.original
    return model


def _checked(model: torch.nn.Module) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if ATTACHMENT in vars(model):
        raise ValueError(
            "model must not have a KittyCache applied yet, got one that has: call kitty_compile.remove first"
        )
    refusal = support.model_refusal(model)
    if refusal is not None:
        raise ValueError(f"model must be one that a KittyCache can serve, got {type(model).__name__}: {refusal}")
    return model


def _attach(model: PreTrainedModel, config: KittyConfig, plans: tuple[LayerPlan, ...], *, graphed: bool) -> None:
    decoder = model.get_decoder()
    original = model.config._attn_implementation
    attachment = hooks.Attachment(
        config=config,
        plans=plans,
        original=original,
        implementation=attention.register(original),
        cache_argument=support.cache_argument(decoder),
        parameters=tuple(inspect.signature(decoder.forward).parameters),
    )
    attachment.handles += [
        decoder.register_forward_pre_hook(functools.partial(hooks.before_forward, attachment), with_kwargs=True),
        decoder.register_forward_hook(functools.partial(hooks.after_forward, attachment), always_call=True),
    ]
    # A partial, not a method: copies and pickles of the model get one of their own.
    overrides: dict[str, Any] = dict.fromkeys(
        generation.CONTINUOUS_BATCHING_METHODS, generation.refuse_continuous_batching
    )
    overrides["_prepare_cache_for_generation"] = functools.partial(generation.prepare_cache, model)
    if graphed:
        overrides["forward"] = DecodeGraph(model, attachment)
    vars(model).update(overrides)
    # The internal name, as transformers' own set_attn_implementation does: the public one would also be saved.
    model.config._attn_implementation_internal = attachment.implementation
    vars(model)[ATTACHMENT] = attachment


def _log(model: PreTrainedModel) -> None:
    table = report(model)
    if any(layer.status == "quantized" for layer in table.layers):
        logger.info("%s", table.summary())
    else:
        logger.warning("no layer is quantized: %s", table.summary())

"""Put a KittyCache under a transformers model, and take it away again."""

import functools
import inspect
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.huggingface import attention, generation, hooks, support
from kitty_compile.huggingface.decode_step import DecodeStep
from kitty_compile.huggingface.hooks import ATTACHMENT
from kitty_compile.layers import LayerPlan
from kitty_compile.reporting import report

logger = logging.getLogger(__name__)


def attach(model: PreTrainedModel, config: KittyConfig | str | None, *, graphed: bool) -> None:
    """Change ``model`` in place; ``graphed``: run decode steps on a CUDA device as one CUDA graph.

    Raises:
        ValueError: the model cannot be served, with the reason.
    """
    resolved = resolve_config(config)
    _check(model)
    plans = tuple(support.layer_plans(model.config))
    unknown = [layer for layer in resolved.skip_layers if layer >= len(plans)]
    if unknown:
        raise ValueError(f"skip_layers must name layers of the model (0 to {len(plans) - 1}), got {unknown}")
    _attach(model, resolved, plans, graphed=graphed)
    _log(model)


def detach(model: torch.nn.Module) -> None:
    """Undo ``attach``."""
    if not isinstance(model, PreTrainedModel) or ATTACHMENT not in vars(model):
        raise ValueError(f"model must have a KittyCache applied, got a {type(model).__name__} without")
    attachment: hooks.Attachment = vars(model).pop(ATTACHMENT)
    for handle in attachment.handles:
        handle.remove()
    for name in ("_prepare_cache_for_generation", *generation.CONTINUOUS_BATCHING_METHODS):
        vars(model).pop(name, None)
    step = vars(model).get("forward")
    if isinstance(step, DecodeStep):
        del vars(model)["forward"]
        if step.previous is not None:
            vars(model)["forward"] = step.previous
    if model.config._attn_implementation == attachment.implementation:
        model.config._attn_implementation_internal = attachment.original


def _check(model: PreTrainedModel) -> None:
    if ATTACHMENT in vars(model):
        raise ValueError(
            "model must not have a KittyCache applied yet, got one that has: call kitty_compile.remove first"
        )
    refusal = support.model_refusal(model)
    if refusal is not None:
        raise ValueError(f"model must be one that a KittyCache can serve, got {type(model).__name__}: {refusal}")


def _attach(model: PreTrainedModel, config: KittyConfig, plans: tuple[LayerPlan, ...], *, graphed: bool) -> None:
    decoder = support.decoder_of(model)
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
    overrides["forward"] = DecodeStep(model, attachment, graphed=graphed)
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

"""The hooks that ``apply`` puts on a decoder: they open a KittyCache's call before its forward and close it after.

A forward on a stock cache, without a cache or in training takes the model's own path, see ``attention.py``.
"""

import dataclasses
import logging
import weakref
from typing import Any, TypeGuard

import torch
from transformers import PreTrainedModel

from kitty_compile.columns import Call
from kitty_compile.config import KittyConfig
from kitty_compile.huggingface.attention import ActiveCall, active_call, in_step, set_active_call
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.layers import LayerPlan

logger = logging.getLogger(__name__)

ATTACHMENT = "_kitty_attachment"


@dataclasses.dataclass
class Attachment:
    """What ``apply`` has done to a model, kept on it until ``remove``."""

    config: KittyConfig
    plans: tuple[LayerPlan, ...]
    original: str | None
    implementation: str
    cache_argument: str
    parameters: tuple[str, ...]
    handles: list[torch.utils.hooks.RemovableHandle] = dataclasses.field(default_factory=list)
    latest_cache: weakref.ref[KittyCache] | None = None
    warnings: set[str] = dataclasses.field(default_factory=set)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has no cache yet, and a weak reference cannot be pickled.
        return {**self.__dict__, "latest_cache": None}

    def warn_once(self, message: str, *arguments: object) -> None:
        if message not in self.warnings:
            self.warnings.add(message)
            logger.warning(message, *arguments)


def before_forward(
    attachment: Attachment, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pre-hook of the decoder: find or make the KittyCache and open the call."""
    if in_step():
        return None
    drop_call(decoder)
    arguments = dict(zip(attachment.parameters, args, strict=False)) | kwargs
    inputs = arguments.get("input_ids")
    if inputs is None:
        inputs = arguments.get("inputs_embeds")
    if inputs is None:
        return None
    cache = arguments.get("cache")
    if cache is None:
        cache = arguments.get("past_key_values")
    made = cache is None
    if made:
        if not _wants_cache(decoder, arguments):
            return None
        cache = KittyCache(decoder.config, attachment.config)
        arguments.pop("past_key_values", None)
        arguments[attachment.cache_argument] = cache
    if not _is_kitty(cache, attachment):
        return None
    _open_call(attachment, decoder, cache, arguments, inputs)
    return ((), arguments) if made else None


def after_forward(attachment: Attachment, decoder: torch.nn.Module, args: Any, output: Any) -> None:
    """Post-hook of the decoder, called after an exception too (``output`` is None then)."""
    if in_step():
        return
    call = active_call()
    if call is None or call.decoder is not decoder:
        return
    set_active_call(call.previous)
    if output is None:
        call.cache.abort_call()
    elif call.staged is not None or not call.num_served:
        call.cache.abort_call()
        where = "any layer" if call.staged is None else f"layer {call.staged[0]}"
        raise RuntimeError(f"attention must run on the KittyCache, but that of {where} did not")
    else:
        call.cache.end_call()


def _open_call(
    attachment: Attachment,
    decoder: PreTrainedModel,
    cache: KittyCache,
    arguments: dict[str, Any],
    inputs: torch.Tensor,
) -> None:
    check_call(attachment, decoder, cache)
    if arguments.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
        raise ValueError("output_attentions must be False with a KittyCache, which never forms them, got True")
    begin_call(attachment, cache, arguments.get("attention_mask"), inputs)
    set_active_call(ActiveCall(cache, decoder.config, decoder, active_call()))


def check_call(attachment: Attachment, decoder: PreTrainedModel, cache: KittyCache) -> None:
    """Raise a ValueError when ``cache`` or the decoder are no longer what was applied."""
    if cache.plans != attachment.plans or cache.config != attachment.config:
        raise ValueError(
            f"the KittyCache must match what was applied to the model ({attachment.config}), got one of {cache.config} "
            f"with {len(cache.plans)} layers"
        )
    if decoder.config._attn_implementation != attachment.implementation:
        raise ValueError(
            f"the attention implementation must stay {attachment.implementation!r} while a KittyCache is applied, got "
            f"{decoder.config._attn_implementation!r}: call kitty_compile.remove(model) first"
        )


def begin_call(attachment: Attachment, cache: KittyCache, mask: object, inputs: torch.Tensor) -> Call:
    """The host's part of a forward: check the mask and begin the cache's call."""
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            shape = f"shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask must be 2-D [batch, columns] with a KittyCache, got {shape}")
        mask = mask.to(inputs.device)
    if cache.is_bounded_by_generate and cache.get_seq_length() + inputs.shape[1] > (cache.max_length or 0):
        cache.max_length = None
    attachment.latest_cache = weakref.ref(cache)
    return cache.begin_call(inputs.shape[1], mask)


def drop_call(decoder: torch.nn.Module) -> None:
    """Close a call that an interrupt has left open: post-hooks do not run after a KeyboardInterrupt."""
    call = active_call()
    if call is not None and call.decoder is decoder:
        set_active_call(call.previous)
        call.cache.abort_call()


def _wants_cache(decoder: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    if decoder.training and torch.is_grad_enabled():
        return False
    use_cache = arguments.get("use_cache")
    return bool(getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache)


def _is_kitty(cache: object, attachment: Attachment) -> TypeGuard[KittyCache]:
    if isinstance(cache, KittyCache):
        return True
    attachment.warn_once(
        "a %s was passed to a model with a KittyCache applied: it is used as it is, unquantized", type(cache).__name__
    )
    return False

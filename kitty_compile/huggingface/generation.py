"""What ``apply`` changes about ``generate``: it makes a KittyCache, and refuses what a KittyCache cannot be."""

from typing import Any, NoReturn

from transformers import GenerationConfig, PreTrainedModel

from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.decode_step import DecodeStep
from kitty_compile.huggingface.hooks import ATTACHMENT, Attachment

CONTINUOUS_BATCHING_METHODS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def prepare_cache(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Replaces ``_prepare_cache_for_generation``: writes a KittyCache to ``model_kwargs`` where a DynamicCache would be."""
    attachment: Attachment = vars(model)[ATTACHMENT]
    _check_implementation(attachment, model, generation_config)
    _forget_recording(model, generation_config)
    if generation_config.use_cache is False or model_kwargs.get(attachment.cache_argument) is not None:
        type(model)._prepare_cache_for_generation(  # type: ignore[attr-defined]
            model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        return
    cache = KittyCache(model.config, attachment.config, max_length=_max_length(generation_config, max_cache_length))
    cache.is_bounded_by_generate = generation_config.max_cache_len is None
    model_kwargs[attachment.cache_argument] = cache


def _forget_recording(model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    """Weights, hooks and adapters may have changed since the last call; they cannot within one, of which an assistant gets
    many short parts."""
    step = vars(model).get("forward")
    if isinstance(step, DecodeStep) and step.graph is not None and not generation_config.is_assistant:
        step.graph.forget()


def _max_length(generation_config: GenerationConfig, max_cache_length: int) -> int | None:
    if generation_config.is_assistant:
        # An assistant keeps its cache over many short calls of generate: the first one's length says nothing.
        return None
    # Drafted columns can pass the end before they are cropped.
    drafted = generation_config.prompt_lookup_num_tokens or 0
    return max(max_cache_length + drafted, generation_config.max_cache_len or 0, 1)


def _check_implementation(attachment: Attachment, model: PreTrainedModel, generation_config: GenerationConfig) -> None:
    name = generation_config.cache_implementation
    if name is None:
        return
    if name != model.generation_config.cache_implementation:
        raise ValueError(
            f"cache_implementation must be None on a model with a KittyCache applied, got {name!r}: "
            "call kitty_compile.remove(model) first"
        )
    attachment.warn_once("cache_implementation=%r of the model's generation config gives way to a KittyCache", name)
    generation_config.cache_implementation = None


def refuse_continuous_batching(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "continuous batching must be used on a model without a KittyCache, got an applied one: "
        "call kitty_compile.remove(model) first"
    )

"""What a KittyCache can serve: the kind and the head shapes of every attention layer, or the reason why not."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.utils import GenerationMixin

from kitty_compile.kernels.layout import HEAD_DIM_ALIGNMENT
from kitty_compile.layers import LayerPlan

LAYER_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
UNSERVED_LAYER_TYPES = {
    "chunked_attention": "chunked attention is not supported",
    "indexed_attention": "indexed (sparse) attention is not supported",
    "deepseek_sparse_attention": "indexed (sparse) attention is not supported",
    "qwen_sparse_attention": "indexed (sparse) attention is not supported",
    "linear_attention": "a linear attention layer has no keys and values to page",
    "conv": "a convolution layer has no keys and values to page",
    "hybrid": "a layer with a recurrent state is not supported",
    "hybrid_sliding": "a layer with a recurrent state is not supported",
    "dummy": "a layer without keys and values of its own is not supported",
    "moe": "a layer without attention is not supported",
    "mlp": "a layer without attention is not supported",
}

# By model_type: what gives one thing to the cache and attends to another, although it calls the attention interface.
UNSERVED_MODELS = {
    "diffllama": "differential attention, which splits its values behind the cache, is not supported",
    "doge": "a mask that depends on the values is not supported",
    "git": "an image prefix, which is attended in both directions, is not supported",
    "hrm_text": "layers that run in loops are not supported",
    "moshi": "a window in the cache that the mask knows nothing of is not supported",
    "jetmoe": "attention that repeats keys and values for its experts is not supported",
}


@dataclasses.dataclass(frozen=True)
class LayerSupport:
    """One attention layer of a model: what it is and, when it cannot be served, why (``reason``)."""

    index: int
    plan: LayerPlan | None
    reason: str | None
    key_dim: int
    value_dim: int
    num_kv_heads: int


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's own configuration; the same object for a text-only model."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"model_config must be a transformers PreTrainedConfig, got {type(config).__name__}")
    return config.get_text_config(decoder=True)


def config_refusal(config: PreTrainedConfig) -> str | None:
    """Why no layer of a model with this text configuration can be served, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model is not supported"
    if getattr(config, "add_cross_attention", False) or getattr(config, "cross_attention_layers", None):
        return "cross attention is not supported"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "multi-head latent attention (kv_lora_rank) keeps no keys and values per head"
    if getattr(config, "n_recurrent_loops", 1) > 1:
        return "layers that run in loops, with a cache for each, are not supported"
    if getattr(config, "num_kv_shared_layers", None):
        return "layers that share keys and values (num_kv_shared_layers) are not supported"
    # "vision" is said of image tokens alone, whose masks are refused where they come up.
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "bidirectional attention is not supported"
    return None


def layer_support(config: PreTrainedConfig) -> list[LayerSupport]:
    """One entry per layer of the text configuration, in order."""
    refusal = config_refusal(config)
    if refusal is not None:
        layer_configs = _layer_configs(config, _num_layers(config))
        return [
            LayerSupport(index, None, refusal, *_head_shapes(layer_config))
            for index, layer_config in enumerate(layer_configs)
        ]
    types, windows = _layer_types_and_windows(config)
    layer_configs = _layer_configs(config, len(types))
    return [
        _support_of(index, kind, window, layer_config)
        for index, (kind, window, layer_config) in enumerate(zip(types, windows, layer_configs, strict=True))
    ]


def layer_plans(config: PreTrainedConfig) -> list[LayerPlan]:
    """The plan of every layer, or a ValueError that names the first one that cannot be served."""
    plans = []
    for layer in layer_support(config):
        if layer.plan is None:
            raise ValueError(f"every layer must be servable by a KittyCache, got layer {layer.index}: {layer.reason}")
        plans.append(layer.plan)
    if not plans:
        raise ValueError("the model must have attention layers, got a configuration with none")
    return plans


def model_refusal(model: PreTrainedModel) -> str | None:
    """Why ``apply`` cannot serve this model, or None."""
    config = model.config
    if not isinstance(model, GenerationMixin) or not model.can_generate():
        return f"{type(model).__name__} has no language model head to generate with"
    refusal = config_refusal(config)
    if refusal is not None:
        return refusal
    if text_config(config) is not config:
        return f"{type(model).__name__} is more than a text model, only text-only models are supported"
    for layer in layer_support(config):
        if layer.reason is not None:
            return f"layer {layer.index}: {layer.reason}"
    if config.model_type in UNSERVED_MODELS:
        return UNSERVED_MODELS[config.model_type]
    if getattr(model, "_is_stateful", False):
        return "a recurrent state is not supported"
    if not _uses_attention_interface(model):
        return f"the attention of {type(model).__name__} does not use transformers' attention interface"
    if getattr(config, "output_attentions", False):
        return "attention weights (output_attentions) never exist with a KittyCache"
    return _device_refusal(model)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module that runs the layers and takes the cache."""
    decoder = model.get_decoder()
    # Some classes call their head ``decoder``.
    return decoder if isinstance(decoder, PreTrainedModel) else cast(PreTrainedModel, model.base_model)


def cache_argument(module: torch.nn.Module) -> str:
    """The name under which this version of transformers passes the cache to a forward."""
    parameters = inspect.signature(module.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError(f"{type(module).__name__}.forward must take a cache, got {sorted(parameters)}")


def _support_of(index: int, kind: str, window: int | None, config: PreTrainedConfig) -> LayerSupport:
    key_dim, value_dim, num_kv_heads = _head_shapes(config, kind)
    reason = UNSERVED_LAYER_TYPES.get(kind)
    if reason is None and kind not in LAYER_KINDS:
        reason = f"layers of type {kind!r} are not supported"
    if reason is None and kind == "sliding_attention" and not window:
        reason = "a sliding layer must have a window"
    if reason is None and not num_kv_heads:
        reason = "the configuration names no attention heads"
    if reason is None:
        reason = _head_dim_refusal(key_dim, value_dim)
    plan = None if reason is not None else LayerPlan(kind=LAYER_KINDS[kind], window=window)  # type: ignore[arg-type]
    return LayerSupport(index, plan, reason, key_dim, value_dim, num_kv_heads)


def _head_dim_refusal(key_dim: int, value_dim: int) -> str | None:
    for head_dim in (key_dim, value_dim):
        if head_dim <= 0 or head_dim % HEAD_DIM_ALIGNMENT:
            return f"head_dim must be a multiple of {HEAD_DIM_ALIGNMENT}, got {head_dim}"
    return None


def _layer_types_and_windows(config: PreTrainedConfig) -> tuple[list[str], list[int | None]]:
    types, kwargs = get_layer_types_and_kwargs(config)
    # One dict for all layers before transformers had per-layer configurations, a list of dicts since.
    per_layer: Sequence[dict[str, Any]] = kwargs if isinstance(kwargs, list) else [kwargs] * len(types)
    windows = [
        entry.get("sliding_window") if kind == "sliding_attention" else None
        for kind, entry in zip(types, per_layer, strict=True)
    ]
    return list(types), windows


def _num_layers(config: PreTrainedConfig) -> int:
    return int(getattr(config, "num_hidden_layers", 0) or 0)


def _layer_configs(config: PreTrainedConfig, num_layers: int) -> list[PreTrainedConfig]:
    per_layer = getattr(config, "per_layer_config", None)
    return [config] * num_layers if per_layer is None else list(per_layer)[:num_layers]


def _head_shapes(config: PreTrainedConfig, kind: str = "") -> tuple[int, int, int]:
    num_heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if not num_heads:
        return 0, 0, 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    # Falcon names one KV head by a flag, and repeats what it has in its newer form.
    is_multi_query = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or (1 if is_multi_query else num_heads)
    if kind == "sliding_attention" and config.model_type == "mimo_v2_flash":
        # Written in the model's code alone.
        num_kv_heads *= 2
    return int(head_dim), int(value_dim), int(num_kv_heads)


def _uses_attention_interface(model: PreTrainedModel) -> bool:
    # Not asked: _supports_attention_backend, which many a class leaves unset whose attention does. What departs from the
    # interface in a forward is noticed there.
    return bool(type(model)._can_set_attn_implementation() and type(decoder_of(model))._can_set_attn_implementation())


def _device_refusal(model: PreTrainedModel) -> str | None:
    # A device map says 0 where a parameter says cuda:0, so only names of one kind are compared.
    mapped = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    held = {str(parameter.device) for parameter in model.parameters()}
    for devices in (mapped, held):
        if len(devices) > 1:
            return f"a model spread over several devices is not supported, got {', '.join(sorted(devices))}"
    return None

"""Tiny random models of many families, for tests: seconds on one core, attention that matters to the logits."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 96
WINDOW = 40
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOWED: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": WINDOW}


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**_COMMON)


def _qwen2() -> PreTrainedConfig:
    return Qwen2Config(**_COMMON)


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_COMMON, head_dim=32)


def _mistral() -> PreTrainedConfig:
    return MistralConfig(**_COMMON, sliding_window=None, head_dim=16)


def _mistral_windowed() -> PreTrainedConfig:
    return MistralConfig(**_COMMON, sliding_window=WINDOW, head_dim=16)


def _gemma2() -> PreTrainedConfig:
    return Gemma2Config(
        **(_COMMON | _WINDOWED),
        head_dim=32,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=None,
    )


def _gemma3() -> PreTrainedConfig:
    layer_types = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    return Gemma3TextConfig(**(_COMMON | _WINDOWED), head_dim=16, query_pre_attn_scalar=24, layer_types=layer_types)


def _phi3() -> PreTrainedConfig:
    return Phi3Config(**_COMMON)


def _gpt_neox() -> PreTrainedConfig:
    return GPTNeoXConfig(**{name: value for name, value in _COMMON.items() if name != "num_key_value_heads"})


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(**(_COMMON | _WINDOWED), head_dim=16, num_local_experts=2, num_experts_per_tok=1)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "mistral-windowed": _mistral_windowed,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-neox": _gpt_neox,
    "gpt-oss": _gpt_oss,
}


def tiny_config(family: str) -> PreTrainedConfig:
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return FAMILIES[family]()


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random causal language model in eval mode; the same weights for the same family and seed.

    Weights are wide, so that attention is peaked and what lies in the cache decides the logits.
    """
    torch.manual_seed(seed)
    # In 5.17 Gemma 2 runs on sdpa by default, which leaves its softcap out.
    implementation = "eager" if family == "gemma2" else None
    config = tiny_config(family)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # Rows of an embedding come out with unit variance in Gemma too, which multiplies by sqrt(hidden_size).
                is_embedding = "embed" in name and family not in ("gemma2", "gemma3")
                parameter.normal_(0.0, 1.0 if is_embedding else 1.5 * parameter.shape[-1] ** -0.5)
            elif "sinks" in name:
                parameter.normal_()
    model.generation_config.pad_token_id = 0
    model.eval()
    return model


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids that are neither padding nor special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)

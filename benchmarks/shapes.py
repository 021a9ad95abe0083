"""Whole models for the benchmarks: a model's shape with random weights, caches full of random tokens, time and memory."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import kitty_compile
from kitty_compile.config import KittyConfig
from kitty_compile.kernels import ops

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-8b": lambda: transformers.Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=65536,
    ),
    "llama-3.1-8b": lambda: transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    # To try a benchmark out without a GPU.
    "tiny": lambda: transformers.Qwen3Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=65536,
    ),
}
DTYPE = torch.bfloat16
# Bytes of random keys or values made at once.
_FILL_BYTES = 2 * 2**30


def build(name: str, layers: int | None = None, device: str = "cuda") -> Any:
    config = CONFIGS[name]()
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def cache_bytes(model: Any, preset: str | None, length: int) -> float:
    """Bytes of one row's cache at ``length`` by the layout's formula; ``preset`` None for 16-bit K and V."""
    config = model.config
    heads, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    if preset is None:
        return layers * 2 * heads * dim * DTYPE.itemsize * length
    kitty = KittyConfig.preset(preset)
    layout, raw = kitty.parameters(0, dim, dim, heads).page_layout(DTYPE), kitty.raw_layout
    raw_bytes = heads * dim * DTYPE.itemsize * (raw.key_slots + raw.value_slots)
    return layers * (raw.pages_for(length) * layout.page_bytes + raw_bytes)


# ---- devices


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clean() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def wall_seconds(step: Callable[[], object], repeats: int = 8, warmup: int = 3) -> float:
    """Median time of a step as generate's loop would see it, kernels waited for."""
    times = []
    for index in range(repeats + warmup):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        if index >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


# ---- caches full of random tokens


def random_columns(model: Any, batch: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    config = model.config
    shape = (batch, config.num_key_value_heads, columns, config.head_dim)
    key, value = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    return key, value


def filled_kitty(model: Any, preset: str, batch: int, columns: int, max_length: int) -> kitty_compile.KittyCache:
    """A KittyCache of ``columns`` random tokens in every row, packed in a block of rows at a time."""
    config = model.config
    cache = kitty_compile.KittyCache(config, preset, max_length=max_length)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    row_bytes = config.num_key_value_heads * columns * config.head_dim * model.dtype.itemsize
    block = max(1, min(batch, _FILL_BYTES // row_bytes))
    for first in range(0, batch, block):
        key, value = random_columns(model, min(block, batch - first), columns)
        for layer in cache.layers:
            state = layer.state
            parts = {name: getattr(state, name)[first : first + block] for name in state._fields[2:]}
            ops.update(key, value, None, None, state._replace(**parts), layer.parameters)
    for layer in cache.layers:
        layer.columns = columns
    return cache


def filled_stock(model: Any, cache: Any, batch: int, columns: int) -> Any:
    """``cache``, a growing one of transformers, with ``columns`` random columns in every layer."""
    key, value = random_columns(model, batch, columns)
    for layer in range(model.config.num_hidden_layers):
        cache.update(key, value, layer)
    return cache

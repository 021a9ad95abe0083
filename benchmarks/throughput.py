"""Tokens per second of a whole model's decode on the GPU: the 2-bit cache against 16-bit ones, side by side in one process.

    python benchmarks/throughput.py [--model qwen3-8b] [--prompt 1024] [--length 8192] [--memory 80e9] [--out FOLDER]

Random weights in the model's shape. Every system gets the largest batch that fits ``--memory`` bytes (weights, cache at the
full length, and what a step needs) and generates from ``--prompt`` to ``--length`` columns. A step's time is measured at
sampled lengths along the way (the cache is filled with random tokens up to there) and the tokens per second are those of the
whole way, by the trapezoid rule over the samples. Prefill is not part of it.

Systems: kitty, kitty-pro and lossless pages through ``kitty_compile.apply`` (decode steps are one CUDA graph), and
transformers' DynamicCache as it is shipped (eager). "strict" is a 16-bit cache of our own that nothing holds back: the whole
step is one CUDA graph too, K and V are cut to the length, attention is the faster of cuDNN and flash with ``enable_gqa``.
"""

import argparse
import gc
import inspect
import itertools
import pathlib
import statistics
import time
from typing import Any

import torch
import transformers
from common import RESULTS, graph_seconds, write_result
from torch.nn.attention import SDPBackend, sdpa_kernel

import kitty_compile
from kitty_compile.config import KittyConfig

CONFIGS: dict[str, Any] = {
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
}
DTYPE = torch.bfloat16
# What a step keeps beside weights and cache: activations, logits and the graph's pool, per row.
STEP_BYTES_PER_ROW = 4_000_000
SAMPLES = 3


def build(name: str) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=DTYPE).eval()


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


def largest_batch(model: Any, preset: str | None, length: int, memory: float) -> int:
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return int((memory - weights) // (cache_bytes(model, preset, length) + STEP_BYTES_PER_ROW))


STRICT = "strict"


def strict_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
    """transformers' own function repeats K and V for their group; this one leaves that to the kernel."""
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register(STRICT, strict_attention)
transformers.AttentionMaskInterface.register(STRICT, lambda *_, **__: None)


class FixedCache(transformers.DynamicCache):  # type: ignore[misc]
    """16-bit K and V of exactly ``length`` columns; a step overwrites the last one."""

    def __init__(self, config: Any, batch: int, length: int) -> None:
        super().__init__(config=config)
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.buffers = [[torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2)] for _ in layers]
        self.length = length

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any) -> list[torch.Tensor]:
        for buffer, new in zip(self.buffers[layer], (key, value), strict=True):
            buffer[:, :, -1:].copy_(new)
        return self.buffers[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length, 0


def fill(model: Any, cache: Any, columns: int, batch: int) -> None:
    """Give every layer of an empty cache ``columns`` random columns, without running the model."""
    config = model.config
    shape = (batch, config.num_key_value_heads, columns, config.head_dim)
    key, value = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
    for layer in range(config.num_hidden_layers):
        if isinstance(cache, kitty_compile.KittyCache):
            cache.store(key, value, layer)
        else:
            cache.update(key, value, layer)


def wall_seconds(step: Any, repeats: int = 8) -> float:
    """Median time of a step as generate's loop would see it, kernels waited for."""
    times = []
    for index in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if index >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def step_seconds(model: Any, system: str, batch: int, length: int) -> float:
    """Seconds of one decode step of ``batch`` rows at ``length`` columns."""
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")
    positions = torch.full_like(ids, length - 1)
    name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"

    def step(cache: Any) -> None:
        model(input_ids=ids, position_ids=positions, **{name: cache}, use_cache=True)

    if system == "strict":
        cache = FixedCache(model.config, batch, length)
        torch.cuda.reset_peak_memory_stats()
        model.set_attn_implementation(STRICT)
        return min(
            _graphed(lambda: step(cache), backend)
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        )
    if system == "dynamic-eager":
        cache = transformers.DynamicCache(config=model.config)
        fill(model, cache, length - 16, batch)
        model.set_attn_implementation("sdpa")
        torch.cuda.reset_peak_memory_stats()
        return wall_seconds(lambda: step(cache))
    model.set_attn_implementation("sdpa")
    kitty_compile.apply(model, system)
    try:
        cache = kitty_compile.KittyCache(model.config, system, max_length=length + 16)
        fill(model, cache, length - 16, batch)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = wall_seconds(lambda: step(cache))
        refusal = vars(model)["forward"].graph.refusal
        if refusal is not None:
            raise RuntimeError(f"the step must be captured, got {refusal}")
        return seconds
    finally:
        kitty_compile.remove(model)


def _graphed(step: Any, backend: SDPBackend) -> float:
    """Infinity where the backend does not serve these shapes."""
    try:
        with sdpa_kernel(backend):
            return graph_seconds(step, repeats=8)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return float("inf")


def run_system(model: Any, system: str, prompt: int, length: int, batch: int) -> dict[str, Any]:
    lengths = [prompt + (length - prompt) * index // (SAMPLES - 1) for index in range(SAMPLES)]
    seconds = []
    for sample in lengths:
        seconds.append(step_seconds(model, system, batch, sample))
        peak = torch.cuda.max_memory_allocated()
        gc.collect()
        torch.cuda.empty_cache()
    mean = sum((left + right) / 2 for left, right in itertools.pairwise(seconds)) / (SAMPLES - 1)
    return {
        "system": system,
        "batch": batch,
        "lengths": lengths,
        "step_ms": [1e3 * value for value in seconds],
        "tokens_per_second": batch / mean,
        "peak_bytes_at_full_length": peak,
    }


SYSTEMS = {"strict": None, "dynamic-eager": None, "lossless": "lossless", "kitty": "kitty", "kitty-pro": "kitty-pro"}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-8b")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--memory", type=float, default=80e9)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--batch", type=int, default=None, help="the same for all systems, instead of the largest")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    model = build(arguments.model)
    rows: list[dict[str, Any]] = []
    for system in arguments.systems.split(","):
        batch = arguments.batch or largest_batch(model, SYSTEMS[system], arguments.length, arguments.memory)
        row = run_system(model, system, arguments.prompt, arguments.length, batch)
        base = rows[0] if rows else row
        row["over_first"] = row["tokens_per_second"] / base["tokens_per_second"]
        rows.append(row)
        print(row, flush=True)
    kind = f"batch{arguments.batch}" if arguments.batch else f"{arguments.memory / 1e9:.0f}GB"
    name = f"throughput_{arguments.model}_{arguments.prompt}_{arguments.length}_{kind}"
    print(write_result(name, rows, arguments.out, model=arguments.model, memory=arguments.memory))


if __name__ == "__main__":
    main()

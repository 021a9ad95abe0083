"""Single decode steps for ``latency.py``: their times by the host's clock, seals beside the others, recordings and waits."""

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from shapes import build, clean, synchronize
from systems import SYSTEMS, System

import kitty_compile
from kitty_compile.config import KittyConfig
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.kernels.layout import PAGE_SIZE

Row = dict[str, Any]
WARMUP = 4


class Bench:
    """The model and what the command line asks for."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.model = build(arguments.model, arguments.layers, arguments.device)
        self.cache_name = cache_argument(self.model)

    def ids(self, batch: int, columns: int) -> torch.Tensor:
        return torch.randint(0, self.model.config.vocab_size, (batch, columns), device=self.model.device)

    def system(self, name: str, batch: int = 1) -> System:
        return SYSTEMS[name](self.model, batch)

    def empty_cache(self, system: System, max_length: int) -> Any:
        if system.preset is None:
            return transformers.DynamicCache(config=self.model.config)
        return kitty_compile.KittyCache(self.model.config, system.preset, max_length=max_length)

    def forward(self, cache: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of the last column, with the arguments that generate gives."""
        logits: torch.Tensor = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=1,
            use_cache=True,
            **{self.cache_name: cache},
        ).logits
        return logits


def steps(bench: Bench) -> Iterator[Row]:
    batches = [int(batch) for batch in bench.arguments.batches.split(",")]
    for batch in batches:
        yield from steps_of(bench, "kitty", batch, ("lockstep", "staggered")[: min(batch, 2)])
    for name in ("kitty-pro", "lossless", "dynamic-eager"):
        yield from steps_of(bench, name, batches[len(batches) // 2], ("lockstep",))


def steps_of(bench: Bench, name: str, batch: int, kinds: tuple[str, ...]) -> Iterator[Row]:
    with bench.system(name, batch) as system:
        for rows in kinds:
            clean()
            yield {"system": name, **timed_steps(bench, system, rows)}


def timed_steps(bench: Bench, system: System, rows: str) -> Row:
    batch, length = system.batch, bench.arguments.length
    count = bench.arguments.steps if system.preset else min(bench.arguments.steps, 64)
    pads = [row * PAGE_SIZE // batch if rows == "staggered" else 0 for row in range(batch)]
    room = length + WARMUP + count
    mask = torch.ones(batch, room, dtype=torch.int64, device=bench.model.device)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    cache = bench.empty_cache(system, room)
    _fill_rows(bench, cache, mask[:, :length])
    positions = mask.cumsum(dim=1) - 1
    host, whole = [], []
    for step in range(length, room):
        synchronize()
        start = time.perf_counter()
        bench.forward(cache, system.ids, mask[:, : step + 1], positions[:, step : step + 1].contiguous())
        host.append(time.perf_counter() - start)
        synchronize()
        whole.append(time.perf_counter() - start)
    host, whole = host[WARMUP:], whole[WARMUP:]
    row = {
        "batch": batch,
        "rows": rows,
        "length": length,
        "steps": count,
        **_tail(whole),
        "issue_ms": 1e3 * statistics.median(host),
    }
    if system.preset is not None:
        row |= recordings_of(bench)
        row |= _seals(whole, pads, length + WARMUP, KittyConfig.preset(system.preset))
    return row


def recordings_of(bench: Bench) -> Row:
    """Of the model since ``apply``."""
    graph = vars(bench.model)["forward"].graph
    return {"recordings": graph.num_captures, "recording_seconds": graph.seconds, "refusal": graph.refusal}


def recorded(bench: Bench) -> Iterator[Row]:
    batches = [int(batch) for batch in bench.arguments.batches.split(",")]
    prompt, count = min(map(int, bench.arguments.prompts.split(","))), bench.arguments.recorded_steps
    with bench.system("kitty", batches[len(batches) // 2]) as system:
        room = prompt + WARMUP + count
        mask = torch.ones(system.batch, room, dtype=torch.int64, device=bench.model.device)
        cache, positions = bench.empty_cache(system, room), mask.cumsum(dim=1) - 1
        _fill_rows(bench, cache, mask[:, :prompt])

        def steps_to(first: int, last: int) -> None:
            for step in range(first, last):
                where = positions[:, step : step + 1].contiguous()
                bench.forward(cache, system.ids, mask[:, : step + 1], where)
            synchronize()

        steps_to(prompt, prompt + WARMUP)
        start = time.perf_counter()
        with waits_for_device() as waits:
            steps_to(prompt + WARMUP, room)
        row = {"step_ms": 1e3 * (time.perf_counter() - start) / count, **recordings_of(bench)}
    waited = sum("synchroniz" in str(wait.message) for wait in waits) if torch.cuda.is_available() else None
    yield {"system": "kitty", "batch": system.batch, "prompt": prompt, "steps": count, "waits": waited, **row}


@contextlib.contextmanager
def waits_for_device() -> Iterator[list[warnings.WarningMessage]]:
    """Collects a warning for every operation that makes the host wait; ``synchronize`` is none of them."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            yield found
            return
        torch.cuda.set_sync_debug_mode("warn")
        try:
            torch.ones(1, device="cuda").item()
            if not found:
                raise RuntimeError("a wait for the device must be seen, but one made on purpose was not")
            found.clear()
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _fill_rows(bench: Bench, cache: Any, mask: torch.Tensor) -> None:
    """Random tokens in all columns that are no padding."""
    config, model = bench.model.config, bench.model
    shape = (len(mask), config.num_key_value_heads, mask.shape[1], config.head_dim)
    key, value = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    if isinstance(cache, kitty_compile.KittyCache):
        cache.set_padding(mask)
    for layer in range(config.num_hidden_layers):
        cache.update(key, value, layer)


def _seals(seconds: list[float], pads: list[int], first: int, config: KittyConfig) -> Row:
    """Steps in which a row completes a page of keys or values, beside the others."""
    edges = (config.sink_length, config.sink_length + config.value_window)
    sealing = []
    for index in range(len(seconds)):
        tokens = [first + index + 1 - pad for pad in pads]
        sealing.append(any((count - edge) % PAGE_SIZE == 0 for count in tokens for edge in edges))
    seals = [value for value, is_sealing in zip(seconds, sealing, strict=True) if is_sealing]
    median = statistics.median(seconds)
    if not seals:
        return {"sealing_steps": 0}
    return {
        "sealing_steps": len(seals),
        "seal_ms": 1e3 * statistics.median(seals),
        "seal_over_median": statistics.median(seals) / median,
        "worst_seal_over_median": max(seals) / median,
    }


def _tail(seconds: list[float]) -> Row:
    ordered = sorted(seconds)
    return {
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "max_ms": 1e3 * ordered[-1],
    }

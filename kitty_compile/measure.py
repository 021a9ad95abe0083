"""What a generation costs: tokens per second and bytes of cache, for the command line and the demo."""

import dataclasses
import time
from typing import Any, Protocol

import rich.box
import rich.table
import torch
from transformers import PreTrainedModel

from kitty_compile.huggingface import support
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.layers import PagedLayer


class Streamer(Protocol):
    """What ``generate(streamer=)`` calls."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Speed:
    """Times of one or several generations. The first new token ends the prefill; the others are decoded."""

    prompt_tokens: int
    prefill_seconds: float
    decoded_tokens: int
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def __add__(self, other: "Speed") -> "Speed":
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Speed(*(first + second for first, second in zip(mine, theirs, strict=True)))

    def as_dict(self) -> dict[str, float]:
        """Fields and rates, for JSON."""
        return {
            **dataclasses.asdict(self),
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


class TimedStreamer:
    """Notes when each token comes and hands it on."""

    def __init__(self, inner: Streamer | None = None) -> None:
        self.inner = inner
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        # The first call brings the prompt, before anything is computed.
        self.times.append(time.perf_counter())
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        if self.inner is not None:
            self.inner.end()

    def speed(self, prompt_tokens: int) -> Speed:
        if len(self.times) < 2:
            return Speed(prompt_tokens, 0.0, 0, 0.0)
        start, first, last = self.times[0], self.times[1], self.times[-1]
        return Speed(prompt_tokens, first - start, len(self.times) - 2, last - first)


@dataclasses.dataclass(frozen=True)
class Generation:
    """The tokens that ``generate`` appended, the cache it used and its speed."""

    tokens: torch.Tensor  # i64 [prompt and new]
    num_prompt_tokens: int
    cache: Any
    speed: Speed

    @property
    def new_tokens(self) -> torch.Tensor:
        return self.tokens[self.num_prompt_tokens :]


def generate(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    *,
    max_new_tokens: int,
    min_new_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    cache: Any = None,
    streamer: Streamer | None = None,
    pad_token_id: int | None = None,
) -> Generation:
    """One row of text through ``model.generate``.

    Args:
        tokens: i64 [columns], the whole text so far; what ``cache`` holds of it is not computed again.
        temperature: 0 is greedy.
    """
    timed = TimedStreamer(streamer)
    held = cache.get_seq_length() if cache is not None else 0
    arguments: dict[str, Any] = {"do_sample": temperature > 0, "temperature": temperature or None}
    if not temperature:
        arguments |= {"top_k": None, "top_p": None}
    if cache is not None:
        arguments[support.cache_argument(model)] = cache
    torch.manual_seed(seed)
    inputs = tokens.unsqueeze(0).to(model.device)
    output: Any = model.generate(  # type: ignore[operator]
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        return_dict_in_generate=True,
        streamer=timed,
        pad_token_id=pad_token_id,
        **arguments,
    )
    new_cache = getattr(output, "past_key_values", None)
    return Generation(output.sequences[0].cpu(), len(tokens), new_cache, timed.speed(len(tokens) - held))


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a KittyCache by part, beside those of a 16-bit cache that holds the same tokens."""

    tokens: int
    sixteen_bit_bytes: int
    packed_bytes: int  # sealed pages, with their scales, zeros and boost records
    raw_bytes: int  # sinks, rings, sliding windows, page table and lengths
    free_bytes: int  # pages allocated for tokens to come

    @property
    def bytes_in_use(self) -> int:
        return self.packed_bytes + self.raw_bytes

    @property
    def allocated_bytes(self) -> int:
        return self.bytes_in_use + self.free_bytes

    @property
    def bits_per_element(self) -> float:
        """Bits in use per K or V element, raw part counted."""
        return 16 * self.bytes_in_use / self.sixteen_bit_bytes if self.sixteen_bit_bytes else float("nan")

    @property
    def compression(self) -> float:
        """How many times smaller than 16 bits, raw part counted."""
        return self.sixteen_bit_bytes / self.bytes_in_use if self.bytes_in_use else float("nan")

    def as_dict(self) -> dict[str, float]:
        """Fields and sums, for JSON."""
        return {
            **dataclasses.asdict(self),
            "bytes_in_use": self.bytes_in_use,
            "allocated_bytes": self.allocated_bytes,
            "bits_per_element": self.bits_per_element,
            "compression": self.compression,
        }


def measure_memory(cache: KittyCache) -> Memory:
    """What a cache holds now. Asks the device for its lengths."""
    lengths = cache.lengths.tolist()
    sixteen_bit = pool = page = 0
    for layer in cache.layers:
        if isinstance(layer, PagedLayer):
            page_bytes = layer.page_layout.page_bytes if layer.is_initialized else 0
            pool += layer.num_pages * page_bytes
            page += page_bytes
            held = sum(lengths)
        else:
            # The stock cache keeps window - 1 columns of such a layer between calls.
            held = sum(min(length, layer.window - 1) for length in lengths)
        sixteen_bit += 2 * held * layer.elements_per_token
    packed = cache.pages_in_use * page
    return Memory(sum(lengths), sixteen_bit, packed, cache.nbytes - pool, pool - packed)


def stock_bytes(cache: Any) -> int:
    """Bytes of the keys and values in transformers' own cache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if layer.keys is not None)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A generation on a KittyCache, beside the same one on the model's own cache where that was run."""

    ours: Generation
    stock: Generation | None
    memory: Memory
    stock_bytes: int | None

    @classmethod
    def of(cls, ours: Generation, stock: Generation | None) -> "Comparison":
        return cls(ours, stock, measure_memory(ours.cache), None if stock is None else stock_bytes(stock.cache))

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {
            "prompt_tokens": self.ours.num_prompt_tokens,
            "new_tokens": len(self.ours.new_tokens),
            "memory": {**self.memory.as_dict(), "own_cache_bytes": self.stock_bytes},
            "speed": {
                "kitty": self.ours.speed.as_dict(),
                "own_cache": None if self.stock is None else self.stock.speed.as_dict(),
            },
        }

    def table(self) -> rich.table.Table:
        """All numbers, to print with rich."""
        memory = self.memory
        table = rich.table.Table(box=rich.box.SIMPLE, title=f"KV cache of {memory.tokens} tokens", title_justify="left")
        for name in ("", "2-bit cache", "own cache", "at 16 bits"):
            table.add_column(name, justify="right" if name else "left")
        table.add_row("packed pages, metadata counted", _size(memory.packed_bytes))
        table.add_row("raw tokens (sink, newest), tables", _size(memory.raw_bytes))
        table.add_row("in use", _size(memory.bytes_in_use), _size(self.stock_bytes), _size(memory.sixteen_bit_bytes))
        table.add_row("free pages for tokens to come", _size(memory.free_bytes))
        table.add_row("bits per K or V element in use", f"{memory.bits_per_element:.2f}", "", "16.00")
        table.add_row("times smaller than 16 bits", f"{memory.compression:.2f}", "", "1.00")
        speeds = [run.speed for run in (self.ours, self.stock) if run is not None]
        table.add_row("prefill, tokens/s", *(f"{speed.prefill_tokens_per_second:.1f}" for speed in speeds))
        table.add_row("decode, tokens/s", *(f"{speed.decode_tokens_per_second:.1f}" for speed in speeds))
        return table


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.2f} kB"

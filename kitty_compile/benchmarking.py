"""A short benchmark of one model on the machine at hand: its own cache against the 2-bit one, in turns in one process.

A row of the result is a batch size. Both caches are filled by a prefill of random token ids; then they take turns in timed
decode steps, the last of which ends at the length asked for. Memory is what the caches hold there.
"""

import contextlib
import dataclasses
import gc
import inspect
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

import kitty_compile
from kitty_compile.config import KittyConfig
from kitty_compile.huggingface import support
from kitty_compile.huggingface.decode_step import DecodeStep
from kitty_compile.measure import stock_bytes

OWN_CACHE = "transformers' DynamicCache as it is shipped, steps run eagerly"
# Each cache's turns of decode steps, and the steps before the timed ones of a turn: the second of them records a CUDA graph.
TURNS = 2
WARM_UP_STEPS = 3
# A prefill is run again, up to this many times, while all its runs took less than so many seconds; the fastest counts.
PREFILL_RUNS = 3
PREFILL_SECONDS = 4.0
_WARM_UP_COLUMNS = 256
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        length: tokens of a row at the end of its decode steps; None: see ``for_model``.
        batches: rows to run, in this order; none: see ``for_model``.
        steps: timed decode steps of each cache.
        seconds: no batch but the first is begun that would end later than this, by the time that the last one took.
        memory: bytes that caches may take, to count the largest batch; None: what is free on a CUDA device.
    """

    length: int | None = None
    batches: tuple[int, ...] = ()
    steps: int = 16
    seconds: float = 120.0
    memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("length", "steps", "seconds", "memory"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive, got {value}")
        for batch in self.batches:
            if batch < 1:
                raise ValueError(f"batch must be positive, got {batch}")
        if self.length is not None and self.prompt_tokens < 1:
            raise ValueError(f"length must be more than {self.step_columns} decode steps, got {self.length}")

    @property
    def step_columns(self) -> int:
        """Decode steps of a row, warm-up counted."""
        return self.steps + TURNS * WARM_UP_STEPS

    @property
    def prompt_tokens(self) -> int:
        assert self.length is not None
        return self.length - self.step_columns

    def for_model(self, model: PreTrainedModel) -> "Settings":
        """Fills in what takes about a minute with a small model on a CPU or a large one on a GPU.

        Raises:
            ValueError: the model has fewer positions than ``length``.
        """
        is_cpu = model.device.type == "cpu"
        positions = getattr(support.text_config(model.config), "max_position_embeddings", None) or None
        length = self.length
        if length is None:
            length = min(1024 if is_cpu else 8192, positions or sys.maxsize)
        if positions is not None and length > positions:
            raise ValueError(f"length must fit the model's {positions} positions, got {length}")
        return dataclasses.replace(self, length=length, batches=self.batches or ((1,) if is_cpu else (1, 8)))


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one cache took in one row."""

    cache_bytes: int
    prefill_seconds: float
    prefill_runs: int
    step_seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Both caches at one batch size; None: out of memory."""

    batch: int
    kitty: Cost | None
    own: Cost | None


@dataclasses.dataclass(frozen=True)
class Pair:
    """A figure of both caches. ``ratio`` is how many times better the 2-bit cache is."""

    kitty: float | None
    own: float | None
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        if not self.kitty or not self.own:
            return None
        return self.kitty / self.own if self.more_is_better else self.own / self.kitty

    def as_dict(self) -> dict[str, float | None]:
        """Fields and ratio, for JSON."""
        return {"kitty": self.kitty, "own": self.own, "ratio": self.ratio}


@dataclasses.dataclass(frozen=True)
class Result:
    """What ``run`` measured."""

    settings: Settings
    rows: tuple[Row, ...]
    skipped: dict[int, str]  # batches that did not run, and why
    memory: float | None  # bytes that the largest batch is counted for
    itemsize: int  # bytes of an element of the model's own cache
    kitty_steps: str  # how decode steps on the 2-bit cache ran

    def figures(self, row: Row) -> dict[str, Pair]:
        """The figures of a row by name."""

        def pair(of: Callable[[Cost], float], *, more_is_better: bool = False) -> Pair:
            kitty, own = (None if cost is None else of(cost) for cost in (row.kitty, row.own))
            return Pair(kitty, own, more_is_better)

        return {
            "cache_bytes": pair(lambda cost: cost.cache_bytes),
            "first_token_ms": pair(lambda cost: 1e3 * cost.prefill_seconds),
            "step_ms": pair(lambda cost: 1e3 * cost.step_seconds),
            "tokens_per_second": pair(lambda cost: row.batch / cost.step_seconds, more_is_better=True),
        }

    @property
    def row_bytes(self) -> Pair:
        """Bytes of a row's cache at the length."""
        return Pair(self._row_bytes("kitty"), self._row_bytes("own"))

    def _row_bytes(self, kind: str) -> float | None:
        found: list[tuple[int, Cost | None]] = [(row.batch, getattr(row, kind)) for row in self.rows]
        return next((cost.cache_bytes / batch for batch, cost in found if cost is not None), None)

    @property
    def largest_batch(self) -> Pair | None:
        """Rows whose caches fit the memory; None where no memory is known."""
        if self.memory is None:
            return None
        sizes = (self.row_bytes.kitty, self.row_bytes.own)
        kitty, own = (None if size is None else self.memory // size for size in sizes)
        return Pair(kitty, own, more_is_better=True)

    @property
    def best_throughput(self) -> Pair:
        """The most tokens per second that each cache reached in any row."""
        rows = [self.figures(row)["tokens_per_second"] for row in self.rows]
        kitty = max((pair.kitty for pair in rows if pair.kitty), default=None)
        own = max((pair.own for pair in rows if pair.own), default=None)
        return Pair(kitty, own, more_is_better=True)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {
            "length": self.settings.length,
            "prompt_tokens": self.settings.prompt_tokens,
            "steps": self.settings.steps,
            "own_cache": OWN_CACHE,
            "kitty_steps": self.kitty_steps,
            "rows": [
                {
                    "batch": row.batch,
                    **{name: pair.as_dict() for name, pair in self.figures(row).items()},
                    "own_cache_bytes_at_16_bits": None if row.own is None else self.at_16_bits(row.own.cache_bytes),
                    "prefill_runs": {name: cost.prefill_runs for name, cost in _costs(row).items()},
                    "out_of_memory": [name for name in ("kitty", "own") if name not in _costs(row)],
                }
                for row in self.rows
            ],
            "not_run": [{"batch": batch, "reason": reason} for batch, reason in self.skipped.items()],
            "best_tokens_per_second": self.best_throughput.as_dict(),
            "row_bytes": self.row_bytes.as_dict(),
            "memory_bytes": self.memory,
            "largest_batch": None if self.largest_batch is None else self.largest_batch.as_dict(),
        }

    def at_16_bits(self, own_bytes: float) -> float:
        """Bytes of the model's own cache if its elements had 16 bits."""
        return own_bytes * 2 / self.itemsize


def _costs(row: Row) -> dict[str, Cost]:
    return {name: cost for name, cost in (("kitty", row.kitty), ("own", row.own)) if cost is not None}


class _Side:
    """The model on one of the two caches: how it is filled and stepped on, and what that took."""

    def __init__(self, model: PreTrainedModel, config: KittyConfig | None, length: int | None) -> None:
        self.model, self.config, self.length = model, config, length
        self.arguments: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self.arguments["logits_to_keep"] = 1
        self.steps_ran = "eagerly"
        self.clear()

    def clear(self) -> None:
        self.cache: Any = None
        self.prefill_times: list[float] = []
        self.step_times: list[float] = []

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model is as it was outside of this."""
        if self.config is None:
            yield
            return
        kitty_compile.apply(self.model, self.config)
        try:
            yield
        finally:
            step = vars(self.model).get("forward")
            if isinstance(step, DecodeStep) and step.graph is not None and step.graph.num_captures:
                self.steps_ran = "as one CUDA graph"
            kitty_compile.remove(self.model)

    def prefill(self, ids: torch.Tensor) -> None:
        """Time to the first token of the prompts ``ids`` i64 [batch, columns]."""
        least = 1 if self.model.device.type == "cpu" else 2
        with self.applied():
            while len(self.prefill_times) < least or (
                len(self.prefill_times) < PREFILL_RUNS and sum(self.prefill_times) < PREFILL_SECONDS
            ):
                self.cache = None
                self.cache = self._new_cache()
                self.prefill_times.append(self._timed(ids))

    def decode(self, ids: torch.Tensor, steps: int) -> None:
        """``steps`` timed steps after those of the warm-up, each on a column of ``ids`` i64 [batch, 1]."""
        with self.applied():
            times = [self._timed(ids) for _ in range(WARM_UP_STEPS + steps)]
        self.step_times += times[WARM_UP_STEPS:]

    def cost(self) -> Cost:
        cache_bytes = stock_bytes(self.cache) if self.config is None else self.cache.nbytes
        return Cost(cache_bytes, min(self.prefill_times), len(self.prefill_times), statistics.median(self.step_times))

    def _new_cache(self) -> Any:
        if self.config is None:
            return DynamicCache(config=self.model.config)
        # As generate makes it, which knows how long its rows can become.
        return kitty_compile.KittyCache(self.model.config, self.config, max_length=self.length)

    def _timed(self, ids: torch.Tensor) -> float:
        _synchronize(self.model.device)
        start = time.perf_counter()
        output = self.model(input_ids=ids, **{support.cache_argument(self.model): self.cache}, **self.arguments)
        output.logits[:, -1].argmax(dim=-1)
        _synchronize(self.model.device)
        return time.perf_counter() - start


@torch.no_grad()
def run(
    model: PreTrainedModel, config: KittyConfig, settings: Settings, tell: Callable[[str], None] = lambda line: None
) -> Result:
    """Measure ``model``, which is not applied and is left as it is.

    Args:
        tell: called with a line before each row.

    Raises:
        ValueError: the model cannot be served, or has no layer that this cache pages.
    """
    start = time.perf_counter()
    _check(model, config)
    settings = settings.for_model(model)
    own, kitty = (_Side(model, choice, settings.length) for choice in (None, config))
    memory = settings.memory or _free_bytes(model.device)
    tell("warming up")
    _warm_up(own, kitty, settings)
    rows: list[Row] = []
    skipped: dict[int, str] = {}
    seconds_per_sequence = 0.0
    for batch in settings.batches:
        begun = time.perf_counter()
        if rows and begun - start + seconds_per_sequence * batch > settings.seconds:
            skipped[batch] = f"it would have ended later than the {settings.seconds:g} seconds of --seconds"
            continue
        tell(f"batch {batch}, {settings.length} tokens a row")
        rows.append(_measure(own, kitty, settings, batch))
        seconds_per_sequence = (time.perf_counter() - begun) / batch
    return Result(settings, tuple(rows), skipped, memory, model.dtype.itemsize, kitty.steps_ran)


def _check(model: PreTrainedModel, config: KittyConfig) -> None:
    refusal = support.model_refusal(model)
    if refusal is None and all(plan.window is not None for plan in support.layer_plans(model.config)):
        refusal = kitty_compile.report(model, config).summary()
    if refusal is not None:
        raise ValueError(f"MODEL must be one that the 2-bit cache changes, got {type(model).__name__}: {refusal}")


def _warm_up(own: _Side, kitty: _Side, settings: Settings) -> None:
    """First calls pay for what later ones find ready."""
    ids = _random_ids(own.model, 1, min(settings.prompt_tokens, _WARM_UP_COLUMNS))
    _run([own, kitty], ids, steps=0)


def _measure(own: _Side, kitty: _Side, settings: Settings, batch: int) -> Row:
    ids = _random_ids(own.model, batch, settings.prompt_tokens)
    costs = _run([own, kitty], ids, settings.steps)
    if costs is not None:
        return Row(batch, kitty=costs[1], own=costs[0])
    # Both caches beside one another did not fit: does each of them alone?
    alone = [_run([side], ids, settings.steps) for side in (own, kitty)]
    own_cost, kitty_cost = (None if cost is None else cost[0] for cost in alone)
    return Row(batch, kitty=kitty_cost, own=own_cost)


def _run(sides: list[_Side], ids: torch.Tensor, steps: int) -> list[Cost] | None:
    """The sides in turns on the same ids; None when memory ran out."""
    costs: list[Cost] | None = None
    try:
        for side in sides:
            side.clear()
            side.prefill(ids)
        for turn in range(TURNS):
            for side in sides:
                side.decode(ids[:, :1], steps * (turn + 1) // TURNS - steps * turn // TURNS)
        costs = [side.cost() for side in sides] if steps else []
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or any(part in str(error) for part in _OUT_OF_MEMORY)):
            raise
    # Out of the handler, whose traceback holds tensors.
    for side in sides:
        side.clear()
    _clean(ids.device)
    return costs


def _random_ids(model: PreTrainedModel, batch: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    vocabulary = support.text_config(model.config).vocab_size
    return torch.randint(0, vocabulary, (batch, columns), generator=generator).to(model.device)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_bytes(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    _clean(device)
    return float(torch.cuda.mem_get_info(device)[0])

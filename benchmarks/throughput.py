"""Tokens per second of a whole model's decode on the GPU: the 2-bit cache against 16-bit ones, side by side in one process.

    python benchmarks/throughput.py [--model qwen3-8b] [--prompt 1024 --length 8192] [--memory 80e9] [--seconds 70]
        [--ways 1024:8192,8192:32768] [--systems strict,kitty,...] [--batches 1,8,32] [--fit kitty,...] [--out FOLDER]

Random weights in the model's shape. On every way, from a prompt to a length, every system (``systems.py`` says what they are)
gets the largest batch that fits ``--memory`` bytes (weights, cache at the full length, and what a step needs), or the batches
that are given. A step's time is measured at sampled lengths along the way (the cache is filled with random tokens up to there)
and the tokens per second are those of the whole way, by the trapezoid rule over the samples. Prefill is not part of it.

``--fit``: instead, how many rows of these systems a step's peak leaves room for at the ways' lengths, tried from .99 of what
the layout's formula allows downwards.

Nothing is begun once ``--seconds`` have passed. A line of JSON per row is printed as it comes, and the result file of its way
is written: rows with their ratios to every baseline. Rows of other systems that it held from the same device and versions stay.
"""

import argparse
import itertools
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from common import RESULTS, environment, write_result
from shapes import CONFIGS, allocated_bytes, build, cache_bytes, clean, peak_bytes, reset_peak, synchronize
from systems import SYSTEMS, System, UnavailableError

SAMPLES = 3
BASELINES = ("strict", "strict-compiled", "dynamic-eager", "static-compiled", "quantized-eager")
FIT_STEPS = 6
FIT_TRIES = 4

Row = dict[str, Any]


def weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def formula_rows(model: Any, preset: str | None, length: int, memory: float) -> int:
    """Rows beside the weights if a step needed no memory."""
    return int((memory - weight_bytes(model)) // cache_bytes(model, preset, length))


def largest_batch(model: Any, kind: type[System], length: int, memory: float) -> int:
    return max(1, int((memory - weight_bytes(model)) // kind.row_bytes(model, length)))


def run_system(model: Any, kind: type[System], prompt: int, length: int, batch: int) -> Row:
    samples = SAMPLES if prompt < length else 1
    lengths = [prompt + (length - prompt) * index // max(samples - 1, 1) for index in range(samples)]
    measured: dict[int, float] = {}
    start = time.perf_counter()
    with kind(model, batch) as system:
        for sample in lengths[-1:] if kind.is_flat else lengths:
            clean()
            measured[sample] = system.step_seconds(sample)
        peak = peak_bytes()
    seconds = [measured.get(sample, measured[length]) for sample in lengths]
    between = [(left + right) / 2 for left, right in itertools.pairwise(seconds)] or seconds
    return {
        "batch": batch,
        "lengths": lengths,
        "step_ms": [1e3 * value for value in seconds],
        "tokens_per_second": batch * len(between) / sum(between),
        "peak_bytes_at_full_length": peak,
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_that_fits(model: Any, name: str, way: tuple[int, int], batch: int | None, memory: float) -> Row:
    """The row of a system; where its largest batch does not fit after all, with a twentieth less."""
    kind, (prompt, length) = SYSTEMS[name], way
    batch = batch or largest_batch(model, kind, length, memory)
    for _ in range(4):
        try:
            row = run_system(model, kind, prompt, length, batch)
            break
        except torch.OutOfMemoryError:
            clean()
            batch = batch * 19 // 20
    else:
        raise UnavailableError(f"its cache does not fit, {batch} rows were tried last")
    formula = formula_rows(model, kind.preset, length, memory)
    return {"system": name, "formula_batch": formula, "layers": model.config.num_hidden_layers, **row}


def rows_that_fit(model: Any, name: str, length: int, memory: float) -> Row:
    """Most rows with which the peak of a few steps on full caches, the first recording included, stays within ``memory``."""
    kind, start = SYSTEMS[name], time.perf_counter()
    formula = formula_rows(model, kind.preset, length, memory)
    rows, tried = max(1, int(0.99 * formula)), []
    while True:
        peak = _peak_of_steps(model, kind, rows, length)
        tried.append([rows, peak])
        if peak <= memory or rows == 1 or len(tried) == FIT_TRIES:
            break
        rows -= min(rows - 1, 1 + int((peak - memory) // kind.row_bytes(model, length)))
    sixteen = formula_rows(model, None, length, memory)
    return {
        "system": name,
        "length": length,
        "layers": model.config.num_hidden_layers,
        "batch": rows,
        "fits": peak <= memory,
        "peak_bytes": peak,
        "tried": tried,
        "formula_batch": formula,
        "over_formula": rows / formula,
        "sixteen_bit_batch": sixteen,
        "over_sixteen_bit": rows / max(sixteen, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _peak_of_steps(model: Any, kind: type[System], rows: int, length: int) -> int:
    with kind(model, rows) as system:
        cache = system.filled(length)
        clean()
        reset_peak()
        for step in range(FIT_STEPS):
            system.call(cache, length - 1 - FIT_STEPS + step)
        synchronize()
        peak = max(peak_bytes(), allocated_bytes())
        del cache
    return peak


def add_ratios(rows: list[Row]) -> None:
    for base in rows:
        if base["system"] in BASELINES:
            for row in rows:
                row[f"over_{base['system']}"] = row["tokens_per_second"] / base["tokens_per_second"]


class Results:
    """A result file that is written row by row."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.folder = name, arguments.out
        self.more = {"model": arguments.model, "memory": arguments.memory}
        self.skipped: dict[str, str] = {}
        self.rows = self._kept(arguments.layers)

    def _kept(self, layers: int | None) -> list[Row]:
        path = self.folder / f"{self.name}.json"
        if layers is not None or not path.exists():
            return []
        held, same = json.loads(path.read_text()), ("device", "torch", "triton")
        is_same = all(held.get(name) == environment()[name] for name in same)
        return list(held["rows"]) if is_same else []

    def add(self, row: Row) -> None:
        """Takes the place of what was measured of the same system and length before."""
        key = (row["system"], row.get("length"))
        row = {**row, "date": environment()["date"]}
        self.rows = [old for old in self.rows if (old["system"], old.get("length")) != key] + [row]
        if "tokens_per_second" in row:
            add_ratios(self.rows)
        print(json.dumps(row), flush=True)
        self._write()

    def skip(self, system: str, reason: str) -> None:
        self.skipped[system] = reason
        print(json.dumps({"system": system, "skipped": reason}), flush=True)
        self._write()

    def _write(self) -> None:
        write_result(self.name, self.rows, self.folder, **self.more, skipped=self.skipped)


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, str, tuple[int, int], int | None]]:
    """(result file, system, way, batch) in the order in which they run."""
    memory = f"{arguments.memory / 1e9:.0f}GB"
    for way in (arguments.ways or f"{arguments.prompt}:{arguments.length}").split(","):
        prompt, length = map(int, way.split(":"))
        if arguments.fit:
            for system in arguments.fit.split(","):
                yield f"largest_batch_{arguments.model}_{memory}", system, (prompt, length), None
            continue
        for batch in [int(batch) for batch in arguments.batches.split(",")] if arguments.batches else [None]:
            kind = memory if batch is None else f"batch{batch}"
            for system in arguments.systems.split(","):
                yield f"throughput_{arguments.model}_{prompt}_{length}_{kind}", system, (prompt, length), batch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="fewer than the model has")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ways", default="", help="several prompt:length instead, separated by commas")
    parser.add_argument("--memory", type=float, default=80e9)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--batches", default="", help="the same for all systems, instead of the largest")
    parser.add_argument("--fit", default="", help="systems whose largest batch is looked for instead")
    parser.add_argument("--seconds", type=float, default=70, help="nothing is begun later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    start = time.perf_counter()
    arguments = parse()
    model = build(arguments.model, arguments.layers, arguments.device)
    synchronize()
    print(json.dumps({"built_in_seconds": round(time.perf_counter() - start, 1)}), flush=True)
    results: dict[str, Results] = {}
    for name, system, way, batch in jobs(arguments):
        if name not in results:
            results[name] = Results(name, arguments)
        result = results[name]
        if time.perf_counter() - start > arguments.seconds:
            result.skip(system, f"{arguments.seconds:.0f} seconds had passed")
            continue
        try:
            if arguments.fit:
                result.add(rows_that_fit(model, system, way[1], arguments.memory))
            else:
                result.add(run_that_fits(model, system, way, batch, arguments.memory))
        except UnavailableError as error:
            result.skip(system, str(error))
    for name in results:
        print(arguments.out / f"{name}.json")


if __name__ == "__main__":
    main()

"""Prefill and decode apart: time to first token, step times with their tail, memory, what ``generate`` adds.

    python benchmarks/latency.py [--model qwen3-8b] [--layers 12] [--seconds 100]
        [--sections prefill,memory,generate,steps,recorded,compiled] [--prompts 1024,8192,32768] [--batches 1,8,32]
        [--length 8192] [--steps 384] [--recorded-steps 2000] [--out FOLDER]

Random weights in the model's shape, with fewer layers unless told: every row says how many. No row is begun once ``--seconds``
have passed. A line of JSON a row is printed as it comes; the result file is written after each.

    prefill     time to first token of one row (host's clock, until its token is on the host), logits of the last column
                alone, the median of two or three; peak memory above the weights, and what stays
    memory      bytes that the device holds for a full cache, against ``nbytes`` and the layout's formula
    generate    ``model.generate`` of one row twice: what the second call takes beyond prefill and steps, and what generate's
                own loop adds to each step (the slope of its time over the tokens, minus a step's time)
    steps       each decode step by the host's clock, kernels waited for. "lockstep": all rows seal a page in the same step.
                "staggered": left padding spreads their seals evenly over 128 steps. ``issue_ms``: until the host is free
    recorded    as many steps as ``--recorded-steps`` says on one cache: recordings, and how often a forward waited
    compiled    "generate" and some of "steps" again, after ``model.compile(backend="kitty")``
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import RESULTS, write_result
from latency_steps import WARMUP, Bench, recorded, recordings_of, steps, steps_of
from shapes import (
    CONFIGS,
    allocated_bytes,
    cache_bytes,
    clean,
    filled_kitty,
    peak_bytes,
    reset_peak,
    synchronize,
)
from systems import System

Row = dict[str, Any]


# ---- prefill


def prefill(bench: Bench) -> Iterator[Row]:
    for length in map(int, bench.arguments.prompts.split(",")):
        stock_peak = None
        for name in ("dynamic-eager", "kitty", "kitty-pro", "lossless"):
            with bench.system(name) as system:
                row = first_token(bench, system, length)
            stock_peak = stock_peak or row["peak_bytes"]
            yield {
                "system": name,
                "batch": 1,
                "prompt": length,
                **row,
                "peak_over_dynamic": _over(row["peak_bytes"], stock_peak),
            }


def first_token(bench: Bench, system: System, length: int) -> Row:
    ids = bench.ids(1, length)
    mask, positions = torch.ones_like(ids), torch.arange(length, device=ids.device).unsqueeze(0)
    seconds, peak, kept = [], 0, 0
    for _ in range(4 if length < 16384 else 3):
        clean()
        before = allocated_bytes()
        reset_peak()
        start = time.perf_counter()
        cache = bench.empty_cache(system, length + 256)
        token = int(bench.forward(cache, ids, mask, positions).argmax())
        seconds.append(time.perf_counter() - start)
        assert token >= 0
        peak, kept = peak_bytes() - before, allocated_bytes() - before
        del cache
    seconds = seconds[1:]
    return {
        "ttft_ms": 1e3 * statistics.median(seconds),
        "ttft_ms_each": _ms(seconds),
        "peak_bytes": peak,
        "kept_bytes": kept,
    }


# ---- memory


def memory(bench: Bench) -> Iterator[Row]:
    for batch, length in ((1, max(map(int, bench.arguments.prompts.split(",")))), (8, bench.arguments.length)):
        for name in ("kitty", "kitty-pro", "lossless"):
            with bench.system(name, batch) as system:
                assert system.preset is not None
                clean()
                before = allocated_bytes()
                cache = filled_kitty(bench.model, system.preset, batch, length - 16, length)
                clean()
                held = allocated_bytes() - before
                for step in range(WARMUP):
                    system.call(cache, length - 16 + step)
                clean()
                recorded = allocated_bytes() - before
                formula, nbytes = batch * cache_bytes(bench.model, system.preset, length), cache.nbytes
                del cache
            yield {
                "system": name,
                "batch": batch,
                "length": length,
                "formula_bytes": int(formula),
                "cache_nbytes": nbytes,
                "held_bytes": held,
                "held_with_recorded_step_bytes": recorded,
                "nbytes_over_formula": nbytes / formula,
                "held_over_formula": _over(held, formula),
                "sixteen_bit_over_nbytes": batch * cache_bytes(bench.model, None, length) / nbytes,
            }


# ---- generate


def generate(bench: Bench, suffix: str = "") -> Iterator[Row]:
    for name in ("kitty" + suffix,) if suffix else ("kitty", "dynamic-eager"):
        with bench.system(name) as system:
            yield {"system": name, "batch": 1, **generation(bench, system)}


def generation(bench: Bench, system: System) -> Row:
    prompt, tokens, few = min(map(int, bench.arguments.prompts.split(","))), bench.arguments.tokens, 16
    if system.preset is None:
        tokens = max(tokens // 4, 2 * few)
    ids = bench.ids(1, prompt)
    mask, positions = torch.ones_like(ids), torch.arange(prompt, device=ids.device).unsqueeze(0)

    def wall(run: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - start

    def generated(count: int) -> float:
        arguments = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        return wall(lambda: bench.model.generate(ids, attention_mask=mask, **arguments))

    first, second, third = (generated(tokens) for _ in range(3))
    short = statistics.median(generated(few) for _ in range(3))
    per_token = (min(second, third) - short) / (tokens - few)
    ttft = statistics.median(
        wall(lambda: bench.forward(bench.empty_cache(system, prompt + tokens), ids, mask, positions)) for _ in range(3)
    )
    cache = bench.empty_cache(system, prompt + tokens)
    bench.forward(cache, ids, mask, positions)
    long = torch.ones(1, prompt + tokens, dtype=torch.int64, device=ids.device)
    seconds = []
    for column in range(prompt, prompt + tokens):
        where = torch.full_like(system.ids, column)
        run = lambda: bench.forward(cache, system.ids, long[:, : column + 1], where)  # noqa: B023, E731
        seconds.append(wall(run))
    step = statistics.median(seconds[WARMUP:])
    return {
        **(recordings_of(bench) if system.preset else {}),
        "prompt": prompt,
        "new_tokens": tokens,
        "first_seconds": first,
        "second_seconds": second,
        "third_seconds": third,
        "ttft_ms": 1e3 * ttft,
        "per_token_ms": 1e3 * per_token,
        "step_ms": 1e3 * step,
        "generate_host_ms_per_token": 1e3 * (per_token - step),
        "second_extra_seconds": second - ttft - (tokens - 1) * per_token,
        "first_extra_seconds": first - ttft - (tokens - 1) * per_token,
    }


def compiled(bench: Bench) -> Iterator[Row]:
    yield from generate(bench, "-compiled")
    batches = [int(batch) for batch in bench.arguments.batches.split(",")]
    yield from steps_of(bench, "kitty-compiled", batches[len(batches) // 2], ("lockstep", "staggered"))


def _ms(seconds: list[float]) -> list[float]:
    return [round(1e3 * value, 3) for value in seconds]


def _over(value: float, base: float) -> float | None:
    """None where nothing was counted: memory on the CPU."""
    return value / base if base and value else None


SECTIONS = {
    "prefill": prefill,
    "memory": memory,
    "generate": generate,
    "steps": steps,
    "recorded": recorded,
    "compiled": compiled,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=12, help="of the model, 36 are all of qwen3-8b")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--prompts", default="1024,8192,32768")
    parser.add_argument("--batches", default="1,8,32", help="rows of the section steps")
    parser.add_argument("--length", type=int, default=8192, help="columns before the first step")
    parser.add_argument("--steps", type=int, default=384)
    parser.add_argument("--recorded-steps", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of the section generate")
    parser.add_argument("--seconds", type=float, default=100, help="no row is begun later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    start = time.perf_counter()
    bench = Bench(parse())
    arguments, layers = bench.arguments, bench.model.config.num_hidden_layers
    result = f"latency_{arguments.model}_{layers}layers"
    found: list[Row] = []
    for section in arguments.sections.split(","):
        began = time.perf_counter()
        for row in SECTIONS[section](bench):
            now = time.perf_counter()
            found.append({"section": section, "layers": layers, **row, "seconds": round(now - began, 1)})
            began = now
            print(json.dumps(found[-1]), flush=True)
            write_result(result, found, arguments.out, model=arguments.model, layers=layers)
            if now - start > arguments.seconds:
                print(json.dumps({"section": section, "skipped": "what follows, the time is up"}), flush=True)
                return
    print(arguments.out / f"{result}.json")


if __name__ == "__main__":
    main()

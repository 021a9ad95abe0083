"""The commands ``export`` and ``run``: a model becomes a file, and a file generates without the model's code."""

import pathlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kitty_compile import export_formats
from kitty_compile.cli_options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    PresetOption,
    one_line_errors,
    print_json,
)
from kitty_compile.config import KittyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export(
    model: ModelArgument,
    out: Annotated[str, typer.Option(help="The file to write; a manifest comes beside it.")],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(export_formats.FORMATS)}.")] = "pt2",  # noqa: A002
    preset: PresetOption = "kitty",
    max_batch: Annotated[int, typer.Option(min=1, help="Rows that a call can bring.")] = 1,
    max_length: Annotated[int, typer.Option(min=16, help="Tokens that a row can come to hold.")] = 4096,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write a model as a program with the 2-bit cache inside, which runs without transformers."""
    from kitty_compile import loading

    loading.quiet_transformers()
    with one_line_errors():
        kind = export_formats.by_name(format)
        target = pathlib.Path(out)
        if not target.absolute().parent.is_dir():
            raise ValueError(f"--out must be a file in a folder that exists, got {out}")
        config = KittyConfig.preset(preset)
        _tell("loading the model")
        language_model = loading.load_model(model, dtype=dtype, device=device)
        options = export_formats.ExportOptions(config, max_batch, max_length, _source(model), _tell)
        manifest = kind.export(language_model, target, options)
        beside = export_formats.write_manifest(target, format, manifest)
    written = {"file": str(target), "file_bytes": target.stat().st_size, "manifest": str(beside)}
    if as_json:
        print_json({**written, **manifest})
        return
    for name, value in {**written, "state_bytes": manifest.get("state_bytes")}.items():
        if value is not None:
            typer.echo(f"{name:12} {value}")


def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="What `kitty-compile export` wrote.")],
    prompt: Annotated[str | None, typer.Option(help="The text to go on from, or to answer.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead, like 1,22,333.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Where the tokenizer is: a model folder, a .gguf file or a hub id; the exported model's."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt as it is, without the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Generate greedily from an exported file."""
    import torch

    with one_line_errors():
        if (prompt is None) == (prompt_ids is None):
            raise ValueError("exactly one of --prompt and --prompt-ids must be given")
        program = export_formats.load(pathlib.Path(file))
        manifest = export_formats.manifest_of(program)
        words = None if prompt is None else _tokenizer(tokenizer or manifest.get("source"))
        ids = _parse(prompt_ids) if words is None else _encode(words, str(prompt), raw=raw)
        _check_ids(ids, manifest.get("vocabulary"))
        start = time.perf_counter()
        tokens: Any = program.generate(
            torch.tensor([ids], device=manifest.get("device", "cpu")),
            max_new_tokens,
            eos_token_id=list(manifest.get("eos_token_ids", ())) or None,
        )
        seconds = time.perf_counter() - start
    new = tokens[0, len(ids) :].tolist()
    text = None if words is None else str(words.decode(new, skip_special_tokens=True))
    if as_json:
        print_json({"file": file, "tokens": new, "text": text, "seconds": seconds})
    else:
        typer.echo(",".join(map(str, new)) if text is None else text)


def _tell(line: str) -> None:
    typer.echo(line, err=True)
    sys.stderr.flush()


def _source(model: str) -> str:
    path = pathlib.Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def _parse(prompt_ids: str | None) -> list[int]:
    parts = (prompt_ids or "").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--prompt-ids must be token ids like 1,22,333, got {prompt_ids!r}")
    return [int(part) for part in parts]


def _check_ids(ids: list[int], vocabulary: int | None) -> None:
    if vocabulary is not None and max(ids) >= vocabulary:
        raise ValueError(f"--prompt-ids must be below the model's {vocabulary} tokens, got {max(ids)}")


def _tokenizer(source: str | None) -> "PreTrainedTokenizerBase":
    if not source:
        raise ValueError("--tokenizer must be given for a file that does not say where its model was")
    from kitty_compile import loading

    loading.quiet_transformers()
    return loading.load_tokenizer(source)


def _encode(tokenizer: "PreTrainedTokenizerBase", prompt: str, *, raw: bool) -> list[int]:
    uses_template = not raw and bool(tokenizer.chat_template)
    if uses_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids: Any = tokenizer(prompt, add_special_tokens=not uses_template)["input_ids"]
    if not ids:
        raise ValueError("the prompt must have at least one token, got none")
    return [int(token) for token in ids]

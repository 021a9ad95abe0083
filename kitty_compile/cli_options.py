"""What the commands share: arguments, errors in one line, JSON."""

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kitty_compile.config import KittyConfig

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a .gguf file or a hub id.")]
PresetOption = Annotated[str, typer.Option(help=f"One of {', '.join(KittyConfig.presets())}.")]
RandomWeightsOption = Annotated[
    bool, typer.Option("--random-weights", help="Build the model from its configuration alone, without its weights.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, float16, bfloat16 or float32.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def print_json(content: dict[str, Any]) -> None:
    """One object on the standard output."""
    typer.echo(json.dumps(content, indent=2, default=str))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends the command with one line and exit code 2."""
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        typer.echo(f"kitty-compile: {lines[0]}", err=True)
        raise typer.Exit(2) from error

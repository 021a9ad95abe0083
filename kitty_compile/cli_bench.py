"""The command ``bench``: the 2-bit cache against the model's own, measured on the user's machine and model."""

import platform
import sys
from typing import TYPE_CHECKING, Annotated, Any

import rich.box
import rich.console
import rich.table
import typer

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
    from transformers import PreTrainedModel

    from kitty_compile.benchmarking import Pair, Result, Row


def bench(
    model: ModelArgument,
    length: Annotated[
        int | None, typer.Option(help="Tokens a row; 8192 on a GPU, 1024 on the CPU, or what the model has.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Rows; may be given several times. 1 and 8 on a GPU, 1 on the CPU.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed decode steps of each cache, of which the median counts.")] = 16,
    seconds: Annotated[float, typer.Option(help="No batch but the first is begun that would end later.")] = 120.0,
    memory: Annotated[
        float | None, typer.Option(help="Bytes for caches, to count the largest batch; what is free on a GPU.")
    ] = None,
    preset: PresetOption = "kitty",
    random_weights: RandomWeightsOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure memory, prefill and decode of the 2-bit cache beside the model's own cache, and print the ratios."""
    from kitty_compile import benchmarking, loading

    loading.quiet_transformers()
    with one_line_errors():
        config = KittyConfig.preset(preset)
        settings = benchmarking.Settings(length, tuple(batch or ()), steps, seconds, memory)
        _tell("loading the model")
        load = loading.build_random_model if random_weights else loading.load_model
        language_model = load(model, dtype=dtype, device=device)
        result = benchmarking.run(language_model, config, settings, _tell)
    where = _environment(language_model)
    if as_json:
        about = {"source": model, "preset": preset, "random_weights": random_weights, **where}
        print_json({**about, **result.as_dict(), "conclusion": conclusion(result)})
        return
    console = rich.console.Console()
    console.print(table(result))
    for line in (*_notes(result, preset, where), conclusion(result)):
        typer.echo(line)


def table(result: "Result") -> rich.table.Table:
    """A block of lines for every batch."""
    length, prompt = result.settings.length, result.settings.prompt_tokens
    lines = rich.table.Table(box=rich.box.SIMPLE, title=f"{length} tokens a row", title_justify="left")
    for name in ("", "2-bit cache", "own cache", "ratio"):
        lines.add_column(name, justify="right" if name else "left")
    for row in result.rows:
        missing = "out of memory"
        figures = result.figures(row)
        lines.add_row(f"batch {row.batch}: cache", *_cells(figures["cache_bytes"], _size, missing))
        if row.own is not None and row.kitty is not None and result.itemsize != 2:
            lines.add_row("  if the own cache had 16 bits", *_cells(_at_16_bits(result, row), _size, missing))
        lines.add_row(
            f"  first token after {prompt} tokens", *_cells(figures["first_token_ms"], _milliseconds, missing)
        )
        lines.add_row("  decode step", *_cells(figures["step_ms"], _milliseconds, missing))
        lines.add_row("  decode, tokens/s", *_cells(figures["tokens_per_second"], "{:.1f}".format, missing))
        lines.add_section()
    for batch, reason in result.skipped.items():
        lines.add_row(f"batch {batch}: not run, {reason}")
    if result.largest_batch is not None and result.memory is not None:
        name = f"largest batch whose caches fit {_size(result.memory)}"
        lines.add_row(name, *_cells(result.largest_batch, "{:.0f}".format, "unknown"))
    return lines


def conclusion(result: "Result") -> str:
    """One line: the largest batch that both caches ran, and the best throughput where that was not theirs."""
    both = [row for row in result.rows if row.kitty is not None and row.own is not None]
    if not both:
        return "no batch ran on both caches: memory ran out"
    row = max(both, key=lambda row: row.batch)
    figures = result.figures(row)
    memory = figures["cache_bytes"] if result.itemsize == 2 else _at_16_bits(result, row)
    parts = [
        f"At {result.settings.length} tokens and batch {row.batch} 16-bit keys and values take {memory.ratio:.2f} times the "
        f"memory of the 2-bit cache, with which the first token comes {_speed(figures['first_token_ms'])} and a decode "
        f"step is {_speed(figures['step_ms'])}"
    ]
    best = result.best_throughput
    if best.ratio != figures["tokens_per_second"].ratio:
        parts.append(f"the most tokens/s of any batch that ran are {best.ratio:.2f} times those of the own cache")
    largest = result.largest_batch
    if largest is not None and largest.ratio is not None:
        parts.append(f"{largest.ratio:.2f} times as many rows fit as of the own cache")
    return "; ".join(parts) + "."


def _speed(pair: "Pair") -> str:
    return f"{pair.ratio:.2f} times as fast"


def _at_16_bits(result: "Result", row: "Row") -> "Pair":
    from kitty_compile.benchmarking import Pair

    assert row.kitty is not None
    assert row.own is not None
    return Pair(row.kitty.cache_bytes, result.at_16_bits(row.own.cache_bytes))


def _cells(pair: "Pair", form: Any, missing: str) -> tuple[str, str, str]:
    shown = [missing if value is None else form(value) for value in (pair.kitty, pair.own)]
    return shown[0], shown[1], "" if pair.ratio is None else f"{pair.ratio:.2f}x"


def _size(num_bytes: float) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:.2f} {unit}"
    return f"{num_bytes / 1e3:.2f} kB"


def _milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 1e3 else f"{value / 1e3:.2f} s"


def _notes(result: "Result", preset: str, where: dict[str, Any]) -> list[str]:
    from kitty_compile.benchmarking import OWN_CACHE

    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return [
        "A ratio above 1 is in favour of the 2-bit cache.",
        f"2-bit cache: preset {preset}, steps run {result.kitty_steps}. Own cache: {OWN_CACHE}.",
        f"{where['device']}, {where['dtype']}, {versions}",
    ]


def _environment(model: "PreTrainedModel") -> dict[str, Any]:
    import torch
    import transformers

    import kitty_compile

    is_cuda = model.device.type == "cuda"
    versions = {
        "kitty-compile": kitty_compile.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {
        "device": torch.cuda.get_device_name(model.device)
        if is_cuda
        else f"{model.device.type.upper()}, {torch.get_num_threads()} threads",
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions,
    }


def _tell(line: str) -> None:
    typer.echo(line, err=True)
    sys.stderr.flush()

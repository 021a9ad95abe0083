"""The formats that the command knows: how each is written, how its files are recognised, and how they run.

A new format is an entry in ``FORMATS``. Its module is imported when it is asked for.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kitty_compile.config import KittyConfig

if TYPE_CHECKING:
    import torch


class Runner(Protocol):
    """What a loaded file can do: ``Program`` is one. ``manifest`` is a dataclass or a dict."""

    manifest: Any

    def generate(
        self, input_ids: "torch.Tensor", max_new_tokens: int, *, eos_token_id: list[int] | None = None
    ) -> "torch.Tensor": ...


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """What the command was told. ``source``: where the model is. ``tell``: takes a line before each stage."""

    config: KittyConfig
    max_batch: int
    max_length: int
    source: str
    tell: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Format:
    """One kind of file.

    Attributes:
        export: (model, path, options) writes the file and returns its manifest as plain values.
        recognises: is this existing file one?
        load: the file, ready to run.
    """

    export: Callable[[Any, pathlib.Path, ExportOptions], dict[str, Any]]
    recognises: Callable[[pathlib.Path], bool]
    load: Callable[[pathlib.Path], Runner]


def _export_pt2(model: Any, path: pathlib.Path, options: ExportOptions) -> dict[str, Any]:
    from kitty_compile.exporting import export

    program = export(
        model,
        max_batch=options.max_batch,
        max_length=options.max_length,
        config=options.config,
        progress=options.tell,
    )
    program.manifest = dataclasses.replace(program.manifest, source=options.source)
    options.tell("writing the file")
    program.save(path)
    return dataclasses.asdict(program.manifest)


def _recognises_pt2(path: pathlib.Path) -> bool:
    from kitty_compile.program_file import is_program

    return is_program(path)


def _load_pt2(path: pathlib.Path) -> Runner:
    from kitty_compile.program_file import load

    return load(path)


def _export_aoti(model: Any, path: pathlib.Path, options: ExportOptions) -> dict[str, Any]:
    from kitty_compile.aot_package import aot_compile
    from kitty_compile.exporting import export

    program = export(
        model,
        max_batch=options.max_batch,
        max_length=options.max_length,
        config=options.config,
        progress=options.tell,
    )
    program.manifest = dataclasses.replace(program.manifest, source=options.source)
    options.tell("compiling native code, which takes minutes")
    aot_compile(program, path)
    return dataclasses.asdict(program.manifest)


def _recognises_aoti(path: pathlib.Path) -> bool:
    from kitty_compile.aot_package import is_package

    return is_package(path)


def _load_aoti(path: pathlib.Path) -> Runner:
    from kitty_compile.aot_package import load_package

    return load_package(path)


def _export_onnx(model: Any, path: pathlib.Path, options: ExportOptions) -> dict[str, Any]:
    import torch

    from kitty_compile.onnx_export import export_onnx

    options.tell("rows and length are free in ONNX: --max-batch and --max-length are not used")
    # transformers refuses to cast what came from a .gguf file, which it has unpacked long since.
    model = torch.nn.Module.float(model).cpu()
    manifest = export_onnx(model, path, config=options.config, source=options.source, progress=options.tell)
    return dataclasses.asdict(manifest)


def _recognises_onnx(path: pathlib.Path) -> bool:
    # Such a file has no mark of its own at its beginning; what else bears the name is refused when it is loaded.
    return path.suffix == ".onnx"


def _load_onnx(path: pathlib.Path) -> Runner:
    from kitty_compile.onnx_runner import load_onnx

    return load_onnx(path)


FORMATS: dict[str, Format] = {
    "pt2": Format(_export_pt2, _recognises_pt2, _load_pt2),
    "aoti": Format(_export_aoti, _recognises_aoti, _load_aoti),
    "onnx": Format(_export_onnx, _recognises_onnx, _load_onnx),
}


def by_name(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def load(path: pathlib.Path) -> Runner:
    """A file of any format, ready to run."""
    if not path.is_file():
        raise ValueError(f"FILE must be a file that exists, got {path}")
    for kind in FORMATS.values():
        if kind.recognises(path):
            return kind.load(path)
    raise ValueError(f"FILE must be a whole file that `kitty-compile export` wrote, got {path}")


def manifest_of(program: Runner) -> dict[str, Any]:
    manifest = program.manifest
    return dict(manifest) if isinstance(manifest, dict) else dataclasses.asdict(manifest)


def write_manifest(path: pathlib.Path, name: str, manifest: dict[str, Any]) -> pathlib.Path:
    """The manifest beside a file, for people and tools that do not open it."""
    beside = path.with_name(path.name + ".json")
    content = {"file_format": name, "file_bytes": path.stat().st_size, **manifest}
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return beside

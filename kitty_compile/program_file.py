"""Programs as files: a ``torch.export`` archive with a manifest in it.

The weights are written, and of the state its shapes alone, whatever the program holds. A file takes its name when it is
complete.

An archive can name code to be run while it is read, as every ``torch.export`` file can: load those that you trust.
"""

import contextlib
import os
import pathlib
import uuid
import zipfile
from collections.abc import Iterator

import torch
from torch.export import ExportedProgram

from kitty_compile.manifest import Manifest
from kitty_compile.program import Program, is_counter, is_state

Path = str | os.PathLike[str]
MANIFEST = "kitty_manifest.json"


def save_program(program: Program, path: Path) -> None:
    """``Program.save``."""
    target = pathlib.Path(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.pt2")
    try:
        with _empty_state(program.exported):
            torch.export.save(program.exported, partial, extra_files={MANIFEST: program.manifest.to_json()})
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _empty_state(exported: ExportedProgram) -> Iterator[None]:
    """The state is left out but for its counters, which are zero: a file must not tell what was generated before."""
    held = {name: tensor for name, tensor in exported.constants.items() if is_state(name)}
    try:
        for name, tensor in held.items():
            exported.constants[name] = torch.zeros_like(tensor) if is_counter(name) else tensor.new_empty(0)
        yield
    finally:
        exported.constants.update(held)


def _allocate_state(exported: ExportedProgram) -> None:
    """Zeros for what was left out, of the shapes that the graph has for it."""
    names = exported.graph_signature.inputs_to_buffers
    for node in exported.graph.find_nodes(op="placeholder"):
        name = names.get(node.name, "")
        if is_state(name) and not is_counter(name):
            shape, held = node.meta["val"].shape, exported.constants[name]
            exported.constants[name] = torch.zeros(shape, dtype=held.dtype, device=held.device)


def is_program(path: Path) -> bool:
    """Is a file a whole archive with the manifest of a program, of whatever version?"""
    try:
        return _manifest_text(path) is not None
    except (zipfile.BadZipFile, EOFError, UnicodeDecodeError):
        return False


def read_manifest(path: Path) -> Manifest:
    """The manifest of a saved program, without its weights.

    Raises:
        ValueError: the file is not whole, not a program's, or of another version.
    """
    try:
        text = _manifest_text(path)
    except (zipfile.BadZipFile, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"path must be a whole file that Program.save wrote, got {path}: {error}") from error
    if text is None:
        raise ValueError(f"path must be a file that Program.save wrote, got {path}, which has no manifest")
    return Manifest.from_json(text)


def _manifest_text(path: Path) -> str | None:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/{MANIFEST}")]
        return archive.read(names[0]).decode() if names else None


def load(path: Path) -> Program:
    """The program that ``Program.save`` wrote, with an empty state. transformers is not needed.

    Raises:
        ValueError: the file is not whole, not a program's, of another version, or for a device that is not here.
    """
    manifest = read_manifest(path)
    device = torch.device(manifest.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the program must be loaded where its device is, got one for {device} and no CUDA here")
    try:
        exported = torch.export.load(path)
    except (RuntimeError, KeyError, ValueError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"path must be a whole file that Program.save wrote, got {path}: {reason}") from error
    _allocate_state(exported)
    return Program(exported, manifest)

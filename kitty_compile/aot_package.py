"""AOTInductor packages: a program compiled to native code, that runs in any process with libtorch and nothing of this project.

A package holds weights, code and an empty state. It is loaded here with the methods of the program, or elsewhere by
``torch._inductor.aoti_load_package`` and its counterpart in C++; ``passes/lower_attend.py`` says what its inputs are.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import uuid
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torchgen.aoti.fallback_ops import inductor_fallback_ops  # type: ignore[import-untyped]

from kitty_compile.kernels.layout import PAGE_SIZE, RawLayout
from kitty_compile.manifest import Manifest
from kitty_compile.passes.lower_attend import PREFIX, lower_attend
from kitty_compile.program import Program, is_counter, is_state

Path = str | os.PathLike[str]
_MANIFEST, _COUNTERS = "kitty_manifest", "kitty_counters"
# Bytes, of inputs on CUDA.
_ALIGNMENT = 16
_OPTIONS = {
    # Pages must come out bit for bit as from every other backend: roundings to 16 bits are kept, quotients are IEEE's.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    # It takes a buffer that holds zeros now for a constant, whoever writes to it.
    "joint_graph_constant_folding": False,
}


def aot_compile(program: Program, path: Path) -> None:
    """Compile a program with AOTInductor, for the device that it is on; takes minutes and a C++ compiler.

    Args:
        program: stays as it is, with the state that it has.
        path: of the package, ending in .pt2. The file takes its name when it is complete.

    Raises:
        ValueError: ``path`` does not end in .pt2, or an operator of the program has no native code in this version of torch.
    """
    target = pathlib.Path(path)
    if target.suffix != ".pt2":
        raise ValueError(f"path must end in .pt2, got {target.name}")
    _check_operators(program.exported)
    lowered = lower_attend(program.exported, program.max_length)
    counters = _empty_state(lowered)
    metadata = {_MANIFEST: program.manifest.to_json(), _COUNTERS: json.dumps(counters)}
    options = {**_known_options(), "aot_inductor.metadata": metadata}
    partial = target.with_name(f"{target.stem}-{uuid.uuid4().hex}.pt2")
    try:
        with _own_folder():
            torch._inductor.aoti_compile_and_package(lowered, package_path=str(partial), inductor_configs=options)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _check_operators(exported: ExportedProgram) -> None:
    """Raise a ValueError for operators that only Python has, and for those that inductor calls by a missing function of C."""
    used = {node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    refused = sorted(str(target) for target in used if not _is_native(target))
    if refused:
        raise ValueError(
            f"the program must have operators with native code in torch {torch.__version__} alone to be compiled, got "
            f'{", ".join(refused)}; where they are those of experts, call model.set_experts_implementation("batched_mm") '
            "before export"
        )


def _is_native(target: torch._ops.OpOverload) -> bool:
    if str(target) == "aten._grouped_mm.default":
        # Lowered by itself, without a look at what there is in C; torch 2.12 is the first to have it.
        return str(target) in inductor_fallback_ops
    # Those of this project are replaced.
    return target.namespace in ("aten", "prims", "kitty")


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Within this context inductor's files of a package have a folder of their own, which then goes: they hold the weights. Its
    own choice is a folder for every graph, whose files two processes that compile the same model would overwrite meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix="kitty-") as folder,
        torch._inductor.config.patch({"aot_inductor.output_path": folder}),
    ):
        yield


def _known_options() -> dict[str, Any]:
    """Those of ``_OPTIONS`` that this version of inductor has."""
    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in _OPTIONS.items() if name in known}


def _empty_state(lowered: ExportedProgram) -> dict[str, list[Any]]:
    """Put zeros in the place of state, which would be compiled in as it stands. Returns shape and dtype of the counters."""
    counters: dict[str, list[Any]] = {}
    for held in (lowered.constants, lowered.state_dict):
        for name, tensor in held.items():
            own = name.removeprefix(PREFIX)
            if not isinstance(tensor, torch.Tensor) or not is_state(own):
                continue
            held[name] = torch.zeros_like(tensor)
            if is_counter(own):
                counters[own] = [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
    return counters


class PackagedProgram(Program):
    """A program that runs as native code; made by :func:`load_package`. Its methods are those of a program.

    Attributes:
        module: runs the package; its buffers are the counters that say how much of the state is in use.
    """

    def __init__(self, package: Any, manifest: Manifest, counters: dict[str, list[Any]]) -> None:
        self.manifest = manifest
        self.columns = self.batch = 0
        self._is_torn = False
        self.module = _Runner(package, counters, torch.device(manifest.device))
        raw = (manifest.config[name] for name in ("sink_length", "value_window", "rollback_window"))
        self._raw = RawLayout(*raw)

    def _arguments(self, ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        """The graph's inputs; the last two speak by their length alone."""
        counts = (max(self._raw.pages_for(self.columns), 1), -(-ids.shape[1] // PAGE_SIZE))
        pages = [torch.empty(count, dtype=torch.uint8, device=ids.device) for count in counts]
        return [_as_compiled(tensor) for tensor in (*super()._arguments(ids, mask), *pages)]

    def save(self, path: Path) -> None:
        """Raises a ValueError: a package is a file already."""
        raise ValueError(
            f"the program must come from export to be saved, got one that was loaded from a package: {path}"
        )


def _as_compiled(tensor: torch.Tensor) -> torch.Tensor:
    """With strides and alignment of the example, which native code takes for granted: it copies what is not aligned itself, and
    says so on stderr in every call."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


class _Runner(nn.Module):
    """Runs a package; it keeps the state, but for the counters, which are buffers here so that they can be set to zero."""

    def __init__(self, package: Any, counters: dict[str, list[Any]], device: torch.device) -> None:
        super().__init__()
        for name, (shape, dtype) in counters.items():
            self.register_buffer(name, torch.zeros(shape, dtype=getattr(torch, dtype), device=device), persistent=False)
        self.package = package
        managed = {f"{PREFIX}{name}": buffer for name, buffer in self.named_buffers()}
        package.load_constants(managed, check_full_update=False, user_managed=True)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.package(*inputs)


def load_package(path: Path) -> PackagedProgram:
    """The program of a package, with an empty state. Neither transformers nor an operator of this project is needed.

    A package is native code: load those that you trust.

    Raises:
        ValueError: the file is not whole, not a package of :func:`aot_compile`, of another version, or for a device that is
            not here.
    """
    metadata = _metadata(path)
    manifest = Manifest.from_json(metadata[_MANIFEST])
    if torch.device(manifest.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"the package must be loaded where its device is, got one for {manifest.device} and no CUDA here"
        )
    package = torch._inductor.aoti_load_package(os.fspath(path))
    return PackagedProgram(package, manifest, json.loads(metadata[_COUNTERS]))


def is_package(path: Path) -> bool:
    """Is it a whole file that :func:`aot_compile` wrote, of whatever version?"""
    try:
        return bool(_metadata(path))
    except (OSError, ValueError):
        return False


def _metadata(path: Path) -> dict[str, str]:
    """What was written into the package beside its code, read without running any of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("_metadata.json")]
            found = [json.loads(archive.read(name)) for name in names]
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"path must be a whole package that aot_compile wrote, got {path}: {error}") from error
    for metadata in found:
        if isinstance(metadata, dict) and {_MANIFEST, _COUNTERS} <= metadata.keys():
            return metadata
    raise ValueError(f"path must be a package that aot_compile wrote, got {path}")

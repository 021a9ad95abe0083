"""What a saved program says of itself."""

import dataclasses
import json
from typing import Any, cast

import torch
from torch import fx
from torch.export import ExportedProgram

import kitty_compile
from kitty_compile.config import KittyConfig
from kitty_compile.kernels.layout import LAYOUT_VERSION
from kitty_compile.passes.bind_served import PREFIX

FORMAT = "kitty_compile.program"
# Of the manifest and the names of buffers; what is in a page has LAYOUT_VERSION.
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Made by ``export``; a file's has the same fields as JSON.

    Attributes:
        model: class name. source: the folder or hub id it came from, "" when unknown.
        config: of the cache, the fields of ``KittyConfig``.
        inputs: kinds of the graph's inputs in order: "ids" i64 [b, T], "mask" bool [b, T], "positions" i64 [T].
        max_batch: rows of the state. is_batch_fixed: every call must bring that many. max_length: columns of a row.
        logits: "last" column or "all" of the call, "own" for what a module gives by itself.
        vocabulary: token ids are below it.
        state_bytes: of all buffers that calls change, and the page table. weight_bytes: of parameters and constants.
    """

    model: str
    config: dict[str, Any]
    inputs: tuple[str, ...]
    max_batch: int
    max_length: int
    logits: str
    device: str
    dtype: str
    state_bytes: int
    weight_bytes: int
    vocabulary: int
    versions: dict[str, str]
    is_batch_fixed: bool = False
    source: str = ""
    eos_token_ids: tuple[int, ...] = ()
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    layout_version: int = LAYOUT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Raises a ValueError in one line for what is no manifest of this version."""
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError("the manifest must be that of an exported program, got something else")
        wanted = {"format_version": FORMAT_VERSION, "layout_version": LAYOUT_VERSION}
        for name, version in wanted.items():
            if found.get(name) != version:
                raise ValueError(f"{name} of the program must be {version}, got {found.get(name)}: export it again")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(found) != names:
            raise ValueError(f"the manifest must have the fields {sorted(names)}, got {sorted(found)}")
        found |= {name: tuple(found[name]) for name in ("inputs", "eos_token_ids")}
        return cls(**found)


def make_manifest(
    exported: ExportedProgram, *, config: KittyConfig, versions: dict[str, str] | None = None, **fields: Any
) -> Manifest:
    """The manifest of a program; ``fields`` are those that its tensors do not tell."""
    tensors = {**exported.state_dict, **exported.constants}
    state = {name for name in tensors if name.startswith(PREFIX)}
    # Tied weights are one tensor under two names.
    weights = {tensor.data_ptr(): tensor for name, tensor in tensors.items() if name not in state}
    largest = max((tensor for tensor in weights.values() if tensor.is_floating_point()), key=torch.Tensor.numel)
    return Manifest(
        config=dataclasses.asdict(config) | {"skip_layers": list(config.skip_layers)},
        device=str(largest.device),
        dtype=str(largest.dtype).removeprefix("torch."),
        state_bytes=sum(tensors[name].nbytes for name in state),
        weight_bytes=sum(tensor.nbytes for tensor in weights.values()),
        vocabulary=_last_size(exported),
        versions={"kitty_compile": kitty_compile.__version__, "torch": torch.__version__, **(versions or {})},
        **fields,
    )


def _last_size(exported: ExportedProgram) -> int:
    """Of the first tensor that a call gives: its logits."""
    (results,) = exported.graph.output_node().args
    node = next(node for node in cast(Any, results) if isinstance(node, fx.Node))
    return int(node.meta["val"].shape[-1])

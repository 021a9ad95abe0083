"""What an ONNX file says of itself: in its metadata, and as JSON beside it."""

import dataclasses
import json
from typing import Any

from kitty_compile.kernels.layout import LAYOUT_VERSION

# The key of the metadata that holds all of it.
METADATA = "kitty_compile"
FORMAT = "kitty_compile.onnx"
# Of the manifest, the names of inputs and outputs and the order of bytes in a page.
FORMAT_VERSION = 1
TOKENS, LENGTH, LOGITS = "input_ids", "past_length", "logits"


@dataclasses.dataclass(frozen=True)
class OnnxManifest:
    """Made by ``export_onnx``. The graph takes all rows at one length: it knows no padding.

    Attributes:
        model: class name. source: the folder or hub id it came from, "" when unknown.
        config: of the cache, the fields of ``KittyConfig``.
        groups: per stacked state, name, layers, window of sliding layers, shapes of a head.
        states: names of the state's inputs without their prefix ``past_``; outputs have ``present_``.
        max_length: columns of a row that the model's positions allow.
        logits: "last" column or "all" of the call.
        state_bytes_per_token: of pages, in the long run. weight_bytes: of the constants in the file.
    """

    model: str
    source: str
    config: dict[str, Any]
    groups: list[dict[str, Any]]
    states: list[str]
    max_length: int
    logits: str
    dtype: str
    opset: int
    state_bytes_per_token: float
    weight_bytes: int
    versions: dict[str, str]
    eos_token_ids: list[int]
    device: str = "cpu"
    rows: str = "of equal length"
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    layout_version: int = LAYOUT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_metadata(cls, metadata: dict[str, str]) -> "OnnxManifest":
        """Raises a ValueError in one line for a file of something else or of another version."""
        try:
            found = json.loads(metadata.get(METADATA, ""))
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError("the file must be one that export_onnx wrote, got an ONNX file without its metadata")
        for name, version in {"format_version": FORMAT_VERSION, "layout_version": LAYOUT_VERSION}.items():
            if found.get(name) != version:
                raise ValueError(f"{name} of the file must be {version}, got {found.get(name)}: export it again")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(found) != names:
            raise ValueError(f"the manifest must have the fields {sorted(names)}, got {sorted(found)}")
        return cls(**found)

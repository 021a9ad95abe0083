"""``export_onnx``: a model as an ONNX file whose packed cache goes in and out of every call.

    inputs     input_ids i64 [batch, columns]    past_length i64 [1]       past_key_raw, past_key_low ...
    outputs    logits                            present_length i64 [1]    present_key_raw, present_key_low ...

A state tensor is [layers, batch, KV heads, ...]. One graph serves prompts and steps; pages are sealed inside of it. All rows of
a call have one length: nothing in the graph knows of padding. Operators are those of the ONNX standard alone.
"""

import dataclasses
import importlib.util
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

import kitty_compile
from kitty_compile import export_formats
from kitty_compile.api import is_pretrained
from kitty_compile.config import KittyConfig
from kitty_compile.functional_step import FunctionalStep, LayerGroup
from kitty_compile.onnx_checks import check_operators, check_program, check_updates
from kitty_compile.onnx_manifest import LENGTH, LOGITS, METADATA, TOKENS, OnnxManifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHECK_TOLERANCE = 2e-2
_PRESENT_LENGTH = "present_length"
# Sizes of the example that is traced: they and their differences are none that torch.export takes for a constant (0 and 1).
_BATCH, _COLUMNS, _WINDOW_TOKENS = 2, 5, 13
_SIZES = {"key_raw": 7, "value_raw": 11, "key": 6, "value": 3}


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    config: KittyConfig | str | None = None,
    logits: str = "last",
    source: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> OnnxManifest:
    """Write a causal language model as an ONNX file; the model is left as it was found.

    Weights of more than 2 GB come in a second file beside it. The manifest is in the file's metadata, and as JSON beside it.

    Args:
        model: a transformers causal language model in eval mode, float32 and on the CPU, with or without ``apply``. One with
            experts needs ``model.set_experts_implementation("batched_mm")``: the others have no form in ONNX.
        path: the file to write.
        config: a ``KittyConfig``, a preset's name, or None for what was applied, else "kitty".
        logits: "last" gives those of a call's last column, "all" those of every column.
        source: where the model is, for the manifest; what it was loaded from unless told.
        progress: called with a line before each stage.

    Returns:
        The manifest.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing.
        TypeError, ValueError: the model or an argument cannot be served, with the reason; no file is written.
    """
    target = pathlib.Path(path)
    _check_arguments(model, target, logits)
    from kitty_compile.huggingface.export_step import describe
    from kitty_compile.huggingface.functional_forward import capturing

    tell = progress or (lambda line: None)
    tell("running the model")
    with capturing(model, config, all_logits=logits == "all") as capture:  # type: ignore[arg-type]
        tell("tracing the model")
        exported = _trace(capture.step, model)
    tell("translating to ONNX (seconds for every layer)")
    program = _translate(exported, capture.step.groups)
    description = describe(model)  # type: ignore[arg-type]
    description["source"] = description["source"] if source is None else source
    versions = {"transformers": description.pop("transformers")}
    manifest = _manifest(
        program,
        capture.step.groups,
        capture.config,
        versions,
        **description,
        logits=logits,
        max_length=capture.max_length,
    )
    program.model.metadata_props[METADATA] = manifest.to_json()
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as folder:
        written = pathlib.Path(folder) / target.name
        tell("writing the file")
        program.save(written)
        tell("checking the file")
        _check_file(written)
        _compare(written, capture.calls, capture.expected)
        for file in sorted(written.parent.iterdir(), reverse=True):
            shutil.move(file, target.with_name(file.name))
    export_formats.write_manifest(target, "onnx", dataclasses.asdict(manifest))
    return manifest


def _check_arguments(model: nn.Module, target: pathlib.Path, logits: str) -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{' and '.join(missing)} must be installed to export ONNX: pip install 'kitty-compile[onnx]'"
        )
    if not isinstance(model, nn.Module) or not is_pretrained(model):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    if logits not in ("last", "all"):
        raise ValueError(f'logits must be "last" or "all", got {logits!r}')
    if not target.absolute().parent.is_dir():
        raise ValueError(f"path must be in a folder that exists, got {target}")
    parameter = next(model.parameters())
    if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
        raise ValueError(
            "model must be float32 and on the CPU to become ONNX (onnxruntime computes in nothing else there), got "
            f"{parameter.dtype} on {parameter.device}: load it with dtype=torch.float32"
        )


def trace(module: nn.Module, inputs: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """``torch.export.export`` for sizes that may come to be 0 or 1, as torch.onnx itself traces.

    Otherwise sizes that are computed from several free ones, like pages of K without one of V, are taken to be what they are in
    the example when that is 0 or 1: this is no error, and the graph is wrong for others.
    """
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)


def _trace(step: FunctionalStep, model: "nn.Module | PreTrainedModel") -> ExportedProgram:
    ids = torch.ones(_BATCH, _COLUMNS, dtype=torch.int64)
    states = [_example_state(group) for group in step.groups]
    # A state tensor is [layers, batch, KV heads, tokens or pages, ...].
    free = [{name: {1: Dim.DYNAMIC, 3: Dim.DYNAMIC} for name in state} for state in states]
    shapes: tuple[Any, ...] = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {}, free)
    try:
        return trace(step, (ids, torch.full((1,), 9, dtype=torch.int64), states), shapes)
    # What torch.export raises is of many kinds: all of them mean that the forward is not a graph.
    except (RuntimeError, TypeError, AssertionError, torch._dynamo.exc.TorchDynamoException) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ValueError(
            f"the forward of {type(model).__name__} must be one graph to be exported, but torch.export says: {lines[0]}"
        ) from error


def _example_state(group: LayerGroup) -> dict[str, torch.Tensor]:
    made = {}
    for name, tensor in group.empty_state(_BATCH, torch.float32).named().items():
        size = _WINDOW_TOKENS if group.window is not None else _SIZES.get(name, _SIZES[name.split("_")[0]])
        made[name] = tensor.new_zeros(*tensor.shape[:3], size, *tensor.shape[4:])
    return made


def _state_names(groups: Sequence[LayerGroup]) -> list[str]:
    names = []
    for group in groups:
        prefix = f"{group.name}_" if group.name else ""
        names += [prefix + name for name in group.empty_state(1, torch.float32).named()]
    return names


def _translate(exported: ExportedProgram, groups: Sequence[LayerGroup]) -> Any:
    names = _state_names(groups)
    inputs = [TOKENS, LENGTH, *(f"past_{name}" for name in names)]
    outputs = [LOGITS, _PRESENT_LENGTH, *(f"present_{name}" for name in names)]
    try:
        program = torch.onnx.export(
            exported, dynamo=True, verbose=False, input_names=inputs, output_names=outputs, optimize=True
        )
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(f"every operator must have a form in ONNX, but torch.onnx says: {_root(error)}") from error
    assert program is not None
    assert program.exported_program is not None
    check_program(program.exported_program)
    _name_axes(program, groups)
    check_operators(program.model.graph)
    check_updates(program.model.graph, TOKENS, outputs[2:], counters=[_PRESENT_LENGTH])
    return program


def _root(error: BaseException) -> str:
    """The first line of what an error came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]


def _name_axes(program: Any, groups: Sequence[LayerGroup]) -> None:
    """Readable names for the sizes that may vary; a ValueError when one may not."""
    sizes = {value.name: [getattr(size, "value", size) for size in value.shape] for value in program.model.graph.inputs}
    mapping = {sizes[TOKENS][0]: "batch", sizes[TOKENS][1]: "columns"}
    for name in _state_names(groups):
        rows, length = sizes[f"past_{name}"][1], sizes[f"past_{name}"][3]
        part, _, kind = name.rpartition("_")
        mapping.setdefault(rows, "batch")
        mapping.setdefault(length, f"{part}_tokens" if kind == "raw" else f"{part}_pages")
    fixed = [size for size in mapping if not isinstance(size, str)]
    if fixed:
        raise ValueError(f"the model must work for any batch and length, but its graph takes {fixed} alone")
    program.rename_axes(mapping)


def _manifest(
    program: Any, groups: Sequence[LayerGroup], config: KittyConfig, versions: dict[str, str], **fields: Any
) -> OnnxManifest:
    import onnx
    import onnxruntime

    layouts = [(group, group.parameters.page_layout(torch.float32)) for group in groups if group.window is None]
    weights = [value.const_value for value in program.model.graph.initializers.values()]
    return OnnxManifest(
        config=dataclasses.asdict(config),
        groups=[
            {
                "name": group.name,
                "layers": list(group.layers),
                "window": group.window,
                "num_kv_heads": group.parameters.num_kv_heads,
                "key_dim": group.parameters.key_dim,
                "value_dim": group.parameters.value_dim,
            }
            for group in groups
        ],
        states=_state_names(groups),
        dtype="float32",
        opset=program.model.opset_imports[""],
        state_bytes_per_token=sum(len(group.layers) * layout.bytes_per_token for group, layout in layouts),
        weight_bytes=sum(tensor.nbytes for tensor in weights if tensor is not None),
        versions={
            "kitty_compile": kitty_compile.__version__,
            "torch": torch.__version__,
            "onnx": onnx.__version__,
            "onnxruntime": onnxruntime.__version__,
            **versions,
        },
        **fields,
    )


def _check_file(path: pathlib.Path) -> None:
    import onnx

    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(
            f"the graph must be valid ONNX, but onnx.checker says: {str(error).splitlines()[0]}"
        ) from error


def _compare(path: pathlib.Path, calls: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """The file must give what the model gives, also after it has sealed pages."""
    from kitty_compile.onnx_runner import load_onnx

    runner = load_onnx(path)
    for ids, wanted in zip(calls, expected, strict=True):
        error = float((runner(ids) - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-6)
        if not error < _CHECK_TOLERANCE:
            raise ValueError(f"the file must give what the model gives, but its logits differ by {error:.1%}")

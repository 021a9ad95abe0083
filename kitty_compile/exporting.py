"""``export``: a model as a ``torch.export`` program with its packed cache in mutable buffers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kitty_compile.api import is_pretrained
from kitty_compile.config import KittyConfig
from kitty_compile.export_module import export_module
from kitty_compile.manifest import make_manifest
from kitty_compile.passes.bind_served import bind_served
from kitty_compile.program import Program, retrace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of the logits' norm: models of 16 bits round differently in another order of the same sums.
_TOLERANCES = {torch.float32: 2e-2}
_COARSE_TOLERANCE = 1e-1
_MIN_LENGTH = 16


def export(
    model: nn.Module,
    *,
    max_batch: int = 1,
    max_length: int = 4096,
    config: KittyConfig | str | None = None,
    logits: str = "last",
    example_inputs: Sequence[Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Program:
    """Make a program of a causal language model: one graph for prompts and steps, for 1 to ``max_batch`` rows.

    The model is left as it was found; the program shares its weights.

    Args:
        model: a transformers causal language model in eval mode, with or without ``apply``; or any module that ``apply``
            takes with example_inputs.
        max_batch: rows that a call can bring. max_length: columns that a row can come to hold.
        config: a ``KittyConfig``, a preset's name, or None for what was applied, else "kitty".
        logits: "last" gives those of a call's last column, "all" those of every column; other modules give their own.
        example_inputs: for modules that are not from transformers: token ids i64 [batch, columns] of at least three columns,
            and positions i64 [columns] where the forward takes them. The batch then stays as it is here.
        progress: called with a line before each stage.

    Raises:
        TypeError, ValueError: the model or an argument cannot be served, with the reason.
    """
    _check_arguments(model, max_batch, max_length, logits)
    if is_pretrained(model) != (example_inputs is None):
        raise TypeError(
            "example_inputs must be given for modules that are not a transformers PreTrainedModel, and for no others, got "
            f"a {type(model).__name__} {'without' if example_inputs is None else 'with'}"
        )
    tell = progress or (lambda line: None)
    if example_inputs is not None:
        return export_module(model, example_inputs, max_batch, max_length, config, tell)
    return _export_pretrained(model, max_batch, max_length, config, logits, tell)  # type: ignore[arg-type]


def _check_arguments(model: object, max_batch: object, max_length: object, logits: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, number, least in (("max_batch", max_batch, 1), ("max_length", max_length, _MIN_LENGTH)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {number!r}")
    if logits not in ("last", "all"):
        raise ValueError(f'logits must be "last" or "all", got {logits!r}')


def _export_pretrained(
    model: "PreTrainedModel",
    max_batch: int,
    max_length: int,
    config: KittyConfig | str | None,
    logits: str,
    tell: Callable[[str], None],
) -> Program:
    from kitty_compile.huggingface import export_step

    tell("tracing the model")
    found = export_step.capture(model, config, max_batch=max_batch, max_length=max_length, all_logits=logits == "all")
    tell("binding attention to buffers")
    mask = found.gm.graph.find_nodes(op="placeholder")[1]
    windows = [plan.window for plan in found.plans]
    bind_served(found.gm, windows, found.config.parameters, mask=mask, rows=max_batch, max_length=max_length)
    exported = retrace(found.gm, found.inputs, found.dynamic_shapes)
    description = export_step.describe(model)
    versions = {"transformers": description.pop("transformers")}
    manifest = make_manifest(
        exported,
        config=found.config,
        inputs=("ids", "mask"),
        max_batch=max_batch,
        max_length=max_length,
        logits=logits,
        versions=versions,
        **description,
    )
    program = Program(exported, manifest)
    tell("comparing with the model")
    _compare(program, export_step.example_calls(model, max_batch), found.expected)
    return program


def _compare(
    program: Program, calls: list[tuple[torch.Tensor, torch.Tensor]], expected: tuple[torch.Tensor, ...]
) -> None:
    for (ids, mask), wanted in zip(calls, expected, strict=True):
        shown = mask[:, -wanted.shape[1] :]
        found, wanted = program(ids, mask)[shown], wanted[shown]
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-6))
        if not error < _TOLERANCES.get(wanted.dtype, _COARSE_TOLERANCE):
            raise ValueError(f"the program must give what the model gives, but its logits differ by {error:.1%}")
    program.reset()

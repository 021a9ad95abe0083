"""Programs of modules that are not from transformers, made from what ``apply`` makes of them (``plain_module.py``)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from kitty_compile.config import KittyConfig
from kitty_compile.manifest import make_manifest
from kitty_compile.plain_module import attach_cache
from kitty_compile.program import Program, retrace


def export_module(
    module: nn.Module,
    example_inputs: Sequence[Any],
    max_batch: int,
    max_length: int,
    config: KittyConfig | str | None,
    tell: Callable[[str], None],
) -> Program:
    """``export`` of a captured module, whose batch stays that of ``example_inputs``.

    Raises:
        TypeError, ValueError: the inputs are others than token ids and positions, or ``apply`` would refuse the module.
    """
    # Contiguous, or sizes that happen to equal a stride would be guarded.
    inputs = tuple(value.contiguous() if isinstance(value, torch.Tensor) else value for value in example_inputs)
    kinds = _kinds(inputs)
    rows = inputs[kinds.index("ids")].shape[0]
    if max_batch not in (1, rows):
        raise ValueError(
            f"max_batch must be the {rows} rows of example_inputs, which stay as they are, got {max_batch}"
        )
    tell("tracing the module and giving it a cache")
    cached = attach_cache(module, inputs, config, max_length=max_length)
    dynamic = torch.export.Dim("columns", min=1, max=max_length)
    tell("making the program")
    gm = cached.graph_module
    exported = retrace(gm, inputs, tuple({1: dynamic} if kind == "ids" else {0: dynamic} for kind in kinds))
    manifest = make_manifest(
        exported,
        model=type(module).__name__,
        config=cached.config,
        inputs=kinds,
        max_batch=rows,
        is_batch_fixed=True,
        max_length=max_length,
        logits="own",
    )
    return Program(exported, manifest)


def _kinds(inputs: tuple[Any, ...]) -> tuple[str, ...]:
    kinds = tuple(_kind(value) for value in inputs)
    if kinds not in (("ids",), ("ids", "positions"), ("positions", "ids")):
        got = ", ".join(map(_describe, inputs))
        raise TypeError(
            f"example_inputs must be token ids i64 [batch, columns], or these and positions [columns], got {got}"
        )
    return kinds


def _kind(value: object) -> str:
    is_integer = isinstance(value, torch.Tensor) and value.dtype == torch.int64
    return {1: "positions", 2: "ids"}.get(value.dim(), "other") if is_integer else "other"  # type: ignore[attr-defined]


def _describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__

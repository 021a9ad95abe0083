"""Programs with TensorRT engines in them: kitty operators stay in torch, what is between them compiles.

Needs the extra ``tensorrt`` and a CUDA device. This has not been run: see docs/export.md.
"""

import importlib
from typing import Any

import torch
from torch import nn

from kitty_compile.program import Program, is_counter

# A fragment between two kitty operators is worth an engine when it has this many operators.
_MIN_BLOCK_SIZE = 3
_KEPT = (torch.ops.kitty.attend.default, torch.ops.kitty.attend_window.default)


def to_tensorrt(program: Program, **options: Any) -> nn.Module:
    """Compile a program on a CUDA device with TensorRT. It shares the program's state; the program runs it from then on, with
    the same ``generate`` and ``reset``.

    Args:
        program: what ``kitty_compile.export`` gave for a model on a CUDA device.
        options: for ``torch_tensorrt.dynamo.compile``, before those that are set here.

    Returns:
        The compiled module, which is the program's ``module`` now.

    Raises:
        ImportError: torch-tensorrt is not installed.
        ValueError: the program is not on a CUDA device.
    """
    if program.device.type != "cuda":
        raise ValueError(f"program must be on a CUDA device for TensorRT, got one on {program.device}")
    compiler = _torch_tensorrt()
    given = {
        "torch_executed_ops": set(_KEPT),
        "min_block_size": _MIN_BLOCK_SIZE,
        # Types are the model's; positions are 64-bit integers.
        "use_explicit_typing": True,
        "truncate_double": True,
    }
    inputs = [_input(compiler, kind, program) for kind in program.manifest.inputs]
    module: nn.Module = compiler.dynamo.compile(program.exported, arg_inputs=inputs, **{**given, **options})
    # reset() sets counters to zero by their names.
    missing = {name for name, _ in program.module.named_buffers() if is_counter(name)} - dict(
        module.named_buffers()
    ).keys()
    if missing:
        raise ValueError(
            f"the compiled module must have the program's counters as buffers, got none named {min(missing)}"
        )
    program.reset()
    program.module = module
    return module


def _torch_tensorrt() -> Any:
    try:
        return importlib.import_module("torch_tensorrt")
    except ImportError as error:
        raise ImportError(
            "to_tensorrt needs torch-tensorrt: install kitty_compile's extra, pip install 'kitty-compile[tensorrt]'"
        ) from error


def _input(compiler: Any, kind: str, program: Program) -> Any:
    """The sizes that an input may have, and those that engines are tuned for: a decode step of all rows."""
    dtypes = {"ids": torch.int64, "mask": torch.bool}
    if kind not in dtypes:
        raise ValueError(f"inputs of the program must be ids and mask for TensorRT, got {kind!r}")
    most = (program.max_batch, program.max_length)
    least = (program.max_batch if program.manifest.is_batch_fixed else 1, 1)
    return compiler.Input(min_shape=least, opt_shape=(program.max_batch, 1), max_shape=most, dtype=dtypes[kind])

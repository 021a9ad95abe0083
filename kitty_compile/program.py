"""A program: a model's graph with its packed cache in buffers, which needs neither the model's code nor its library.

Calls take the next columns of every row. The host counts the columns; tokens per row live on the device, in the buffers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from kitty_compile.greedy import generate_greedily
from kitty_compile.kernels import ops, serving  # noqa: F401 (the operators that a loaded graph calls)
from kitty_compile.manifest import Manifest
from kitty_compile.passes.bind_served import PREFIX, TABLE


class Program:
    """What ``kitty_compile.export`` makes and ``kitty_compile.load`` reads.

    Attributes:
        exported: the ``torch.export`` program. Its state is in non-persistent buffers named ``kitty_...``.
        manifest: what it was made from, and its sizes.
        columns: columns that the state holds. batch: rows that it holds them of, 0 when it is empty.
    """

    def __init__(self, exported: ExportedProgram, manifest: Manifest) -> None:
        self.exported, self.manifest = exported, manifest
        # The checks below say more than the guards of torch.export.
        self.module: nn.Module = exported.module(check_guards=False)
        self.columns = self.batch = 0
        self._is_torn = False

    @property
    def max_batch(self) -> int:
        return self.manifest.max_batch

    @property
    def max_length(self) -> int:
        return self.manifest.max_length

    @property
    def device(self) -> torch.device:
        return torch.device(self.manifest.device)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of the next columns of every row, after which the state holds their tokens.

        Args:
            input_ids: i64 [b, T].
            attention_mask: [b, T], nonzero where the call's own columns hold a token; None: everywhere.

        Returns:
            [b, 1, vocabulary] of the last column, or [b, T, vocabulary], as it was exported. Of a module that returns more,
            the first tensor. Those of a column without a token mean nothing.

        Raises:
            ValueError: the shapes do not fit, there is no room, or an earlier call failed half way.
        """
        self._check_ids(input_ids)
        self.check_room(input_ids.shape[1])
        arguments = self._arguments(input_ids, attention_mask)
        self._is_torn = True
        with torch.no_grad():
            logits: torch.Tensor = pytree.tree_leaves(self.module(*arguments))[0]
        self._is_torn = False
        self.batch, self.columns = input_ids.shape[0], self.columns + input_ids.shape[1]
        return logits

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        attention_mask: torch.Tensor | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
    ) -> torch.Tensor:
        """Greedy generation from an empty state, which is reset first.

        Args:
            input_ids: i64 [b, T]. attention_mask: [b, T], nonzero where a column holds a token; the last must.
            eos_token_id: a row that has brought one (of them) is done; the result ends when all are.
            pad_token_id: what stands in a row that is done; the (first) end token unless told.

        Returns:
            i64 [b, T + new], the prompt included.

        Raises:
            ValueError: as a call does, before anything changes.
        """
        self._check_ids(input_ids, is_first=True)
        return generate_greedily(self, input_ids, max_new_tokens, attention_mask, eos_token_id, pad_token_id)

    def reset(self) -> None:
        """Forget all tokens."""
        for name, buffer in self.module.named_buffers():
            if is_counter(name):
                buffer.zero_()
        self.columns = self.batch = 0
        self._is_torn = False

    def save(self, path: Any) -> None:
        """Write the program with an empty state to a file (usually .pt2); :func:`kitty_compile.load` reads it."""
        from kitty_compile.program_file import save_program

        save_program(self, path)

    def check_room(self, num_columns: int) -> None:
        """Raise a ValueError unless the state can take ``num_columns`` more columns."""
        if self._is_torn:
            raise ValueError("the state must be whole, but a call failed half way: call reset()")
        if self.columns + num_columns > self.max_length:
            raise ValueError(
                f"columns must not exceed max_length={self.max_length}, got {self.columns} + {num_columns}"
            )

    def _check_ids(self, ids: object, *, is_first: bool = False) -> None:
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
            got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise TypeError(f"input_ids must be an int64 tensor [batch, columns], got {got}")
        rows, columns = ids.shape
        if columns < 1:
            raise ValueError("input_ids must have at least one column, got none")
        if self.columns and not is_first and rows != self.batch:
            raise ValueError(f"batch must stay {self.batch} while the state holds tokens, got {rows}: call reset()")
        least = self.max_batch if self.manifest.is_batch_fixed else 1
        if not least <= rows <= self.max_batch:
            raise ValueError(f"batch must be from {least} to max_batch={self.max_batch}, got {rows}")
        if ids.device != self.device:
            raise ValueError(f"input_ids must be on {self.device}, where the program is, got {ids.device}")

    def _arguments(self, ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        """The graph's inputs, by the kinds that the manifest names."""
        made: list[torch.Tensor] = []
        for kind in self.manifest.inputs:
            if kind == "ids":
                made.append(ids)
            elif kind == "mask":
                made.append(_own_mask(ids, mask))
            else:
                made.append(torch.arange(self.columns, self.columns + ids.shape[1], device=ids.device))
        if mask is not None and "mask" not in self.manifest.inputs and not bool(mask.all()):
            raise ValueError("attention_mask must be all ones for a program without a mask, got pads")
        return made


def retrace(gm: fx.GraphModule, inputs: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """The ``torch.export`` program of a rewritten graph: its signature names the new buffers."""
    with torch.no_grad():
        return torch.export.export(gm, inputs, dynamic_shapes=dynamic_shapes, strict=False)


def _own_mask(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must have the shape of input_ids {list(ids.shape)}, got {got}")
    return mask.to(ids.device, torch.bool)


def is_state(name: str) -> bool:
    """Does a buffer hold what calls leave behind?"""
    return name.startswith(PREFIX) and name != TABLE


def is_counter(name: str) -> bool:
    """Is it one of the small ones that say what the rest holds? Zero means empty."""
    return is_state(name) and name.endswith(("_tokens", "_columns", "_lengths", "_high_water", "_position"))

"""A call of ``attend`` on CUDA, and what its launches have in common."""

from typing import Any, NamedTuple

import torch
import triton

from kitty_compile.kernels import launch_plan
from kitty_compile.kernels.layout import LayerTensors, PageLayout, RawLayout
from kitty_compile.kernels.merge_splits import LOG2_E, merge_splits_kernel
from kitty_compile.kernels.triton_update import dense_channels, is_short, require_half_precision

_MERGE_ELEMENTS = 4096
_MERGED_SPLITS = 128
_DEALT_SPLITS = 16


class Call(NamedTuple):
    """The arguments of one call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    columns: torch.Tensor | None
    counts: torch.Tensor | None
    state: LayerTensors
    layout: PageLayout
    raw: RawLayout
    score_factors: tuple[float, float]
    sinks: torch.Tensor | None
    is_empty: bool

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        columns: torch.Tensor | None,
        counts: torch.Tensor | None,
        state: LayerTensors,
        layout: PageLayout,
        raw: RawLayout,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        is_empty: bool,
    ) -> "Call":
        require_half_precision(query)
        return cls(
            dense_channels(query),
            dense_channels(key),
            dense_channels(value),
            None if columns is None else columns.contiguous(),
            counts,
            state,
            layout,
            raw,
            _score_factors(scale, softcap),
            sinks,
            is_empty,
        )

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def heads(self) -> int:
        """KV heads over all rows."""
        return self.key.shape[0] * self.key.shape[1]

    @property
    def max_pages(self) -> int:
        return 0 if self.is_empty else self.state.page_table.shape[1]

    @property
    def is_step(self) -> bool:
        """Is it a decode step, which is appended before it attends?"""
        is_step = launch_plan.is_step(self.query.shape[2], self.group, self.raw)
        return self.max_pages > 0 and is_step and is_short(self.key, self.state, self.raw)

    def new_output(self) -> torch.Tensor:
        return self.query.new_empty((*self.query.shape[:3], self.layout.value_dim))

    def new_parts(self, num_columns: int, num_parts: int) -> "Parts":
        rows = self.query.shape[0] * self.query.shape[1] * num_columns
        partial = self.query.new_empty((rows, num_parts, self.layout.value_dim), dtype=torch.float32)
        return Parts(partial, self.query.new_empty((rows, num_parts), dtype=torch.float32))

    def constants(self) -> dict[str, Any]:
        """What all attention kernels take."""
        return {
            "GROUP": self.group,
            "NUM_HEADS": self.key.shape[1],
            "SINK": self.raw.sink_length,
            "HAS_SOFTCAP": self.score_factors[1] > 0,
        }


class Parts(NamedTuple):
    """Partial outputs, to be merged."""

    partial: torch.Tensor  # fp32 [B * Hq * T, parts, Dv]
    lse: torch.Tensor  # fp32 [B * Hq * T, parts]


class Splits(NamedTuple):
    """Partial outputs over packed pages, ``number`` for a row of the batch on average."""

    number: int
    partial: torch.Tensor  # fp32 [B * number, Hq * T, Dv]
    lse: torch.Tensor  # fp32 [B * number, Hq * T]
    dealt: torch.Tensor | None  # i32 [2, B], first split of a row and their number; None: all have the same


def merge(
    parts: Parts,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    splits: Splits | None = None,
    advanced: tuple[LayerTensors, torch.Tensor | None, int] | None = None,
) -> None:
    """``advanced``: the state whose lengths grow at the end of it, by counts or else by a number of tokens."""
    state, counts, num_tokens = advanced or (None, None, 0)
    number, *split_tensors = splits or Splits(0, *parts, None)
    batch, num_heads, num_columns, head_dim = output.shape
    num_rows, num_parts = parts.lse.shape
    # A row may have been dealt many more splits than there are on average.
    most = max(number, _DEALT_SPLITS) if split_tensors[-1] is not None else number
    width, split_width = triton.next_power_of_2(num_parts), min(triton.next_power_of_2(most), _MERGED_SPLITS)
    widest = max(width, split_width)
    channels = min(triton.next_power_of_2(head_dim), max(16, _MERGE_ELEMENTS // widest))
    rows = max(1, min(_MERGE_ELEMENTS // (widest * channels), num_rows // 512))
    rows = 1 << (rows.bit_length() - 1)
    merge_splits_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(head_dim, channels))](
        *parts, *split_tensors, output, sinks, state and state.lengths, state and state.high_water, counts,
        *output.stride()[:3], num_rows, num_columns, num_parts, number, num_tokens, batch,
        QUERY_HEADS=num_heads, VALUE_DIM=head_dim, LARGEST=torch.finfo(output.dtype).max,
        PARTS=width, SPLITS=split_width if number else 0, ROWS=rows, CHANNELS=channels,
        num_warps=4 if rows * widest * channels >= 2048 else 1,
    )  # fmt: skip


def _score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What kernels multiply q . k by, and the cap: scores are in units of log2."""
    log2_e = LOG2_E.value
    return (scale / softcap, softcap * log2_e) if softcap > 0 else (scale * log2_e, 0.0)

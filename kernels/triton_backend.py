"""The CUDA backend of ``ops``: launches the Triton kernels. Nothing here reads device memory or waits for it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton

from kitty_compile.kernels import reference
from kitty_compile.kernels.append import advance_kernel, append_kernel
from kitty_compile.kernels.decode_attention import attend_pages_kernel
from kitty_compile.kernels.dequantize_pages import copy_pages_kernel, dequantize_keys_kernel, dequantize_values_kernel
from kitty_compile.kernels.launch_plan import (
    ProgramShape,
    block_sizes,
    choose_splits,
    key_constants,
    num_processors,
    page_constants,
    program_shape,
    value_constants,
)
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout, RawLayout
from kitty_compile.kernels.merge_splits import LOG2_E, merge_splits_kernel
from kitty_compile.kernels.prefill_attention import prefill_pages_kernel
from kitty_compile.kernels.residue_attention import attend_residue_kernel
from kitty_compile.kernels.seal_page import seal_pages_kernel

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_APPEND_TOKENS = 16
_MAX_APPENDED = 32
_ADVANCE_ROWS = 128
_COPY_BLOCK = 4096
_MERGE_ELEMENTS = 4096
# Raw tokens of a program in decode.
_PART_TOKENS = 64
# Registers allow this many warps of the page kernel on a multiprocessor.
_WARPS_PER_PROCESSOR = 8
# Query columns are taken in chunks whose partial outputs stay under this many bytes.
_MAX_PARTIAL_BYTES = 1 << 28
_CHUNK_COLUMNS = 64


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    is_empty: bool,
) -> torch.Tensor:
    """See ``attend_torch.attend``."""
    _require_half_precision(query)
    if is_empty and columns is None and counts is None and softcap == 0 and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        ).contiguous()
    query, key, value = _dense_channels(query), _dense_channels(key), _dense_channels(value)
    columns = None if columns is None else columns.contiguous()
    output = query.new_empty((*query.shape[:3], value.shape[3]))
    call = _Call(
        query, key, value, columns, counts, state, layout, raw, _score_factors(scale, softcap), sinks, is_empty
    )
    with torch.cuda.device_of(query):
        for first, last in call.chunks():
            call.attend_columns(first, last, output)
    return output


def _score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What kernels multiply q . k by, and the cap: scores are in units of log2."""
    log2_e = LOG2_E.value
    return (scale / softcap, softcap * log2_e) if softcap > 0 else (scale * log2_e, 0.0)


class _Call(NamedTuple):
    """One call of ``attend``: its arguments, and the launches for a chunk of its columns."""

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

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def has_pages(self) -> bool:
        return not self.is_empty and self.state.page_table.shape[1] > 0

    def chunks(self) -> Iterator[tuple[int, int]]:
        batch, num_heads, num_columns, _ = self.query.shape
        column_bytes = 4 * batch * num_heads * self.layout.value_dim * 4
        step = max(_MAX_PARTIAL_BYTES // column_bytes // _CHUNK_COLUMNS, 1) * _CHUNK_COLUMNS
        for first in range(0, num_columns, step):
            yield first, min(first + step, num_columns)

    def attend_columns(self, first: int, last: int, output: torch.Tensor) -> None:
        batch, num_heads, _, _ = self.query.shape
        num_columns = last - first
        shape = program_shape(num_columns * self.group, self.layout)
        splits = self.num_splits(shape, num_columns)
        mixed = self.raw.max_mixed_pages if self.has_pages else 0
        raw_parts = self.num_raw_parts(shape, num_columns)
        parts = splits + raw_parts + mixed
        rows = batch * num_heads * num_columns
        partial = self.query.new_empty((rows, parts, self.layout.value_dim), dtype=torch.float32)
        lse = self.query.new_empty((rows, parts), dtype=torch.float32)
        query = self.query[:, :, first:last]
        if splits:
            self.launch_pages(query, partial, lse, shape, 0, splits, raw_values=False)
        self.launch_residue(query, partial, lse, shape, first, splits, raw_parts)
        if mixed and not shape.is_decode:
            self.launch_pages(query, partial, lse, shape, splits + raw_parts, mixed, raw_values=True)
        _merge(partial, lse, self.sinks, output[:, :, first:last])

    def num_splits(self, shape: ProgramShape, num_columns: int) -> int:
        if not self.has_pages:
            return 0
        batch, num_heads = self.key.shape[:2]
        programs = batch * num_heads * triton.cdiv(num_columns * self.group, shape.columns)
        room = num_processors(self.query.device) * _WARPS_PER_PROCESSOR // shape.warps
        return choose_splits(programs, self.state.page_table.shape[1], room)

    def num_raw_parts(self, shape: ProgramShape, num_columns: int) -> int:
        """Raw tokens are dealt to several programs where few rows would leave the device idle."""
        batch, num_heads = self.key.shape[:2]
        if not shape.is_decode or batch * num_heads > 4 * num_processors(self.query.device):
            return 1
        most = num_columns if self.is_empty else self.raw.sink_length + PAGE_SIZE - 1 + num_columns
        return int(triton.cdiv(most, _PART_TOKENS))

    def launch_pages(
        self,
        query: torch.Tensor,
        partial: torch.Tensor,
        lse: torch.Tensor,
        shape: ProgramShape,
        first_part: int,
        splits: int,
        *,
        raw_values: bool,
    ) -> None:
        batch, num_heads = self.key.shape[:2]
        blocks = triton.cdiv(query.shape[2] * self.group, shape.columns)
        constants = {**self.common_constants(), **page_constants(self.layout)}
        if shape.is_decode:
            has_raw_pages = raw_values or self.layout.key.is_raw or self.layout.value.is_raw
            kernel, stages = attend_pages_kernel, 1 if has_raw_pages else shape.stages
        else:
            kernel, stages = prefill_pages_kernel, shape.stages
            constants["NUM_BOOSTED"] = self.layout.key.num_boosted
        kernel[(splits * blocks, num_heads, batch)](
            query, self.state.key_pages, self.state.value_pages, self.state.raw_value, self.state.page_table,
            self.state.lengths, partial, lse, *query.stride()[:3], self.state.page_table.stride(0),
            query.shape[2], splits, partial.shape[1], first_part, *self.score_factors,
            **constants, RAW_VALUES=raw_values, COLUMNS=shape.columns, STAGES=stages, num_warps=shape.warps,
        )  # fmt: skip

    def launch_residue(
        self,
        query: torch.Tensor,
        partial: torch.Tensor,
        lse: torch.Tensor,
        shape: ProgramShape,
        first_column: int,
        first_part: int,
        raw_parts: int,
    ) -> None:
        batch, num_heads, num_new, _ = self.key.shape
        mixed = self.raw.max_mixed_pages if shape.is_decode and self.has_pages else 0
        blocks = triton.cdiv(query.shape[2] * self.group, shape.columns)
        attend_residue_kernel[((raw_parts + mixed) * blocks, num_heads, batch)](
            query, self.key, self.value, self.state.key_pages, self.state.raw_key, self.state.raw_value,
            self.state.page_table, self.state.lengths, self.counts, self.columns, partial, lse,
            *query.stride()[:3], *self.key.stride()[:3], *self.value.stride()[:3], self.state.page_table.stride(0),
            first_column, query.shape[2], num_new, raw_parts, partial.shape[1], first_part, *self.score_factors,
            **self.common_constants(), **key_constants(self.layout), **block_sizes(self.layout),
            VALUE_DIM=self.layout.value_dim, KEY_RING=self.raw.key_ring, IS_EMPTY=self.is_empty, MIXED_PAGES=mixed,
            COLUMNS=shape.columns, ROWS=shape.rows, PART_TOKENS=_PART_TOKENS, TOKENS=shape.tokens, STAGES=2,
            num_warps=shape.residue_warps,
        )  # fmt: skip

    def common_constants(self) -> dict[str, Any]:
        return {
            "GROUP": self.group,
            "NUM_HEADS": self.key.shape[1],
            "SINK": self.raw.sink_length,
            "VALUE_WINDOW": self.raw.value_window,
            "VALUE_RING": self.raw.value_ring,
            "HAS_SOFTCAP": self.score_factors[1] > 0,
        }


def _merge(partial: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, output: torch.Tensor) -> None:
    _, num_heads, num_columns, head_dim = output.shape
    num_rows, num_parts = lse.shape
    parts = triton.next_power_of_2(num_parts)
    channels = min(triton.next_power_of_2(head_dim), max(16, _MERGE_ELEMENTS // parts))
    rows = max(1, min(_MERGE_ELEMENTS // (parts * channels), num_rows // 512))
    rows = 1 << (rows.bit_length() - 1)
    merge_splits_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(head_dim, channels))](
        partial, lse, output, sinks, *output.stride()[:3], num_rows, num_columns, num_parts,
        QUERY_HEADS=num_heads, VALUE_DIM=head_dim, LARGEST=torch.finfo(output.dtype).max,
        PARTS=parts, ROWS=rows, CHANNELS=channels, num_warps=4 if rows * parts * channels >= 2048 else 1,
    )  # fmt: skip


def update(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    *,
    seed: int,
    layer: int,
) -> None:
    """Seal the pages that the call completes, append its tokens to the raw slots, advance the lengths."""
    _require_half_precision(key)
    key, value = _dense_channels(key), _dense_channels(value)
    columns = None if columns is None else columns.contiguous()
    batch, num_heads, num_columns, _ = key.shape
    strides = (*key.stride()[:3], *value.stride()[:3])
    constants = {
        "NUM_HEADS": num_heads,
        "SINK": raw.sink_length,
        "KEY_RING": raw.key_ring,
        "VALUE_RING": raw.value_ring,
        **block_sizes(layout),
    }
    del constants["SLOT_BLOCK"]
    # A short call, every decode step among them, is sealed and appended in one launch.
    is_short = num_columns <= min(raw.rollback_window, _MAX_APPENDED) and state.page_table.shape[1] > 0
    appended = triton.next_power_of_2(num_columns) if is_short else 0
    with torch.cuda.device_of(key):
        if state.page_table.shape[1] > 0:
            key_record = {name: number for name, number in key_constants(layout).items() if name != "HAS_INDEX"}
            programs = 2 * triton.cdiv(num_columns, PAGE_SIZE) + int(is_short)
            seal_pages_kernel[(programs, num_heads, batch)](
                key, value, state.raw_key, state.raw_value, state.key_pages, state.value_pages,
                state.lengths, counts, columns, state.page_table, *strides,
                num_columns, state.page_table.stride(0), _hash_base(seed, layer),
                VALUE_WINDOW=raw.value_window, IS_RANDOM=seed >= 0, NUM_BOOSTED=layout.key.num_boosted,
                APPENDED=appended, **constants, **key_record, **value_constants(layout),
                num_warps=8 if max(layout.key_dim, layout.value_dim) > 128 else 4,
            )  # fmt: skip
        if not is_short:
            append_kernel[(triton.cdiv(num_columns, _APPEND_TOKENS), num_heads, batch)](
                key, value, state.raw_key, state.raw_value, state.lengths, counts, columns, *strides, num_columns,
                KEY_DIM=layout.key_dim, VALUE_DIM=layout.value_dim, TOKENS=_APPEND_TOKENS, **constants,
            )  # fmt: skip
        advance_kernel[(triton.cdiv(batch, _ADVANCE_ROWS),)](
            state.lengths, state.high_water, counts, num_columns, batch, ROWS=_ADVANCE_ROWS, num_warps=1
        )


def dequantize_pages(
    pages: torch.Tensor, page_table: torch.Tensor, num_pages: int, layout: PageLayout, *, is_key: bool
) -> torch.Tensor:
    """The first ``num_pages`` pages of every row, dense: [B, Hkv, num_pages * 128, D] in the layout's dtype (algorithm 1)."""
    record = layout.key if is_key else layout.value
    batch, num_heads = page_table.shape[0], layout.num_kv_heads
    dense = torch.empty(
        (batch, num_heads, num_pages * PAGE_SIZE, record.head_dim), dtype=layout.dtype, device=pages.device
    )
    _require_half_precision(dense)
    if dense.numel() == 0:
        return dense
    grid = (num_pages, num_heads, batch)
    arguments = page_table, dense, page_table.stride(0), num_pages
    blocks = block_sizes(layout)
    with torch.cuda.device_of(pages):
        if record.is_raw:
            copy_pages_kernel[grid](
                pages.view(layout.dtype), *arguments, NUM_HEADS=num_heads, HEAD_DIM=record.head_dim, BLOCK=_COPY_BLOCK
            )
        elif is_key:
            constants = {name: number for name, number in key_constants(layout).items() if name != "KEY_BITS"}
            dequantize_keys_kernel[grid](
                pages, *arguments, NUM_HEADS=num_heads, NUM_BOOSTED=layout.key.num_boosted, **constants,
                KEY_BLOCK=blocks["KEY_BLOCK"], SLOT_BLOCK=blocks["SLOT_BLOCK"],
            )  # fmt: skip
        else:
            dequantize_values_kernel[grid](
                pages, *arguments, NUM_HEADS=num_heads, **value_constants(layout), VALUE_BLOCK=blocks["VALUE_BLOCK"]
            )
    return dense


def _hash_base(seed: int, layer: int) -> int:
    """The part of ``reference.random_scores`` that a launch has in common, as a signed 32-bit integer."""
    primes = reference.HASH_PRIMES
    mixed = (seed * primes[0] + layer * primes[1]) & 0xFFFFFFFF
    return mixed - (1 << 32) if mixed >> 31 else mixed


def _dense_channels(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _require_half_precision(tensor: torch.Tensor) -> None:
    if tensor.dtype not in _HALF_DTYPES:
        raise ValueError(f"kitty on CUDA must run in fp16 or bf16, got {str(tensor.dtype).removeprefix('torch.')}")

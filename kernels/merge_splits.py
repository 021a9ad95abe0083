"""Merge partial attention outputs by their log-sum-exps, learned sinks included; as the last kernel of a step, advance it."""

import triton
import triton.language as tl

from kitty_compile.kernels.append import advance_row
from kitty_compile.kernels.primitives import narrow

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge_parts(
    partial_ptr, lse_ptr, place, is_part, largest, total, merged, channel, in_head, VALUE_DIM: tl.constexpr
):
    """Take partial outputs at ``place`` [ROWS, PARTS] into the running largest, total [ROWS] and merged [ROWS, CHANNELS]."""
    lse = tl.load(lse_ptr + place, mask=is_part, other=-float("inf"))
    # Loaded beside the log-sum-exps rather than after them.
    mask = is_part[:, :, None] & in_head[None, None, :]
    partial = tl.load(partial_ptr + place[:, :, None] * VALUE_DIM + channel[None, None, :], mask=mask, other=0.0)
    # A part of weight zero may hold anything.
    partial = tl.where((lse > -float("inf"))[:, :, None], partial, 0.0)
    new_largest = tl.maximum(largest, tl.max(lse, axis=1))
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    weights = tl.exp2(lse - base[:, None])
    alpha = tl.exp2(largest - base)
    merged = merged * alpha[:, None] + tl.sum(partial * weights[:, :, None], axis=1)
    return new_largest, total * alpha + tl.sum(weights, axis=1), merged


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_parts", "num_splits", "num_tokens", "batch"])
def merge_splits_kernel(
    partial_ptr,  # fp32 [num_rows, num_parts, Dv]
    lse_ptr,  # fp32 [num_rows, num_parts], -inf where a part has no output
    split_partial_ptr,  # fp32 [batch * num_splits, num_rows / batch, Dv]: further parts, dealt by ``deal_splits``
    split_lse_ptr,
    dealt_ptr,  # i32 [2, batch]: the first split of each row and their number, or None where all have num_splits
    output_ptr,
    sinks_ptr,  # [Hq] or None
    lengths_ptr,  # i32 [B], or None where something after this kernel still reads them
    high_water_ptr,
    counts_ptr,
    output_stride_row,
    output_stride_head,
    output_stride_column,
    num_rows,
    num_columns,
    num_parts,
    num_splits,
    num_tokens,
    batch,
    QUERY_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LARGEST: tl.constexpr,  # of the output's dtype
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,  # taken at a time, 0 where there are none
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Grid (blocks of ROWS rows, blocks of CHANNELS channels). A row is (batch row, query head, column); a row that sees
    nothing comes out as 0."""
    if lengths_ptr is not None and tl.program_id(1) == 0:
        for advanced in range(tl.program_id(0), batch, tl.num_programs(0)):
            advance_row(advanced, lengths_ptr, high_water_ptr, counts_ptr, num_tokens)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_row, in_head = row < num_rows, channel < VALUE_DIM
    head = (row // num_columns) % QUERY_HEADS
    batch_row = row // num_columns // QUERY_HEADS
    first = batch_row * num_splits
    count = tl.where(is_row, num_splits, 0)
    if SPLITS > 0 and dealt_ptr is not None:
        first = tl.load(dealt_ptr + batch_row, mask=is_row, other=0)
        count = tl.load(dealt_ptr + batch + batch_row, mask=is_row, other=0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        largest = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += 1.0
    merged = tl.zeros([ROWS, CHANNELS], tl.float32)
    part = tl.arange(0, PARTS)
    place = row.to(tl.int64)[:, None] * num_parts + part[None, :]
    is_part = is_row[:, None] & (part < num_parts)[None, :]
    largest, total, merged = _merge_parts(
        partial_ptr, lse_ptr, place, is_part, largest, total, merged, channel, in_head, VALUE_DIM
    )
    if SPLITS > 0:
        per_split = num_columns * QUERY_HEADS
        split = tl.arange(0, SPLITS)
        for start in range(0, tl.max(count, axis=0), SPLITS):
            split_place = (first[:, None] + start + split[None, :]).to(tl.int64) * per_split + (row % per_split)[
                :, None
            ]
            is_split = is_row[:, None] & (start + split[None, :] < count[:, None])
            largest, total, merged = _merge_parts(
                split_partial_ptr,
                split_lse_ptr,
                split_place,
                is_split,
                largest,
                total,
                merged,
                channel,
                in_head,
                VALUE_DIM,
            )
    merged = merged * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    output_ptr += batch_row.to(tl.int64)[:, None] * output_stride_row + head.to(tl.int64)[:, None] * output_stride_head
    output_ptr += (row % num_columns).to(tl.int64)[:, None] * output_stride_column + channel[None, :]
    # Three steps above a page's least value may lie just outside of fp16.
    merged = tl.minimum(tl.maximum(merged, -LARGEST), LARGEST)
    tl.store(output_ptr, narrow(merged, output_ptr.dtype.element_ty), mask=is_row[:, None] & in_head[None, :])

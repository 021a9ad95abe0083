"""Merge partial attention outputs by their log-sum-exps, learned sinks included; as the last kernel of a step, advance it."""

import triton
import triton.language as tl

from kitty_compile.kernels.append import advance_row
from kitty_compile.kernels.primitives import narrow

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows", "num_columns", "num_parts", "num_tokens", "batch"])
def merge_splits_kernel(
    partial_ptr,  # fp32 [num_rows, num_parts, Dv]
    lse_ptr,  # fp32 [num_rows, num_parts], -inf where a part has no output
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
    num_tokens,
    batch,
    QUERY_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LARGEST: tl.constexpr,  # of the output's dtype
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Grid (blocks of ROWS rows, blocks of CHANNELS channels). A row is (batch row, query head, column); a row that sees
    nothing comes out as 0."""
    if lengths_ptr is not None and tl.program_id(1) == 0:
        for advanced in range(tl.program_id(0), batch, tl.num_programs(0)):
            advance_row(advanced, lengths_ptr, high_water_ptr, counts_ptr, num_tokens)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_row = row < num_rows
    place = row.to(tl.int64)[:, None] * num_parts + part[None, :]
    lse = tl.load(lse_ptr + place, mask=is_row[:, None] & (part < num_parts)[None, :], other=-float("inf"))
    head = (row // num_columns) % QUERY_HEADS
    largest = tl.max(lse, axis=1)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp2(lse - largest[:, None])
    total = tl.sum(weights, axis=1)
    if sinks_ptr is not None:
        total += tl.exp2(sink - largest)
    weights = weights * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]

    # A part of weight zero may hold anything.
    mask = (lse > -float("inf"))[:, :, None] & (channel < VALUE_DIM)[None, None, :]
    partial = tl.load(partial_ptr + place[:, :, None] * VALUE_DIM + channel[None, None, :], mask=mask, other=0.0)
    merged = tl.sum(partial * weights[:, :, None], axis=1)
    batch_row = row // num_columns // QUERY_HEADS
    output_ptr += batch_row.to(tl.int64)[:, None] * output_stride_row + head.to(tl.int64)[:, None] * output_stride_head
    output_ptr += (row % num_columns).to(tl.int64)[:, None] * output_stride_column + channel[None, :]
    # Three steps above a page's least value may lie just outside of fp16.
    merged = tl.minimum(tl.maximum(merged, -LARGEST), LARGEST)
    tl.store(
        output_ptr, narrow(merged, output_ptr.dtype.element_ty), mask=is_row[:, None] & (channel < VALUE_DIM)[None, :]
    )

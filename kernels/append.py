"""Take a call's new tokens into the raw slots and advance the lengths."""

import triton
import triton.language as tl

from kitty_compile.kernels.primitives import new_column, new_count, raw_slot, row_columns


@triton.jit
def _copy_tokens(
    source_ptr, source_stride, raw_ptr, column, token, kept, SINK, RING, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    channels = tl.arange(0, DIM)
    mask = kept[:, None] & (channels < HEAD_DIM)[None, :]
    values = tl.load(
        source_ptr + column.to(tl.int64)[:, None] * source_stride + channels[None, :], mask=mask, other=0.0
    )
    slot = raw_slot(token, SINK, RING)
    tl.store(raw_ptr + slot.to(tl.int64)[:, None] * HEAD_DIM + channels[None, :], values, mask=mask)


@triton.jit
def append_tokens(
    block,
    key_ptr,  # the row's and head's, as are the next three
    value_ptr,
    raw_key_ptr,
    raw_value_ptr,
    key_stride_column,
    value_stride_column,
    columns_ptr,  # the row's
    length,
    count,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write a block of TOKENS new tokens to the raw slots, but for those that the call itself overwrites."""
    index = block * TOKENS + tl.arange(0, TOKENS)
    is_new = index < count
    token = length + index
    total = length + count
    column = new_column(columns_ptr, index, is_new)
    kept = is_new & ((token < SINK) | (token >= total - KEY_RING))
    _copy_tokens(key_ptr, key_stride_column, raw_key_ptr, column, token, kept, SINK, KEY_RING, KEY_DIM, KEY_BLOCK)
    kept = is_new & ((token < SINK) | (token >= total - VALUE_RING))
    _copy_tokens(
        value_ptr, value_stride_column, raw_value_ptr, column, token, kept, SINK, VALUE_RING, VALUE_DIM, VALUE_BLOCK
    )


@triton.jit(do_not_specialize=["num_columns"])
def append_kernel(
    key_ptr,
    value_ptr,
    raw_key_ptr,
    raw_value_ptr,
    lengths_ptr,
    counts_ptr,
    columns_ptr,
    key_stride_row,
    key_stride_head,
    key_stride_column,
    value_stride_row,
    value_stride_head,
    value_stride_column,
    num_columns,
    NUM_HEADS: tl.constexpr,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (blocks of TOKENS new tokens, KV heads, rows). A short call does without: ``seal_pages_kernel`` appends as well."""
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    append_tokens(
        tl.program_id(0),
        key_ptr + row * key_stride_row + head.to(tl.int64) * key_stride_head,
        value_ptr + row * value_stride_row + head.to(tl.int64) * value_stride_head,
        raw_key_ptr + (row * NUM_HEADS + head) * ((SINK + KEY_RING) * KEY_DIM),
        raw_value_ptr + (row * NUM_HEADS + head) * ((SINK + VALUE_RING) * VALUE_DIM),
        key_stride_column, value_stride_column, row_columns(columns_ptr, row, num_columns),
        tl.load(lengths_ptr + row), new_count(counts_ptr, row, num_columns),
        SINK, KEY_RING, VALUE_RING, KEY_DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK, TOKENS,
    )  # fmt: skip


@triton.jit
def advance_row(row, lengths_ptr, high_water_ptr, counts_ptr, num_columns):
    """Count a call's tokens into the length of a row."""
    length = tl.load(lengths_ptr + row) + new_count(counts_ptr, row, num_columns)
    tl.store(lengths_ptr + row, length)
    tl.store(high_water_ptr + row, tl.maximum(tl.load(high_water_ptr + row), length))


@triton.jit(do_not_specialize=["num_columns"])
def advance_kernel(lengths_ptr, high_water_ptr, counts_ptr, num_columns):
    """Grid (rows,). In a launch of its own where no merge comes last: the programs of the other kernels read the lengths."""
    advance_row(tl.program_id(0), lengths_ptr, high_water_ptr, counts_ptr, num_columns)

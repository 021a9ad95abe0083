"""Take a call's new tokens into the raw slots and advance the lengths."""

import triton
import triton.language as tl

from kitty_compile.kernels.primitives import new_column, new_count, raw_slot, row_columns


@triton.jit
def _copy_items(source_ptr, raw_ptr, token, kept, SINK, RING, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """``source_ptr`` i64 pointers to the items' channels, ``raw_ptr`` to the first slot of their row and head."""
    channels = tl.arange(0, DIM)
    mask = kept[:, None] & (channels < HEAD_DIM)[None, :]
    values = tl.load(source_ptr[:, None] + channels[None, :], mask=mask, other=0.0)
    slot = raw_slot(token, SINK, RING)
    tl.store((raw_ptr + slot * HEAD_DIM)[:, None] + channels[None, :], values, mask=mask)


@triton.jit
def append_items(
    block,
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
    num_items,
    num_columns,
    NUM_HEADS: tl.constexpr,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Write a block of ITEMS of the call's (row, head, new token) to the raw slots, but for tokens that the call itself
    overwrites."""
    item = block * ITEMS + tl.arange(0, ITEMS)
    is_item = item < num_items
    item = tl.minimum(item, num_items - 1)
    index = item % num_columns
    head = (item // num_columns % NUM_HEADS).to(tl.int64)
    row = (item // num_columns // NUM_HEADS).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    count = new_count(counts_ptr, row, num_columns)
    is_new = is_item & (index < count)
    column = new_column(row_columns(columns_ptr, row, num_columns), index, is_new).to(tl.int64)
    token = length + index
    total = length + count
    place = row * NUM_HEADS + head
    _copy_items(
        key_ptr + row * key_stride_row + head * key_stride_head + column * key_stride_column,
        raw_key_ptr + place * ((SINK + KEY_RING) * KEY_DIM), token,
        is_new & ((token < SINK) | (token >= total - KEY_RING)), SINK, KEY_RING, KEY_DIM, KEY_BLOCK,
    )  # fmt: skip
    _copy_items(
        value_ptr + row * value_stride_row + head * value_stride_head + column * value_stride_column,
        raw_value_ptr + place * ((SINK + VALUE_RING) * VALUE_DIM), token,
        is_new & ((token < SINK) | (token >= total - VALUE_RING)), SINK, VALUE_RING, VALUE_DIM, VALUE_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_items", "num_columns"])
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
    num_items,
    num_columns,
    NUM_HEADS: tl.constexpr,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Grid (blocks of ITEMS items,). A short call does without: ``seal_pages_kernel`` appends as well."""
    append_items(
        tl.program_id(0), key_ptr, value_ptr, raw_key_ptr, raw_value_ptr, lengths_ptr, counts_ptr, columns_ptr,
        key_stride_row, key_stride_head, key_stride_column, value_stride_row, value_stride_head, value_stride_column,
        num_items, num_columns, NUM_HEADS, SINK, KEY_RING, VALUE_RING, KEY_DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK, ITEMS,
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

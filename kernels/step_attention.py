"""The attention kernel of a decode step: packed pages, raw tokens and pages whose V is raw, each by programs of one warp."""

import triton
import triton.language as tl

from kitty_compile.kernels.decode_attention import attend_packed_pages
from kitty_compile.kernels.primitives import (
    PAGE_SIZE,
    call_columns,
    new_count,
    pages_of_split,
    partial_rows,
    row_columns,
    sealed_pages,
)
from kitty_compile.kernels.raw_attention import attend_half_page, attend_raw_tokens


@triton.jit
def deal_splits(lengths_ptr, batch, num_splits, SINK: tl.constexpr, VALUE_WINDOW: tl.constexpr, ROWS: tl.constexpr):
    """How many of the ``batch * num_splits`` splits each row gets, i32 [ROWS], and where they end: one, and its share of the
    others by its packed pages. Rows of equal length get ``num_splits`` each."""
    row = tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + row, mask=row < batch, other=0)
    pages = sealed_pages(length, SINK + VALUE_WINDOW)
    share = pages * (batch * (num_splits - 1)) // tl.maximum(tl.sum(pages, axis=0), 1)
    counts = tl.where(row < batch, 1 + share, 0)
    return counts, tl.cumsum(counts, axis=0)


@triton.jit
def _split_pages(
    item, lengths_ptr, dealt_ptr, batch, num_splits, SINK: tl.constexpr, VALUE_WINDOW: tl.constexpr, ROWS: tl.constexpr
):
    """Row, first and last page of a split. Of dealt ones the merge is told; one that no row needs has no pages."""
    if dealt_ptr is None:
        row = item // num_splits
        first_page, last_page = pages_of_split(
            tl.load(lengths_ptr + row), item % num_splits, num_splits, SINK, VALUE_WINDOW, False
        )
    else:
        counts, ends = deal_splits(lengths_ptr, batch, num_splits, SINK, VALUE_WINDOW, ROWS)
        row = tl.sum((ends <= item).to(tl.int32), axis=0)
        first_split = tl.sum(tl.where(ends <= item, counts, 0), axis=0)
        splits = tl.sum(tl.where(tl.arange(0, ROWS) == row, counts, 0), axis=0)
        is_dealt = row < batch
        tl.store(dealt_ptr + row, first_split, mask=is_dealt)
        tl.store(dealt_ptr + batch + row, splits, mask=is_dealt)
        row = tl.minimum(row, batch - 1)
        first_page, last_page = pages_of_split(
            tl.load(lengths_ptr + row), item - first_split, tl.maximum(splits, 1), SINK, VALUE_WINDOW, False
        )
        last_page = tl.where(is_dealt, last_page, first_page)
    return row, first_page, last_page


@triton.jit(
    do_not_specialize=[
        "table_stride", "num_columns", "num_splits", "num_blocks", "num_raw_parts", "part_tokens", "batch",
    ]
)  # fmt: skip
def attend_step_kernel(
    query_ptr,
    key_pages_ptr,
    value_pages_ptr,
    raw_key_ptr,
    raw_value_ptr,
    table_ptr,
    lengths_ptr,  # as they were before the step
    counts_ptr,
    columns_ptr,
    split_partial_ptr,  # fp32 [B * num_splits, Hq * T, Dv]
    split_lse_ptr,  # fp32 [B * num_splits, Hq * T]
    dealt_ptr,  # i32 [2, B], written for the merge: the first split of each row and their number; None: all have num_splits
    partial_ptr,  # fp32 [B * Hq * T, raw parts + half pages, Dv]
    lse_ptr,  # fp32 [B * Hq * T, raw parts + half pages]
    query_stride_row,
    query_stride_head,
    query_stride_column,
    table_stride,
    num_columns,
    num_splits,
    num_blocks,
    num_raw_parts,
    part_tokens,
    batch,
    score_scale,
    score_cap,
    GROUP: tl.constexpr,
    VALUE_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SINGLE: tl.constexpr,  # one column
    IS_ALIGNED: tl.constexpr,  # sink and rings are multiples of RAW_TOKENS
    HALF_PAGES: tl.constexpr,  # that can be packed in K alone
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    KEY_HIGH: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    KEY_BOOST: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_HIGH: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPREAD: tl.constexpr,
    RAW_TOKENS: tl.constexpr,  # of a raw part's step
    DEALT_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    RAW_STAGES: tl.constexpr,
):
    """Grid (KV heads, (splits + parts) * column blocks), splits and parts of all rows.

    A split takes packed pages of a row. Splits are dealt to the rows by their lengths, or evenly where ``dealt_ptr`` is None.
    Parts are a row's raw parts, of ``part_tokens`` raw tokens each, and halves of the pages whose V is raw. What they write is
    divided by the sum already; a program that finds nothing to attend to says so with a log-sum-exp of -inf.
    """
    PAIRS: tl.constexpr = COLUMNS // SPREAD
    head = tl.program_id(0)
    item = tl.program_id(1) // num_blocks
    block = tl.program_id(1) % num_blocks
    is_split = item < batch * num_splits
    column, member, is_real = call_columns(block, num_columns, GROUP, PAIRS, PAIRS, 1)
    parts = num_raw_parts + HALF_PAGES
    first_page = 0
    last_page = 0
    part = 0
    if is_split:
        row, first_page, last_page = _split_pages(
            item, lengths_ptr, dealt_ptr, batch, num_splits, SINK, VALUE_WINDOW, DEALT_ROWS
        )
        place = partial_rows(item.to(tl.int64), head, column, member, num_columns, NUM_HEADS, GROUP)
        partial_ptr = split_partial_ptr
        lse_ptr = split_lse_ptr
    else:
        row = (item - batch * num_splits) // parts
        part = (item - batch * num_splits) % parts
        place = partial_rows(row.to(tl.int64), head, column, member, num_columns, NUM_HEADS, GROUP) * parts + part
    row = row.to(tl.int64)
    length = tl.load(lengths_ptr + row)
    num_packed = sealed_pages(length, SINK)
    num_cached = length - num_packed * PAGE_SIZE
    first_token = part * part_tokens
    last_token = tl.minimum(num_cached + new_count(counts_ptr, row, num_columns), first_token + part_tokens)
    half_page = part - num_raw_parts
    mixed_page = sealed_pages(length, SINK + VALUE_WINDOW) + half_page // 2
    is_raw = (not is_split) & (part < num_raw_parts)
    has_work = tl.where(
        is_split, first_page < last_page, tl.where(is_raw, first_token < last_token, mixed_page < num_packed)
    )
    if not has_work:
        tl.store(lse_ptr + place, tl.full([PAIRS], -float("inf"), tl.float32), mask=is_real)
        return

    query_column, query_member, column_mask = call_columns(block, num_columns, GROUP, PAIRS, COLUMNS, SPREAD)
    query_offsets = (head * GROUP + query_member) * query_stride_head + query_column * query_stride_column
    query_ptr += row * query_stride_row
    table_ptr += row * table_stride
    key_pages_ptr += head.to(tl.int64) * KEY_BYTES
    key_channels = tl.arange(0, KEY_BLOCK)
    query_mask = column_mask[None, :] & (key_channels < KEY_DIM)[:, None]
    query = tl.load(query_ptr + query_offsets[None, :] + key_channels[:, None], mask=query_mask, other=0.0)
    raw_value_ptr += (row * NUM_HEADS + head) * ((SINK + VALUE_RING) * VALUE_DIM)
    if is_split:
        result, lse = attend_packed_pages(
            query_ptr, query_offsets, column_mask, query, key_pages_ptr,
            value_pages_ptr + head.to(tl.int64) * VALUE_BYTES, table_ptr, first_page, last_page, score_scale, score_cap,
            HAS_SOFTCAP, NUM_HEADS, KEY_DIM, KEY_BITS, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST,
            KEY_BYTES, VALUE_DIM, VALUE_BITS, VALUE_HIGH, VALUE_SCALE, VALUE_ZERO, VALUE_BYTES, KEY_BLOCK, VALUE_BLOCK,
            SLOT_BLOCK, SPREAD, STAGES,
        )  # fmt: skip
    elif is_raw:
        result, lse = attend_raw_tokens(
            query, column, raw_key_ptr + (row * NUM_HEADS + head) * ((SINK + KEY_RING) * KEY_DIM), raw_value_ptr,
            row_columns(columns_ptr, row, num_columns), first_token, last_token, num_cached, num_packed * PAGE_SIZE,
            score_scale, score_cap, HAS_SOFTCAP, IS_SINGLE, IS_ALIGNED, SINK, KEY_RING, VALUE_RING, KEY_DIM, VALUE_DIM,
            VALUE_BLOCK, SPREAD, RAW_TOKENS, RAW_STAGES,
        )  # fmt: skip
    else:
        page = tl.load(table_ptr + mixed_page).to(tl.int64)
        result, lse = attend_half_page(
            query_ptr, query_offsets, column_mask, query, key_pages_ptr + page * (NUM_HEADS * KEY_BYTES), raw_value_ptr,
            mixed_page * PAGE_SIZE % VALUE_RING, half_page % 2, score_scale, score_cap, HAS_SOFTCAP, IS_ALIGNED, SINK,
            VALUE_RING, KEY_DIM, KEY_BITS, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, VALUE_DIM,
            KEY_BLOCK, VALUE_BLOCK, SLOT_BLOCK, SPREAD,
        )  # fmt: skip
    channels = tl.arange(0, VALUE_BLOCK)
    mask = is_real[None, :] & (channels < VALUE_DIM)[:, None]
    tl.store(partial_ptr + place[None, :] * VALUE_DIM + channels[:, None], result, mask=mask)
    tl.store(lse_ptr + place, lse, mask=is_real)

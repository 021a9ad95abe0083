"""Attention of a decode step over what lies raw: the sink, the raw tail of K with the step's own tokens, which have been
appended by then, and pages whose V is still raw.

The raw tokens of a row are numbered through: sink, tail, own.
"""

import triton
import triton.language as tl

from kitty_compile.kernels.mixed_pages import attend_mixed_fields
from kitty_compile.kernels.prefill_attention import softmax_result, softmax_step
from kitty_compile.kernels.primitives import (
    FIELDS,
    PAGE_SIZE,
    call_columns,
    new_column,
    new_count,
    partial_rows,
    row_columns,
    sealed_pages,
)


@triton.jit
def _ring_offsets(number, shift, SINK: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where raw tokens lie: ``shift`` is the ring index of the first token behind the sink, and the ring wraps at most once."""
    index = number - SINK + shift
    slot = tl.where(number < SINK, number, SINK + tl.where(index >= RING, index - RING, index))
    return slot * HEAD_DIM


@triton.jit
def _attend_tokens(
    query_ptr,  # the row's
    query_offsets,  # [M]
    query_column,  # [M]
    is_real,  # [M]
    raw_key_ptr,  # the row's and head's
    raw_value_ptr,
    columns_ptr,  # the row's
    first,
    last,
    num_cached,
    packed_tokens,
    score_scale,
    score_cap,
    HAS_SOFTCAP: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Attention over raw tokens [first, last) -> output [M, Dv] (already divided by the sum) and log2-sum-exp2 [M]."""
    key_channels = tl.arange(0, KEY_BLOCK)
    value_channels = tl.arange(0, VALUE_BLOCK)
    in_key = (key_channels < KEY_DIM)[None, :]
    in_value = (value_channels < VALUE_DIM)[None, :]
    query_pointers = query_ptr + query_offsets[:, None] + key_channels[None, :]
    query = tl.load(query_pointers, mask=is_real[:, None] & in_key, other=0.0)
    running_max = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        number = first + step * TOKENS + tl.arange(0, TOKENS)
        is_valid = number < last
        key_rows = _ring_offsets(number, packed_tokens % KEY_RING, SINK, KEY_RING, KEY_DIM)[:, None]
        value_rows = _ring_offsets(number, packed_tokens % VALUE_RING, SINK, VALUE_RING, VALUE_DIM)[:, None]
        keys = tl.load(raw_key_ptr + key_rows + key_channels[None, :], mask=is_valid[:, None] & in_key, other=0.0)
        values = tl.load(
            raw_value_ptr + value_rows + value_channels[None, :], mask=is_valid[:, None] & in_value, other=0.0
        )
        visible = tl.broadcast_to(is_valid[None, :], [ROWS, TOKENS])
        if not IS_SINGLE:
            is_own = is_valid & (number >= num_cached)
            column = new_column(columns_ptr, number - num_cached, is_own)
            visible &= tl.where(is_own, column, -1)[None, :] <= query_column[:, None]
        running_max, total, accumulator = softmax_step(
            query, tl.trans(keys), values, visible, running_max, total, accumulator, score_scale, score_cap, HAS_SOFTCAP
        )
    return softmax_result(running_max, total, accumulator)


@triton.jit(do_not_specialize=["table_stride", "num_columns", "num_raw_parts"])
def attend_raw_kernel(
    query_ptr,
    key_pages_ptr,
    raw_key_ptr,
    raw_value_ptr,
    table_ptr,
    lengths_ptr,  # as they were before the step
    counts_ptr,
    columns_ptr,
    partial_ptr,  # fp32 [B * Hq * T, raw and mixed parts, Dv]
    lse_ptr,  # fp32 [B * Hq * T, raw and mixed parts]
    query_stride_row,
    query_stride_head,
    query_stride_column,
    table_stride,
    num_columns,
    num_raw_parts,
    score_scale,
    score_cap,
    GROUP: tl.constexpr,
    VALUE_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SINGLE: tl.constexpr,  # one column
    MIXED_PAGES: tl.constexpr,
    MIXED_FIELDS: tl.constexpr,
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
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Grid ((raw parts + mixed parts) * column blocks, KV heads, rows). A raw part takes STEPS times TOKENS raw tokens; a mixed
    part takes MIXED_FIELDS fields of a page whose K is packed and whose V is not."""
    PAGE_PARTS: tl.constexpr = FIELDS // MIXED_FIELDS
    parts = num_raw_parts + MIXED_PAGES * PAGE_PARTS
    part = tl.program_id(0) % parts
    block = tl.program_id(0) // parts
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    query_ptr += row * query_stride_row
    raw_value_ptr += (row * NUM_HEADS + head) * ((SINK + VALUE_RING) * VALUE_DIM)
    channels = tl.arange(0, VALUE_BLOCK)
    in_head = channels < VALUE_DIM
    num_packed = sealed_pages(length, SINK)
    if part < num_raw_parts:
        column, member, is_real = call_columns(block, num_columns, GROUP, COLUMNS, ROWS, 1)
        query_offsets = (head * GROUP + member) * query_stride_head + column * query_stride_column
        num_cached = length - num_packed * PAGE_SIZE
        first = part * (STEPS * TOKENS)
        last = tl.minimum(num_cached + new_count(counts_ptr, row, num_columns), first + STEPS * TOKENS)
        result, lse = _attend_tokens(
            query_ptr, query_offsets, column, is_real,
            raw_key_ptr + (row * NUM_HEADS + head) * ((SINK + KEY_RING) * KEY_DIM), raw_value_ptr,
            row_columns(columns_ptr, row, num_columns), first, last, num_cached, num_packed * PAGE_SIZE, score_scale,
            score_cap, HAS_SOFTCAP, IS_SINGLE, SINK, KEY_RING, VALUE_RING, KEY_DIM, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK,
            ROWS, TOKENS, STEPS,
        )  # fmt: skip
        place = partial_rows(row, head, column, member, num_columns, NUM_HEADS, GROUP) * parts + part
        mask = is_real[:, None] & in_head[None, :]
        tl.store(partial_ptr + place[:, None] * VALUE_DIM + channels[None, :], result, mask=mask)
        tl.store(lse_ptr + place, lse, mask=is_real)
    elif MIXED_PAGES > 0:
        page_column, page_member, is_page = call_columns(block, num_columns, GROUP, COLUMNS, COLUMNS, 1)
        page_place = partial_rows(row, head, page_column, page_member, num_columns, NUM_HEADS, GROUP)
        page_place = page_place * parts + part
        mixed_part = part - num_raw_parts
        index = sealed_pages(length, SINK + VALUE_WINDOW) + mixed_part // PAGE_PARTS
        if index < num_packed:
            page = tl.load(table_ptr + row * table_stride + index).to(tl.int64)
            page_offsets = (head * GROUP + page_member) * query_stride_head + page_column * query_stride_column
            page_result, page_lse = attend_mixed_fields(
                query_ptr, page_offsets, is_page, key_pages_ptr + (page * NUM_HEADS + head) * KEY_BYTES, raw_value_ptr,
                index * PAGE_SIZE + SINK, mixed_part % PAGE_PARTS * MIXED_FIELDS, score_scale, score_cap, HAS_SOFTCAP,
                MIXED_FIELDS, SINK, VALUE_RING, KEY_DIM, KEY_BITS, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO,
                KEY_BOOST, VALUE_DIM, KEY_BLOCK, VALUE_BLOCK, SLOT_BLOCK,
            )  # fmt: skip
            page_mask = is_page[None, :] & in_head[:, None]
            tl.store(partial_ptr + page_place[None, :] * VALUE_DIM + channels[:, None], page_result, mask=page_mask)
            tl.store(lse_ptr + page_place, page_lse, mask=is_page)
        else:
            tl.store(lse_ptr + page_place, tl.full([COLUMNS], -float("inf"), tl.float32), mask=is_page)

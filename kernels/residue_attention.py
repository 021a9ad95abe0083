"""Attention of a longer call over the sink, the raw tail of K and its own tokens.

The raw tokens of a row are numbered through: sink, tail, own. A program walks all tokens up to its columns' causal edge.
"""

import triton
import triton.language as tl

from kitty_compile.kernels.prefill_attention import softmax_result, softmax_step
from kitty_compile.kernels.primitives import (
    PAGE_SIZE,
    call_columns,
    new_column,
    new_count,
    partial_rows,
    row_columns,
    sealed_pages,
    token_pointers,
)


@triton.jit
def _attend_raw_range(
    query_ptr,  # the row's
    query_offsets,  # [M]
    query_column,  # [M]
    is_real,  # [M]
    key_ptr,  # the row's and head's, as are the next three
    value_ptr,
    raw_key_ptr,
    raw_value_ptr,
    columns_ptr,
    key_stride_column,
    value_stride_column,
    first,
    last,
    sink_count,
    num_cached,
    length,
    score_scale,
    score_cap,
    HAS_SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention over raw tokens [first, last) -> output [M, Dv] (already divided by the sum) and log2-sum-exp2 [M]."""
    key_channels = tl.arange(0, KEY_BLOCK)
    value_channels = tl.arange(0, VALUE_BLOCK)
    in_key = (key_channels < KEY_DIM)[None, :]
    in_value = (value_channels < VALUE_DIM)[None, :]
    query = tl.load(
        query_ptr + query_offsets[:, None] + key_channels[None, :], mask=is_real[:, None] & in_key, other=0.0
    )
    running_max = tl.full([COLUMNS], -float("inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    accumulator = tl.zeros([COLUMNS, VALUE_BLOCK], tl.float32)
    for start in tl.range(first, last, TOKENS, num_stages=STAGES):
        number = start + tl.arange(0, TOKENS)
        is_valid = number < last
        is_own = number >= num_cached
        token = tl.where(number < sink_count, number, number - num_cached + length)
        column = new_column(columns_ptr, number - num_cached, is_valid & is_own)
        key_rows = token_pointers(
            raw_key_ptr, KEY_DIM, key_ptr, key_stride_column, token, column, length, SINK, KEY_RING
        )
        value_rows = token_pointers(
            raw_value_ptr, VALUE_DIM, value_ptr, value_stride_column, token, column, length, SINK, VALUE_RING
        )
        keys = tl.load(key_rows[:, None] + key_channels[None, :], mask=is_valid[:, None] & in_key, other=0.0)
        values = tl.load(value_rows[:, None] + value_channels[None, :], mask=is_valid[:, None] & in_value, other=0.0)
        visible = is_valid[None, :] & (tl.where(is_own, column, -1)[None, :] <= query_column[:, None])
        running_max, total, accumulator = softmax_step(
            query, tl.trans(keys), values, visible, running_max, total, accumulator, score_scale, score_cap, HAS_SOFTCAP
        )
    return softmax_result(running_max, total, accumulator)


@triton.jit(do_not_specialize=["first_column", "num_columns", "num_new", "num_parts", "part"])
def attend_residue_kernel(
    query_ptr,  # columns first_column .. first_column + num_columns of the call
    key_ptr,
    value_ptr,
    raw_key_ptr,
    raw_value_ptr,
    lengths_ptr,
    counts_ptr,
    columns_ptr,
    partial_ptr,  # fp32 [B * Hq * num_columns, num_parts, Dv]
    lse_ptr,  # fp32 [B * Hq * num_columns, num_parts]
    query_stride_row,
    query_stride_head,
    query_stride_column,
    key_stride_row,
    key_stride_head,
    key_stride_column,
    value_stride_row,
    value_stride_head,
    value_stride_column,
    first_column,
    num_columns,
    num_new,
    num_parts,
    part,
    score_scale,
    score_cap,
    GROUP: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_EMPTY: tl.constexpr,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (column blocks, KV heads, rows)."""
    # The last columns see the most tokens: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = 0
    if not IS_EMPTY:
        length = tl.load(lengths_ptr + row)
    column, member, is_real = call_columns(block, num_columns, GROUP, COLUMNS, COLUMNS, 1)
    query_offsets = (head * GROUP + member) * query_stride_head + column * query_stride_column
    last_column = first_column + tl.minimum((block * COLUMNS + COLUMNS - 1) // GROUP, num_columns - 1)
    num_own = tl.minimum(new_count(counts_ptr, row, num_new), last_column + 1)
    sink_count = tl.minimum(length, SINK)
    num_cached = length - sealed_pages(length, SINK) * PAGE_SIZE
    result, lse = _attend_raw_range(
        query_ptr + row * query_stride_row, query_offsets, first_column + column, is_real,
        key_ptr + row * key_stride_row + head.to(tl.int64) * key_stride_head,
        value_ptr + row * value_stride_row + head.to(tl.int64) * value_stride_head,
        raw_key_ptr + (row * NUM_HEADS + head) * ((SINK + KEY_RING) * KEY_DIM),
        raw_value_ptr + (row * NUM_HEADS + head) * ((SINK + VALUE_RING) * VALUE_DIM),
        row_columns(columns_ptr, row, num_new), key_stride_column, value_stride_column, 0, num_cached + num_own,
        sink_count, num_cached, length, score_scale, score_cap, HAS_SOFTCAP, SINK, KEY_RING, VALUE_RING, KEY_DIM,
        VALUE_DIM, KEY_BLOCK, VALUE_BLOCK, COLUMNS, TOKENS, STAGES,
    )  # fmt: skip
    place = partial_rows(row, head, column, member, num_columns, NUM_HEADS, GROUP) * num_parts + part
    channels = tl.arange(0, VALUE_BLOCK)
    mask = is_real[:, None] & (channels < VALUE_DIM)[None, :]
    tl.store(partial_ptr + place[:, None] * VALUE_DIM + channels[None, :], result, mask=mask)
    tl.store(lse_ptr + place, lse, mask=is_real)

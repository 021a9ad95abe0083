"""Attention of many query columns over pages: chunked prefill, multi-turn, speculative verification.

Flash attention in its usual form: a page is dequantised to tiles of K and V in the model's dtype, which live in shared memory
and serve a whole block of columns. Within a tile tokens stand in word order, 8 j + f for token 16 f + j; nobody minds.
"""

import triton
import triton.language as tl

from kitty_compile.kernels.primitives import (
    CODE_EXPONENT,
    FIELD_PREMULTIPLIER,
    FIELD_WEIGHTS,
    FIELDS,
    PAGE_SIZE,
    WORD_ROWS,
    bfloat16_to_float32,
    boosted_slots,
    call_columns,
    dot,
    high_word_offset,
    join_fields,
    key_operand,
    load_padded,
    load_zero,
    narrow,
    pages_of_split,
    partial_rows,
    raw_slot,
    saturate,
    softcapped,
    split_fields,
    value_operand,
)


@triton.jit
def softmax_step(
    query, keys, values, visible, running_max, total, accumulator, score_scale, score_cap, HAS_SOFTCAP: tl.constexpr
):
    """One step of the online softmax: query [M, Dk], keys [Dk, N], values [N, Dv]; ``visible`` [M, N] or None for all."""
    scores = dot(query, keys, tl.zeros([query.shape[0], keys.shape[1]], tl.float32)) * score_scale
    if HAS_SOFTCAP:
        scores = softcapped(scores, score_cap)
    if visible is not None:
        scores = tl.where(visible, scores, -float("inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    alpha = tl.exp2(running_max - base)
    total = total * alpha + tl.sum(weights, axis=1)
    accumulator = dot(narrow(weights, values.dtype), values, accumulator * alpha[:, None])
    return new_max, total, accumulator


@triton.jit
def softmax_result(running_max, total, accumulator):
    """Output divided by the sum, and log2-sum-exp2."""
    total = tl.where(total > 0.0, total, 1.0)
    return accumulator * (1.0 / total)[:, None], running_max + tl.log2(total)


@triton.jit
def _tile_tokens():
    """Which token of its page stands where in a tile, i32 [128]."""
    index = tl.arange(0, PAGE_SIZE)
    return index % FIELDS * WORD_ROWS + index // FIELDS


@triton.jit
def _key_tile(
    record_ptr, DTYPE: tl.constexpr, KEY_DIM: tl.constexpr, NUM_BOOSTED: tl.constexpr, NUM_SLOTS: tl.constexpr,
    HAS_INDEX: tl.constexpr, KEY_HIGH: tl.constexpr, KEY_SCALE: tl.constexpr, KEY_ZERO: tl.constexpr,
    KEY_BOOST: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A packed key page, transposed: [DIM, 128]."""
    plane_ptr = record_ptr.to(tl.pointer_type(tl.int16))
    channels = tl.arange(0, DIM)
    in_head = channels < KEY_DIM
    low = key_operand(load_padded(plane_ptr, WORD_ROWS * KEY_DIM, WORD_ROWS * DIM), DIM)
    scale = bfloat16_to_float32(load_padded(plane_ptr + KEY_SCALE // 2, KEY_DIM, DIM))
    zero = load_zero(plane_ptr + KEY_ZERO // 2 + channels, in_head, DTYPE)
    codes = split_fields(low)
    if NUM_SLOTS > 0:
        slot = channels
        boosted = in_head
        if HAS_INDEX:
            slot, boosted = boosted_slots(record_ptr + KEY_BOOST, channels, NUM_BOOSTED, SLOTS)
        offsets = high_word_offset(tl.arange(0, WORD_ROWS)[:, None], slot[None, :])
        high = split_fields(tl.load(plane_ptr + KEY_HIGH // 2 + offsets, mask=boosted[None, :], other=0))
    unit = scale * (2.0**CODE_EXPONENT)
    parts = ()
    for field in tl.static_range(FIELDS):
        code = codes[field]
        if NUM_SLOTS > 0:
            code = code + high[field] * 4.0
        keys = code.to(tl.float32) * (unit * FIELD_WEIGHTS[field])[None, :] + zero[None, :]
        parts = parts + (narrow(saturate(keys, DTYPE), DTYPE),)
    return tl.reshape(tl.permute(join_fields(parts), [1, 0, 2]), [DIM, PAGE_SIZE])


@triton.jit
def _value_tile(
    record_ptr, DTYPE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_HIGH: tl.constexpr,
    VALUE_SCALE: tl.constexpr, VALUE_ZERO: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A packed value page: [128, DIM]."""
    plane_ptr = record_ptr.to(tl.pointer_type(tl.int16))
    codes = split_fields(value_operand(load_padded(plane_ptr, WORD_ROWS * VALUE_DIM, WORD_ROWS * DIM), DIM))
    if VALUE_BITS == 4:
        high_words = load_padded(plane_ptr + VALUE_HIGH // 2, WORD_ROWS * VALUE_DIM, WORD_ROWS * DIM)
        high = split_fields(value_operand(high_words, DIM))
    rows = tl.arange(0, WORD_ROWS)
    parts = ()
    for field in tl.static_range(FIELDS):
        code = codes[field]
        if VALUE_BITS == 4:
            code = code + high[field] * 4.0
        tokens = rows + field * WORD_ROWS
        premultiplied = bfloat16_to_float32(tl.load(plane_ptr + VALUE_SCALE // 2 + tokens))
        unit = premultiplied * (2.0**CODE_EXPONENT * FIELD_WEIGHTS[field] * 0.25 ** FIELD_PREMULTIPLIER[field])
        zero = load_zero(plane_ptr + VALUE_ZERO // 2 + tokens, tokens >= 0, DTYPE)
        values = code.to(tl.float32) * unit[None, :] + zero[None, :]
        parts = parts + (narrow(saturate(values, DTYPE), DTYPE),)
    return tl.reshape(tl.permute(join_fields(parts), [1, 2, 0]), [PAGE_SIZE, DIM])


@triton.jit
def _raw_tile(rows_ptr, tokens, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    channels = tl.arange(0, DIM)
    pointers = rows_ptr + tokens[:, None] * HEAD_DIM + channels[None, :]
    return tl.load(pointers, mask=(channels < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["table_stride", "num_columns", "num_splits", "num_parts", "first_part"])
def prefill_pages_kernel(
    query_ptr,
    key_pages_ptr,
    value_pages_ptr,
    raw_value_ptr,
    table_ptr,
    lengths_ptr,
    partial_ptr,  # fp32 [B * Hq * T, num_parts, Dv]
    lse_ptr,  # fp32 [B * Hq * T, num_parts]
    query_stride_row,
    query_stride_head,
    query_stride_column,
    table_stride,
    num_columns,
    num_splits,
    num_parts,
    first_part,
    score_scale,
    score_cap,
    GROUP: tl.constexpr,
    VALUE_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RAW_VALUES: tl.constexpr,
    SINK: tl.constexpr,
    VALUE_RING: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_BOOSTED: tl.constexpr,
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
    STAGES: tl.constexpr,
):
    """Grid (num_splits * column blocks, KV heads, rows); with RAW_VALUES the pages whose K is packed and whose V
    is read from the ring."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    split = tl.program_id(0) % num_splits
    block = tl.program_id(0) // num_splits
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first_page, last_page = pages_of_split(
        tl.load(lengths_ptr + row), split, num_splits, SINK, VALUE_WINDOW, RAW_VALUES
    )
    column, member, is_real = call_columns(block, num_columns, GROUP, COLUMNS, COLUMNS, 1)
    part = partial_rows(row, head, column, member, num_columns, NUM_HEADS, GROUP) * num_parts + first_part + split
    if first_page >= last_page:
        tl.store(lse_ptr + part, tl.full([COLUMNS], -float("inf"), tl.float32), mask=is_real)
        return
    query_offsets = (head * GROUP + member) * query_stride_head + column * query_stride_column
    key_channels = tl.arange(0, KEY_BLOCK)
    query_mask = is_real[:, None] & (key_channels < KEY_DIM)[None, :]
    query_ptr += row * query_stride_row
    query = tl.load(query_ptr + query_offsets[:, None] + key_channels[None, :], mask=query_mask, other=0.0)
    raw_value_ptr += (row * NUM_HEADS + head) * ((SINK + VALUE_RING) * VALUE_DIM)
    tokens = _tile_tokens()
    running_max = tl.full([COLUMNS], -float("inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    accumulator = tl.zeros([COLUMNS, VALUE_BLOCK], tl.float32)
    for index in tl.range(first_page, last_page, num_stages=STAGES):
        page = tl.load(table_ptr + row * table_stride + index).to(tl.int64)
        key_record_ptr = key_pages_ptr + (page * NUM_HEADS + head) * KEY_BYTES
        value_record_ptr = value_pages_ptr + (page * NUM_HEADS + head) * VALUE_BYTES
        if KEY_BITS == 16:
            keys = tl.trans(_raw_tile(key_record_ptr.to(tl.pointer_type(DTYPE)), tokens, KEY_DIM, KEY_BLOCK))
        else:
            keys = _key_tile(
                key_record_ptr, DTYPE, KEY_DIM, NUM_BOOSTED, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO,
                KEY_BOOST, KEY_BLOCK, SLOT_BLOCK,
            )  # fmt: skip
        if RAW_VALUES:
            slots = raw_slot(tokens + (index * PAGE_SIZE + SINK), SINK, VALUE_RING)
            values = _raw_tile(raw_value_ptr, slots, VALUE_DIM, VALUE_BLOCK)
        elif VALUE_BITS == 16:
            values = _raw_tile(value_record_ptr.to(tl.pointer_type(DTYPE)), tokens, VALUE_DIM, VALUE_BLOCK)
        else:
            values = _value_tile(
                value_record_ptr, DTYPE, VALUE_DIM, VALUE_BITS, VALUE_HIGH, VALUE_SCALE, VALUE_ZERO, VALUE_BLOCK
            )
        running_max, total, accumulator = softmax_step(
            query, keys, values, None, running_max, total, accumulator, score_scale, score_cap, HAS_SOFTCAP
        )
    result, lse = softmax_result(running_max, total, accumulator)
    channels = tl.arange(0, VALUE_BLOCK)
    mask = is_real[:, None] & (channels < VALUE_DIM)[None, :]
    tl.store(partial_ptr + part[:, None] * VALUE_DIM + channels[None, :], result, mask=mask)
    tl.store(lse_ptr + part, lse, mask=is_real)

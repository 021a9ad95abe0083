"""Attention of a decode step over what lies raw: the sink, the raw tail of K with the step's own tokens, which have been
appended by then, and pages whose V is still raw.

Like that over packed pages (``decode_attention.py``), with one warp a program and KV as the M side of every product. The raw
tokens of a row are numbered through: sink, tail, own.
"""

import triton
import triton.language as tl

from kitty_compile.kernels.decode_attention import (
    QUERY_TOP,
    max_of_fields,
    packed_scores,
    raw_scores,
    softcapped_fields,
    sum_of_fields,
)
from kitty_compile.kernels.primitives import (
    FIELDS,
    PAGE_SIZE,
    WORD_ROWS,
    call_columns,
    close_up,
    dot,
    narrow,
    new_column,
    new_count,
    normalize_columns,
    partial_rows,
    row_columns,
    score_units,
    sealed_pages,
    softcapped,
    spread,
)


@triton.jit
def _raw_offsets(
    number, shift, COUNT: tl.constexpr, SINK: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where the raw tokens from ``number`` on lie, i32 [COUNT]. With IS_ALIGNED they lie side by side.

    ``shift`` is the ring index of the first token behind the sink, and the ring wraps at most once.
    """
    if IS_ALIGNED:
        slots = _raw_slots(number, shift, SINK, RING) + tl.arange(0, COUNT)
    else:
        slots = _raw_slots(number + tl.arange(0, COUNT), shift, SINK, RING)
    return slots * HEAD_DIM


@triton.jit
def _raw_slots(number, shift, SINK: tl.constexpr, RING: tl.constexpr):
    index = number - SINK + shift
    return tl.where(number < SINK, number, SINK + tl.where(index >= RING, index - RING, index))


@triton.jit
def _attend_tokens(
    query,  # [Dk, N]
    query_column,  # [N / SPREAD]
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
    IS_ALIGNED: tl.constexpr,
    SINK: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention over raw tokens [first, last) -> output [Dv, N / SPREAD] (already divided by the sum) and log2-sum-exp2."""
    PAIRS: tl.constexpr = query_column.shape[0]
    key_channels = tl.arange(0, query.shape[0])
    value_channels = tl.arange(0, VALUE_BLOCK)
    in_key = (key_channels < KEY_DIM)[None, :]
    in_value = (value_channels < VALUE_DIM)[:, None]
    key_shift, value_shift = packed_tokens % KEY_RING, packed_tokens % VALUE_RING
    running_max = tl.full([PAIRS], -float("inf"), tl.float32)
    weight_sum = tl.zeros([TOKENS, PAIRS], tl.float32)
    accumulator = tl.zeros([VALUE_BLOCK, PAIRS], tl.float32)
    for start in tl.range(first, last, TOKENS, num_stages=STAGES):
        number = start + tl.arange(0, TOKENS)
        is_valid = number < last
        key_rows = _raw_offsets(start, key_shift, TOKENS, SINK, KEY_RING, KEY_DIM, IS_ALIGNED)[:, None]
        value_rows = _raw_offsets(start, value_shift, TOKENS, SINK, VALUE_RING, VALUE_DIM, IS_ALIGNED)[None, :]
        keys = tl.load(raw_key_ptr + key_rows + key_channels[None, :], mask=is_valid[:, None] & in_key, other=0.0)
        values = tl.load(
            raw_value_ptr + value_rows + value_channels[:, None], mask=is_valid[None, :] & in_value, other=0.0
        )
        scores = dot(keys, query, tl.zeros([TOKENS, query.shape[1]], tl.float32))
        scores = close_up(scores, SPREAD) * score_scale
        if HAS_SOFTCAP:
            scores = softcapped(scores, score_cap)
        visible = tl.broadcast_to(is_valid[:, None], [TOKENS, PAIRS])
        if not IS_SINGLE:
            is_own = is_valid & (number >= num_cached)
            column = new_column(columns_ptr, number - num_cached, is_own)
            visible &= tl.where(is_own, column, -1)[:, None] <= query_column[None, :]
        scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=0))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)[None, :]
        weights = tl.exp2(scores - base)
        alpha = tl.exp2(running_max[None, :] - base)
        running_max = new_max
        weight_sum = weight_sum * alpha + weights
        output = dot(
            values,
            spread(narrow(weights, values.dtype), SPREAD),
            tl.zeros([VALUE_BLOCK, query.shape[1]], tl.float32),
        )
        accumulator = accumulator * alpha + close_up(output, SPREAD)
    total = tl.sum(weight_sum, axis=0)
    total = tl.where(total > 0.0, total, 1.0)
    return accumulator * (1.0 / total)[None, :], running_max + tl.log2(total)


@triton.jit
def _attend_mixed_page(
    query_ptr,  # the row's
    query_offsets,  # [N]
    column_mask,  # [N]
    query,  # [Dk, N]
    record_ptr,  # of K
    raw_value_ptr,  # the row's and head's
    value_shift,  # ring index of the page's first token
    score_scale,
    score_cap,
    HAS_SOFTCAP: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    SINK: tl.constexpr,
    VALUE_RING: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    KEY_HIGH: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    KEY_BOOST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Attention over a page whose K is packed and whose V lies in the ring, as ``_attend_tokens`` returns it."""
    DTYPE: tl.constexpr = query.dtype
    COLUMNS: tl.constexpr = query.shape[1]
    if KEY_BITS == 16:
        scores = raw_scores(record_ptr, query, score_scale, SPREAD, KEY_DIM, KEY_BLOCK)
    else:
        normalized, exponents = normalize_columns(query, QUERY_TOP)
        units = close_up(score_units(exponents, COLUMNS), SPREAD)
        scores = packed_scores(
            record_ptr, query_ptr, query_offsets, column_mask, query, normalized, exponents, units, score_scale, SPREAD,
            KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, KEY_BLOCK, SLOT_BLOCK,
        )  # fmt: skip
    if HAS_SOFTCAP:
        scores = softcapped_fields(scores, score_cap)
    largest = max_of_fields(scores)
    channels = tl.arange(0, VALUE_BLOCK)
    in_head = (channels < VALUE_DIM)[:, None]
    output = tl.zeros([VALUE_BLOCK, COLUMNS], tl.float32)
    weights = ()
    for field in tl.static_range(FIELDS):
        number = SINK + field * WORD_ROWS
        value_rows = _raw_offsets(number, value_shift, WORD_ROWS, SINK, VALUE_RING, VALUE_DIM, IS_ALIGNED)[None, :]
        values = tl.load(raw_value_ptr + value_rows + channels[:, None], mask=in_head, other=0.0)
        weights = weights + (tl.exp2(scores[field] - largest[None, :]),)
        output = dot(values, spread(narrow(weights[field], DTYPE), SPREAD), output)
    total = tl.sum(sum_of_fields(weights), axis=0)
    return close_up(output, SPREAD) * (1.0 / total)[None, :], largest + tl.log2(total)


@triton.jit(do_not_specialize=["table_stride", "num_columns", "num_raw_parts", "part_tokens"])
def attend_raw_kernel(
    query_ptr,
    key_pages_ptr,
    raw_key_ptr,
    raw_value_ptr,
    table_ptr,
    lengths_ptr,  # as they were before the step
    counts_ptr,
    columns_ptr,
    partial_ptr,  # fp32 [B * Hq * T, raw parts + mixed pages, Dv]
    lse_ptr,  # fp32 [B * Hq * T, raw parts + mixed pages]
    query_stride_row,
    query_stride_head,
    query_stride_column,
    table_stride,
    num_columns,
    num_raw_parts,
    part_tokens,
    score_scale,
    score_cap,
    GROUP: tl.constexpr,
    VALUE_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SINGLE: tl.constexpr,  # one column
    IS_ALIGNED: tl.constexpr,  # sink and rings are multiples of TOKENS
    MIXED_PAGES: tl.constexpr,
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
    SPREAD: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid ((raw parts + mixed pages) * column blocks, KV heads, rows). A raw part takes ``part_tokens`` raw tokens, a mixed
    part one page whose K is packed and whose V is not, if there is one."""
    parts = num_raw_parts + MIXED_PAGES
    part = tl.program_id(0) % parts
    block = tl.program_id(0) // parts
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    num_packed = sealed_pages(length, SINK)
    PAIRS: tl.constexpr = COLUMNS // SPREAD
    column, member, is_real = call_columns(block, num_columns, GROUP, PAIRS, PAIRS, 1)
    place = partial_rows(row, head, column, member, num_columns, NUM_HEADS, GROUP) * parts + part
    mixed_page = sealed_pages(length, SINK + VALUE_WINDOW) + part - num_raw_parts
    num_cached = length - num_packed * PAGE_SIZE
    first = part * part_tokens
    last = tl.minimum(num_cached + new_count(counts_ptr, row, num_columns), first + part_tokens)
    is_raw = part < num_raw_parts
    if (is_raw & (first >= last)) | ((not is_raw) & (mixed_page >= num_packed)):
        tl.store(lse_ptr + place, tl.full([PAIRS], -float("inf"), tl.float32), mask=is_real)
        return

    query_column, query_member, column_mask = call_columns(block, num_columns, GROUP, PAIRS, COLUMNS, SPREAD)
    query_offsets = (head * GROUP + query_member) * query_stride_head + query_column * query_stride_column
    query_ptr += row * query_stride_row
    key_channels = tl.arange(0, KEY_BLOCK)
    query_mask = column_mask[None, :] & (key_channels < KEY_DIM)[:, None]
    query = tl.load(query_ptr + query_offsets[None, :] + key_channels[:, None], mask=query_mask, other=0.0)
    raw_value_ptr += (row * NUM_HEADS + head) * ((SINK + VALUE_RING) * VALUE_DIM)
    if is_raw:
        result, lse = _attend_tokens(
            query, column, raw_key_ptr + (row * NUM_HEADS + head) * ((SINK + KEY_RING) * KEY_DIM), raw_value_ptr,
            row_columns(columns_ptr, row, num_columns), first, last, num_cached, num_packed * PAGE_SIZE, score_scale,
            score_cap, HAS_SOFTCAP, IS_SINGLE, IS_ALIGNED, SINK, KEY_RING, VALUE_RING, KEY_DIM, VALUE_DIM, VALUE_BLOCK, SPREAD,
            TOKENS, STAGES,
        )  # fmt: skip
    else:
        page = tl.load(table_ptr + row * table_stride + mixed_page).to(tl.int64)
        result, lse = _attend_mixed_page(
            query_ptr, query_offsets, column_mask, query, key_pages_ptr + (page * NUM_HEADS + head) * KEY_BYTES,
            raw_value_ptr, mixed_page * PAGE_SIZE % VALUE_RING, score_scale, score_cap, HAS_SOFTCAP, IS_ALIGNED, SINK,
            VALUE_RING,
            KEY_DIM, KEY_BITS, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, VALUE_DIM, KEY_BLOCK,
            VALUE_BLOCK, SLOT_BLOCK, SPREAD,
        )  # fmt: skip
    channels = tl.arange(0, VALUE_BLOCK)
    mask = is_real[None, :] & (channels < VALUE_DIM)[:, None]
    tl.store(partial_ptr + place[None, :] * VALUE_DIM + channels[:, None], result, mask=mask)
    tl.store(lse_ptr + place, lse, mask=is_real)

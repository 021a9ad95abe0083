"""Attention of a decode step over what lies raw: the sink, the raw tail of K with the step's own tokens, which have been
appended by then, and pages whose V is still raw. KV is the M side of every product, as it is over packed pages.

The raw tokens of a row are numbered through: sink, tail, own.
"""

import triton
import triton.language as tl

from kitty_compile.kernels.decode_attention import (
    QUERY_TOP,
    packed_scores,
    raw_scores,
    softcapped_fields,
)
from kitty_compile.kernels.primitives import (
    FIELDS,
    WORD_ROWS,
    close_up,
    dot,
    narrow,
    new_column,
    normalize_columns,
    score_units,
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
def attend_raw_tokens(
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
def attend_half_page(
    query_ptr,  # the row's
    query_offsets,  # [N]
    column_mask,  # [N]
    query,  # [Dk, N]
    record_ptr,  # of K
    raw_value_ptr,  # the row's and head's
    value_shift,  # ring index of the page's first token
    half,
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
    """Attention over half of a page whose K is packed and whose V lies in the ring, as ``attend_raw_tokens`` returns it."""
    HALF_FIELDS: tl.constexpr = FIELDS // 2
    COLUMNS: tl.constexpr = query.shape[1]
    channels = tl.arange(0, VALUE_BLOCK)
    in_head = (channels < VALUE_DIM)[:, None]
    if KEY_BITS == 16:
        scores = raw_scores(record_ptr, query, half, score_scale, HALF_FIELDS, SPREAD, KEY_DIM, KEY_BLOCK)
    else:
        normalized, exponents = normalize_columns(query, QUERY_TOP)
        units = close_up(score_units(exponents, COLUMNS), SPREAD)
        scores = packed_scores(
            record_ptr, query_ptr, query_offsets, column_mask, query, normalized, exponents, units, half, score_scale,
            HALF_FIELDS, SPREAD, KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, KEY_BLOCK,
            SLOT_BLOCK,
        )  # fmt: skip
    if HAS_SOFTCAP:
        scores = softcapped_fields(scores, score_cap, HALF_FIELDS)
    largest = tl.max(tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3])), axis=0)
    weight_sum = tl.zeros(scores[0].shape, tl.float32)
    output = tl.zeros([VALUE_BLOCK, COLUMNS], tl.float32)
    for field in tl.static_range(HALF_FIELDS):
        number = SINK + (half * HALF_FIELDS + field) * WORD_ROWS
        value_rows = _raw_offsets(number, value_shift, WORD_ROWS, SINK, VALUE_RING, VALUE_DIM, IS_ALIGNED)[None, :]
        values = tl.load(raw_value_ptr + value_rows + channels[:, None], mask=in_head, other=0.0)
        weights = tl.exp2(scores[field] - largest[None, :])
        weight_sum += weights
        output = dot(values, spread(narrow(weights, query.dtype), SPREAD), output)
    total = tl.sum(weight_sum, axis=0)
    return close_up(output, SPREAD) * (1.0 / total)[None, :], largest + tl.log2(total)

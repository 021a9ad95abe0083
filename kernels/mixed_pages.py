"""Attention over a page whose K is packed and whose V is still raw, or over some of its word fields.

A row has no more such pages than the value window spans, so what counts is how soon a program is done: the fields stand one
below the other as the rows of one product, which brings the tokens into their own order.
"""

import triton
import triton.language as tl

from kitty_compile.kernels.decode_attention import QUERY_TOP, SCALE_TOP, boosted_query, load_key_page
from kitty_compile.kernels.primitives import (
    CODE_EXPONENT,
    WORD_ROWS,
    dot,
    high_operand,
    key_operand,
    narrow,
    normalize_columns,
    power_of_two,
    raw_slot,
    relative_scales,
    scale_exponent,
    softcapped,
)


@triton.jit
def _stacked_codes(words, first_field, NUM_FIELDS: tl.constexpr):
    """Words [16, X] -> fp16 code * 2**-24, [16 NUM_FIELDS, X]: row by row the tokens from 16 ``first_field`` on."""
    shifts = (2 * (first_field + tl.arange(0, NUM_FIELDS))).to(tl.int16)
    codes = (words[None, :, :] >> shifts[:, None, None]) & 3
    return tl.reshape(codes, [NUM_FIELDS * WORD_ROWS, words.shape[1]]).to(tl.float16, bitcast=True)


@triton.jit
def _packed_scores(
    record_ptr, query_ptr, query_offsets, column_mask, query, first_field, score_scale, NUM_FIELDS: tl.constexpr,
    KEY_DIM: tl.constexpr, NUM_SLOTS: tl.constexpr, HAS_INDEX: tl.constexpr, KEY_HIGH: tl.constexpr,
    KEY_SCALE: tl.constexpr, KEY_ZERO: tl.constexpr, KEY_BOOST: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Scores of the fields of a packed key page, fp32 [16 NUM_FIELDS, N]."""
    low_words, high_words, scale_bits, zero_bits, boost = load_key_page(
        record_ptr, KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, DIM, SLOTS
    )
    normalized, exponents = normalize_columns(query, QUERY_TOP)
    exponent = scale_exponent(scale_bits, SCALE_TOP)
    scaled_query = normalized * relative_scales(scale_bits, exponent)[:, None]
    products = tl.dot(_stacked_codes(key_operand(low_words, DIM), first_field, NUM_FIELDS), scaled_query)
    if HAS_INDEX:
        high_query = boosted_query(query_ptr, query_offsets, column_mask, exponents, boost, exponent)
    elif NUM_SLOTS > 0:
        high_query = scaled_query * 4.0
    if NUM_SLOTS > 0:
        high = _stacked_codes(high_operand(high_words, SLOTS), first_field, NUM_FIELDS)
        products = tl.dot(high, high_query, products)
    zero = tl.broadcast_to(zero_bits.to(query.dtype, bitcast=True)[None, :], [WORD_ROWS, DIM])
    constant = tl.max(dot(zero, query, tl.zeros([WORD_ROWS, query.shape[1]], tl.float32)), axis=0)
    unit = power_of_two(exponents) * power_of_two(exponent) * 2.0**CODE_EXPONENT
    return (products * unit[None, :] + constant[None, :]) * score_scale


@triton.jit
def attend_mixed_fields(
    query_ptr,  # the row's
    query_offsets,  # [N]
    column_mask,  # [N]
    record_ptr,  # of K
    raw_value_ptr,  # the row's and head's
    first_token,  # of the page
    first_field,
    score_scale,
    score_cap,
    HAS_SOFTCAP: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
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
):
    """-> output [Dv, N] (already divided by the sum) and log2-sum-exp2 [N]."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    TOKENS: tl.constexpr = NUM_FIELDS * WORD_ROWS
    tokens = first_field * WORD_ROWS + tl.arange(0, TOKENS)
    key_channels = tl.arange(0, KEY_BLOCK)
    value_channels = tl.arange(0, VALUE_BLOCK)
    in_key = key_channels < KEY_DIM
    rows_ptr = raw_value_ptr + raw_slot(first_token + tokens, SINK, VALUE_RING)[:, None] * VALUE_DIM
    values = tl.load(rows_ptr + value_channels[None, :], mask=(value_channels < VALUE_DIM)[None, :], other=0.0)
    query_pointers = query_ptr + query_offsets[None, :] + key_channels[:, None]
    query = tl.load(query_pointers, mask=column_mask[None, :] & in_key[:, None], other=0.0)
    if KEY_BITS == 16:
        key_pointers = record_ptr.to(tl.pointer_type(DTYPE)) + tokens[:, None] * KEY_DIM + key_channels[None, :]
        keys = tl.load(key_pointers, mask=in_key[None, :], other=0.0)
        scores = dot(keys, query, tl.zeros([TOKENS, query.shape[1]], tl.float32)) * score_scale
    else:
        scores = _packed_scores(
            record_ptr, query_ptr, query_offsets, column_mask, query, first_field, score_scale, NUM_FIELDS,
            KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, KEY_BLOCK, SLOT_BLOCK,
        )  # fmt: skip
    if HAS_SOFTCAP:
        scores = softcapped(scores, score_cap)
    largest = tl.max(scores, axis=0)
    weights = tl.exp2(scores - largest[None, :])
    total = tl.sum(weights, axis=0)
    output = dot(tl.trans(values), narrow(weights, DTYPE), tl.zeros([VALUE_BLOCK, query.shape[1]], tl.float32))
    return output * (1.0 / total)[None, :], largest + tl.log2(total)

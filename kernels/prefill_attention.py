"""Attention of many query columns over pages: chunked prefill, multi-turn, speculative verification.

As in ``decode_attention.py`` codes go to the tensor cores as they are, and scales and zeros to what they meet there; here the
columns are the M side of the products, and a page's codes lie in shared memory for a whole block of columns. Within a tile
tokens stand in word order, 8 j + f for token 16 f + j; nobody minds.
"""

import triton
import triton.language as tl

from kitty_compile.kernels.decode_attention import (
    PROBABILITY_TOP,
    QUERY_TOP,
    SCALE_TOP,
    VALUE_SCALE_TOP,
    VALUE_UNIT,
    load_key_page,
)
from kitty_compile.kernels.primitives import (
    CODE_EXPONENT,
    FIELDS,
    IS_INTERPRETED,
    PAGE_SIZE,
    WORD_ROWS,
    bfloat16_to_float32,
    call_columns,
    dot,
    high_operand,
    join_fields,
    key_operand,
    load_padded,
    narrow,
    pages_of_split,
    partial_rows,
    power_of_two,
    raw_slot,
    relative_scales,
    scale_exponent,
    softcapped,
    split_fields,
    value_operand,
    widen,
)


@triton.jit
def _tile_tokens():
    """Which token of its page stands where in a tile, i32 [128]."""
    index = tl.arange(0, PAGE_SIZE)
    return index % FIELDS * WORD_ROWS + index // FIELDS


@triton.jit
def _split_codes_inline(words):
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 shifted;
        and.b32 $0, $8, 0x00030003;
        shr.u32 shifted, $8, 2;
        and.b32 $1, shifted, 0x00030003;
        shr.u32 shifted, $8, 4;
        and.b32 $2, shifted, 0x00030003;
        shr.u32 shifted, $8, 6;
        and.b32 $3, shifted, 0x00030003;
        shr.u32 shifted, $8, 8;
        and.b32 $4, shifted, 0x00030003;
        shr.u32 shifted, $8, 10;
        and.b32 $5, shifted, 0x00030003;
        shr.u32 shifted, $8, 12;
        and.b32 $6, shifted, 0x00030003;
        shr.u32 shifted, $8, 14;
        and.b32 $7, shifted, 0x00030003;
        }
        """,
        constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
        args=[words],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _split_codes(words):
    """As ``split_fields``, but every field holds code * 2**-24: scores need no weights."""
    if not IS_INTERPRETED:
        codes = _split_codes_inline(words)
    else:
        codes = ()
        for field in tl.static_range(FIELDS):
            code = (words.to(tl.int32) >> (2 * field)) & 3
            codes = codes + (code.to(tl.int16).to(tl.float16, bitcast=True),)
    return codes


@triton.jit
def _key_codes(words):
    """Words [16, X] of a key record -> code * 2**-24, fp16 [X, 128]."""
    return tl.reshape(tl.permute(join_fields(_split_codes(words)), [1, 0, 2]), [words.shape[1], PAGE_SIZE])


@triton.jit
def _value_codes(words):
    """Words [X, 16] of a value record -> code * 4**e * 2**-24 with the exponent of a token's field, fp16 [128, X]."""
    return tl.reshape(tl.permute(join_fields(split_fields(words)), [1, 2, 0]), [PAGE_SIZE, words.shape[0]])


@triton.jit
def _normalize_rows(rows):
    """fp16 or bf16 [M, D] -> fp16 [M, D] with rows under 2**(QUERY_TOP + 1), and i32 [M], the exponents divided out."""
    wide = widen(rows)
    largest = tl.max(tl.abs(wide), axis=1)
    exponents = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - (127 + QUERY_TOP), -100)
    return (wide * power_of_two(-exponents)[:, None]).to(tl.float16), exponents


@triton.jit
def _packed_scores(
    record_ptr, query_ptr, query_offsets, is_real, query, normalized, exponents, score_scale, KEY_DIM: tl.constexpr,
    NUM_SLOTS: tl.constexpr, HAS_INDEX: tl.constexpr, KEY_HIGH: tl.constexpr, KEY_SCALE: tl.constexpr,
    KEY_ZERO: tl.constexpr, KEY_BOOST: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Scores of a packed key page, fp32 [M, 128]: of the ``normalized`` query, which is ``query`` * 2**-``exponents``, with the
    codes, and of the query with the zeros."""
    low_words, high_words, scale_bits, zero_bits, boost = load_key_page(
        record_ptr, KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, DIM, SLOTS
    )
    exponent = scale_exponent(scale_bits, SCALE_TOP)
    scaled_query = normalized * relative_scales(scale_bits, exponent)[None, :]
    products = tl.dot(scaled_query, _key_codes(key_operand(low_words, DIM)))
    if HAS_INDEX:
        pointers = query_ptr + query_offsets[:, None] + (boost >> 16)[None, :]
        picked = widen(tl.load(pointers, mask=is_real[:, None], other=0.0)) * power_of_two(-exponents)[:, None]
        # The record holds four times the scale.
        boosted = picked * (bfloat16_to_float32(boost) * power_of_two(-exponent))[None, :]
        products = tl.dot(boosted.to(tl.float16), _key_codes(high_operand(high_words, SLOTS)), products)
    elif NUM_SLOTS > 0:
        products = tl.dot(scaled_query * 4.0, _key_codes(high_operand(high_words, SLOTS)), products)
    zero = tl.broadcast_to(zero_bits.to(query.dtype, bitcast=True)[:, None], [DIM, 16])
    constant = tl.max(dot(query, zero, tl.zeros([query.shape[0], 16], tl.float32)), axis=1) * score_scale
    unit = power_of_two(exponents) * (score_scale * 2.0**CODE_EXPONENT) * power_of_two(exponent)
    return products * unit[:, None] + constant[:, None]


@triton.jit
def _packed_values(
    record_ptr, weights, alpha, accumulator, zero_sum, exponent, IS_BFLOAT16: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_HIGH: tl.constexpr, VALUE_SCALE: tl.constexpr, VALUE_ZERO: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Probabilities fp32 [M, 128] times a packed value page: takes the codes' part into the accumulator [M, D], in units of
    VALUE_UNIT * 2**e, and p z into ``zero_sum`` [M]. Returns both and e, which grows from ``exponent`` as scales demand."""
    plane_ptr = record_ptr.to(tl.pointer_type(tl.int16))
    scale_bits = load_padded(plane_ptr + VALUE_SCALE // 2, PAGE_SIZE, PAGE_SIZE)
    zero_bits = load_padded(plane_ptr + VALUE_ZERO // 2, PAGE_SIZE, PAGE_SIZE)
    low_words = load_padded(plane_ptr, WORD_ROWS * VALUE_DIM, WORD_ROWS * DIM)
    new_exponent = tl.maximum(exponent, scale_exponent(scale_bits, VALUE_SCALE_TOP))
    scale = _in_tile_order(relative_scales(scale_bits, new_exponent))
    if IS_BFLOAT16:
        zero = bfloat16_to_float32(_in_tile_order(zero_bits))
    else:
        zero = _in_tile_order(zero_bits).to(tl.float16, bitcast=True).to(tl.float32)
    zero_sum = zero_sum * alpha + tl.sum(weights * zero[None, :], axis=1)
    scaled = weights.to(tl.float16) * scale[None, :]
    accumulator = accumulator * (alpha * power_of_two(exponent - new_exponent))[:, None]
    accumulator = tl.dot(scaled, _value_codes(value_operand(low_words, DIM)), accumulator)
    if VALUE_BITS == 4:
        high_words = load_padded(plane_ptr + VALUE_HIGH // 2, WORD_ROWS * VALUE_DIM, WORD_ROWS * DIM)
        accumulator = tl.dot(scaled * 4.0, _value_codes(value_operand(high_words, DIM)), accumulator)
    return accumulator, zero_sum, new_exponent


@triton.jit
def _in_tile_order(tokens):
    """[128] in token order -> in a tile's."""
    return tl.reshape(tl.trans(tl.reshape(tokens, [FIELDS, WORD_ROWS])), [PAGE_SIZE])


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
    normalized, exponents = _normalize_rows(query)
    raw_value_ptr += (row * NUM_HEADS + head) * ((SINK + VALUE_RING) * VALUE_DIM)
    tokens = _tile_tokens()
    running_max = tl.full([COLUMNS], -float("inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    zero_sum = tl.zeros([COLUMNS], tl.float32)
    accumulator = tl.zeros([COLUMNS, VALUE_BLOCK], tl.float32)
    value_exponent = -112
    # Pages fetched ahead would take the shared memory of a second program.
    for index in tl.range(first_page, last_page, num_stages=1):
        page = tl.load(table_ptr + row * table_stride + index).to(tl.int64)
        key_record_ptr = key_pages_ptr + (page * NUM_HEADS + head) * KEY_BYTES
        value_record_ptr = value_pages_ptr + (page * NUM_HEADS + head) * VALUE_BYTES
        if KEY_BITS == 16:
            keys = tl.trans(_raw_tile(key_record_ptr.to(tl.pointer_type(DTYPE)), tokens, KEY_DIM, KEY_BLOCK))
            scores = dot(query, keys, tl.zeros([COLUMNS, PAGE_SIZE], tl.float32)) * score_scale
        else:
            scores = _packed_scores(
                key_record_ptr, query_ptr, query_offsets, is_real, query, normalized, exponents, score_scale,
                KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, KEY_BLOCK, SLOT_BLOCK,
            )  # fmt: skip
        if HAS_SOFTCAP:
            scores = softcapped(scores, score_cap)
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - (new_max - PROBABILITY_TOP)[:, None])
        alpha = tl.exp2(running_max - new_max)
        running_max = new_max
        total = total * alpha + tl.sum(weights, axis=1)
        if RAW_VALUES or VALUE_BITS == 16:
            if RAW_VALUES:
                slots = raw_slot(tokens + (index * PAGE_SIZE + SINK), SINK, VALUE_RING)
                values = _raw_tile(raw_value_ptr, slots, VALUE_DIM, VALUE_BLOCK)
            else:
                values = _raw_tile(value_record_ptr.to(tl.pointer_type(DTYPE)), tokens, VALUE_DIM, VALUE_BLOCK)
            accumulator = dot(narrow(weights, DTYPE), values, accumulator * alpha[:, None])
        else:
            accumulator, zero_sum, value_exponent = _packed_values(
                value_record_ptr, weights, alpha, accumulator, zero_sum, value_exponent, DTYPE == tl.bfloat16,
                VALUE_DIM, VALUE_BITS, VALUE_HIGH, VALUE_SCALE, VALUE_ZERO, VALUE_BLOCK,
            )  # fmt: skip
    inverse = 1.0 / total
    if RAW_VALUES or VALUE_BITS == 16:
        result = accumulator * inverse[:, None]
    else:
        result = accumulator * (inverse * VALUE_UNIT * power_of_two(value_exponent))[:, None]
        result += (zero_sum * inverse)[:, None]
    lse = running_max - PROBABILITY_TOP + tl.log2(total)
    channels = tl.arange(0, VALUE_BLOCK)
    mask = is_real[:, None] & (channels < VALUE_DIM)[None, :]
    tl.store(partial_ptr + part[:, None] * VALUE_DIM + channels[None, :], result, mask=mask)
    tl.store(lse_ptr + part, lse, mask=is_real)

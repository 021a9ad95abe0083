"""Attention over packed pages: split-KV flash attention that never forms K or V.

    q . k = sum_d (q_d s_d) c_d + sum_d q_d z_d          the scale goes into q once a page, the zero is a constant of the page
    sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t z_t

KV is the M side of every product and the query columns (new tokens x GQA group of one KV head) are the N side, so that the
codes, which lie in memory as an A operand, go to the tensor cores as they are. Up to four columns stand in every other of the
product's eight (``spread``): a thread holds two neighbours, and the empty one is dropped where it stands, before the softmax.
The boosted channels' high bits are a second small product. What must fit fp16 is brought near 1 by powers of two: a query
column by its largest |q| (once), scales and zeros by the page's largest; they are factored back in fp32.

The order of statements in the loops was measured, as was one warp a program (see DESIGN, section 4).
"""

import triton
import triton.language as tl

from kitty_compile.kernels.primitives import (
    CODE_EXPONENT,
    FIELD_WEIGHTS,
    FIELDS,
    IS_INTERPRETED,
    PAGE_SIZE,
    WORD_ROWS,
    bfloat16_to_float32,
    close_up,
    dot,
    high_operand,
    key_operand,
    load_padded,
    narrow,
    normalize_columns,
    power_of_two,
    relative_scales,
    scale_exponent,
    score_units,
    softcapped,
    split_fields,
    split_tokens,
    spread,
    value_operand,
    widen,
)

# Exponents of what is normalised: a query column's largest magnitude, a page's largest key scale, the largest value scale so
# far, and the largest probability. A product of two, or four times one, stays under fp16's 2**16.
QUERY_TOP = tl.constexpr(3)
SCALE_TOP = tl.constexpr(8)
VALUE_SCALE_TOP = tl.constexpr(8)
PROBABILITY_TOP = tl.constexpr(4)
# The stored value scale carries 4**(2 - e), the code 4**e * 2**-24.
VALUE_UNIT = tl.constexpr(2.0 ** (24 - 4))
# A good order of the fields for the instruction scheduler.
FIELD_ORDER = tl.constexpr((5, 3, 2, 4, 7, 6, 1, 0))


@triton.jit
def _split_half_inline(words, shift):
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 amount, shifted;
        and.b32 amount, $5, 0xF;
        shr.u32 shifted, $4, amount;
        and.b32 $0, shifted, 0x00030003;
        and.b32 $1, shifted, 0x000C000C;
        and.b32 $2, shifted, 0x00300030;
        and.b32 $3, shifted, 0x00C000C0;
        }
        """,
        constraints="=r,=r,=r,=r,r,r",
        args=[words, shift],
        dtype=(tl.float16,) * 4,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _split_half(words, half):
    """As ``split_fields``, the four fields of one ``half`` of the words; field f holds code * 4**f * 2**-24."""
    if not IS_INTERPRETED:
        # Two words are shifted as one, by the lower one's amount; what the upper one loses to the lower one is masked.
        fields = _split_half_inline(words, (8 * half).to(tl.int16))
    else:
        fields = ()
        for field in tl.static_range(FIELDS // 2):
            masked = (words.to(tl.int32) >> (8 * half)) & (3 << (2 * field))
            fields = fields + (masked.to(tl.int16).to(tl.float16, bitcast=True),)
    return fields


@triton.jit
def _dot_fields(words, operand, sums, half, NUM_FIELDS: tl.constexpr):
    """The products of fields of ``words`` [16, D] with ``operand`` [D, N], added to ``sums`` where given: of all eight fields,
    or with NUM_FIELDS = 4 of the ``half``'s four."""
    if NUM_FIELDS == FIELDS:
        fields = split_fields(words)
    else:
        fields = _split_half(words, half)
    products = ()
    for field in tl.static_range(NUM_FIELDS):
        if sums is None:
            products = products + (tl.dot(fields[field], operand),)
        else:
            products = products + (tl.dot(fields[field], operand, sums[field]),)
    return products


@triton.jit
def max_of_fields(scores):
    front = tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3]))
    back = tl.maximum(tl.maximum(scores[4], scores[5]), tl.maximum(scores[6], scores[7]))
    return tl.max(tl.maximum(front, back), axis=0)


@triton.jit
def softcapped_fields(scores, score_cap, NUM_FIELDS: tl.constexpr):
    capped = ()
    for field in tl.static_range(NUM_FIELDS):
        capped = capped + (softcapped(scores[field], score_cap),)
    return capped


@triton.jit
def sum_of_fields(parts):
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))


@triton.jit
def load_key_page(
    record_ptr, KEY_DIM: tl.constexpr, NUM_SLOTS: tl.constexpr, HAS_INDEX: tl.constexpr, KEY_HIGH: tl.constexpr,
    KEY_SCALE: tl.constexpr, KEY_ZERO: tl.constexpr, KEY_BOOST: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """A packed key page's low words [16 DIM], high words [SLOTS / 8, 32, 4], scales and zeros [DIM] as bits, boost [SLOTS].

    Where a page has no high words or no boost record, low words stand in for them: a compiled function cannot return None.
    """
    plane_ptr = record_ptr.to(tl.pointer_type(tl.int16))
    if NUM_SLOTS > 0:
        half = tl.arange(0, SLOTS // 8)[:, None, None]
        high_offsets = half * 128 + tl.arange(0, 32)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        if SLOTS > NUM_SLOTS:
            high_words = tl.load(plane_ptr + KEY_HIGH // 2 + high_offsets, mask=half < NUM_SLOTS // 8, other=0)
        else:
            high_words = tl.load(plane_ptr + KEY_HIGH // 2 + high_offsets)
    low_words = load_padded(plane_ptr, WORD_ROWS * KEY_DIM, WORD_ROWS * DIM)
    zero_bits = load_padded(plane_ptr + KEY_ZERO // 2, KEY_DIM, DIM)
    scale_bits = load_padded(plane_ptr + KEY_SCALE // 2, KEY_DIM, DIM)
    if HAS_INDEX:
        boost = load_padded(record_ptr.to(tl.pointer_type(tl.int32)) + KEY_BOOST // 4, NUM_SLOTS, SLOTS)
    else:
        boost = low_words
    if NUM_SLOTS == 0:
        high_words = low_words
    return low_words, high_words, scale_bits, zero_bits, boost


@triton.jit
def boosted_query(query_ptr, query_offsets, column_mask, exponents, boost, exponent):
    """The query's boosted channels, normalised as the query is, times 4 * scale * 2**-exponent: fp16 [SLOTS, N]."""
    pointers = query_ptr + query_offsets[None, :] + (boost >> 16)[:, None]
    picked = widen(tl.load(pointers, mask=column_mask[None, :], other=0.0)) * power_of_two(-exponents)[None, :]
    boost_scale = bfloat16_to_float32(boost) * power_of_two(-exponent)
    return (picked * boost_scale[:, None]).to(tl.float16)


@triton.jit
def packed_scores(
    record_ptr, query_ptr, query_offsets, column_mask, query, normalized, exponents, units, half, score_scale,
    NUM_FIELDS: tl.constexpr, SPREAD: tl.constexpr, KEY_DIM: tl.constexpr, NUM_SLOTS: tl.constexpr,
    HAS_INDEX: tl.constexpr, KEY_HIGH: tl.constexpr, KEY_SCALE: tl.constexpr, KEY_ZERO: tl.constexpr,
    KEY_BOOST: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Scores of a packed key page, or with NUM_FIELDS = 4 of a ``half`` of it, as fp32 [16, N / SPREAD] a field: of the
    ``normalized`` query, which is ``query`` * 2**-``exponents``, with the codes, and of the query with the zeros.
    ``units`` [N / SPREAD] are 2**exponents."""
    low_words, high_words, scale_bits, zero_bits, boost = load_key_page(
        record_ptr, KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, DIM, SLOTS
    )
    exponent = scale_exponent(scale_bits, SCALE_TOP)
    scaled_query = normalized * relative_scales(scale_bits, exponent)[:, None]
    scores = _dot_fields(key_operand(low_words, DIM), scaled_query, None, half, NUM_FIELDS)
    if HAS_INDEX:
        high_query = boosted_query(query_ptr, query_offsets, column_mask, exponents, boost, exponent)
        scores = _dot_fields(high_operand(high_words, SLOTS), high_query, scores, half, NUM_FIELDS)
    elif NUM_SLOTS > 0:
        scores = _dot_fields(high_operand(high_words, SLOTS), scaled_query * 4.0, scores, half, NUM_FIELDS)

    zero = tl.broadcast_to(zero_bits.to(query.dtype, bitcast=True)[None, :], [WORD_ROWS, DIM])
    constant = close_up(dot(zero, query, tl.zeros([WORD_ROWS, query.shape[1]], tl.float32)), SPREAD) * score_scale
    unit = units * (score_scale * 2.0**CODE_EXPONENT) * power_of_two(exponent)
    finished = ()
    for field in tl.static_range(NUM_FIELDS):
        score = close_up(scores[field], SPREAD)
        finished = finished + (score * (unit * FIELD_WEIGHTS[field])[None, :] + constant,)
    return finished


@triton.jit
def raw_scores(
    record_ptr, query, half, score_scale, NUM_FIELDS: tl.constexpr, SPREAD: tl.constexpr, KEY_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Scores of a raw key page, or of a half of it, as fp32 [16, N / SPREAD] a field."""
    channels = tl.arange(0, DIM)
    page_ptr = record_ptr.to(tl.pointer_type(query.dtype)) + half * (NUM_FIELDS * WORD_ROWS * KEY_DIM)
    offsets = tl.arange(0, WORD_ROWS)[:, None] * KEY_DIM + channels[None, :]
    scores = ()
    for field in tl.static_range(NUM_FIELDS):
        keys = tl.load(page_ptr + field * WORD_ROWS * KEY_DIM + offsets, mask=(channels < KEY_DIM)[None, :], other=0.0)
        score = dot(keys, query, tl.zeros([WORD_ROWS, query.shape[1]], tl.float32))
        scores = scores + (close_up(score, SPREAD) * score_scale,)
    return scores


@triton.jit
def _packed_values(
    record_ptr, weights, alpha, zero_sum, exponent, SPREAD: tl.constexpr,
    IS_BFLOAT16: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BITS: tl.constexpr,
    VALUE_HIGH: tl.constexpr, VALUE_SCALE: tl.constexpr, VALUE_ZERO: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Probabilities (eight fp32 [16, N / SPREAD]) times a packed value page -> the codes' part [D, N / SPREAD] in units of
    VALUE_UNIT * 2**e, the running sum of p z [16, N / SPREAD], and e, which grows from ``exponent`` as scales demand."""
    plane_ptr = record_ptr.to(tl.pointer_type(tl.int16))
    scale_bits = load_padded(plane_ptr + VALUE_SCALE // 2, PAGE_SIZE, PAGE_SIZE)
    low_words = load_padded(plane_ptr, WORD_ROWS * VALUE_DIM, WORD_ROWS * DIM)
    if VALUE_BITS == 4:
        high_words = load_padded(plane_ptr + VALUE_HIGH // 2, WORD_ROWS * VALUE_DIM, WORD_ROWS * DIM)
    zero_bits = load_padded(plane_ptr + VALUE_ZERO // 2, PAGE_SIZE, PAGE_SIZE)

    exponent = tl.maximum(exponent, scale_exponent(scale_bits, VALUE_SCALE_TOP))
    zeros = split_tokens(zero_bits)
    scales = split_tokens(relative_scales(scale_bits, exponent))
    zero_sum = zero_sum * alpha
    scaled = ()
    for index in tl.static_range(FIELDS):
        if IS_BFLOAT16:
            zero = bfloat16_to_float32(zeros[FIELD_ORDER[index]])
        else:
            zero = zeros[FIELD_ORDER[index]].to(tl.float16, bitcast=True).to(tl.float32)
        zero_sum = zero_sum + weights[FIELD_ORDER[index]] * zero[:, None]
        product = weights[FIELD_ORDER[index]].to(tl.float16) * scales[FIELD_ORDER[index]][:, None]
        scaled = scaled + (spread(product, SPREAD),)

    low_fields = split_fields(value_operand(low_words, DIM))
    output = tl.dot(low_fields[FIELD_ORDER[0]], scaled[0])
    for index in tl.static_range(1, FIELDS):
        output = tl.dot(low_fields[FIELD_ORDER[index]], scaled[index], output)
    if VALUE_BITS == 4:
        high_fields = split_fields(value_operand(high_words, DIM))
        for index in tl.static_range(FIELDS):
            output = tl.dot(high_fields[FIELD_ORDER[index]], scaled[index] * 4.0, output)
    return close_up(output, SPREAD), zero_sum, exponent


@triton.jit
def _raw_values(
    record_ptr, weights, DTYPE: tl.constexpr, SPREAD: tl.constexpr, VALUE_DIM: tl.constexpr, DIM: tl.constexpr
):
    """Probabilities times a raw value page -> [D, N / SPREAD]."""
    channels = tl.arange(0, DIM)
    page_ptr = record_ptr.to(tl.pointer_type(DTYPE))
    offsets = tl.arange(0, WORD_ROWS)[:, None] * VALUE_DIM + channels[None, :]
    output = tl.zeros([DIM, SPREAD * weights[0].shape[1]], tl.float32)
    for field in tl.static_range(FIELDS):
        rows_ptr = page_ptr + field * WORD_ROWS * VALUE_DIM
        values = tl.load(rows_ptr + offsets, mask=(channels < VALUE_DIM)[None, :], other=0.0)
        output = dot(tl.trans(values), spread(narrow(weights[field], DTYPE), SPREAD), output)
    return close_up(output, SPREAD)


@triton.jit
def attend_packed_pages(
    query_ptr,  # the row's
    query_offsets,  # [N]
    column_mask,  # [N]
    query,  # [Dk, N]
    key_pages_ptr,  # the head's record of page 0
    value_pages_ptr,
    table_ptr,  # the row's
    first_page,
    last_page,
    score_scale,
    score_cap,
    HAS_SOFTCAP: tl.constexpr,
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
    SPREAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention over pages [first_page, last_page), at least one, packed in K and V (or raw in both, where the layout has no
    codes) -> output [Dv, N / SPREAD], already divided by the sum, and log2-sum-exp2 [N / SPREAD].

    Scores are ``q . k * score_scale`` in units of log2, or with HAS_SOFTCAP ``score_cap * tanh(q . k * score_scale)``.
    """
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    COLUMNS: tl.constexpr = query.shape[1]
    PAIRS: tl.constexpr = query.shape[1] // SPREAD
    normalized, exponents = normalize_columns(query, QUERY_TOP)
    units = close_up(score_units(exponents, COLUMNS), SPREAD)
    running_max = tl.full([PAIRS], -float("inf"), tl.float32)
    weight_sum = tl.zeros([WORD_ROWS, PAIRS], tl.float32)
    zero_sum = tl.zeros([WORD_ROWS, PAIRS], tl.float32)
    accumulator = tl.zeros([VALUE_BLOCK, PAIRS], tl.float32)
    value_exponent = -112
    next_page = tl.load(table_ptr + first_page)
    for index in tl.range(first_page, last_page, num_stages=STAGES):
        page = next_page.to(tl.int64)
        next_page = tl.load(table_ptr + tl.minimum(index + 1, last_page - 1))
        key_record_ptr = key_pages_ptr + page * (NUM_HEADS * KEY_BYTES)
        value_record_ptr = value_pages_ptr + page * (NUM_HEADS * VALUE_BYTES)
        if KEY_BITS == 16:
            scores = raw_scores(key_record_ptr, query, 0, score_scale, FIELDS, SPREAD, KEY_DIM, KEY_BLOCK)
        else:
            scores = packed_scores(
                key_record_ptr, query_ptr, query_offsets, column_mask, query, normalized, exponents, units, 0, score_scale,
                FIELDS, SPREAD, KEY_DIM, NUM_SLOTS, HAS_INDEX, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, KEY_BLOCK, SLOT_BLOCK,
            )  # fmt: skip
        if HAS_SOFTCAP:
            scores = softcapped_fields(scores, score_cap, FIELDS)
        new_max = tl.maximum(running_max, max_of_fields(scores))
        base = (new_max - PROBABILITY_TOP)[None, :]
        weights = ()
        for field in tl.static_range(FIELDS):
            weights = weights + (tl.exp2(scores[field] - base),)
        alpha = tl.exp2(running_max - new_max)[None, :]
        running_max = new_max
        weight_sum = weight_sum * alpha + sum_of_fields(weights)
        if VALUE_BITS == 16:
            output = _raw_values(value_record_ptr, weights, DTYPE, SPREAD, VALUE_DIM, VALUE_BLOCK)
        else:
            old_exponent = value_exponent
            output, zero_sum, value_exponent = _packed_values(
                value_record_ptr, weights, alpha, zero_sum, value_exponent, SPREAD,
                DTYPE == tl.bfloat16, VALUE_DIM, VALUE_BITS, VALUE_HIGH, VALUE_SCALE, VALUE_ZERO, VALUE_BLOCK,
            )  # fmt: skip
            alpha = alpha * power_of_two(old_exponent - value_exponent)
        # One flush a page: inside the tensor core a long fp32 sum drifts.
        accumulator = accumulator * alpha + output
    total = tl.sum(weight_sum, axis=0)
    total = tl.where(total > 0.0, total, 1.0)
    inverse = (1.0 / total)[None, :]
    if VALUE_BITS == 16:
        result = accumulator * inverse
    else:
        result = (
            accumulator * (inverse * VALUE_UNIT) * power_of_two(value_exponent)
            + tl.sum(zero_sum, axis=0)[None, :] * inverse
        )
    return result, running_max - PROBABILITY_TOP + tl.log2(total)

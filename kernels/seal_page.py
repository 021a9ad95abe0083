"""Seal pages: quantise and pack every page that a call completes (``reference.seal_keys`` and ``seal_values``, bit for bit)."""

import triton
import triton.language as tl

from kitty_compile.kernels import reference
from kitty_compile.kernels.append import append_items
from kitty_compile.kernels.primitives import (
    FIELD_PREMULTIPLIER,
    FIELDS,
    IS_INTERPRETED,
    PAGE_SIZE,
    WORD_ROWS,
    bfloat16_to_float32,
    high_word_offset,
    mix_hash,
    new_column,
    new_count,
    order_key_words,
    order_value_words,
    pack_words,
    power_of_two,
    round_to_bfloat16,
    row_columns,
    sealed_pages,
    token_pointers,
    widen,
)

MAX_SCALE = tl.constexpr(reference.MAX_SCALE)
LARGEST = tl.constexpr(3.4028234663852886e38)
MIN_SCALE = tl.constexpr(reference.MIN_SCALE)
SCORE_BITS = tl.constexpr(reference.SCORE_BITS)


@triton.jit
def _stored_scale(low, high, levels):
    scale = tl.minimum(tl.div_rn(high - low, levels), MAX_SCALE)
    return round_to_bfloat16(tl.where(scale < MIN_SCALE, 0.0, scale))


@triton.jit
def _divide(numbers, step, reciprocal):
    """numbers / step, correctly rounded, with ``reciprocal`` = 1 / step, correctly rounded: one division for many numbers.

    A quotient within one unit in the last place is refined by its exact remainder (Markstein, IBM J. Res. Dev. 34, 1990). Steps
    are far enough from the ends of fp32's range for remainders to be exact.
    """
    if IS_INTERPRETED:  # which rounds twice in fma
        quotients = tl.div_rn(numbers, step)
    else:
        quotients = numbers * reciprocal
        quotients = tl.fma(tl.fma(-quotients, step, numbers), reciprocal, quotients)
        quotients = tl.fma(tl.fma(-quotients, step, numbers), reciprocal, quotients)
    return quotients


@triton.jit
def _quantize(values, zero, scale, levels, AXIS: tl.constexpr):
    """Codes i32 of values; ``zero`` (the least of them), ``scale`` and ``levels`` lie along the other axis than AXIS."""
    step = tl.where(scale == 0.0, 1.0, scale)
    reciprocal = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    # An infinite difference would have no remainder, the largest finite one has the same code.
    numbers = tl.minimum(values - tl.expand_dims(zero, AXIS), LARGEST)
    # Not negative, so that truncation is the floor.
    codes = (_divide(numbers, tl.expand_dims(step, AXIS), tl.expand_dims(reciprocal, AXIS)) + 0.5).to(tl.int32)
    most = tl.where(scale == 0.0, 0, levels)
    return tl.minimum(codes, tl.expand_dims(most, AXIS))


@triton.jit
def _zero_bits(low, DTYPE: tl.constexpr):
    """The least value of a 16-bit tensor is one of its elements: stored exactly."""
    if DTYPE == tl.bfloat16:
        bits = round_to_bfloat16(low).to(tl.int16)
    else:
        bits = low.to(tl.float16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def _magnitude_scores(keys):
    """``reference.magnitude_scores``: masked channels must hold 0."""
    magnitudes = tl.abs(keys)
    largest = tl.max(tl.max(magnitudes, axis=1), axis=0)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, SCORE_BITS)
    factor = power_of_two(127 + SCORE_BITS - exponent)
    return tl.sum((magnitudes * factor).to(tl.int32), axis=0)


@triton.jit
def _best_channels(scores, channels, NUM_BOOSTED: tl.constexpr):
    """Whether each channel is among the best-scored NUM_BOOSTED: fewer than that many others come before it."""
    # A tie goes to the lower channel.
    before = scores[None, :] + (channels[None, :] < channels[:, None]).to(tl.int32) > scores[:, None]
    return tl.sum(before.to(tl.int32), axis=1) < NUM_BOOSTED


@triton.jit
def _store_high_plane(record_ptr, high, slots, boosted, NUM_BOOSTED: tl.constexpr, NUM_SLOTS: tl.constexpr):
    rows = tl.arange(0, WORD_ROWS)
    plane = record_ptr.to(tl.pointer_type(tl.int16))
    tl.store(plane + high_word_offset(rows[:, None], slots[None, :]), high, mask=boosted[None, :])
    if NUM_SLOTS > NUM_BOOSTED:
        unused = NUM_BOOSTED + tl.arange(0, 8)
        pointers = plane + high_word_offset(rows[:, None], unused[None, :])
        tl.store(pointers, tl.zeros([WORD_ROWS, 8], tl.int16), mask=(unused < NUM_SLOTS)[None, :])


@triton.jit
def _store_boost_record(
    record_ptr, channels, slots, scale, boosted, NUM_BOOSTED: tl.constexpr, NUM_SLOTS: tl.constexpr
):
    words = record_ptr.to(tl.pointer_type(tl.int32))
    tl.store(words + slots, (channels << 16) | round_to_bfloat16(4.0 * scale), mask=boosted)
    if NUM_SLOTS > NUM_BOOSTED:
        unused = NUM_BOOSTED + tl.arange(0, 8)
        tl.store(words + unused, tl.zeros([8], tl.int32), mask=unused < NUM_SLOTS)


@triton.jit
def _seal_key_page(
    rows,  # pointers to the page's tokens [128]
    record_ptr,
    hash_base,
    head,
    page_index,
    IS_RANDOM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_BOOSTED: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    HIGH_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    BOOST_OFFSET: tl.constexpr,
    DIM: tl.constexpr,
):
    channels = tl.arange(0, DIM)
    in_head = channels < KEY_DIM
    stored = tl.load(rows[:, None] + channels[None, :], mask=in_head[None, :], other=0.0)
    if KEY_BITS == 16:
        tokens = tl.arange(0, PAGE_SIZE)
        page = record_ptr.to(tl.pointer_type(stored.dtype))
        tl.store(page + tokens[:, None] * KEY_DIM + channels[None, :], stored, mask=in_head[None, :])
    else:
        keys = widen(stored)
        low, high = tl.min(keys, axis=0) + 0.0, tl.max(keys, axis=0)
        if NUM_BOOSTED == KEY_DIM:
            boosted = in_head
            slots = channels
        elif NUM_BOOSTED > 0:
            if IS_RANDOM:
                scores = mix_hash(hash_base, head, page_index, channels)
            else:
                scores = _magnitude_scores(keys)
            boosted = _best_channels(tl.where(in_head, scores, -1), channels, NUM_BOOSTED)
            slots = tl.cumsum(boosted.to(tl.int32), axis=0) - boosted.to(tl.int32)
        else:
            boosted = channels < 0
            slots = channels
        levels = tl.where(boosted, 15, 3)
        scale_bits = _stored_scale(low, high, levels.to(tl.float32))
        scale = bfloat16_to_float32(scale_bits)
        codes = _quantize(keys, low, scale, levels, 0)

        planes = record_ptr.to(tl.pointer_type(tl.int16))
        words = tl.arange(0, WORD_ROWS * DIM)
        tl.store(planes + words, order_key_words(pack_words(codes & 3, DIM), DIM), mask=words < WORD_ROWS * KEY_DIM)
        tl.store(planes + SCALE_OFFSET // 2 + channels, scale_bits.to(tl.int16), mask=in_head)
        tl.store(planes + ZERO_OFFSET // 2 + channels, _zero_bits(low, stored.dtype), mask=in_head)
        if NUM_SLOTS > 0:
            high_words = pack_words(codes >> 2, DIM)
            _store_high_plane(record_ptr + HIGH_OFFSET, high_words, slots, boosted, NUM_BOOSTED, NUM_SLOTS)
        if NUM_SLOTS > 0 and NUM_BOOSTED != KEY_DIM:
            _store_boost_record(record_ptr + BOOST_OFFSET, channels, slots, scale, boosted, NUM_BOOSTED, NUM_SLOTS)


@triton.jit
def _premultipliers(tokens):
    """The power of four that each token's stored scale carries, fp32 [128]."""
    field = tokens // WORD_ROWS
    powers = tokens * 0
    for index in tl.static_range(FIELDS):
        powers = tl.where(field == index, 2 * FIELD_PREMULTIPLIER[index], powers)
    return power_of_two(powers)


@triton.jit
def _seal_value_page(
    rows,  # pointers to the page's tokens [128]
    record_ptr,
    VALUE_DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HIGH_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    DIM: tl.constexpr,
):
    channels = tl.arange(0, DIM)
    tokens = tl.arange(0, PAGE_SIZE)
    in_head = channels < VALUE_DIM
    stored = tl.load(rows[:, None] + channels[None, :], mask=in_head[None, :], other=0.0)
    if VALUE_BITS == 16:
        page = record_ptr.to(tl.pointer_type(stored.dtype))
        tl.store(page + tokens[:, None] * VALUE_DIM + channels[None, :], stored, mask=in_head[None, :])
    else:
        values = widen(stored)
        low = tl.min(tl.where(in_head[None, :], values, float("inf")), axis=1) + 0.0
        high = tl.max(tl.where(in_head[None, :], values, -float("inf")), axis=1)
        levels = tl.full([PAGE_SIZE], (1 << VALUE_BITS) - 1, tl.int32)
        scale = bfloat16_to_float32(_stored_scale(low, high, levels.to(tl.float32)))
        codes = _quantize(values, low, scale, levels, 1)

        planes = record_ptr.to(tl.pointer_type(tl.int16))
        words = tl.arange(0, WORD_ROWS * DIM)
        in_plane = words < WORD_ROWS * VALUE_DIM
        tl.store(planes + words, order_value_words(pack_words(codes & 3, DIM), DIM), mask=in_plane)
        if VALUE_BITS == 4:
            high_plane = planes + HIGH_OFFSET // 2
            tl.store(high_plane + words, order_value_words(pack_words(codes >> 2, DIM), DIM), mask=in_plane)
        premultiplied = round_to_bfloat16(scale * _premultipliers(tokens)).to(tl.int16)
        tl.store(planes + SCALE_OFFSET // 2 + tokens, premultiplied)
        tl.store(planes + ZERO_OFFSET // 2 + tokens, _zero_bits(low, stored.dtype))


@triton.jit
def _rows_pages(row, batch, lengths_ptr, counts_ptr, num_columns, SINK: tl.constexpr, VALUE_WINDOW: tl.constexpr):
    """How many pages the call completes in each of some rows, none beyond the batch: in K, and in K and V together."""
    real = tl.minimum(row, batch - 1)
    length = tl.load(lengths_ptr + real)
    total = length + tl.where(row < batch, new_count(counts_ptr, real, num_columns), 0)
    keys = sealed_pages(total, SINK) - sealed_pages(length, SINK)
    values = sealed_pages(total, SINK + VALUE_WINDOW) - sealed_pages(length, SINK + VALUE_WINDOW)
    return keys, keys + values


@triton.jit
def _page_rows(
    page_index, raw_ptr, new_ptr, stride_row, stride_head, stride_column, row, head, columns_ptr, length, num_columns,
    NUM_HEADS: tl.constexpr, SINK: tl.constexpr, RING: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Pointers to the tokens of a page that the call completes, [128]."""
    token = page_index * PAGE_SIZE + SINK + tl.arange(0, PAGE_SIZE)
    column = new_column(row_columns(columns_ptr, row, num_columns), token - length, token >= length)
    return token_pointers(
        raw_ptr + (row * NUM_HEADS + head) * ((SINK + RING) * HEAD_DIM), HEAD_DIM,
        new_ptr + row * stride_row + head * stride_head, stride_column, token, column, length, SINK, RING,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch", "num_columns", "table_stride", "hash_base"])
def seal_pages_kernel(
    key_ptr,
    value_ptr,
    raw_key_ptr,
    raw_value_ptr,
    key_pages_ptr,
    value_pages_ptr,
    lengths_ptr,
    counts_ptr,
    columns_ptr,
    table_ptr,
    key_stride_row,
    key_stride_head,
    key_stride_column,
    value_stride_row,
    value_stride_head,
    value_stride_column,
    batch,
    num_columns,
    table_stride,
    hash_base,
    NUM_HEADS: tl.constexpr,
    SINK: tl.constexpr,
    VALUE_WINDOW: tl.constexpr,
    KEY_RING: tl.constexpr,
    VALUE_RING: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_BOOSTED: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
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
    ROWS: tl.constexpr,
    IS_SHORT: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Grid: any number of programs, which share the pages to seal, of all rows and heads, and with IS_SHORT append the tokens.

    A call of no more than rollback_window tokens overwrites no slot that sealing reads, in whatever order the programs run.
    """
    program = tl.program_id(0)
    if IS_SHORT:
        num_items = batch * NUM_HEADS * num_columns
        for block in range(program, tl.cdiv(num_items, ITEMS), tl.num_programs(0)):
            append_items(
                block, key_ptr, value_ptr, raw_key_ptr, raw_value_ptr, lengths_ptr, counts_ptr, columns_ptr,
                key_stride_row, key_stride_head, key_stride_column, value_stride_row, value_stride_head,
                value_stride_column, num_items, num_columns, NUM_HEADS, SINK, KEY_RING, VALUE_RING, KEY_DIM, VALUE_DIM,
                KEY_BLOCK, VALUE_BLOCK, ITEMS,
            )  # fmt: skip
    rows = tl.arange(0, ROWS)
    key_counts, counts = _rows_pages(rows, batch, lengths_ptr, counts_ptr, num_columns, SINK, VALUE_WINDOW)
    num_pages = tl.sum(counts, axis=0)
    if num_pages == 0:  # as in most decode steps
        return
    ends = tl.cumsum(counts, axis=0)
    for item in range(program, num_pages * NUM_HEADS, tl.num_programs(0)):
        head = item % NUM_HEADS
        index = item // NUM_HEADS
        row = tl.sum((ends <= index).to(tl.int32), axis=0)
        index -= tl.sum(tl.where(ends <= index, counts, 0), axis=0)
        num_keys = tl.sum(tl.where(rows == row, key_counts, 0), axis=0)
        length = tl.load(lengths_ptr + row)
        long_row = row.to(tl.int64)
        long_head = head.to(tl.int64)
        row_table_ptr = table_ptr + long_row * table_stride
        if index < num_keys:
            page_index = sealed_pages(length, SINK) + index
            pointers = _page_rows(
                page_index, raw_key_ptr, key_ptr, key_stride_row, key_stride_head, key_stride_column, long_row, long_head,
                columns_ptr, length, num_columns, NUM_HEADS, SINK, KEY_RING, KEY_DIM,
            )  # fmt: skip
            page = tl.load(row_table_ptr + page_index).to(tl.int64)
            _seal_key_page(
                pointers, key_pages_ptr + (page * NUM_HEADS + head) * KEY_BYTES, hash_base, head, page_index, IS_RANDOM,
                KEY_DIM, KEY_BITS, NUM_BOOSTED, NUM_SLOTS, KEY_HIGH, KEY_SCALE, KEY_ZERO, KEY_BOOST, KEY_BLOCK,
            )  # fmt: skip
        else:
            page_index = sealed_pages(length, SINK + VALUE_WINDOW) + index - num_keys
            pointers = _page_rows(
                page_index, raw_value_ptr, value_ptr, value_stride_row, value_stride_head, value_stride_column, long_row,
                long_head, columns_ptr, length, num_columns, NUM_HEADS, SINK, VALUE_RING, VALUE_DIM,
            )  # fmt: skip
            page = tl.load(row_table_ptr + page_index).to(tl.int64)
            _seal_value_page(
                pointers, value_pages_ptr + (page * NUM_HEADS + head) * VALUE_BYTES,
                VALUE_DIM, VALUE_BITS, VALUE_HIGH, VALUE_SCALE, VALUE_ZERO, VALUE_BLOCK,
            )  # fmt: skip

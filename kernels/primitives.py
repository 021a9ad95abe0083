"""Device helpers that the Triton kernels share: two-bit fields, fragment order, exact scalings, where a token lies.

A masked two-bit field of an int16 word, read as fp16, is the subnormal ``code * 4**e * 2**-24`` (``FIELD_EXPONENTS``): codes
reach the tensor cores, which keep subnormals, without a conversion. See ``layout.py`` for the format itself.
"""

import triton
import triton.language as tl

from kitty_compile.kernels import layout

PAGE_SIZE = tl.constexpr(layout.PAGE_SIZE)
FIELDS = tl.constexpr(layout.FIELDS_PER_WORD)
WORD_ROWS = tl.constexpr(layout.WORD_ROWS)
FIELD_EXPONENTS = tl.constexpr(layout.FIELD_EXPONENTS)
FIELD_WEIGHTS = tl.constexpr(tuple(0.25**exponent for exponent in layout.FIELD_EXPONENTS))
FIELD_PREMULTIPLIER = tl.constexpr(layout.FIELD_PREMULTIPLIER)

# A subnormal fp16 code times 2**24 is the code.
CODE_EXPONENT = tl.constexpr(24)
# The interpreter knows no inline assembly and half of bf16. Triton chooses it when a kernel is defined, so this is as early.
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _split_fields_inline(words):
    return tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 shifted;
        and.b32 $0, $8, 0x00030003;
        and.b32 $1, $8, 0x000C000C;
        and.b32 $2, $8, 0x00300030;
        and.b32 $3, $8, 0x00C000C0;
        and.b32 $4, $8, 0x03000300;
        shr.u32 shifted, $8, 6;
        and.b32 $5, shifted, 0x00300030;
        and.b32 $6, shifted, 0x00C000C0;
        and.b32 $7, shifted, 0x03000300;
        }
        """,
        constraints="=r,=r,=r,=r,=r,=r,=r,=r,r",
        args=[words],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def split_fields(words):
    """int16 words -> eight fp16 tensors, field f holding code * 4**FIELD_EXPONENTS[f] * 2**-24."""
    if not IS_INTERPRETED:
        fields = _split_fields_inline(words)
    else:
        fields = ()
        for field in tl.static_range(FIELDS):
            masked = (words.to(tl.int32) >> (2 * (field - FIELD_EXPONENTS[field]))) & (
                3 << (2 * FIELD_EXPONENTS[field])
            )
            fields = fields + (masked.to(tl.int16).to(tl.float16, bitcast=True),)
    return fields


@triton.jit
def split_tokens(values):
    """[128] -> eight [16], part f holding tokens 16 f .. 16 f + 15."""
    tree = tl.permute(tl.reshape(values, [2, 2, 2, 16]), [3, 2, 1, 0])
    front, back = tl.split(tree)
    front0, front1 = tl.split(front)
    back0, back1 = tl.split(back)
    part0, part1 = tl.split(front0)
    part2, part3 = tl.split(front1)
    part4, part5 = tl.split(back0)
    part6, part7 = tl.split(back1)
    return part0, part1, part2, part3, part4, part5, part6, part7


@triton.jit
def join_fields(parts):
    """Eight [X, Y] -> [X, Y, 8]."""
    even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
    odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
    return tl.reshape(tl.join(even, odd), [parts[0].shape[0], parts[0].shape[1], 8])


@triton.jit
def key_operand(words, DIM: tl.constexpr):
    """Low plane of a key record, [16 DIM] in memory order -> [16, DIM], a tensor core's A operand as it lies."""
    tiles = tl.reshape(words, [DIM // 16, 8, 4, 2, 2, 2])  # block, row, pair, half, row_half, column
    return tl.reshape(tl.permute(tiles, [4, 1, 0, 3, 2, 5]), [WORD_ROWS, DIM])


@triton.jit
def high_operand(words, SLOTS: tl.constexpr):
    """High plane of a key record, loaded as [SLOTS / 8, 32, 4] -> [16, SLOTS]."""
    tiles = tl.reshape(words, [SLOTS // 16, 2, 8, 4, 2, 2])  # block, half, row, pair, row_half, column
    return tl.reshape(tl.permute(tiles, [4, 2, 0, 1, 3, 5]), [WORD_ROWS, SLOTS])


@triton.jit
def value_operand(words, DIM: tl.constexpr):
    """A plane of a value record, [16 DIM] in memory order -> [DIM, 16], a tensor core's A operand as it lies."""
    tiles = tl.reshape(words, [DIM // 16, 8, 4, 2, 2, 2])  # block, channel, pair, row_half, half, row
    return tl.reshape(tl.permute(tiles, [0, 4, 1, 3, 2, 5]), [DIM, WORD_ROWS])


@triton.jit
def order_key_words(words, DIM: tl.constexpr):
    """[16, DIM] -> [16 DIM], the inverse of ``key_operand``."""
    tiles = tl.reshape(words, [2, 8, DIM // 16, 2, 4, 2])  # row_half, row, block, half, pair, column
    return tl.reshape(tl.permute(tiles, [2, 1, 4, 3, 0, 5]), [WORD_ROWS * DIM])


@triton.jit
def order_value_words(words, DIM: tl.constexpr):
    """[16, DIM] -> [16 DIM], the inverse of ``value_operand`` over the transposed words."""
    tiles = tl.reshape(words, [2, 4, 2, DIM // 16, 2, 8])  # row_half, pair, row, block, half, channel
    return tl.reshape(tl.permute(tiles, [3, 5, 1, 0, 4, 2]), [WORD_ROWS * DIM])


@triton.jit
def high_word_offset(row, slot):
    """Where word (row, slot) of the high plane lies, in words."""
    return (slot // 8) * 128 + (row % 8) * 16 + ((slot % 8) // 2) * 4 + (row // 8) * 2 + slot % 2


@triton.jit
def boosted_slots(boost_ptr, channels, NUM_BOOSTED: tl.constexpr, SLOTS: tl.constexpr):
    """The slot of each channel in the high plane, and whether it has one, from a record's boost part."""
    slots = tl.arange(0, SLOTS)
    is_used = slots < NUM_BOOSTED
    record = tl.load(boost_ptr.to(tl.pointer_type(tl.int32)) + slots, mask=is_used, other=0)
    names = is_used[None, :] & ((record >> 16)[None, :] == channels[:, None])
    return tl.sum(tl.where(names, slots[None, :], 0), axis=1), tl.sum(names.to(tl.int32), axis=1) > 0


@triton.jit
def pack_words(codes, DIM: tl.constexpr):
    """Two-bit codes i32 [128, DIM] -> words i16 [16, DIM]."""
    shifts = 2 * tl.arange(0, FIELDS)
    fields = tl.reshape(codes, [FIELDS, WORD_ROWS, DIM]) << shifts[:, None, None]
    return tl.sum(fields, axis=0).to(tl.int16)


@triton.jit
def bfloat16_to_float32(bits):
    """The bits of bf16 numbers as int16 (or in the low half of an int32) -> fp32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def widen(values):
    """fp16 or bf16 -> fp32. By the bits, because the interpreter's own conversion loses bf16's subnormals."""
    if values.dtype == tl.bfloat16:
        wide = bfloat16_to_float32(values.to(tl.int16, bitcast=True))
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def round_to_bfloat16(values):
    """The bf16 bits of finite fp32 numbers, rounded to nearest even, in an int32."""
    bits = values.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def saturate(values, DTYPE: tl.constexpr):
    """fp32 within the finite range of fp16 or bf16."""
    LARGEST: tl.constexpr = 65504.0 if DTYPE == tl.float16 else 3.3895313892515355e38
    return tl.minimum(tl.maximum(values, -LARGEST), LARGEST)


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """fp32 -> fp16 or bf16, to nearest even; the interpreter truncates bf16."""
    if IS_INTERPRETED and DTYPE == tl.bfloat16:
        narrowed = round_to_bfloat16(values).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = values.to(DTYPE)
    return narrowed


@triton.jit
def dot(left, right, sums):
    """``left @ right + sums`` in fp32; the interpreter multiplies the bits of bf16 operands."""
    if IS_INTERPRETED and left.dtype == tl.bfloat16:
        product = tl.dot(widen(left), widen(right), sums)
    else:
        product = tl.dot(left, right, sums)
    return product


@triton.jit
def load_padded(pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """SIZE elements, and zeros up to BLOCK."""
    offsets = tl.arange(0, BLOCK)
    if BLOCK > SIZE:
        part = tl.load(pointer + offsets, mask=offsets < SIZE, other=0)
    else:
        part = tl.load(pointer + offsets)
    return part


@triton.jit
def load_zero(pointers, mask, DTYPE: tl.constexpr):
    """Stored zeros -> fp32; ``pointers`` to int16."""
    return widen(tl.load(pointers, mask=mask, other=0).to(DTYPE, bitcast=True))


@triton.jit
def power_of_two(exponent):
    """2**exponent as fp32, exponent clamped to that of a normal number."""
    return ((tl.minimum(tl.maximum(exponent, -126), 127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def normalize_columns(columns, TOP: tl.constexpr):
    """fp16 or bf16 [D, N] -> fp16 [D, N] with columns under 2**(TOP + 1), and i32 [N], the exponents divided out."""
    wide = widen(columns)
    largest = tl.max(tl.abs(wide), axis=0)
    exponents = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - (127 + TOP), -100)
    return (wide * power_of_two(-exponents)[None, :]).to(tl.float16), exponents


@triton.jit
def score_units(exponents, COLUMNS: tl.constexpr):
    """2**exponents [N] by way of a tensor core: they come out in the layout of scores, and no page has to convert them."""
    units = tl.broadcast_to(narrow(power_of_two(exponents), tl.bfloat16)[None, :], [WORD_ROWS, COLUMNS])
    mean = tl.full([WORD_ROWS, WORD_ROWS], 1 / 16, tl.bfloat16)
    return tl.max(dot(mean, units, tl.zeros([WORD_ROWS, COLUMNS], tl.float32)), axis=0)


@triton.jit
def scale_exponent(bits, TOP: tl.constexpr):
    """The e for ``relative_scales`` with which the largest of some scales comes out in [2**TOP, 2**(TOP + 1))."""
    return tl.maximum((tl.max(bits.to(tl.int32), axis=0) >> 7) - (127 + TOP), -112)


@triton.jit
def relative_scales(bits, exponent):
    """The bits of scales (bf16, not negative, int16 [X]) -> fp16 scale * 2**-exponent, which must not overflow.

    What comes out normal is exact; below 2**-14, far under the largest, it may be anything from 0 to 2**-14.
    """
    if tl.target_info.cuda_capability_geq(9, 0):
        # A bf16 number is an fp16 one shifted down by three bits, but for the bias.
        scales = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 clamped;
            max.u16x2 clamped, $1, $2;
            sub.u32 clamped, clamped, $2;
            shl.b32 $0, clamped, 3;
            }
            """,
            constraints="=r,r,r",
            args=[bits, ((exponent + (127 - 15)) << 7).to(tl.int16)],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        scales = (bfloat16_to_float32(bits) * power_of_two(-exponent)).to(tl.float16)
    return scales


@triton.jit
def mix_hash(base, head, page, channel):
    """``reference.random_scores`` with (seed, layer) folded into ``base`` on the host: a 31-bit hash as int32."""
    mixed = base.to(tl.uint32) + head.to(tl.uint32) * 0xC2B2AE3D + page.to(tl.uint32) * 0x27D4EB2F
    mixed = mixed + channel.to(tl.uint32) * 0x165667B1
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    return ((mixed ^ (mixed >> 16)) >> 1).to(tl.int32)


@triton.jit
def new_count(counts_ptr, row, num_columns):
    """How many tokens the call brings to a row."""
    if counts_ptr is None:
        count = num_columns
    else:
        count = tl.load(counts_ptr + row)
    return count


@triton.jit
def new_column(columns_ptr, index, mask):
    """The column of the row's ``index``-th new token; ``columns_ptr`` points to the row."""
    if columns_ptr is None:
        column = index
    else:
        column = tl.load(columns_ptr + index, mask=mask, other=0)
    return column


@triton.jit
def row_columns(columns_ptr, row, num_columns):
    """The row's part of the column map, or None for the identity."""
    if columns_ptr is None:
        pointer = None
    else:
        pointer = columns_ptr + row * num_columns
    return pointer


@triton.jit
def raw_slot(token, SINK: tl.constexpr, RING: tl.constexpr):
    """Where a token lies among the raw slots: the sink first, then the ring."""
    return tl.where(token < SINK, token, SINK + (token - SINK) % RING)


@triton.jit
def token_pointers(
    raw_ptr, raw_stride, new_ptr, new_stride, token, column, length, SINK: tl.constexpr, RING: tl.constexpr
):
    """The first channel of each token: below ``length`` in the raw slots, from there on at its ``column`` of the call."""
    slot = raw_slot(token, SINK, RING)
    from_call = new_ptr + column.to(tl.int64) * new_stride
    return tl.where(token >= length, from_call, raw_ptr + slot.to(tl.int64) * raw_stride)


@triton.jit
def sealed_pages(length, OFFSET: tl.constexpr):
    """``RawLayout.key_pages`` with OFFSET = S, ``value_pages`` with OFFSET = S + R."""
    return tl.maximum(length - OFFSET, 0) // PAGE_SIZE


@triton.jit
def call_columns(
    block, num_columns, GROUP: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPREAD: tl.constexpr
):
    """A block of the COLUMNS (new column, head of the group) pairs that share a KV head, SPREAD apart and padded to ROWS:
    column, head in the group, whether real."""
    index = tl.arange(0, ROWS) // SPREAD
    pair = block * COLUMNS + index
    is_real = (index < COLUMNS) & (pair < num_columns * GROUP) & (tl.arange(0, ROWS) % SPREAD == 0)
    return pair // GROUP, pair % GROUP, is_real


@triton.jit
def close_up(spread_columns, SPREAD: tl.constexpr):
    """[X, N] or [N] -> the columns that ``call_columns`` uses, N / SPREAD of them. SPREAD is 1 or 2."""
    if SPREAD == 1:
        columns = spread_columns
    elif len(spread_columns.shape) == 1:
        columns, _ = tl.split(tl.reshape(spread_columns, [spread_columns.shape[0] // 2, 2]))
    else:
        columns, _ = tl.split(tl.reshape(spread_columns, [spread_columns.shape[0], spread_columns.shape[1] // 2, 2]))
    return columns


@triton.jit
def spread(columns, SPREAD: tl.constexpr):
    """The inverse of ``close_up`` on [X, N]: columns stand SPREAD times side by side, what is made of the others is dropped."""
    rows = tl.broadcast_to(columns[:, :, None], [columns.shape[0], columns.shape[1], SPREAD])
    return tl.reshape(rows, [columns.shape[0], SPREAD * columns.shape[1]])


@triton.jit
def partial_rows(row, head, column, member, num_columns, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Rows of the partial outputs, [B * Hq * T]."""
    return ((row * NUM_HEADS + head) * GROUP + member) * num_columns + column


@triton.jit
def pages_of_split(length, split, num_splits, SINK: tl.constexpr, VALUE_WINDOW: tl.constexpr, RAW_VALUES: tl.constexpr):
    """The pages of a row that a split takes: of those packed in K and V, or with RAW_VALUES of those packed in K alone."""
    first_page = 0
    last_page = sealed_pages(length, SINK + VALUE_WINDOW)
    if RAW_VALUES:
        first_page = last_page
        last_page = sealed_pages(length, SINK)
    num_pages = last_page - first_page
    return first_page + split * num_pages // num_splits, first_page + (split + 1) * num_pages // num_splits


@triton.jit
def softcapped(scores, score_cap):
    """``score_cap * tanh(scores)``; the exponential may overflow to infinity, which gives 1."""
    return score_cap - 2.0 * score_cap / (tl.exp2(scores * 2.8853900817779268) + 1.0)

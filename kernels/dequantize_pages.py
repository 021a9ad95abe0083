"""Algorithm 1 of the paper: pages -> dense K or V in the model's dtype, for the materialising form of the cache."""

import triton
import triton.language as tl

from kitty_compile.kernels.primitives import (
    FIELD_PREMULTIPLIER,
    FIELDS,
    PAGE_SIZE,
    WORD_ROWS,
    bfloat16_to_float32,
    boosted_slots,
    high_word_offset,
    key_operand,
    load_padded,
    load_zero,
    narrow,
    saturate,
    value_operand,
)


@triton.jit
def _field_codes(words, FIELD: tl.constexpr):
    return (words.to(tl.int32) >> (2 * FIELD)) & 3


@triton.jit(do_not_specialize=["table_stride", "num_pages"])
def dequantize_keys_kernel(
    pages_ptr,
    table_ptr,
    output_ptr,  # [B, Hkv, num_pages * 128, Dk]
    table_stride,
    num_pages,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    NUM_BOOSTED: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    KEY_HIGH: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    KEY_ZERO: tl.constexpr,
    KEY_BOOST: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
):
    """Grid (pages, KV heads, rows)."""
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    index, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    page = tl.load(table_ptr + row * table_stride + index).to(tl.int64)
    record_ptr = pages_ptr + (page * NUM_HEADS + head) * KEY_BYTES
    plane_ptr = record_ptr.to(tl.pointer_type(tl.int16))
    channels = tl.arange(0, KEY_BLOCK)
    in_head = channels < KEY_DIM
    low = key_operand(load_padded(plane_ptr, WORD_ROWS * KEY_DIM, WORD_ROWS * KEY_BLOCK), KEY_BLOCK)
    scale = bfloat16_to_float32(load_padded(plane_ptr + KEY_SCALE // 2, KEY_DIM, KEY_BLOCK))
    zero = load_zero(plane_ptr + KEY_ZERO // 2 + channels, in_head, DTYPE)
    rows = tl.arange(0, WORD_ROWS)
    if NUM_SLOTS > 0:
        slot = channels
        boosted = in_head
        if HAS_INDEX:
            slot, boosted = boosted_slots(record_ptr + KEY_BOOST, channels, NUM_BOOSTED, SLOT_BLOCK)
        offsets = high_word_offset(rows[:, None], slot[None, :])
        high = tl.load(plane_ptr + KEY_HIGH // 2 + offsets, mask=boosted[None, :], other=0)
    output_ptr += ((row * NUM_HEADS + head) * num_pages + index) * (PAGE_SIZE * KEY_DIM)
    for field in tl.static_range(FIELDS):
        codes = _field_codes(low, field)
        if NUM_SLOTS > 0:
            codes += _field_codes(high, field) << 2
        keys = codes.to(tl.float32) * scale[None, :] + zero[None, :]
        offsets = (rows + field * WORD_ROWS)[:, None] * KEY_DIM + channels[None, :]
        tl.store(output_ptr + offsets, narrow(saturate(keys, DTYPE), DTYPE), mask=in_head[None, :])


@triton.jit(do_not_specialize=["table_stride", "num_pages"])
def dequantize_values_kernel(
    pages_ptr,
    table_ptr,
    output_ptr,  # [B, Hkv, num_pages * 128, Dv]
    table_stride,
    num_pages,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_HIGH: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    VALUE_ZERO: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Grid (pages, KV heads, rows)."""
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    index, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    page = tl.load(table_ptr + row * table_stride + index).to(tl.int64)
    plane_ptr = (pages_ptr + (page * NUM_HEADS + head) * VALUE_BYTES).to(tl.pointer_type(tl.int16))
    channels = tl.arange(0, VALUE_BLOCK)
    in_head = channels < VALUE_DIM
    low = value_operand(load_padded(plane_ptr, WORD_ROWS * VALUE_DIM, WORD_ROWS * VALUE_BLOCK), VALUE_BLOCK)
    if VALUE_BITS == 4:
        high_words = load_padded(plane_ptr + VALUE_HIGH // 2, WORD_ROWS * VALUE_DIM, WORD_ROWS * VALUE_BLOCK)
        high = value_operand(high_words, VALUE_BLOCK)
    rows = tl.arange(0, WORD_ROWS)
    output_ptr += ((row * NUM_HEADS + head) * num_pages + index) * (PAGE_SIZE * VALUE_DIM)
    for field in tl.static_range(FIELDS):
        tokens = rows + field * WORD_ROWS
        premultiplied = bfloat16_to_float32(tl.load(plane_ptr + VALUE_SCALE // 2 + tokens))
        scale = premultiplied * (0.25 ** FIELD_PREMULTIPLIER[field])
        zero = load_zero(plane_ptr + VALUE_ZERO // 2 + tokens, tokens >= 0, DTYPE)
        codes = _field_codes(low, field)
        if VALUE_BITS == 4:
            codes += _field_codes(high, field) << 2
        values = codes.to(tl.float32) * scale[None, :] + zero[None, :]
        offsets = tokens[None, :] * VALUE_DIM + channels[:, None]
        tl.store(output_ptr + offsets, narrow(saturate(values, DTYPE), DTYPE), mask=in_head[:, None])


@triton.jit(do_not_specialize=["table_stride", "num_pages"])
def copy_pages_kernel(
    pages_ptr,  # in the model's dtype
    table_ptr,
    output_ptr,  # [B, Hkv, num_pages * 128, D]
    table_stride,
    num_pages,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raw pages. Grid (pages, KV heads, rows)."""
    index, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    page = tl.load(table_ptr + row * table_stride + index).to(tl.int64)
    pages_ptr += (page * NUM_HEADS + head) * (PAGE_SIZE * HEAD_DIM)
    output_ptr += ((row * NUM_HEADS + head) * num_pages + index) * (PAGE_SIZE * HEAD_DIM)
    for start in tl.static_range(0, PAGE_SIZE * HEAD_DIM, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < PAGE_SIZE * HEAD_DIM
        tl.store(output_ptr + offsets, tl.load(pages_ptr + offsets, mask=mask), mask=mask)

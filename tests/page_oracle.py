"""The page format once more, in numpy with plain loops, written from the paper and the layout's docstring alone."""

import math

import numpy as np

PAGE, FIELDS, ROWS = 128, 8, 16
EXPONENTS = (0, 1, 2, 3, 4, 2, 3, 4)


def bfloat16_bits(value):
    """Round a float32 to bfloat16, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) & 0xFFFF


def bfloat16_value(bits):
    return np.uint32(bits << 16).view(np.float32)


def stored_zero(value, dtype):
    """(bits, value) of a zero."""
    if dtype == "bfloat16":
        bits = bfloat16_bits(value)
        return bits, bfloat16_value(bits)
    half = np.float16(np.clip(value, -65504, 65504))
    return int(half.view(np.uint16)), np.float32(half)


def quantize(group, bits, dtype):
    """One group: (codes, bits of the scale, bits of the zero)."""
    group = group.astype(np.float32)
    levels = np.float32(2**bits - 1)
    zero_bits, zero = stored_zero(group.min(), dtype)
    scale_bits = bfloat16_bits((group.max() - group.min()) / levels)
    scale = bfloat16_value(scale_bits)
    if scale == 0:
        return [0] * len(group), scale_bits, zero_bits
    steps = [np.floor((value - zero) / scale + np.float32(0.5)) for value in group]
    return [int(min(max(step, 0), levels)) for step in steps], scale_bits, zero_bits


def boosted(page, count):
    """Channels of the largest integer score, ties to the lower channel."""
    exponent = max(int(np.abs(page).max().astype(np.float32).view(np.uint32)) >> 23, 22)
    scores = [sum(int(math.ldexp(abs(float(x)), 149 - exponent)) for x in page[:, d]) for d in range(page.shape[1])]
    return sorted(sorted(range(len(scores)), key=lambda d: (-scores[d], d))[:count])


def pack(codes):
    """Two-bit codes [128][X] -> words [16][X]."""
    width = len(codes[0])
    return [
        [sum(codes[16 * field + row][x] << 2 * field for field in range(FIELDS)) for x in range(width)]
        for row in range(ROWS)
    ]


def key_order(words):
    columns = range(len(words[0]) // 16)
    return [
        words[8 * row_half + row][16 * block + 8 * half + 2 * pair + column]
        for block in columns
        for row in range(8)
        for pair in range(4)
        for half in range(2)
        for row_half in range(2)
        for column in range(2)
    ]


def high_order(words):
    return [
        words[8 * row_half + row][8 * half + 2 * pair + column]
        for half in range(len(words[0]) // 8)
        for row in range(8)
        for pair in range(4)
        for row_half in range(2)
        for column in range(2)
    ]


def value_order(words):
    return [
        words[8 * row_half + 2 * pair + row][16 * block + 8 * half + channel]
        for block in range(len(words[0]) // 16)
        for channel in range(8)
        for pair in range(4)
        for row_half in range(2)
        for half in range(2)
        for row in range(2)
    ]


def key_record(page, key_bits, num_boosted, dtype):
    """Bytes of one head's key page, float32 [128, D]."""
    width = page.shape[1]
    channels = list(range(width)) if key_bits == 4 else boosted(page, num_boosted)
    groups = [quantize(page[:, d], 4 if d in channels else 2, dtype) for d in range(width)]
    codes = [[groups[d][0][token] for d in range(width)] for token in range(PAGE)]
    record = _words(key_order(pack([[code & 3 for code in row] for row in codes])))
    padding = [0] * (-len(channels) % 8)
    if channels:
        record += _words(high_order(pack([[row[d] >> 2 for d in channels] + padding for row in codes])))
    record += _words([scale for _, scale, _ in groups]) + _words([zero for _, _, zero in groups])
    if 0 < len(channels) < width:
        slots = [d << 16 | bfloat16_bits(4 * bfloat16_value(groups[d][1])) for d in channels]
        record += np.array(slots + padding, dtype=np.uint32).tobytes()
    return record


def value_record(page, bits, dtype):
    """Bytes of one head's value page, float32 [128, D]."""
    groups = [quantize(token, bits, dtype) for token in page]
    record = b""
    for shift in range(0, bits, 2):
        record += _words(value_order(pack([[code >> shift & 3 for code in codes] for codes, _, _ in groups])))
    powers = [4.0 ** (2 - EXPONENTS[token // 16]) for token in range(PAGE)]
    scales = [bfloat16_bits(bfloat16_value(g[1]) * np.float32(p)) for g, p in zip(groups, powers, strict=True)]
    return record + _words(scales) + _words([zero for _, _, zero in groups])


def _words(words):
    return np.array(words, dtype=np.uint16).tobytes()

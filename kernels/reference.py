"""The page format in plain torch: quantise, pack, unpack. This is the specification of every other implementation.

Codes, scales, zeros and boosted channels must be reproduced bit for bit. Formulas: arXiv 2511.18643, section 3.2 (scores and
boost), 3.3 (per-channel K, per-token V), 4.1 (two dense 2-bit planes).
"""

from typing import NamedTuple

import torch

from kitty_compile.kernels.layout import (
    BOOST_ALIGNMENT,
    FIELD_PREMULTIPLIER,
    FIELDS_PER_WORD,
    PAGE_SIZE,
    SCALE_DTYPE,
    WORD_ROWS,
    KeyRecord,
    PageLayout,
    ValueRecord,
    zero_dtype,
)

# Scales outside this range are clamped (or flushed to zero), so that 16x pre-multiplied ones stay finite and normal in bf16.
MAX_SCALE = 2.0**120
MIN_SCALE = 2.0**-100

SCORE_BITS = 22
HASH_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)


class BoostSeed(NamedTuple):
    """What the hash of ``selection="random"`` is made of, besides head and channel."""

    seed: int
    layer: int
    pages: torch.Tensor  # i64 [N], page index in its row


class Quantized(NamedTuple):
    codes: torch.Tensor  # i32, the shape of the input
    scale: torch.Tensor  # bf16, one per channel (K) or token (V)
    zero: torch.Tensor  # 16 bit, likewise


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Two-bit codes i32 [..., 128, X] -> words i16 [..., 16, X]; bits 2f, 2f+1 of row j are token 16 f + j."""
    fields = codes.unflatten(-2, (FIELDS_PER_WORD, WORD_ROWS)).to(torch.int32)
    shifts = 2 * torch.arange(FIELDS_PER_WORD, device=codes.device, dtype=torch.int32)
    words = (fields << shifts.view(-1, 1, 1)).sum(dim=-3, dtype=torch.int32)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def unpack_fields(words: torch.Tensor) -> torch.Tensor:
    """Words [...] -> their eight 2-bit fields, i32 [..., 8]."""
    shifts = 2 * torch.arange(FIELDS_PER_WORD, device=words.device, dtype=torch.int32)
    return (words.to(torch.int32).unsqueeze(-1) >> shifts) & 3


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """Words i16 [..., 16, X] -> two-bit codes i32 [..., 128, X]."""
    return unpack_fields(words).movedim(-1, -3).flatten(-3, -2)


def order_key_words(words: torch.Tensor) -> torch.Tensor:
    """[..., 16, D] -> [..., 16 D] in memory order: 16-column block, row % 8, column pair, block half, row // 8, column % 2."""
    tiles = words.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (2, 8))  # row_half, row, block, half, pair, column
    return _permute_last(tiles, (2, 1, 4, 3, 0, 5)).flatten(-6)


def restore_key_words(ordered: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`order_key_words`."""
    tiles = ordered.unflatten(-1, (-1, 8, 4, 2, 2, 2))
    return _permute_last(tiles, (4, 1, 0, 3, 2, 5)).flatten(-4).flatten(-3, -2)


def order_high_words(words: torch.Tensor) -> torch.Tensor:
    """Like :func:`order_key_words` with each 8-column half outermost, so that any multiple of eight columns is dense."""
    tiles = words.unflatten(-1, (-1, 4, 2)).unflatten(-4, (2, 8))  # row_half, row, half, pair, column
    return _permute_last(tiles, (2, 1, 3, 0, 4)).flatten(-5)


def restore_high_words(ordered: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`order_high_words`."""
    tiles = ordered.unflatten(-1, (-1, 8, 4, 2, 2))
    return _permute_last(tiles, (3, 1, 0, 2, 4)).flatten(-3).flatten(-3, -2)


def order_value_words(words: torch.Tensor) -> torch.Tensor:
    """[..., 16, D] -> [..., 16 D]: 16-channel block, channel % 8, row pair, row // 8, channel half, row % 2."""
    tiles = words.mT.unflatten(-1, (2, 4, 2)).unflatten(-4, (-1, 2, 8))  # block, half, channel, row_half, pair, row
    return _permute_last(tiles, (0, 2, 4, 3, 1, 5)).flatten(-6)


def restore_value_words(ordered: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`order_value_words`."""
    tiles = ordered.unflatten(-1, (-1, 8, 4, 2, 2, 2))
    return _permute_last(tiles, (0, 4, 1, 3, 2, 5)).flatten(-3).flatten(-4, -2).mT


def _permute_last(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    lead = tensor.dim() - len(order)
    return tensor.permute(*range(lead), *(lead + axis for axis in order))


def magnitude_scores(keys: torch.Tensor) -> torch.Tensor:
    """Mean |x| over the page's tokens as an integer, fp32 [..., 128, D] -> i32 [..., D] (section 3.2, equation 2).

    |x| is scaled by a power of two to 23 bits under the page's largest, truncated and summed: no order of summation can
    change the result, and the factor 1/128 changes no rank.
    """
    magnitudes = keys.abs()
    largest = magnitudes.amax(dim=(-2, -1), keepdim=True)
    exponent = torch.clamp(largest.view(torch.int32) >> 23, min=SCORE_BITS)
    factor = ((127 + 127 + SCORE_BITS - exponent) << 23).view(torch.float32)
    return (magnitudes * factor).to(torch.int32).sum(dim=-2, dtype=torch.int32)


def random_scores(seed: BoostSeed, num_heads: int, head_dim: int) -> torch.Tensor:
    """A 31-bit hash of (seed, layer, head, page, channel), i32 [N, num_heads, head_dim]: the ablation of figure 4."""
    device = seed.pages.device
    parts = (
        torch.full((), seed.seed, device=device),
        torch.full((), seed.layer, device=device),
        torch.arange(num_heads, device=device).view(1, -1, 1),
        seed.pages.to(torch.int64).view(-1, 1, 1),
        torch.arange(head_dim, device=device).view(1, 1, -1),
    )
    mixed = sum(part.to(torch.int64) * prime for part, prime in zip(parts, HASH_PRIMES, strict=True))
    assert isinstance(mixed, torch.Tensor)
    mixed = mixed & 0xFFFFFFFF
    for shift, prime in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * prime) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 16)) >> 1).to(torch.int32)


def boosted_channels(scores: torch.Tensor, num_boosted: int) -> torch.Tensor:
    """The ``num_boosted`` best-scored channels in ascending order, i64 [..., num_boosted]; ties go to the lower channel."""
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :num_boosted]
    return best.sort(dim=-1).values


def quantize(values: torch.Tensor, levels: torch.Tensor, axis: int, dtype: torch.dtype) -> Quantized:
    """Asymmetric min-max quantisation over ``axis`` against the stored scale and zero.

    ``values`` fp32, ``levels`` = 2**bits - 1 (broadcast against the reduced shape, without ``axis``), ``dtype`` of the zero.
    """
    # The least of -0.0 and 0.0 is either: adding 0.0 makes it the latter everywhere.
    low, high = values.amin(dim=axis) + 0.0, values.amax(dim=axis)
    largest = torch.finfo(dtype).max
    zero = low.clamp(-largest, largest).to(dtype)
    scale = ((high - low) / levels).clamp(max=MAX_SCALE)
    scale = torch.where(scale < MIN_SCALE, torch.zeros_like(scale), scale).to(SCALE_DTYPE)
    step = scale.float().unsqueeze(axis)
    steps = torch.floor((values - zero.float().unsqueeze(axis)) / torch.where(step == 0, 1.0, step) + 0.5)
    codes = torch.minimum(steps.clamp(min=0), levels.unsqueeze(axis))
    return Quantized(torch.where(step == 0, 0.0, codes).to(torch.int32), scale, zero)


def seal_keys(keys: torch.Tensor, layout: PageLayout, seed: BoostSeed | None = None) -> torch.Tensor:
    """Key pages [N, H, 128, D] -> records u8 [N, H, nbytes]. ``seed`` replaces magnitude by a hash as the score."""
    record = layout.key
    if record.is_raw:
        return _bytes(keys.to(layout.dtype)).flatten(-2)
    keys = keys.float()
    if record.all_boosted or record.num_boosted == 0:
        channels = torch.arange(record.num_boosted, device=keys.device).expand(*keys.shape[:2], -1)
    else:
        scores = magnitude_scores(keys) if seed is None else random_scores(seed, keys.shape[1], record.head_dim)
        channels = boosted_channels(scores, record.num_boosted)
    levels = torch.full_like(keys[..., 0, :], 3.0).scatter(-1, channels, 15.0)
    codes, scale, zero = quantize(keys, levels, -2, zero_dtype(layout.dtype))
    parts = [order_key_words(pack_words(codes & 3))]
    if record.num_slots:
        high = (codes >> 2).gather(-1, channels.unsqueeze(-2).expand(*codes.shape[:-1], -1))
        high = torch.nn.functional.pad(high, (0, record.num_slots - record.num_boosted))
        parts.append(order_high_words(pack_words(high)))
    parts += [scale, zero]
    if record.has_boost_index:
        scale_bits = (4 * scale.gather(-1, channels)).view(torch.int16).to(torch.int32)
        slots = (channels.to(torch.int32) << 16) | scale_bits
        parts.append(torch.nn.functional.pad(slots, (0, record.num_slots - record.num_boosted)))
    return torch.cat([_bytes(part) for part in parts], dim=-1)


def seal_values(values: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Value pages [N, H, 128, D] -> records u8 [N, H, nbytes]."""
    record = layout.value
    if record.is_raw:
        return _bytes(values.to(layout.dtype)).flatten(-2)
    values = values.float()
    levels = torch.full_like(values[..., 0], float(2**record.bits - 1))
    codes, scale, zero = quantize(values, levels, -1, zero_dtype(layout.dtype))
    planes = [codes & 3, codes >> 2][: record.bits // 2]
    parts = [order_value_words(pack_words(plane)) for plane in planes]
    parts += [scale * value_premultipliers(values.device), zero]
    return torch.cat([_bytes(part) for part in parts], dim=-1)


def value_premultipliers(device: torch.device) -> torch.Tensor:
    """The power of four that each token's stored scale carries, bf16 [128] (exact)."""
    # Made on the device: an exported graph would keep a table as a constant of the CPU.
    parts = [torch.full((WORD_ROWS,), 4.0**power, device=device, dtype=SCALE_DTYPE) for power in FIELD_PREMULTIPLIER]
    return torch.cat(parts)


class KeyParts(NamedTuple):
    """Views into key records u8 [..., nbytes]."""

    low: torch.Tensor  # i16 [..., 16 D], memory order
    high: torch.Tensor  # i16 [..., 16 num_slots], memory order
    scale: torch.Tensor  # bf16 [..., D]
    zero: torch.Tensor  # 16 bit [..., D]
    slots: torch.Tensor | None  # i32 [..., num_slots]: channel << 16 | bits of 4 * scale


class ValueParts(NamedTuple):
    """Views into value records u8 [..., nbytes]."""

    low: torch.Tensor  # i16 [..., 16 D], memory order
    high: torch.Tensor | None  # i16 [..., 16 D], memory order
    scale: torch.Tensor  # bf16 [..., 128], pre-multiplied
    zero: torch.Tensor  # 16 bit [..., 128]


def split_key_records(records: torch.Tensor, record: KeyRecord, dtype: torch.dtype) -> KeyParts:
    return KeyParts(
        records[..., : record.high_offset].view(torch.int16),
        records[..., record.high_offset : record.scale_offset].view(torch.int16),
        records[..., record.scale_offset : record.zero_offset].view(SCALE_DTYPE),
        records[..., record.zero_offset : record.boost_offset].view(zero_dtype(dtype)),
        records[..., record.boost_offset :].view(torch.int32) if record.has_boost_index else None,
    )


def split_value_records(records: torch.Tensor, record: ValueRecord, dtype: torch.dtype) -> ValueParts:
    return ValueParts(
        records[..., : record.high_offset].view(torch.int16),
        records[..., record.high_offset : record.scale_offset].view(torch.int16) if record.bits == 4 else None,
        records[..., record.scale_offset : record.zero_offset].view(SCALE_DTYPE),
        records[..., record.zero_offset :].view(zero_dtype(dtype)),
    )


def key_codes(parts: KeyParts) -> torch.Tensor:
    """The integer codes of key records, i32 [..., 128, D]: low | high << 2 (algorithm 1, line 13)."""
    codes = unpack_words(restore_key_words(parts.low))
    if parts.high.shape[-1] == 0:
        return codes
    high = unpack_words(restore_high_words(parts.high)) << 2
    if parts.slots is None:
        return codes + high
    # Unused slots name channel 0 with a high code of 0: added, they change nothing.
    channels = slot_channels(parts.slots, codes.shape[-1])
    return codes.scatter_add(-1, channels.unsqueeze(-2).expand(*high.shape), high)


def slot_channels(slots: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Channel of each slot, i64, clamped: pages that are not sealed may hold any bytes."""
    return (slots >> 16).to(torch.int64).clamp(0, head_dim - 1)


def unseal_keys(records: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Key records u8 [..., nbytes] -> fp32 [..., 128, D]: code * scale + zero (algorithm 1)."""
    record = layout.key
    if record.is_raw:
        result: torch.Tensor = records.view(layout.dtype).unflatten(-1, (PAGE_SIZE, record.head_dim)).float()
        return result
    parts = split_key_records(records, record, layout.dtype)
    return _saturate(
        key_codes(parts) * parts.scale.float().unsqueeze(-2) + parts.zero.float().unsqueeze(-2), layout.dtype
    )


def unseal_values(records: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Value records u8 [..., nbytes] -> fp32 [..., 128, D]."""
    record = layout.value
    if record.is_raw:
        result: torch.Tensor = records.view(layout.dtype).unflatten(-1, (PAGE_SIZE, record.head_dim)).float()
        return result
    parts = split_value_records(records, record, layout.dtype)
    codes = unpack_words(restore_value_words(parts.low))
    if parts.high is not None:
        codes = codes + (unpack_words(restore_value_words(parts.high)) << 2)
    scale = parts.scale.float() / value_premultipliers(records.device).float()
    return _saturate(codes * scale.unsqueeze(-1) + parts.zero.float().unsqueeze(-1), layout.dtype)


def _saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The top code of a page that spans the dtype's range can lie half a step above it."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest)


def boost_index(records: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """The paper's Boost_IDX of key records (section 4.1), i32 [..., D]: a boosted channel's row in the high plane, else
    the sentinel ``num_boosted + 1``."""
    record = layout.key
    shape = (*records.shape[:-1], record.head_dim)
    if record.all_boosted:
        return torch.arange(record.head_dim, device=records.device, dtype=torch.int32).expand(shape)
    index = torch.full(shape, record.num_boosted + 1, device=records.device, dtype=torch.int32)
    slots = split_key_records(records, record, layout.dtype).slots if record.num_boosted else None
    if slots is None:
        return index
    channels = (slots[..., : record.num_boosted] >> 16).to(torch.int64)
    rows = torch.arange(record.num_boosted, device=records.device, dtype=torch.int32)
    return index.scatter(-1, channels, rows.expand(channels.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


assert BOOST_ALIGNMENT == 8, "order_high_words is written for 8-column halves"

"""The page format in one place: shapes, byte offsets and sizes that every kernel and every report reads.

A page holds ``PAGE_SIZE`` tokens of one layer. It is the KV heads' records one after another; a record is what one head
keeps. All offsets are bytes from the start of a record.

Key record (2 or 4 bit)                              Value record (2 or 4 bit)
    low plane    i16 [16, D]                             low plane   i16 [D, 16]
    high plane   i16 [16, num_slots]                     high plane  i16 [D, 16], only with 4 bits
    scale        bf16 [D]                                scale       bf16 [128], times 4 ** FIELD_PREMULTIPLIER
    zero         16-bit dtype of the model [D]           zero        16-bit dtype of the model [128]
    boost        i32 [num_slots], unless all are boosted

With 16 bits a record is the raw [128, D] tensor in the model's dtype.

One word holds eight tokens: bits 2f, 2f+1 of word (j, x) belong to token 16 f + j. The order of the words within a plane
is that of a tensor core's A operand, see ``reference.order_key_words``.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch

# Saved pages carry it: any change of what the bytes of a page mean, or of where raw tokens lie, must count it up.
LAYOUT_VERSION = 1

PAGE_SIZE = 128
FIELDS_PER_WORD = 8
WORD_ROWS = PAGE_SIZE // FIELDS_PER_WORD
BOOST_ALIGNMENT = 8
HEAD_DIM_ALIGNMENT = 16

# A masked field read as fp16 is the subnormal code * 4**e * 2**-24; fields 5, 6 and 7 are shifted down by six bits first.
FIELD_EXPONENTS = (0, 1, 2, 3, 4, 2, 3, 4)
# The power of four stored with a value scale, so that the kernel multiplies probabilities by it without a constant.
FIELD_PREMULTIPLIER = tuple(2 - exponent for exponent in FIELD_EXPONENTS)

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALE_DTYPE = torch.bfloat16
BITS = (2, 4, 16)


def zero_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype of a stored zero: exact for 16-bit models, fp16 for fp32 ones."""
    return torch.float16 if dtype == torch.float32 else dtype


@dataclasses.dataclass(frozen=True)
class KeyRecord:
    """What one KV head keeps of a key page: per-channel codes, ``num_boosted`` channels with 4 bits."""

    head_dim: int
    bits: int
    num_boosted: int
    itemsize: int

    @property
    def is_raw(self) -> bool:
        return self.bits == 16

    @property
    def num_slots(self) -> int:
        """Columns of the high plane: the boosted channels, rounded up to a multiple of eight."""
        return 0 if self.is_raw else -(-self.num_boosted // BOOST_ALIGNMENT) * BOOST_ALIGNMENT

    @property
    def all_boosted(self) -> bool:
        return not self.is_raw and self.num_boosted == self.head_dim

    @property
    def has_boost_index(self) -> bool:
        return self.num_slots > 0 and not self.all_boosted

    @property
    def high_offset(self) -> int:
        return 2 * WORD_ROWS * self.head_dim

    @property
    def scale_offset(self) -> int:
        return self.high_offset + 2 * WORD_ROWS * self.num_slots

    @property
    def zero_offset(self) -> int:
        return self.scale_offset + 2 * self.head_dim

    @property
    def boost_offset(self) -> int:
        return self.zero_offset + 2 * self.head_dim

    @property
    def nbytes(self) -> int:
        if self.is_raw:
            return PAGE_SIZE * self.head_dim * self.itemsize
        return self.boost_offset + (4 * self.num_slots if self.has_boost_index else 0)


@dataclasses.dataclass(frozen=True)
class ValueRecord:
    """What one KV head keeps of a value page: per-token codes."""

    head_dim: int
    bits: int
    itemsize: int

    @property
    def is_raw(self) -> bool:
        return self.bits == 16

    @property
    def high_offset(self) -> int:
        return 2 * WORD_ROWS * self.head_dim

    @property
    def scale_offset(self) -> int:
        planes = 2 if self.bits == 4 else 1
        return planes * self.high_offset

    @property
    def zero_offset(self) -> int:
        return self.scale_offset + 2 * PAGE_SIZE

    @property
    def nbytes(self) -> int:
        if self.is_raw:
            return PAGE_SIZE * self.head_dim * self.itemsize
        return self.zero_offset + 2 * PAGE_SIZE


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """The pages of one layer.

    ``key_dim`` and ``value_dim`` are head dimensions (multiples of 16, they may differ); ``num_boosted`` counts the key
    channels per head with 4 bits and is forced to ``key_dim`` when ``key_bits`` is 4 and to 0 when it is 16.
    """

    key_dim: int
    value_dim: int
    num_kv_heads: int
    key_bits: int
    value_bits: int
    num_boosted: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, head_dim in (("key_dim", self.key_dim), ("value_dim", self.value_dim)):
            if head_dim <= 0 or head_dim % HEAD_DIM_ALIGNMENT:
                raise ValueError(f"{name} must be a positive multiple of {HEAD_DIM_ALIGNMENT}, got {head_dim}")
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits not in BITS:
                raise ValueError(f"{name} must be one of {BITS}, got {bits}")
        if not 0 <= self.num_boosted <= self.key_dim:
            raise ValueError(f"num_boosted must be between 0 and key_dim={self.key_dim}, got {self.num_boosted}")

    @functools.cached_property
    def key(self) -> KeyRecord:
        num_boosted = {2: self.num_boosted, 4: self.key_dim, 16: 0}[self.key_bits]
        return KeyRecord(self.key_dim, self.key_bits, num_boosted, self.dtype.itemsize)

    @functools.cached_property
    def value(self) -> ValueRecord:
        return ValueRecord(self.value_dim, self.value_bits, self.dtype.itemsize)

    @property
    def key_page_bytes(self) -> int:
        return self.num_kv_heads * self.key.nbytes

    @property
    def value_page_bytes(self) -> int:
        return self.num_kv_heads * self.value.nbytes

    @property
    def page_bytes(self) -> int:
        return self.key_page_bytes + self.value_page_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in sealed pages over all KV heads, scales, zeros and boost records counted."""
        return self.page_bytes / PAGE_SIZE

    @property
    def raw_bytes_per_token(self) -> int:
        """Bytes of one token that is kept raw."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class RawLayout:
    """Where a row's raw tokens lie: ``sink_length`` slots for ever, then a ring that holds the newest tokens.

    ``value_window`` (R) tokens of V stay raw behind the newest page; ``rollback_window`` (W) tokens can be cropped without
    loss because raw tokens outlive the completion of their page by W tokens.
    """

    sink_length: int
    value_window: int
    rollback_window: int

    @property
    def key_ring(self) -> int:
        return PAGE_SIZE + self.rollback_window

    @property
    def value_ring(self) -> int:
        return self.value_window + PAGE_SIZE + self.rollback_window

    @property
    def key_slots(self) -> int:
        return self.sink_length + self.key_ring

    @property
    def value_slots(self) -> int:
        return self.sink_length + self.value_ring

    @property
    def max_mixed_pages(self) -> int:
        """How many pages can be packed in K while V is still raw."""
        return -(-self.value_window // PAGE_SIZE)

    def pages_for(self, length: int) -> int:
        """Table slots that a row of ``length`` tokens can come to need."""
        return max(length - self.sink_length, 0) // PAGE_SIZE

    def key_pages(self, lengths: torch.Tensor) -> torch.Tensor:
        """Pages whose K is read packed at these lengths: S + (n + 1) G <= t."""
        return torch.clamp(lengths - self.sink_length, min=0) // PAGE_SIZE

    def value_pages(self, lengths: torch.Tensor) -> torch.Tensor:
        """Pages whose V is read packed at these lengths: S + (n + 1) G + R <= t."""
        return torch.clamp(lengths - self.sink_length - self.value_window, min=0) // PAGE_SIZE

    def slots(self, tokens: torch.Tensor, ring: int) -> torch.Tensor:
        """Raw slot of each token index."""
        return torch.where(tokens < self.sink_length, tokens, self.sink_length + (tokens - self.sink_length) % ring)


class LayerTensors(NamedTuple):
    """The device state of one layer, all at fixed addresses between growths.

    ``page_table`` is shared by the layers of a device; the rest is the layer's own.
    """

    key_pages: torch.Tensor  # u8 [num_pages, key_page_bytes]
    value_pages: torch.Tensor  # u8 [num_pages, value_page_bytes]
    raw_key: torch.Tensor  # [B, Hkv, key_slots, key_dim]
    raw_value: torch.Tensor  # [B, Hkv, value_slots, value_dim]
    lengths: torch.Tensor  # i32 [B], tokens in the row
    high_water: torch.Tensor  # i32 [B], greatest length since the rings were last refilled
    page_table: torch.Tensor  # i32 [B, max_pages]

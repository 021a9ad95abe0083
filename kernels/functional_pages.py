"""Pages as values: sealing returns new tensors, nothing is written in place, and every operator has a form in ONNX.

Codes, scales, zeros and boosted channels are those of ``reference.py``, bit for bit. Only the order in memory is another: one
byte holds four tokens, bits 2f, 2f+1 of byte (j, x) are the code of token 32 f + j, and the channels of the high plane stand in
ascending order without unused slots. Masked fields are read where they stand, code * 4 ** f, and the power is taken out of
the scores or put into the probabilities: that is exact, and spares a shift of every code.
"""

from typing import NamedTuple

import torch

from kitty_compile.kernels.layout import PAGE_SIZE, PageLayout, zero_dtype
from kitty_compile.kernels.reference import SCORE_BITS, quantize

FIELDS_PER_BYTE = 4
BYTE_ROWS = PAGE_SIZE // FIELDS_PER_BYTE
_FIELD_MASKS = tuple(3 << 2 * field for field in range(FIELDS_PER_BYTE))
_FIELD_FACTORS = tuple(4.0**field for field in range(FIELDS_PER_BYTE))
_EXPONENT_BIAS = 127
# The biased exponents that a score can tell apart, see ``reference.magnitude_scores``.
_EXPONENTS = range(SCORE_BITS + 1, 2 * _EXPONENT_BIAS + 1)


class Pages(NamedTuple):
    """n sealed pages of K or V; X is the head dimension. What stands before n is rows and KV heads, or layers before them."""

    low: torch.Tensor  # u8 [..., n, 32, X]
    scale: torch.Tensor  # bf16 [..., n, X] for K, [..., n, 128] for V
    zero: torch.Tensor  # the 16-bit dtype of the model's zeros, likewise
    high: torch.Tensor | None = None  # u8 [..., n, 32, boosted channels]
    channels: torch.Tensor | None = None  # i16 [..., n, boosted channels], ascending; None when all are boosted

    @property
    def number(self) -> int:
        return self.low.shape[-3]

    def join(self, other: "Pages") -> "Pages":
        """These pages and then the ``other`` ones."""
        pairs = zip(self, other, (-3, -2, -2, -3, -2), strict=True)
        joined = (None if a is None or b is None else torch.cat([a, b], dim=dim) for a, b, dim in pairs)
        return Pages(*joined)  # type: ignore[arg-type]


def seal_keys(keys: torch.Tensor, layout: PageLayout) -> Pages:
    """Keys [..., n, 128, D] of n full pages."""
    keys = keys.float()
    record = layout.key
    levels = torch.full_like(keys[..., 0, :], 3.0)
    channels = None
    if record.all_boosted:
        levels = levels + 12.0
    elif record.num_boosted:
        channels = boosted_channels(magnitude_scores(keys), record.num_boosted)
        levels = levels.scatter(-1, channels, 15.0)
    quantized = quantize(keys, levels, -2, zero_dtype(layout.dtype))
    low, high = _split(quantized.codes)
    if channels is None:
        return Pages(pack(low), quantized.scale, quantized.zero, pack(high) if record.all_boosted else None)
    boosted = high.gather(-1, channels.unsqueeze(-2).expand(*high.shape[:-1], -1))
    return Pages(pack(low), quantized.scale, quantized.zero, pack(boosted), channels.to(torch.int16))


def seal_values(values: torch.Tensor, layout: PageLayout) -> Pages:
    """Values [..., n, 128, D] of n full pages."""
    values = values.float()
    record = layout.value
    levels = torch.full_like(values[..., 0], float(2**record.bits - 1))
    quantized = quantize(values, levels, -1, zero_dtype(layout.dtype))
    low, high = _split(quantized.codes)
    return Pages(pack(low), quantized.scale, quantized.zero, pack(high) if record.bits == 4 else None)


def no_pages(layout: PageLayout, *rows: int, is_key: bool) -> Pages:
    """The pages of ``rows`` that have none yet: sizes of what stands before the KV heads."""
    record = layout.key if is_key else layout.value
    empty = torch.zeros(*rows, layout.num_kv_heads, 0, PAGE_SIZE, record.head_dim)
    return seal_keys(empty, layout) if is_key else seal_values(empty, layout)


def magnitude_scores(keys: torch.Tensor) -> torch.Tensor:
    """``reference.magnitude_scores`` as i64; the exponent is counted, for ONNX cannot read the bits of a float."""
    magnitudes = keys.abs()
    largest = magnitudes.amax(dim=(-2, -1))
    bounds = torch.tensor([2.0 ** (exponent - _EXPONENT_BIAS) for exponent in _EXPONENTS], device=keys.device)
    factors = torch.tensor(
        [2.0 ** (_EXPONENT_BIAS - count) for count in range(len(_EXPONENTS) + 1)], device=keys.device
    )
    count = (largest.unsqueeze(-1) >= bounds).to(torch.int32).sum(dim=-1)
    factor = factors[count]
    return (magnitudes * factor[..., None, None]).to(torch.int32).sum(dim=-2, dtype=torch.int64)


def boosted_channels(scores: torch.Tensor, num_boosted: int) -> torch.Tensor:
    """The ``num_boosted`` best-scored channels in ascending order, i64; ties go to the lower channel."""
    num_channels = scores.shape[-1]
    # Keys that are all different leave nothing to how a runtime treats ties.
    keys = scores * num_channels + torch.arange(num_channels - 1, -1, -1, device=scores.device)
    best = keys.topk(num_boosted, dim=-1).indices
    return best.topk(num_boosted, dim=-1, largest=False).values


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two-bit codes fp32 [..., 128, X] -> u8 [..., 32, X]."""
    by_field: torch.Tensor = codes.unflatten(-2, (FIELDS_PER_BYTE, BYTE_ROWS))
    weights = torch.tensor(_FIELD_FACTORS, device=codes.device).view(-1, 1, 1)
    return (by_field * weights).sum(dim=-3).to(torch.uint8)


def fields(plane: torch.Tensor) -> torch.Tensor:
    """u8 [..., 32, X] -> fp32 [..., 128, X]: the code of token 32 f + j times 4 ** f."""
    masks = torch.tensor(_FIELD_MASKS, dtype=torch.uint8, device=plane.device).view(-1, 1, 1)
    return (plane.unsqueeze(-3) & masks).to(torch.float32).flatten(-3, -2)


def page_scores(query: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Products of fp32 queries [B, H, M, D] with every key of n pages, [B, H, M, n, 128]."""
    per_page = query.unsqueeze(2)  # [B, H, 1, M, D]
    scale = pages.scale.float().unsqueeze(-2)
    scores = (per_page * scale) @ fields(pages.low).mT
    if pages.high is not None:
        scores = scores + _boosted_query(per_page, scale, pages) @ fields(pages.high).mT
    zero = query @ pages.zero.float().mT  # [B, H, M, n]
    return (scores * _unit(query.device)).transpose(2, 3) + zero.unsqueeze(-1)


def _boosted_query(per_page: torch.Tensor, scale: torch.Tensor, pages: Pages) -> torch.Tensor:
    """The queries' boosted channels times 4 * scale, [B, H, n, M, boosted channels]."""
    scaled = per_page * (4 * scale)
    if pages.channels is None:
        return scaled
    channels = pages.channels.to(torch.int64).unsqueeze(-2)
    return scaled.gather(-1, channels.expand(*scaled.shape[:-1], -1))


def weighted_values(probabilities: torch.Tensor, pages: Pages) -> torch.Tensor:
    """Sum of the values of n pages, weighted by fp32 [B, H, M, n, 128] -> [B, H, M, D]."""
    scaled = probabilities * (pages.scale.float() * _unit(probabilities.device)).unsqueeze(2)
    output = scaled.flatten(-2) @ fields(pages.low).flatten(2, 3)
    if pages.high is not None:
        output = output + 4 * (scaled.flatten(-2) @ fields(pages.high).flatten(2, 3))
    zero: torch.Tensor = probabilities.flatten(-2) @ pages.zero.float().flatten(2).unsqueeze(-1)
    return output + zero


def unseal_keys(pages: Pages) -> torch.Tensor:
    """The keys of n pages, fp32 [..., n, 128, D]: code * scale + zero (algorithm 1)."""
    codes = _codes(pages.low)
    if pages.high is not None:
        high = 4 * _codes(pages.high)
        if pages.channels is None:
            codes = codes + high
        else:
            channels = pages.channels.to(torch.int64).unsqueeze(-2)
            codes = codes.scatter_add(-1, channels.expand_as(high), high)
    return codes * pages.scale.float().unsqueeze(-2) + pages.zero.float().unsqueeze(-2)


def unseal_values(pages: Pages) -> torch.Tensor:
    """The values of n pages, fp32 [..., n, 128, D]."""
    codes = _codes(pages.low)
    if pages.high is not None:
        codes = codes + 4 * _codes(pages.high)
    return codes * pages.scale.float().unsqueeze(-1) + pages.zero.float().unsqueeze(-1)


def _codes(plane: torch.Tensor) -> torch.Tensor:
    return fields(plane) * _unit(plane.device).unsqueeze(-1)


def _split(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of up to four bits as their low and their high half, fp32."""
    whole = codes.to(torch.float32)
    high = torch.floor(whole * 0.25)
    return whole - 4 * high, high


def _unit(device: torch.device) -> torch.Tensor:
    """fp32 [128]: what makes a code of a masked field."""
    factors = torch.tensor(_FIELD_FACTORS, device=device)
    return (1 / factors).repeat_interleave(BYTE_ROWS)

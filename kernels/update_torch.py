"""Changes of the paged cache in vectorised torch: seal, append, advance; and the dense form of pages."""

import torch

from kitty_compile.kernels import reference
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout, RawLayout


def update(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    *,
    seed: int,
    layer: int,
) -> None:
    """Take a call's tokens into the cache: seal every page that they complete, write the rest raw, advance the lengths.

    ``seed`` >= 0 selects boosted channels by hash (with ``layer``), -1 by magnitude. Arguments else as in :func:`attend`.
    """
    batch, _, num_columns, _ = key.shape
    device = key.device
    before = state.lengths.long()
    new = torch.full_like(before, num_columns) if counts is None else counts.long()
    after = before + new
    column_of = torch.arange(num_columns, device=device).expand(batch, -1) if columns is None else columns.long()
    _seal(key, True, column_of, before, after, state, layout, raw, seed, layer)
    _seal(value, False, column_of, before, after, state, layout, raw, seed, layer)

    _append(key, column_of, before, after, state.raw_key, raw, raw.key_ring)
    _append(value, column_of, before, after, state.raw_value, raw, raw.value_ring)
    state.lengths.copy_(after)
    torch.maximum(state.high_water, state.lengths, out=state.high_water)


def _append(
    source: torch.Tensor,
    column_of: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    held: torch.Tensor,
    raw: RawLayout,
    ring: int,
) -> None:
    tokens = before.unsqueeze(1) + torch.arange(source.shape[2], device=source.device)
    survives = (tokens < raw.sink_length) | (tokens >= after.unsqueeze(1) - ring)
    rows, index = torch.nonzero(survives & (tokens < after.unsqueeze(1)), as_tuple=True)
    slots = raw.slots(tokens[rows, index], ring)
    held[rows, :, slots] = source[rows, :, column_of[rows, index]].to(held.dtype)


def _seal(
    source: torch.Tensor,
    is_key: bool,
    column_of: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    seed: int,
    layer: int,
) -> None:
    pages_at, ring, held, pool = (
        (raw.key_pages, raw.key_ring, state.raw_key, state.key_pages)
        if is_key
        else (raw.value_pages, raw.value_ring, state.raw_value, state.value_pages)
    )
    first, last = pages_at(before), pages_at(after)
    most = int((last - first).max())
    if most == 0:
        return
    page = first.unsqueeze(1) + torch.arange(most, device=source.device)
    rows, index = torch.nonzero(page < last.unsqueeze(1), as_tuple=True)
    page = page[rows, index]
    tokens = raw.sink_length + page.unsqueeze(1) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=source.device)
    new = tokens - before[rows].unsqueeze(1)
    from_call = source[rows.unsqueeze(1), :, column_of[rows.unsqueeze(1), new.clamp(min=0)]].to(held.dtype)
    from_ring = held[rows.unsqueeze(1), :, raw.slots(tokens, ring)]
    tensors = torch.where((new >= 0)[..., None, None], from_call, from_ring).transpose(1, 2)
    if is_key:
        boost_seed = None if seed < 0 else reference.BoostSeed(seed, layer, page)
        records = reference.seal_keys(tensors, layout, boost_seed)
    else:
        records = reference.seal_values(tensors, layout)
    pool[state.page_table[rows, page].long()] = records.flatten(1)


def dequantize_pages(
    pages: torch.Tensor, page_table: torch.Tensor, num_pages: int, layout: PageLayout, *, is_key: bool
) -> torch.Tensor:
    """The first ``num_pages`` pages of every row, dense: [B, Hkv, num_pages * 128, D] in the layout's dtype (algorithm 1)."""
    record = layout.key if is_key else layout.value
    records = pages[page_table[:, :num_pages].long()].unflatten(-1, (-1, record.nbytes)).transpose(1, 2)
    dense = reference.unseal_keys(records, layout) if is_key else reference.unseal_values(records, layout)
    return dense.flatten(2, 3).to(layout.dtype)

"""``kitty::attend`` as plain torch operators alone: for graphs that run where no Python is, such as AOTInductor packages.

Nothing here depends on data: batch, columns and the number of pages read are the only sizes that may vary, and a traced graph
keeps them as symbols. Where the other backends look at lengths to leave work out, this one masks. The state changes in place,
by writes of a fixed number of pages and raw slots, so that a compiler can leave the pools where they are.

Before                                          After
    out = kitty.attend(q, k, v, ..., state)       dense_key = where(is_packed, unseal(key_pages[table]), raw_key[slots]); ...
                                                  out = scaled_dot_product_attention(q, cat(dense_key, k), ..., mask)
                                                  key_pages[ids] = where(is_complete, seal(...), key_pages[ids]); ...
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kitty_compile.kernels import attend_torch, reference
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout, RawLayout
from kitty_compile.kernels.ops import OpParameters

# Elements: what the rows of a bias start at a multiple of, for CUDA's memory-efficient attention.
_BIAS_ALIGNMENT = 8


def attend_and_update(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    raw_key: torch.Tensor,
    raw_value: torch.Tensor,
    lengths: torch.Tensor,
    high_water: torch.Tensor,
    page_table: torch.Tensor,
    parameters: Sequence[int],
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    is_empty: bool,
    num_pages: int | None = None,
    num_sealed: int | None = None,
) -> torch.Tensor:
    """What ``torch.ops.kitty.attend`` does, with its arguments.

    Args:
        num_pages: pages of each row that are read, at least as many as any row has; None for all that the table has room for.
            All work on cached tokens is in proportion to it.
        num_sealed: pages that a row can complete in this call, ceil(T / 128); None for one more, whose size a tracer that
            knows nothing of T can tell from 1.

    Returns:
        [B, Hq, T, Dv] in the query's dtype; the state may have more rows than the query, and the rest is left alone.
    """
    numbers = OpParameters(*parameters)
    state = LayerTensors(key_pages, value_pages, raw_key, raw_value, lengths, high_water, page_table)
    layout, raw = numbers.page_layout(raw_key.dtype), numbers.raw_layout()
    arguments = query, key, value, columns, counts, state, layout, raw
    output = attend(*arguments, scale=scale, softcap=softcap, sinks=sinks, is_empty=is_empty, num_pages=num_pages)
    update(*arguments[1:], seed=numbers.seed, layer=numbers.layer, num_sealed=num_sealed)
    return output


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    is_empty: bool,
    num_pages: int | None = None,
) -> torch.Tensor:
    """See ``attend_torch.attend``; ``columns`` must be a permutation of each row's columns, tokens first."""
    batch, num_columns = query.shape[0], query.shape[2]
    # The CPU's fused attention rounds probabilities to the dtype of its inputs.
    precision = torch.float32 if query.device.type == "cpu" else query.dtype
    key, value = key.to(precision), value.to(precision)
    causal = torch.ones(num_columns, num_columns, dtype=torch.bool, device=query.device).tril()
    visible = causal.expand(batch, 1, -1, -1)
    if columns is not None:
        real = attend_torch.real_columns(columns, counts)
        visible = visible & real[:, None, None, :]
        # A pad may hold anything, and 0 * inf is not 0.
        hidden = ~real[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    if not is_empty:
        cached_key, cached_value, is_cached = _cached_tokens(state, layout, raw, batch, num_pages)
        key = torch.cat([cached_key.to(key.dtype), key], dim=2)
        value = torch.cat([cached_value.to(value.dtype), value], dim=2)
        visible = torch.cat([is_cached[:, None, None, :].expand(-1, 1, num_columns, -1), visible], dim=-1)
    return _attend_dense(query, key, value, visible, scale, softcap, sinks)


def _attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over K and V [B, Hkv, N, D] as a mask bool [B, 1, T, N] says; 0 where nothing is visible.

    The group's query heads become columns of their KV head, since fused kernels want as many heads on both sides. They are
    joined rather than reshaped: what a tracer cannot say of strides would be a guard on the sizes.
    """
    group, num_columns = query.shape[1] // key.shape[1], query.shape[2]
    folded = torch.cat([query[:, member::group] for member in range(group)], dim=2).to(key.dtype)
    mask = torch.cat([visible] * group, dim=2)
    if softcap == 0 and sinks is None:
        output = _fused(folded, key, value, mask, scale)
    else:
        scores = (folded.float() * scale) @ key.float().mT
        scores = torch.tanh(scores / softcap) * softcap if softcap > 0 else scores
        output = _softmax(scores.masked_fill(~mask, -torch.inf), sinks, num_columns) @ value.float()
    # A page's top code can lie half a step above the dtype's range.
    largest = torch.finfo(query.dtype).max
    output = output.clamp(-largest, largest).to(query.dtype)
    members = [output.narrow(2, member * num_columns, num_columns).unbind(1) for member in range(group)]
    return torch.stack([head for heads in zip(*members, strict=True) for head in heads], dim=1)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention [B, H, M, Dv] by an operator that keeps no scores, as a mask bool [B, 1, M, N] says; 0 where nothing is
    visible."""
    if query.device.type == "cuda":
        # Left to choose while tracing, torch may take cuDNN, which plans anew for every number of tokens.
        bias = _bias(mask, query.dtype).expand(-1, key.shape[1], -1, -1)
        attend: Callable[..., tuple[torch.Tensor, ...]] = torch.ops.aten._scaled_dot_product_efficient_attention
        output = attend(query, key, value, bias, False, scale=scale)[0]
    else:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    if query.device.type != "cpu":
        # Not every kernel there gives zeros for a row that sees nothing.
        output = output.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return output


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores: 0 where a mask [..., N] is true, else -inf. Rows lie as far apart as CUDA's kernels ask for."""
    num_tokens = mask.shape[-1]
    padded = torch.nn.functional.pad(mask, (0, -num_tokens % _BIAS_ALIGNMENT))
    return torch.zeros_like(padded, dtype=dtype).masked_fill(~padded, -torch.inf)[..., :num_tokens]


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, num_columns: int) -> torch.Tensor:
    """Softmax of scores [B, Hkv, group * T, N] over the last axis, as ``attend_torch`` has it: ``sinks`` [Hq] join the
    denominator, a row with nothing visible gives zeros."""
    largest = scores.amax(dim=-1, keepdim=True)
    sink = None
    if sinks is not None:
        by_group = sinks.float().view(1, scores.shape[1], -1).unbind(2)
        sink = torch.cat([logit.unsqueeze(2).expand(-1, -1, num_columns) for logit in by_group], dim=2).unsqueeze(-1)
        largest = torch.maximum(largest, sink)
    largest = largest.clamp(min=torch.finfo(torch.float32).min)
    exponentials = torch.exp(scores - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - largest)
    return exponentials / total.clamp(min=torch.finfo(torch.float32).tiny)


def _cached_tokens(
    state: LayerTensors, layout: PageLayout, raw: RawLayout, batch: int, num_pages: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V of the rows' cached tokens, dense, token j at position j, zero where there is none: [B, Hkv, N, D] each;
    and bool [B, N], where there is one."""
    table = state.page_table[:batch]
    if num_pages is not None:
        # A slice would be another layout where it is all of the table.
        table = table.index_select(1, torch.arange(num_pages, device=table.device))
    lengths = state.lengths[:batch].long().unsqueeze(1)
    tokens = torch.arange(raw.sink_length + (table.shape[1] + 1) * PAGE_SIZE - 1, device=lengths.device)
    is_cached = tokens < lengths
    dense = []
    for is_key, pages_at, ring, held, pool in (
        (True, raw.key_pages, raw.key_ring, state.raw_key, state.key_pages),
        (False, raw.value_pages, raw.value_ring, state.raw_value, state.value_pages),
    ):
        held = held[:batch].index_select(2, raw.slots(tokens, ring))
        if table.shape[1]:
            in_pages = tokens[raw.sink_length : 1 - PAGE_SIZE]
            is_packed = in_pages < raw.sink_length + pages_at(lengths) * PAGE_SIZE
            packed = _unsealed(pool, table, layout, is_key).to(held.dtype)
            middle = held[:, :, raw.sink_length : 1 - PAGE_SIZE]
            middle = torch.where(is_packed[:, None, :, None], packed, middle)
            held = torch.cat([held[:, :, : raw.sink_length], middle, held[:, :, 1 - PAGE_SIZE :]], dim=2)
        # A slot that holds no token may hold anything.
        dense.append(held.masked_fill(~is_cached[:, None, :, None], 0.0))
    return dense[0], dense[1], is_cached


def _unsealed(pool: torch.Tensor, table: torch.Tensor, layout: PageLayout, is_key: bool) -> torch.Tensor:
    """The pages of a table [B, P], whatever bytes they hold: fp32 [B, Hkv, P * 128, D]."""
    records = pool[table.long()].unflatten(-1, (layout.num_kv_heads, -1))
    unseal = reference.unseal_keys if is_key else reference.unseal_values
    return unseal(records, layout).transpose(1, 2).flatten(2, 3)


class _Advance(NamedTuple):
    """How far a call takes each row, and where its tokens are."""

    before: torch.Tensor  # i64 [B, 1], tokens before the call
    after: torch.Tensor  # i64 [B, 1]
    column_of: torch.Tensor  # i64 [B, T], column of the i-th new token


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
    num_sealed: int | None = None,
) -> None:
    """See ``update_torch.update``: the same bytes."""
    batch, _, num_columns, _ = key.shape
    before = state.lengths[:batch].long().unsqueeze(1)
    after = before + (num_columns if counts is None else counts.long().unsqueeze(1))
    if columns is None:
        column_of = torch.arange(num_columns, device=key.device).expand(batch, -1)
    else:
        column_of = columns.long()
    advance = _Advance(before, after, column_of)
    if state.page_table.shape[1]:
        most = (num_columns + PAGE_SIZE - 1) // PAGE_SIZE + 1 if num_sealed is None else num_sealed
        _seal(key, True, advance, state, layout, raw, seed, layer, most)
        _seal(value, False, advance, state, layout, raw, seed, layer, most)
    _append(key, advance, state.raw_key, raw, raw.key_ring)
    _append(value, advance, state.raw_value, raw, raw.value_ring)
    lengths = after.squeeze(1).to(torch.int32)
    high_water = torch.maximum(state.high_water[:batch], lengths)
    state.lengths[:batch].copy_(lengths)
    state.high_water[:batch].copy_(high_water)


def _take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, n, D] at [B, m] -> [B, m, Hkv, D]."""
    rows = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
    return tensor.transpose(1, 2)[rows, index]


def _append(source: torch.Tensor, advance: _Advance, held: torch.Tensor, raw: RawLayout, ring: int) -> None:
    """Write the new tokens that outlive the call to their raw slots. The other columns write what the newest one writes, to
    where that writes it; in a row without new tokens, what is there."""
    new = torch.arange(source.shape[2], device=source.device).expand(source.shape[0], -1)
    tokens = advance.before + new
    survives = (tokens < raw.sink_length) | (tokens >= advance.after - ring)
    newest = advance.after - 1 - advance.before
    new = torch.where(survives & (new <= newest), new, newest).clamp(min=0)
    rows = torch.arange(source.shape[0], device=source.device).unsqueeze(1)
    slots = raw.slots(advance.before + new, ring)
    tensors = _take(source, advance.column_of.gather(1, new)).to(held.dtype)
    held[rows, :, slots] = torch.where((newest < 0)[..., None, None], held[rows, :, slots], tensors)


def _seal(
    source: torch.Tensor,
    is_key: bool,
    advance: _Advance,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    seed: int,
    layer: int,
    most: int,
) -> None:
    """Write the pages that the call completes, of ``most`` that it could. Those that it does not
    complete write what the first one writes to where that writes it, so that no two writes differ."""
    pages_at, ring, held, pool = (
        (raw.key_pages, raw.key_ring, state.raw_key, state.key_pages)
        if is_key
        else (raw.value_pages, raw.value_ring, state.raw_value, state.value_pages)
    )
    batch, num_heads, num_columns, head_dim = source.shape
    first = pages_at(advance.before)
    page = first + torch.arange(most, device=source.device)
    is_complete = page < pages_at(advance.after)
    tokens = raw.sink_length + page.unsqueeze(2) * PAGE_SIZE + torch.arange(PAGE_SIZE, device=source.device)
    tokens = tokens.reshape(batch, most * PAGE_SIZE)
    new = tokens - advance.before
    from_call = _take(source, advance.column_of.gather(1, new.clamp(min=0).clamp(max=num_columns - 1))).to(held.dtype)
    from_ring = _take(held, raw.slots(tokens, ring))
    whole = torch.where((new >= 0)[..., None, None], from_call, from_ring)
    whole = whole.reshape(batch * most, PAGE_SIZE, num_heads, head_dim).transpose(1, 2)
    if is_key:
        boost_seed = None if seed < 0 else reference.BoostSeed(seed, layer, page.reshape(-1))
        records = reference.seal_keys(whole, layout, boost_seed)
    else:
        records = reference.seal_values(whole, layout)
    sealed = records.reshape(batch, most, pool.shape[1])
    page = torch.where(is_complete, page, first).clamp(max=state.page_table.shape[1] - 1)
    ids = state.page_table[:batch].gather(1, page).long()
    kept = torch.where(is_complete[:, :1, None], sealed[:, :1], pool[ids[:, :1]])
    pool.index_put_((ids,), torch.where(is_complete.unsqueeze(2), sealed, kept))


def attend_window_and_append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None,
    ring_key: torch.Tensor,
    ring_value: torch.Tensor,
    ring_real: torch.Tensor,
    position: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What ``torch.ops.kitty.attend_window`` does, with its arguments. Returns [B, Hq, T, Dv]."""
    batch, _, num_columns, _ = query.shape
    ring = ring_key.shape[2]
    own_real = torch.ones_like(query[:, 0, :, 0], dtype=torch.bool) if real is None else real
    own_column = position + torch.arange(num_columns, device=query.device)
    # The newest column that a slot can hold, negative for none.
    ring_column = position - 1 - torch.remainder(position - 1 - torch.arange(ring, device=query.device), ring)
    column = torch.cat([ring_column, own_column])
    distance = own_column.unsqueeze(1) - column
    is_real = torch.cat([ring_real[:batch], own_real], dim=1) & (column >= 0)
    visible = (distance >= 0) & (distance < window) & is_real[:, None, None, :]
    keys, values = (
        # A slot or pad that nobody may see must not hold a NaN.
        torch.cat([held[:batch], own], dim=2).masked_fill(~is_real[:, None, :, None], 0.0)
        for held, own in ((ring_key, key), (ring_value, value))
    )
    output = _attend_dense(query, keys, values, visible, scale, softcap, sinks)
    # Columns that the ring is too short for write what the newest one writes, to where that writes it.
    new = torch.arange(num_columns, device=query.device)
    new = torch.where(new >= num_columns - ring, new, num_columns - 1)
    slots = torch.remainder(position + new, ring)
    rows = torch.arange(batch, device=query.device).unsqueeze(1)
    for source, held in ((key, ring_key), (value, ring_value)):
        held[rows, :, slots] = source.index_select(2, new).transpose(1, 2).to(held.dtype)
    ring_real[rows, slots] = own_real.index_select(1, new)
    position.add_(num_columns)
    return output

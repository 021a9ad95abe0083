"""States and calls for kernel tests: random rows, a shuffled page table, NaN bytes wherever nothing valid lies."""

import dataclasses

import torch

from kitty_compile.kernels import reference
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout, RawLayout


@dataclasses.dataclass
class Case:
    """A layer's state, the tokens it was made of, and a call on top of it (all on one device)."""

    layout: PageLayout
    raw: RawLayout
    state: LayerTensors
    past_key: torch.Tensor  # [B, Hkv, longest, Dk], every token of each row's past, unquantised
    past_value: torch.Tensor
    query: torch.Tensor  # [B, Hq, T, Dk]
    key: torch.Tensor  # [B, Hkv, T, Dk]
    value: torch.Tensor
    columns: torch.Tensor | None
    counts: torch.Tensor | None

    @property
    def lengths(self):
        return self.state.lengths.tolist()

    @property
    def new_counts(self):
        return [self.key.shape[2]] * self.key.shape[0] if self.counts is None else self.counts.tolist()

    def new_columns(self, row):
        if self.columns is None:
            return list(range(self.key.shape[2]))
        return self.columns[row, : self.new_counts[row]].tolist()

    def to(self, device):
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in fields.items()}
        moved["state"] = LayerTensors(*(part.to(device, copy=True) for part in self.state))
        return Case(**moved)


def make_layout(dtype=torch.float16, *, key_dim=64, value_dim=None, heads=2, key_bits=2, value_bits=2, num_boosted=8):
    return PageLayout(key_dim, value_dim or key_dim, heads, key_bits, value_bits, num_boosted, dtype)


def random_tokens(batch, heads, length, head_dim, dtype, generator, kind="normal"):
    """K or V of some tokens. ``kind``: normal; channels (some channels far larger, as in real keys); outliers (single values
    of up to 1e5, clipped to the dtype); constant (whole channels and tokens that do not vary); tiny (subnormal); signed
    (zeros of both signs)."""
    tokens = torch.randn(batch, heads, length, head_dim, generator=generator)
    if kind == "channels":
        tokens *= torch.exp(1.5 * torch.randn(1, heads, 1, head_dim, generator=generator))
        tokens += 4 * torch.randn(1, heads, 1, head_dim, generator=generator)
    elif kind == "outliers":
        spikes = torch.rand(tokens.shape, generator=generator) < 0.002
        largest = min(1e5, torch.finfo(dtype).max)
        tokens = torch.where(spikes, largest * tokens.sign(), tokens)
    elif kind == "constant":
        tokens[..., ::3] = 1.5
        tokens[..., 1::6] = 0.0
        tokens[:, :, ::2] = -0.25
    elif kind == "signed":
        tokens = torch.tensor([-0.0, 0.0, 1.0])[torch.randint(3, tokens.shape, generator=generator)]
    elif kind == "tiny":
        tokens *= 1e-6 if dtype == torch.float16 else 1e-39
    return tokens.to(dtype)


def _new_columns(batch, num_columns, pads, generator):
    """A column map with ``pads[row]`` columns that are no tokens, in random places."""
    columns = torch.full((batch, num_columns), num_columns + 12345, dtype=torch.int32)
    counts = torch.zeros(batch, dtype=torch.int32)
    for row in range(batch):
        count = num_columns - pads[row]
        chosen = torch.randperm(num_columns, generator=generator)[:count].sort().values
        columns[row, :count] = chosen
        counts[row] = count
    return columns, counts


def make_case(
    layout,
    raw,
    lengths,
    *,
    num_columns=1,
    group=1,
    pads=None,
    kind="normal",
    spare_pages=3,
    seed=0,
    boost_seed=None,
    past=None,
    room=0,
):
    """Rows of ``lengths`` tokens and a call of ``num_columns`` columns, ``pads[row]`` of them no tokens; the page table has
    ``room`` for that many tokens more. On the CPU."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, dtype = len(lengths), layout.num_kv_heads, layout.dtype
    longest = max(lengths)
    past_key, past_value = past or (
        random_tokens(batch, heads, longest, head_dim, dtype, generator, kind)
        for head_dim in (layout.key_dim, layout.value_dim)
    )
    max_pages = raw.pages_for(longest + num_columns + room) + 1
    state = _poisoned_state(layout, raw, batch, max_pages, spare_pages, generator)
    for row, length in enumerate(lengths):
        _fill_row(state, layout, raw, row, past_key[row, :, :length], past_value[row, :, :length], boost_seed)

    query = (
        torch.randn(batch, num_columns, heads * group, layout.key_dim, generator=generator).to(dtype).transpose(1, 2)
    )
    # Tokens first in memory, as a model's projections leave them: heads are not dense.
    key = random_tokens(batch, num_columns, heads, layout.key_dim, dtype, generator).transpose(1, 2)
    value = random_tokens(batch, num_columns, heads, layout.value_dim, dtype, generator).transpose(1, 2)
    if kind != "normal":
        key = random_tokens(batch, heads, num_columns, layout.key_dim, dtype, generator, kind)
        value = random_tokens(batch, heads, num_columns, layout.value_dim, dtype, generator, kind)
    columns = counts = None
    if pads is not None:
        columns, counts = _new_columns(batch, num_columns, pads, generator)
        for row in range(batch):
            is_token = torch.zeros(num_columns, dtype=torch.bool)
            is_token[columns[row, : counts[row]].long()] = True
            key[row, :, ~is_token] = torch.nan
            value[row, :, ~is_token] = torch.nan
    return Case(layout, raw, state, past_key, past_value, query, key, value, columns, counts)


def _poisoned_state(layout, raw, batch, max_pages, spare_pages, generator):
    num_pages = batch * max_pages + spare_pages
    table = torch.randperm(num_pages, generator=generator)[: batch * max_pages].view(batch, max_pages)
    heads, dtype = layout.num_kv_heads, layout.dtype
    return LayerTensors(
        torch.full((num_pages, layout.key_page_bytes), 0xFF, dtype=torch.uint8),
        torch.full((num_pages, layout.value_page_bytes), 0xFF, dtype=torch.uint8),
        torch.full((batch, heads, raw.key_slots, layout.key_dim), torch.nan, dtype=dtype),
        torch.full((batch, heads, raw.value_slots, layout.value_dim), torch.nan, dtype=dtype),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        table.to(torch.int32),
    )


def _fill_row(state, layout, raw, row, key, value, boost_seed):
    """Make a row what it is after its past ``key``, ``value`` [Hkv, length, D]."""
    length = key.shape[1]
    state.lengths[row] = length
    state.high_water[row] = length
    table = state.page_table[row].long()
    key_pages = _whole_pages(key, raw.sink_length, int(raw.key_pages(torch.tensor(length))))
    value_pages = _whole_pages(value, raw.sink_length, int(raw.value_pages(torch.tensor(length))))
    seed = None if boost_seed is None else boost_seed._replace(pages=torch.arange(len(key_pages)))
    state.key_pages[table[: len(key_pages)]] = reference.seal_keys(key_pages, layout, seed).flatten(1)
    state.value_pages[table[: len(value_pages)]] = reference.seal_values(value_pages, layout).flatten(1)
    for held, tokens, ring in ((state.raw_key, key, raw.key_ring), (state.raw_value, value, raw.value_ring)):
        index = torch.arange(length)
        kept = index[(index < raw.sink_length) | (index >= length - ring)]
        held[row][:, raw.slots(kept, ring)] = tokens[:, kept]


def _whole_pages(tokens, sink_length, num_pages):
    """[Hkv, length, D] -> [num_pages, Hkv, 128, D]"""
    inner = tokens[:, sink_length : sink_length + num_pages * PAGE_SIZE]
    return (
        inner.unflatten(1, (num_pages, PAGE_SIZE)).transpose(0, 1)
        if num_pages
        else inner.new_empty(0, tokens.shape[0], PAGE_SIZE, tokens.shape[2])
    )


def read_row(case, row, dtype=torch.float64):
    """What attention must read of a row's past: K and V [Hkv, length, D], dequantised where the read rule says packed."""
    length, raw, layout, state = case.lengths[row], case.raw, case.layout, case.state
    read = []
    for past, pages, unseal, count, record in (
        (case.past_key, state.key_pages, reference.unseal_keys, raw.key_pages, layout.key),
        (case.past_value, state.value_pages, reference.unseal_values, raw.value_pages, layout.value),
    ):
        tokens = past[row, :, :length].to(dtype)
        num_pages = int(count(torch.tensor(length)))
        if num_pages:
            ids = state.page_table[row, :num_pages].long()
            records = pages[ids].unflatten(-1, (-1, record.nbytes))
            dense = unseal(records, layout).transpose(0, 1).flatten(1, 2)
            tokens[:, raw.sink_length : raw.sink_length + num_pages * PAGE_SIZE] = dense.to(dtype)
        read.append(tokens)
    return read


def dense_attention(case, *, scale, softcap=0.0, sinks=None, dtype=torch.float64):
    """Attention as the contract says, over dense K and V in ``dtype``: the truth in fp64, an eager run in the model's own.

    Returns [B, Hq, T, Dv], zero in columns that hold no token.
    """
    batch, num_heads, num_columns, _ = case.query.shape
    group = num_heads // case.layout.num_kv_heads
    output = torch.zeros(batch, num_heads, num_columns, case.layout.value_dim, dtype=dtype, device=case.query.device)
    for row in range(batch):
        columns = case.new_columns(row)
        if not columns:
            continue
        past_key, past_value = read_row(case, row, dtype)
        key = torch.cat([past_key, case.key[row][:, columns].to(dtype)], dim=1).repeat_interleave(group, dim=0)
        value = torch.cat([past_value, case.value[row][:, columns].to(dtype)], dim=1).repeat_interleave(group, dim=0)
        query = case.query[row][:, columns].to(dtype)
        scores = (query @ key.mT) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        causal = torch.ones(len(columns), len(columns), dtype=torch.bool, device=scores.device).tril()
        past = torch.ones(len(columns), past_key.shape[1], dtype=torch.bool, device=scores.device)
        # Softmax in at least fp32, as eager attention does.
        wide = scores.to(torch.promote_types(dtype, torch.float32))
        wide = wide.masked_fill(~torch.cat([past, causal], dim=1), -torch.inf)
        if sinks is not None:
            wide = torch.cat([wide, sinks.to(wide.dtype).view(-1, 1, 1).expand(-1, len(columns), 1)], dim=-1)
        probabilities = torch.softmax(wide, dim=-1)[..., : key.shape[1]].to(dtype)
        output[row][:, columns] = probabilities @ value
    return output


def token_columns(case):
    """bool [B, T], the columns that hold tokens."""
    batch, num_columns = case.key.shape[0], case.key.shape[2]
    real = torch.zeros(batch, num_columns, dtype=torch.bool, device=case.key.device)
    for row in range(batch):
        real[row, case.new_columns(row)] = True
    return real

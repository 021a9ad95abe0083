"""Attention over the paged cache in vectorised torch: the CPU kernels, and the reference for the Triton ones.

Nothing loops over pages, rows or heads. Keys and values are never dequantised: the codes enter the products as they are,
with scale and zero folded into the query (K, per channel) and the probabilities (V, per token):

    q . k_t = sum_d (q_d s_d) c_td + sum_d q_d z_d        sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t z_t
"""

import functools
from collections.abc import Callable

import torch

from kitty_compile.kernels import reference
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout, RawLayout

# Query columns are taken in blocks so that the scores of one block stay under this many elements.
_MAX_SCORES = 1 << 26


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
) -> torch.Tensor:
    """Attention of a call's columns over its row's cache and its own tokens; reads the state, changes nothing.

    Args:
        query: [B, Hq, T, Dk]. key, value: [B, Hkv, T, D], the call's own. Hq is a multiple of Hkv.
        columns: i32 [B, T], column of the i-th new token of the row, or None when every column is a token.
        counts: i32 [B], new tokens of the row, or None for T.
        softcap: scores become ``softcap * tanh(score / softcap)`` when it is positive.
        sinks: [Hq], a logit per head that joins the softmax's denominator.
        is_empty: every row's length is 0.

    Returns:
        [B, Hq, T, Dv] in the query's dtype; 0 where nothing is visible.
    """
    real = None if columns is None else real_columns(columns, counts)
    if real is not None:
        # A pad may hold anything, and 0 * inf is not 0.
        key, value = _zero_unless(key, real), _zero_unless(value, real)
    if is_empty and softcap == 0 and sinks is None:
        return _attend_own(query, key, value, real, scale)
    own_mask = _own_mask(query.shape[2], real, query.device)
    cached = None if is_empty else _CachedTokens(state, layout, raw)
    batch, heads, num_columns, _ = query.shape
    visible = num_columns + (0 if cached is None else cached.num_positions)
    block = max(1, _MAX_SCORES // (batch * heads * visible))
    blocks = []
    for start in range(0, num_columns, block):
        stop = min(start + block, num_columns)
        part = query[:, :, start:stop], own_mask[:, :, start:stop]
        blocks.append(_attend_block(*part, key, value, cached, scale, softcap, sinks))
    # A page's top code can lie half a step above the dtype's range.
    largest = torch.finfo(query.dtype).max
    return torch.cat(blocks, dim=2).clamp(-largest, largest).to(query.dtype)


def _own_mask(num_columns: int, real: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Which of the call's own columns each query column sees, bool [1 or B, 1, T, T]."""
    causal = torch.ones(num_columns, num_columns, dtype=torch.bool, device=device).tril()
    return causal[None, None] if real is None else causal & real[:, None, None, :]


def real_columns(columns: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Bool [B, T]: the columns that hold a token. The inverse of the (columns, counts) form."""
    arange = torch.arange(columns.shape[1], device=columns.device)
    is_token = arange < (columns.shape[1] if counts is None else counts.unsqueeze(1))
    real = torch.zeros_like(columns, dtype=torch.bool)
    return real.scatter(1, columns.long(), is_token.expand_as(columns))


def _attend_own(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None, scale: float
) -> torch.Tensor:
    num_columns = query.shape[2]
    mask = None
    if real is not None:
        # A pad that sees nothing would be a row of NaN: it may look at itself, nobody looks at it.
        itself = torch.eye(num_columns, dtype=torch.bool, device=query.device)
        mask = _own_mask(num_columns, real, query.device) | itself
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _attend_block(
    query: torch.Tensor,
    own_mask: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cached: "_CachedTokens | None",
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    folded = _fold_heads(query, key.shape[1]) * scale
    scores = _masked(_softcap(folded @ key.float().mT, softcap), own_mask, query.shape[2])
    if cached is not None:
        scores = torch.cat([cached.masked(_softcap(cached.scores(folded), softcap)), scores], dim=-1)
    probabilities = _softmax(scores, sinks, query.shape)
    output = probabilities[..., -key.shape[2] :] @ value.float()
    if cached is not None:
        output = output + cached.weighted_values(probabilities[..., : -key.shape[2]])
    return output.view(*query.shape[:3], -1)


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Plain grouped attention with softcap and sinks, in fp32. query [B, Hq, T, Dk], key and value [B, Hkv, N, D],
    mask bool [B, 1, T, N] -> [B, Hq, T, Dv] in the query's dtype."""
    scores = (_fold_heads(query, key.shape[1]) * scale) @ key.float().mT
    scores = _masked(_softcap(scores, softcap), mask, query.shape[2])
    output = _softmax(scores, sinks, query.shape) @ value.float()
    return output.view(*query.shape[:3], -1).to(query.dtype)


def _fold_heads(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The group's query heads become rows of their KV head: [B, Hq, T, D] -> fp32 [B, Hkv, group * T, D]."""
    result: torch.Tensor = query.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return result


def _masked(scores: torch.Tensor, mask: torch.Tensor, num_columns: int) -> torch.Tensor:
    """-inf in scores [B, Hkv, group * T, N] where mask [B or 1, 1, T, N] is False."""
    result: torch.Tensor = (
        scores.unflatten(2, (-1, num_columns)).masked_fill(~mask.unsqueeze(2), -torch.inf).flatten(2, 3)
    )
    return result


def _softcap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap > 0 else scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, query_shape: torch.Size) -> torch.Tensor:
    """Softmax over the last axis; ``sinks`` [Hq] join the denominator; a row with nothing visible gives zeros."""
    largest = scores.amax(dim=-1, keepdim=True)
    sink = None
    if sinks is not None:
        batch, _, num_columns, _ = query_shape
        sink = sinks.float().view(1, scores.shape[1], -1, 1, 1).expand(batch, -1, -1, num_columns, 1).flatten(2, 3)
        largest = torch.maximum(largest, sink)
    largest = largest.clamp(min=torch.finfo(torch.float32).min)
    exponentials = torch.exp(scores - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - largest)
    return exponentials / total.clamp(min=torch.finfo(torch.float32).tiny)


class _Positions:
    """Where the cached tokens of every row lie, from the lengths alone: all layers of a forward share it.

    K positions are [sink | packed pages | raw tail]. V's raw tail is longer by the value window, so the probabilities of
    its tokens are picked from K's pages and tail. Masks are None where every row is full there.
    """

    def __init__(self, lengths: torch.Tensor, raw: RawLayout) -> None:
        device = lengths.device
        self.sink = min(raw.sink_length, int(lengths.max()))
        key_pages, value_pages = raw.key_pages(lengths), raw.value_pages(lengths)
        self.num_key_pages, self.num_value_pages = int(key_pages.max()), int(value_pages.max())
        page = torch.arange(self.num_key_pages, device=device)
        key_page_valid = page < key_pages.unsqueeze(1)
        self.value_page_valid = _unless_all(page[: self.num_value_pages] < value_pages.unsqueeze(1))
        sink_valid = torch.arange(self.sink, device=device) < lengths.unsqueeze(1)
        self.sink_valid = _unless_all(sink_valid)

        first = raw.sink_length + key_pages * PAGE_SIZE
        key_tail, key_tail_valid = _ranges(first, lengths)
        self.key_tail_slots = raw.slots(key_tail, raw.key_ring)
        pages = key_page_valid.repeat_interleave(PAGE_SIZE, dim=1)
        self.key_valid = _unless_all(torch.cat([sink_valid, pages, key_tail_valid], dim=1))
        self.num_positions = self.sink + self.num_key_pages * PAGE_SIZE + key_tail.shape[1]

        value_tail, value_tail_valid = _ranges(raw.sink_length + value_pages * PAGE_SIZE, lengths)
        self.value_tail_valid = _unless_all(value_tail_valid)
        self.value_tail_slots = raw.slots(value_tail, raw.value_ring)
        from_tail = value_tail - first.unsqueeze(1)
        position = torch.where(from_tail < 0, value_tail - raw.sink_length, from_tail + self.num_key_pages * PAGE_SIZE)
        self.value_tail_positions = torch.where(value_tail_valid, self.sink + position, 0)


@functools.lru_cache(maxsize=4)
def _positions(lengths: tuple[int, ...], device: torch.device, raw: RawLayout) -> _Positions:
    return _Positions(torch.tensor(lengths, device=device), raw)


def _unless_all(valid: torch.Tensor) -> torch.Tensor | None:
    return None if bool(valid.all()) else valid


def _ranges(first: torch.Tensor, stop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers of [first, stop) of every row, padded: i64 and bool [B, longest]."""
    longest = max(int((stop - first).max()), 0)
    values = first.unsqueeze(1) + torch.arange(longest, device=first.device)
    valid = values < stop.unsqueeze(1)
    return torch.where(valid, values, 0), valid


class _CachedTokens:
    """One layer's cached tokens, ready for products with queries and probabilities."""

    def __init__(self, state: LayerTensors, layout: PageLayout, raw: RawLayout) -> None:
        self.at = _positions(tuple(state.lengths.tolist()), state.lengths.device, raw)
        self.layout, self.state = layout, state
        self.key_records = self._records(state.key_pages, self.at.num_key_pages, layout.key.nbytes)
        self.value_records = self._records(state.value_pages, self.at.num_value_pages, layout.value.nbytes)

    @property
    def num_positions(self) -> int:
        return self.at.num_positions

    def _records(self, pages: torch.Tensor, num_pages: int, nbytes: int) -> torch.Tensor:
        """Records of each row's first pages, u8 [B, Hkv, N, nbytes]."""
        table = self.state.page_table[:, :num_pages]
        records = pages.index_select(0, table.flatten())
        return records.view(*table.shape, self.layout.num_kv_heads, nbytes).transpose(1, 2).contiguous()

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """fp32 [B, Hkv, M, Dk] -> scores [B, Hkv, M, num_positions], not masked."""
        held = self.state.raw_key
        parts = [query @ held[:, :, : self.at.sink].float().mT]
        if self.at.num_key_pages:
            parts.append(self._page_scores(query))
        parts.append(query @ _gather_slots(held, self.at.key_tail_slots).float().mT)
        return torch.cat(parts, dim=-1)

    def _page_scores(self, query: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, M, Dk] -> [B, Hkv, M, N * 128]."""
        record = self.layout.key
        if record.is_raw:
            return query @ reference.unseal_keys(self.key_records, self.layout).flatten(2, 3).mT
        parts = reference.split_key_records(self.key_records, record, self.layout.dtype)
        per_page = query.unsqueeze(2)  # [B, Hkv, 1, M, Dk]
        codes = _codes(parts.low, reference.restore_key_words)
        scores = (per_page * parts.scale.float().unsqueeze(-2)) @ codes
        if record.num_slots:
            high = _codes(parts.high, reference.restore_high_words)
            scores += self._boosted_query(per_page, parts) @ high
        # Columns come in word order (row j, field f); a token is 16 f + j.
        tokens = scores.unflatten(-1, (16, 8)).permute(0, 1, 3, 2, 5, 4)
        zero = query @ parts.zero.float().mT
        result: torch.Tensor = (tokens + zero[..., None, None]).flatten(3)
        return result

    def _boosted_query(self, per_page: torch.Tensor, parts: reference.KeyParts) -> torch.Tensor:
        """The query's boosted channels times 4 * scale, [B, Hkv, N, M, num_slots]."""
        if parts.slots is None:
            return per_page * (4 * parts.scale.float()).unsqueeze(-2)
        scale = (parts.slots << 16).view(torch.float32)  # the low half of a slot is the bits of a bf16
        num_pages, num_rows = parts.slots.shape[2], per_page.shape[3]
        channels = reference.slot_channels(parts.slots, self.layout.key_dim).unsqueeze(-2)
        query = per_page.expand(-1, -1, num_pages, -1, -1)
        return query.gather(-1, channels.expand(-1, -1, -1, num_rows, -1)) * scale.unsqueeze(-2)

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """-inf at every position that holds no token of the row, whatever bytes lie there."""
        if self.at.key_valid is None:
            return scores
        return scores.masked_fill(~self.at.key_valid[:, None, None], -torch.inf)

    def weighted_values(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, M, num_positions] -> fp32 [B, Hkv, M, Dv]."""
        at, held = self.at, self.state.raw_value
        sink_value = _zero_unless(held[:, :, : at.sink].float(), at.sink_valid)
        output = probabilities[..., : at.sink] @ sink_value
        output += self._tail_probabilities(probabilities) @ _zero_unless(
            _gather_slots(held, at.value_tail_slots).float(), at.value_tail_valid
        )
        if at.num_value_pages:
            packed = probabilities[..., at.sink : at.sink + at.num_value_pages * PAGE_SIZE]
            if at.value_page_valid is not None:
                pages = packed.unflatten(-1, (-1, PAGE_SIZE))
                packed = pages.masked_fill(~at.value_page_valid[:, None, None, :, None], 0.0).flatten(3)
            output += self._page_values(packed)
        return output

    def _tail_probabilities(self, probabilities: torch.Tensor) -> torch.Tensor:
        at = self.at
        if at.value_tail_valid is None and len(at.value_tail_positions) == 1:
            return probabilities.index_select(-1, at.value_tail_positions[0])
        positions = at.value_tail_positions[:, None, None].expand(*probabilities.shape[:3], -1)
        tail = probabilities.gather(-1, positions)
        return tail if at.value_tail_valid is None else tail.masked_fill(~at.value_tail_valid[:, None, None], 0.0)

    def _page_values(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, M, N * 128], zero on invalid pages -> [B, Hkv, M, Dv]."""
        record, valid = self.layout.value, self.at.value_page_valid
        valid = None if valid is None else valid.repeat_interleave(PAGE_SIZE, dim=1)
        if record.is_raw:
            values = reference.unseal_values(self.value_records, self.layout).flatten(2, 3)
            return probabilities @ _zero_unless(values, valid)
        parts = reference.split_value_records(self.value_records, record, self.layout.dtype)
        scale = (parts.scale.float() * _value_powers(parts.scale.device)).flatten(2).unsqueeze(-1)
        zero = parts.zero.float().flatten(2).unsqueeze(-1)
        output = probabilities @ _zero_unless(zero, valid)
        weighted = probabilities * _zero_unless(scale, valid).mT
        weighted = weighted.unflatten(-1, (-1, 8, 16)).permute(0, 1, 3, 2, 5, 4).flatten(4)
        products = weighted @ _codes(parts.low, reference.restore_value_words).mT
        if parts.high is not None:
            products += 4 * (weighted @ _codes(parts.high, reference.restore_value_words).mT)
        result: torch.Tensor = output + products.sum(dim=2)
        return result


def _codes(ordered: torch.Tensor, restore: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A plane's words i16 [..., 16 X] in memory order -> its 2-bit fields fp32 [..., X, 128], in word order (row j, field f).

    A lookup of all eight fields of a word at once is several times faster than shifts and masks, and a gather by a short
    permutation than a permuted copy.
    """
    order = _word_order(ordered.shape[-1], restore, ordered.device)
    rows = ordered.flatten(0, -2)
    index = rows.gather(1, order.expand(len(rows), -1)).to(torch.int32).bitwise_and_(0xFFFF)
    fields = _field_table(ordered.device).index_select(0, index.view(-1)).view(torch.int8)
    return fields.float().view(*ordered.shape[:-1], -1, PAGE_SIZE)


@functools.cache
def _word_order(num_words: int, restore: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Where the words of [X, 16] lie in memory, i64 [16 X]."""
    return restore(torch.arange(num_words, device=device)).mT.flatten()


@functools.cache
def _field_table(device: torch.device) -> torch.Tensor:
    """The eight fields of every word, one to a byte, as i64 [65536]."""
    fields = reference.unpack_fields(torch.arange(1 << 16, device=device))
    return fields.to(torch.int8).view(torch.int64).flatten()


@functools.cache
def _value_powers(device: torch.device) -> torch.Tensor:
    """fp32 [128]: what undoes the power of four in a stored value scale."""
    return 1 / reference.value_premultipliers(device).float()


def _zero_unless(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Zero where ``valid`` [B, n] is False in values [B, Hkv, n, D]: 0 * NaN is not 0."""
    return values if valid is None else values.masked_fill(~valid[:, None, :, None], 0.0)


def _gather_slots(raw: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """raw [B, Hkv, slots, D], slots i64 [B, n] -> [B, Hkv, n, D]."""
    if slots.shape[0] == 1:
        return raw.index_select(2, slots[0])
    return raw.gather(2, slots[:, None, :, None].expand(-1, raw.shape[1], -1, raw.shape[3]))

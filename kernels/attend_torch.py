"""Attention over the paged cache in vectorised torch: the CPU kernels, and the reference for the Triton ones.

Nothing loops over pages, rows or heads. Keys and values are never dequantised: the codes enter the products as they are,
with scale and zero folded into the query (K, per channel) and the probabilities (V, per token):

    q . k_t = sum_d (q_d s_d) c_td + sum_d q_d z_d        sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t z_t
"""

import functools

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
    own_mask = _own_mask(query.shape[2], columns, counts, query.device)
    if is_empty and softcap == 0 and sinks is None:
        return _attend_own(query, key, value, own_mask, scale)
    cached = None if is_empty else _CachedTokens(state, layout, raw)
    batch, heads, num_columns, _ = query.shape
    visible = num_columns + (0 if cached is None else cached.num_positions)
    block = max(1, _MAX_SCORES // (batch * heads * visible))
    # A pad's value may hold anything, and 0 * inf is not 0.
    own_value = value.float().masked_fill(~own_mask[:, :, -1].unsqueeze(-1), 0.0)
    blocks = []
    for start in range(0, num_columns, block):
        stop = min(start + block, num_columns)
        part = query[:, :, start:stop], own_mask[:, :, start:stop]
        blocks.append(_attend_block(*part, key, own_value, cached, scale, softcap, sinks))
    return torch.cat(blocks, dim=2).to(query.dtype)


def _own_mask(
    num_columns: int, columns: torch.Tensor | None, counts: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Which of the call's own columns each query column sees, bool [1 or B, 1, T, T]."""
    causal = torch.ones(num_columns, num_columns, dtype=torch.bool, device=device).tril()
    if columns is None:
        return causal[None, None]
    return causal & real_columns(columns, counts)[:, None, None, :]


def real_columns(columns: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Bool [B, T]: the columns that hold a token. The inverse of the (columns, counts) form."""
    arange = torch.arange(columns.shape[1], device=columns.device)
    is_token = arange < (columns.shape[1] if counts is None else counts.unsqueeze(1))
    real = torch.zeros_like(columns, dtype=torch.bool)
    return real.scatter(1, columns.long(), is_token.expand_as(columns))


def _attend_own(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own_mask: torch.Tensor, scale: float
) -> torch.Tensor:
    if own_mask.shape[0] == 1:
        mask = {"is_causal": True}
    else:
        # A pad that sees nothing would be a row of NaN: it may look at itself, nobody looks at it.
        itself = torch.eye(query.shape[2], dtype=torch.bool, device=query.device)
        mask = {"attn_mask": own_mask | itself}
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1], **mask
    )


def _attend_block(
    query: torch.Tensor,
    own_mask: torch.Tensor,
    key: torch.Tensor,
    own_value: torch.Tensor,
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
    output = probabilities[..., -key.shape[2] :] @ own_value
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
    return query.float().unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _masked(scores: torch.Tensor, mask: torch.Tensor, num_columns: int) -> torch.Tensor:
    """-inf in scores [B, Hkv, group * T, N] where mask [B or 1, 1, T, N] is False."""
    return scores.unflatten(2, (-1, num_columns)).masked_fill(~mask.unsqueeze(2), -torch.inf).flatten(2, 3)


def _softcap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap > 0 else scores


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, query_shape: torch.Size) -> torch.Tensor:
    """Softmax over the last axis; ``sinks`` [Hq] join the denominator; a row with nothing visible gives zeros."""
    largest = scores.amax(dim=-1, keepdim=True)
    sink = None
    if sinks is not None:
        batch, heads, num_columns, _ = query_shape
        sink = sinks.float().view(1, scores.shape[1], -1, 1, 1).expand(batch, -1, -1, num_columns, 1).flatten(2, 3)
        largest = torch.maximum(largest, sink)
    largest = largest.clamp(min=torch.finfo(torch.float32).min)
    exponentials = torch.exp(scores - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - largest)
    return exponentials / total.clamp(min=torch.finfo(torch.float32).tiny)


class _CachedTokens:
    """One layer's cached tokens laid out for dense products, built once per call.

    K positions are [sink | packed pages | raw tail], V positions [sink | packed pages | raw tail]; V's tail is longer by the
    value window, so the probabilities of its tokens are gathered from K's pages and tail.
    """

    def __init__(self, state: LayerTensors, layout: PageLayout, raw: RawLayout) -> None:
        lengths = state.lengths.long()
        self.layout, self.sink = layout, raw.sink_length
        key_pages, value_pages = raw.key_pages(lengths), raw.value_pages(lengths)
        self.num_key_pages, self.num_value_pages = int(key_pages.max()), int(value_pages.max())
        device = lengths.device
        page = torch.arange(self.num_key_pages, device=device)
        self.key_page_valid = page < key_pages.unsqueeze(1)
        self.value_page_valid = page[: self.num_value_pages] < value_pages.unsqueeze(1)
        table = state.page_table.long()
        self.key_records = self._records(state.key_pages, table[:, : self.num_key_pages], layout.key.nbytes)
        self.value_records = self._records(state.value_pages, table[:, : self.num_value_pages], layout.value.nbytes)
        self.sink_valid = torch.arange(self.sink, device=device) < lengths.unsqueeze(1)
        self.raw_key, self.raw_value = state.raw_key, state.raw_value

        tail = torch.arange(PAGE_SIZE, device=device)
        key_tail = self.sink + key_pages.unsqueeze(1) * PAGE_SIZE + tail
        self.key_tail_valid = key_tail < lengths.unsqueeze(1)
        self.key_tail_slots = raw.slots(key_tail, raw.key_ring)

        window = torch.arange(raw.value_window + PAGE_SIZE, device=device)
        offset = value_pages.unsqueeze(1) * PAGE_SIZE + window
        self.value_tail_valid = self.sink + offset < lengths.unsqueeze(1)
        self.value_tail_slots = raw.slots(self.sink + offset, raw.value_ring)
        packed = key_pages.unsqueeze(1) * PAGE_SIZE
        position = torch.where(offset < packed, offset, offset - packed + self.num_key_pages * PAGE_SIZE)
        self.value_tail_positions = torch.where(self.value_tail_valid, position, 0)

    @property
    def num_positions(self) -> int:
        return self.sink + (self.num_key_pages + 1) * PAGE_SIZE

    @staticmethod
    def _records(pages: torch.Tensor, table: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Records of each row's pages, u8 [B, Hkv, N, nbytes]."""
        return pages[table].unflatten(-1, (-1, nbytes)).transpose(1, 2)

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """fp32 [B, Hkv, M, Dk] -> scores [B, Hkv, M, num_positions], not masked."""
        sink = query @ self.raw_key[:, :, : self.sink].float().mT
        tail = query @ _gather_slots(self.raw_key, self.key_tail_slots).float().mT
        return torch.cat([sink, self._page_scores(query).flatten(-2), tail], dim=-1)

    def _page_scores(self, query: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, M, Dk] -> [B, Hkv, M, N, 128]."""
        record = self.layout.key
        if record.is_raw:
            keys = reference.unseal_keys(self.key_records, self.layout)
            return (query @ keys.flatten(2, 3).mT).unflatten(-1, (-1, PAGE_SIZE))
        parts = reference.split_key_records(self.key_records, record, self.layout.dtype)
        per_page = query.unsqueeze(2)  # [B, Hkv, 1, M, Dk]
        codes = field_codes(reference.restore_key_words(parts.low).mT)
        scores = (per_page * parts.scale.float().unsqueeze(-2)) @ codes
        if record.num_slots:
            high = field_codes(reference.restore_high_words(parts.high).mT)
            scores = scores + self._boosted_query(per_page, parts) @ high
        # Columns come in word order (row j, field f); a token is 16 f + j.
        scores = scores.unflatten(-1, (16, 8)).mT.flatten(-2)
        zero = per_page @ parts.zero.float().unsqueeze(-1)
        return (scores + zero).transpose(2, 3)

    def _boosted_query(self, per_page: torch.Tensor, parts: reference.KeyParts) -> torch.Tensor:
        """The query's boosted channels times 4 * scale, [B, Hkv, N, M, num_slots]."""
        if parts.slots is None:
            return per_page * (4 * parts.scale.float()).unsqueeze(-2)
        scale = (parts.slots << 16).view(torch.float32)  # the low half of a slot is the bits of a bf16
        num_pages, num_rows = parts.slots.shape[2], per_page.shape[3]
        channels = (parts.slots >> 16).long().clamp(0, self.layout.key_dim - 1).unsqueeze(-2)
        query = per_page.expand(-1, -1, num_pages, -1, -1)
        return query.gather(-1, channels.expand(-1, -1, -1, num_rows, -1)) * scale.unsqueeze(-2)

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """-inf at every position that holds no token of the row, whatever bytes lie there."""
        pages = self.key_page_valid.repeat_interleave(PAGE_SIZE, dim=1)
        valid = torch.cat([self.sink_valid, pages, self.key_tail_valid], dim=1)
        return scores.masked_fill(~valid[:, None, None], -torch.inf)

    def weighted_values(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, M, num_positions] -> fp32 [B, Hkv, M, Dv]."""
        sink, rest = probabilities[..., : self.sink], probabilities[..., self.sink :]
        sink_value = self.raw_value[:, :, : self.sink].float().masked_fill(~self.sink_valid[:, None, :, None], 0.0)
        output = sink @ sink_value
        positions = self.value_tail_positions[:, None, None].expand(*rest.shape[:3], -1)
        tail = rest.gather(-1, positions).masked_fill(~self.value_tail_valid[:, None, None], 0.0)
        tail_value = _gather_slots(self.raw_value, self.value_tail_slots).float()
        output = output + tail @ tail_value.masked_fill(~self.value_tail_valid[:, None, :, None], 0.0)
        if self.num_value_pages == 0:
            return output
        packed = rest[..., : self.num_value_pages * PAGE_SIZE].unflatten(-1, (-1, PAGE_SIZE))
        packed = packed.masked_fill(~self.value_page_valid[:, None, None, :, None], 0.0)
        return output + self._page_values(packed.transpose(2, 3))

    def _page_values(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, N, M, 128], zero on invalid pages -> [B, Hkv, M, Dv]."""
        record, valid = self.layout.value, self.value_page_valid[:, None, :, None]
        if record.is_raw:
            values = reference.unseal_values(self.value_records, self.layout).masked_fill(~valid.unsqueeze(-1), 0.0)
            return (probabilities @ values).sum(dim=2)
        parts = reference.split_value_records(self.value_records, record, self.layout.dtype)
        scale = parts.scale.float() / reference.value_premultipliers(parts.scale.device).float()
        scale, zero = (part.float().masked_fill(~valid, 0.0) for part in (scale, parts.zero))
        weighted = (probabilities * scale.unsqueeze(-2)).unflatten(-1, (8, 16)).mT.flatten(-2)
        output = weighted @ field_codes(reference.restore_value_words(parts.low).mT).mT
        if parts.high is not None:
            output = output + 4 * (weighted @ field_codes(reference.restore_value_words(parts.high).mT).mT)
        return output.sum(dim=2) + (probabilities @ zero.unsqueeze(-1)).sum(dim=2)


def field_codes(words: torch.Tensor) -> torch.Tensor:
    """Words i16 [..., X, 16] -> their eight 2-bit fields as fp32 [..., X, 128], in word order (row j, field f)."""
    index = (words.to(torch.int32) & 0xFFFF).flatten()
    return _field_table(words.device).index_select(0, index).view(*words.shape[:-1], PAGE_SIZE)


@functools.cache
def _field_table(device: torch.device) -> torch.Tensor:
    """fp32 [65536, 8]: the fields of every word. A lookup of 32 bytes beats eight shifts, masks and conversions."""
    return reference.unpack_fields(torch.arange(1 << 16, device=device)).float()


def _gather_slots(raw: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """raw [B, Hkv, slots, D], slots i64 [B, n] -> [B, Hkv, n, D]."""
    return raw.gather(2, slots[:, None, :, None].expand(-1, raw.shape[1], -1, raw.shape[3]))

"""The paged cache as values: a call takes states in and gives new ones out, for runtimes without mutation.

All rows have one length, so a length is a shape: the state of t tokens is exactly as large as t tokens need, no size depends
on data, and every operator has a form in ONNX. What is read packed and in which order things happen is as in the mutating
kernels: attend, then seal the pages that the call completes.

    K    raw tokens [sink | tail], tail shorter than a page       pages 0 .. n-1
    V    raw tokens [sink | tail], the tail R tokens longer       pages 0 .. m-1

Layers of one shape may be stacked in one state: each attends with its own part, and all advance at once. The random selection
of boosted channels and the rollback window have no counterpart here.
"""

from typing import NamedTuple

import torch

from kitty_compile.kernels import functional_pages
from kitty_compile.kernels.functional_pages import Pages
from kitty_compile.kernels.layout import PAGE_SIZE
from kitty_compile.kernels.ops import OpParameters


class Half(NamedTuple):
    """K or V: raw tokens [..., B, H, n, D], and pages unless all tokens are kept raw."""

    raw: torch.Tensor
    pages: Pages | None = None

    @property
    def num_pages(self) -> int:
        return 0 if self.pages is None else self.pages.number

    def select(self, layer: int) -> "Half":
        pages = None
        if self.pages is not None:
            pages = Pages(*(None if part is None else part[layer] for part in self.pages))  # type: ignore[arg-type]
        return Half(self.raw[layer], pages)


class State(NamedTuple):
    """What a layer, or a stack of layers, carries from call to call."""

    key: Half
    value: Half

    def select(self, layer: int) -> "State":
        """One of the stacked layers."""
        return State(self.key.select(layer), self.value.select(layer))

    def named(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, in a fixed order: key_raw, key_low ..., value_raw, value_low ..."""
        tensors: dict[str, torch.Tensor | None] = {}
        for name, half in self._asdict().items():
            parts = {} if half.pages is None else half.pages._asdict()
            tensors |= {f"{name}_{part}": tensor for part, tensor in {"raw": half.raw, **parts}.items()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def of_named(cls, tensors: dict[str, torch.Tensor]) -> "State":
        """The inverse of :meth:`named`."""
        halves = []
        for name in cls._fields:
            parts = {part: tensors.get(f"{name}_{part}") for part in Pages._fields}
            pages = None if parts["low"] is None else Pages(**parts)  # type: ignore[arg-type]
            halves.append(Half(tensors[f"{name}_raw"], pages))
        return cls(*halves)


class Positions(NamedTuple):
    """Where a call finds what it reads, the same for every layer of one kind. Keys stand as [raw and own | pages].

    V has fewer pages than K: values of the newest key pages are among the raw ones.
    """

    visible: torch.Tensor  # bool [T, raw + T]: which raw and own keys a column sees
    values: torch.Tensor | None  # i64: raw and own values in the order of raw and own keys; None: they stand so
    mixed_values: torch.Tensor | None  # i64 [128 * m]: raw values of the m newest key pages
    mixed_pages: torch.Tensor | None  # i64 [m]: these pages
    packed: torch.Tensor | None  # i64: pages of V, or where their tokens stand when K has no pages


def empty_state(parameters: OpParameters, *rows: int, dtype: torch.dtype, window: int | None = None) -> State:
    """The state of no tokens for ``rows`` (batch, or layers and batch); a layer with a ``window`` has no pages."""
    layout, heads = parameters.page_layout(dtype), parameters.num_kv_heads
    key = Half(torch.zeros(*rows, heads, 0, parameters.key_dim, dtype=dtype))
    value = Half(torch.zeros(*rows, heads, 0, parameters.value_dim, dtype=dtype))
    if window is None and not layout.key.is_raw:
        key = Half(key.raw, functional_pages.no_pages(layout, *rows, is_key=True))
    if window is None and not layout.value.is_raw:
        value = Half(value.raw, functional_pages.no_pages(layout, *rows, is_key=False))
    return State(key, value)


def positions(state: State, columns: int, parameters: OpParameters) -> Positions:
    """For a call of ``columns`` new columns on full-attention layers."""
    sink, device = parameters.sink_length, state.key.raw.device
    num_keys, num_values = state.key.raw.shape[-2] + columns, state.value.raw.shape[-2] + columns
    num_pages = state.value.num_pages
    visible = _distance(num_keys, columns, device) >= 0
    if state.key.pages is not None:
        num_mixed = torch.sym_max(state.key.num_pages - num_pages, 0)
        values = _behind_sink(num_keys, sink, PAGE_SIZE * num_mixed, device)
        pages = torch.arange(num_mixed, device=device)
        tokens = torch.arange(PAGE_SIZE * num_mixed, device=device)
        return Positions(visible, values, tokens + sink, pages + num_pages, torch.arange(num_pages, device=device))
    if state.value.pages is not None:
        packed = torch.arange(PAGE_SIZE * num_pages, device=device) + sink
        return Positions(visible, _behind_sink(num_values, sink, PAGE_SIZE * num_pages, device), None, None, packed)
    return Positions(visible, None, None, None, None)


def window_positions(state: State, columns: int, window: int) -> Positions:
    """For a call of ``columns`` new columns on sliding layers: a column sees ``window`` columns, itself among them."""
    distance = _distance(state.key.raw.shape[-2] + columns, columns, state.key.raw.device)
    return Positions((distance >= 0) & (distance < window), None, None, None, None)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: State,
    at: Positions,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a call's columns over one layer's state and themselves.

    Args:
        query: [B, Hq, T, Dk]. key, value: [B, Hkv, T, D], the call's own. Hq is a multiple of Hkv.
        at: :func:`positions` or :func:`window_positions` for T columns.
        softcap: scores become ``softcap * tanh(score / softcap)`` when it is positive.
        sinks: [Hq], a logit per head that joins the softmax's denominator.

    Returns:
        [B, Hq, T, Dv] in the query's dtype.
    """
    keys, values = torch.cat([state.key.raw, key], dim=2), torch.cat([state.value.raw, value], dim=2)
    folded = _fold_heads(query, key.shape[1]) * scale
    scores = [_masked(_softcap(folded @ keys.float().mT, softcap), at.visible)]
    if state.key.pages is not None:
        scores.append(_softcap(functional_pages.page_scores(folded, state.key.pages).flatten(-2), softcap))
    if sinks is not None:
        scores.append(_sink_scores(sinks, scores[0], query.shape[2]))
    probabilities = torch.cat(scores, dim=-1).softmax(dim=-1).split([part.shape[-1] for part in scores], dim=-1)
    if state.key.pages is None:
        output = _weigh_by_token(probabilities[0], values, state, at)
    else:
        output = _weigh(probabilities[0], probabilities[1], values, state, at)
    return output.reshape(*query.shape[:3], value.shape[3]).to(query.dtype)


def advance(state: State, key: torch.Tensor, value: torch.Tensor, parameters: OpParameters) -> State:
    """The state after a call: its tokens [..., B, Hkv, T, D] are taken in, pages that are complete are sealed."""
    layout, sink = parameters.page_layout(key.dtype), parameters.sink_length
    new_key = Half(torch.cat([state.key.raw, key], dim=-2))
    new_value = Half(torch.cat([state.value.raw, value], dim=-2))
    if state.key.pages is not None:
        full, rest = _full_pages(new_key.raw, sink, window=0)
        new_key = Half(rest, state.key.pages.join(functional_pages.seal_keys(full, layout)))
    if state.value.pages is not None:
        full, rest = _full_pages(new_value.raw, sink, window=parameters.value_window)
        new_value = Half(rest, state.value.pages.join(functional_pages.seal_values(full, layout)))
    return State(new_key, new_value)


def advance_window(state: State, key: torch.Tensor, value: torch.Tensor, window: int) -> State:
    """:func:`advance` of sliding layers, which keep the newest ``window - 1`` columns."""
    length = state.key.raw.shape[-2] + key.shape[-2]
    kept = torch.sym_min(length, window - 1)
    newest = torch.arange(kept, device=key.device) + (length - kept)
    keys, values = torch.cat([state.key.raw, key], dim=-2), torch.cat([state.value.raw, value], dim=-2)
    return State(Half(keys.index_select(-2, newest)), Half(values.index_select(-2, newest)))


def _distance(num_keys: int, columns: int, device: torch.device) -> torch.Tensor:
    """How far before each of the call's columns a raw or own key stands, [T, keys]."""
    own = torch.arange(columns, device=device) + (num_keys - columns)
    return own.unsqueeze(1) - torch.arange(num_keys, device=device)


def _behind_sink(number: int, sink_length: int, offset: int, device: torch.device) -> torch.Tensor:
    """0 .. number - 1, those behind the sink moved on by ``offset``."""
    index = torch.arange(number, device=device)
    return torch.where(index < sink_length, index, index + offset)


def _weigh(raw: torch.Tensor, pages: torch.Tensor, values: torch.Tensor, state: State, at: Positions) -> torch.Tensor:
    """Values weighted by the probabilities of raw and own keys, [B, Hkv, M, n], and of packed ones."""
    assert at.values is not None
    assert at.mixed_values is not None
    assert at.mixed_pages is not None
    output: torch.Tensor = raw @ values.index_select(2, at.values).float()
    by_page = pages.unflatten(-1, (state.key.num_pages, PAGE_SIZE))
    mixed = by_page.index_select(-2, at.mixed_pages).flatten(-2)
    output = output + mixed @ values.index_select(2, at.mixed_values).float()
    if state.value.pages is not None and at.packed is not None:
        output = output + functional_pages.weighted_values(by_page.index_select(-2, at.packed), state.value.pages)
    return output


def _weigh_by_token(probabilities: torch.Tensor, values: torch.Tensor, state: State, at: Positions) -> torch.Tensor:
    """Values weighted by probabilities in the order of tokens, for keys that have no pages."""
    if state.value.pages is None or at.values is None or at.packed is None:
        return probabilities @ values.float()
    packed = probabilities.index_select(-1, at.packed).unflatten(-1, (state.value.num_pages, PAGE_SIZE))
    output = probabilities.index_select(-1, at.values) @ values.float()
    return output + functional_pages.weighted_values(packed, state.value.pages)


def _fold_heads(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The group's query heads become rows of their KV head: [B, Hq, T, D] -> fp32 [B, Hkv, group * T, D]."""
    batch, heads, columns, head_dim = query.shape
    return query.float().reshape(batch, num_kv_heads, heads // num_kv_heads * columns, head_dim)


def _masked(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """-inf in scores [B, Hkv, group * T, N] where ``visible`` [T, N] is False."""
    grouped = scores.unflatten(2, (-1, visible.shape[0]))
    return torch.where(visible, grouped, -torch.inf).reshape(scores.shape)


def _softcap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return torch.tanh(scores / softcap) * softcap if softcap > 0 else scores


def _sink_scores(sinks: torch.Tensor, scores: torch.Tensor, columns: int) -> torch.Tensor:
    """The learned logits [Hq] as one more column of scores [B, Hkv, group * T, ...]."""
    batch, heads = scores.shape[:2]
    logits = sinks.float().reshape(1, heads, -1, 1).expand(batch, -1, -1, columns)
    return logits.reshape(*scores.shape[:3], 1)


def _full_pages(tokens: torch.Tensor, sink_length: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw tokens [..., n, D] -> (those of full pages [..., pages, 128, D], the others); ``window`` tokens stay behind."""
    *rows, length, head_dim = tokens.shape
    num_pages = torch.sym_max(length - sink_length - window, 0) // PAGE_SIZE
    num_packed = num_pages * PAGE_SIZE
    packed = torch.arange(num_packed, device=tokens.device) + sink_length
    full = tokens.index_select(-2, packed).reshape(*rows, num_pages, PAGE_SIZE, head_dim)
    index = torch.arange(length - num_packed, device=tokens.device)
    rest = torch.where(index < sink_length, index, index + num_packed)
    return full, tokens.index_select(-2, rest)

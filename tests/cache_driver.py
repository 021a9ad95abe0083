"""Forwards of made-up tokens through a ``PagedCache``, and looks at what it keeps."""

import copy

import torch

from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig
from kitty_compile.layers import SlidingLayer
from tests.cache_model import plans_of

SCALE = 0.25


class Tokens:
    """Query, key and value of ``total`` columns for every layer of a cache; a column always brings the same tokens."""

    def __init__(
        self, total, *, batch=2, num_layers=2, heads=2, group=2, key_dim=16, value_dim=32, dtype=torch.float32
    ):
        channel = torch.linspace(0.1, 3, key_dim)
        self.query = [torch.randn(batch, heads * group, total, key_dim).to(dtype) for _ in range(num_layers)]
        self.key = [(torch.randn(batch, heads, total, key_dim) * channel).to(dtype) for _ in range(num_layers)]
        self.value = [torch.randn(batch, heads, total, value_dim).to(dtype) for _ in range(num_layers)]
        self.real = torch.ones(batch, total, dtype=torch.bool)

    def new(self, layer, start, stop):
        return tuple(side[layer][:, :, start:stop] for side in (self.query, self.key, self.value))

    def mask(self, start, stop):
        return None if bool(self.real.all()) else self.real[:, start:stop]

    def attend(self, cache, start, stop):
        """One fused forward of the columns from ``start`` to ``stop``; the outputs of all layers."""
        cache.begin_call(stop - start, self.mask(start, stop))
        outputs = []
        for layer in range(len(cache.layers)):
            query, key, value = self.new(layer, start, stop)
            outputs.append(cache.attend(query, key, value, layer, scale=SCALE))
        cache.end_call()
        return outputs

    def store(self, cache, start, stop):
        """One materialising forward; (K, V) of all layers."""
        cache.set_padding(self.mask(start, stop))
        return [cache.store(*self.new(layer, start, stop)[1:], layer) for layer in range(len(cache.layers))]

    def feed(self, cache, *stops):
        """Fused forwards from where the cache stands to each of these columns."""
        for stop in stops:
            self.attend(cache, cache.get_seq_length(), stop)
        return cache

    def rows(self, index):
        """The same tokens for other rows."""
        chosen = object.__new__(Tokens)
        for name in ("query", "key", "value"):
            setattr(chosen, name, [side[index] for side in getattr(self, name)])
        chosen.real = self.real[index]
        return chosen


def make_cache(*windows, max_length=None, **overrides):
    """A cache of two full layers, or of a layer per window (None: full)."""
    return PagedCache(plans_of(*(windows or (None, None))), KittyConfig(**overrides), max_length=max_length)


def kept_tensors(thing):
    """Every tensor that can be reached from ``thing``."""
    found, seen, waiting = [], set(), [thing]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type(None), type, torch.dtype)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, dict):
            waiting += list(thing.values())
        elif isinstance(thing, (list, tuple, set, frozenset)):
            waiting += list(thing)
        else:
            waiting += list(getattr(thing, "__dict__", {}).values())
    return found


def kept_bytes(cache):
    """Bytes of the storages that a cache keeps alive."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept_tensors(cache)
    }
    return sum(storages.values())


def snapshot(cache):
    """All that a later forward could notice: the host's numbers and every tensor's address and bytes."""
    host = (cache.max_length, cache._table.num_pages, [layer.columns for layer in cache.layers], cache.batch_size)
    tensors = [layer._tensors for layer in cache.layers] + [{"table": cache._table.table, "real": cache._map.real}]
    return host, [
        (name, tensor.data_ptr(), tensor.clone())
        for group in tensors
        for name, tensor in group.items()
        if tensor is not None
    ]


def same(one, other):
    """Whether two snapshots are equal byte for byte, addresses included."""
    return (
        one[0] == other[0]
        and len(one[1]) == len(other[1])
        and all(
            a[:2] == b[:2] and torch.equal(a[2].view(torch.uint8), b[2].view(torch.uint8))
            for a, b in zip(one[1], other[1], strict=True)
        )
    )


def read(cache, tokens):
    """(K, V) of every layer as a materialising call of the next column would see them; the cache stays as it is."""
    start = cache.get_seq_length()
    return tokens.store(copy.deepcopy(cache), start, start + 1)


def equal(one, other):
    """Whether nested lists and tuples of tensors are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))


def poison_what_nobody_may_read(cache):
    """NaN bytes in every page that is not sealed and every raw slot that holds no token of its row."""
    for layer in cache.layers:
        if isinstance(layer, SlidingLayer):
            continue
        state, raw, lengths = layer.state, layer.config.raw_layout, layer.lengths.tolist()
        for pool, held, ring, pages in (
            (state.key_pages, state.raw_key, raw.key_ring, raw.key_pages(layer.lengths)),
            (state.value_pages, state.raw_value, raw.value_ring, raw.value_pages(layer.lengths)),
        ):
            sealed = {
                page
                for row, count in zip(state.page_table.tolist(), pages.tolist(), strict=True)
                for page in row[:count]
            }
            pool[[page for page in range(len(pool)) if page not in sealed]] = 0xFF
            for row, (length, high) in enumerate(zip(lengths, layer.state.high_water.tolist(), strict=True)):
                tokens = torch.arange(length)
                held_tokens = tokens[(tokens < raw.sink_length) | (tokens >= high - ring)]
                unused = torch.ones(held.shape[2], dtype=torch.bool)
                unused[raw.slots(held_tokens, ring)] = False
                held[row, :, unused] = torch.nan


def goes_on_alike(cache, other, tokens, *stops):
    """Fused forwards to ``stops``, then a materialising look at everything."""
    start = cache.get_seq_length()
    for stop in stops:
        if not equal(tokens.attend(cache, start, stop), tokens.attend(other, start, stop)):
            return False
        start = stop
    return equal(read(cache, tokens), read(other, tokens))


def padded(tokens, seed=0):
    tokens.real = torch.rand(tokens.real.shape, generator=torch.Generator().manual_seed(seed)) < 0.9
    return tokens

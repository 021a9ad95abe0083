"""A rewritten graph at run time: finds the caches behind its inputs, serves its attentions, hands out phantoms."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig
from kitty_compile.kernels.serving import serving
from kitty_compile.layers import LayerPlan
from kitty_compile.passes.bind_call import BoundCalls
from kitty_compile.phantoms import PhantomStore, is_dense_phantom

logger = logging.getLogger(__name__)

# Phantoms of one backend are understood by every graph of it.
STORE = PhantomStore()


class CachedCall:
    """Called in place of the graph that was rewritten, with its inputs; returns what it returned.

    Args:
        compiled: the rewritten graph.
        bound: its layers.
        original: the graph as it was, for a 16-bit cache that cannot be taken over.
    """

    def __init__(
        self, compiled: Callable[..., Any], bound: BoundCalls, config: KittyConfig, original: Callable[..., Any]
    ) -> None:
        self.compiled, self.bound, self.original = compiled, bound, original
        self.plans, self.config = plans_of(bound, config)
        self._is_told = False

    def __call__(self, *inputs: Any) -> Any:
        cache = self._cache(inputs)
        if cache is None:
            self._tell()
            return self.original(*inputs)
        server = Server(cache, self.bound.padding_of(inputs))
        outputs = run(self.compiled, inputs, server)
        return self._with_phantoms(outputs, cache, server)

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning("a cache that was filled without this backend stays in 16 bits, its sliding layers are full")

    def _cache(self, inputs: Sequence[Any]) -> PagedCache | None:
        """What stands behind the past among ``inputs``; None when that is a 16-bit cache which cannot be taken over."""
        given = [inputs[index] for layer in self.bound.layers for index in layer.inputs or ()]
        given = [tensor for tensor in given if tensor.numel()]
        if not given:
            STORE.sweep()  # before memory is taken for another
            return PagedCache(self.plans, self.config)
        strided = [any(tensor.stride()) for tensor in given]
        if all(strided):
            return self._take_over(given, inputs)
        if any(strided):
            raise ValueError("the cache must be phantoms in all layers or in none, got a mixture")
        cache = STORE.resolve(given, self._columns(given))
        if [layer.window for layer in cache.plans] != [plan.window for plan in self.plans]:
            raise ValueError(
                f"the graph must serve the layers that the cache was made with, got {len(self.plans)} for {len(cache.plans)}"
            )
        if cache.batch_size != given[0].shape[0]:
            raise ValueError(f"the cache must keep its {cache.batch_size} rows, got {given[0].shape[0]}")
        return cache

    def _columns(self, given: Sequence[torch.Tensor]) -> int | None:
        """What the caller's cache still holds, as a layer without a window shows."""
        held = {given[2 * index].shape[2] for index, plan in enumerate(self.plans) if plan.window is None}
        if len(held) > 1:
            raise ValueError(f"all layers must hold the same columns, got {sorted(held)}")
        return held.pop() if held else None

    def _take_over(self, given: Sequence[torch.Tensor], inputs: Sequence[Any]) -> PagedCache | None:
        """The caller's own keys and values, made without this backend, become the past; None when some are gone."""
        if is_dense_phantom(given[0]):
            raise ValueError(
                "a stock cache of phantoms must not be reordered, repeated or selected (its 2-bit pages do not follow): "
                "use kitty_compile.apply(model), whose KittyCache can"
            )
        lengths = {tensor.shape[2] for tensor in given}
        windows = [plan.window for plan in self.plans if plan.window is not None]
        # A full window does not say how many columns went before it.
        if len(lengths) > 1 or any(window - 1 <= max(lengths) for window in windows):
            return None
        cache = PagedCache(self.plans, self.config)
        columns = lengths.pop()
        padding = self.bound.padding_of(inputs)
        cache.begin_call(columns, None if padding is None else padding[:, :columns])
        for index in range(len(self.plans)):
            cache.store(given[2 * index], given[2 * index + 1], index)
        return cache

    def _with_phantoms(self, outputs: Sequence[Any], cache: PagedCache, server: "Server") -> tuple[Any, ...]:
        shapes = []
        for layer, (batch, heads, key_dim, value_dim) in zip(self.bound.layers, server.shapes, strict=True):
            columns = cache.columns if layer.kept is None else min(cache.columns, layer.kept)
            shapes += [(batch, heads, columns, key_dim), (batch, heads, columns, value_dim)]
        phantoms = STORE.make(cache, shapes, server.dtype, server.device)
        places = [index for layer in self.bound.layers for index in layer.outputs or ()]
        placed = dict(zip(places, phantoms, strict=True))
        rest = iter(outputs)
        return tuple(placed[i] if i in placed else next(rest) for i in range(self.bound.num_outputs))


def run(compiled: Callable[..., Any], inputs: Sequence[Any], server: "Server") -> Any:
    """The graph's outputs, its attentions served; a call that fails is closed."""
    try:
        with serving(server):
            outputs = compiled(*inputs)
    except BaseException:
        server.cache.abort_call()
        raise
    server.cache.end_call()
    return outputs


def plans_of(bound: BoundCalls, config: KittyConfig) -> tuple[list[LayerPlan], KittyConfig]:
    """Of the cache behind a graph, whose layers are numbered as the graph has them."""
    plans = [LayerPlan() if layer.window is None else LayerPlan("sliding", layer.window) for layer in bound.layers]
    skipped = tuple(index for index, layer in enumerate(bound.layers) if layer.match.layer in config.skip_layers)
    return plans, dataclasses.replace(config, skip_layers=skipped)


class Server:
    """``cache.attend``, with the call begun by the first layer, which knows how many columns there are."""

    def __init__(self, cache: PagedCache, padding: torch.Tensor | None) -> None:
        self.cache, self.padding = cache, padding
        self.is_begun = False
        self.shapes: list[tuple[int, int, int, int]] = []
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self.is_begun:
            self.begin(key.shape[2], positions)
            self.is_begun = True
        self.shapes.append((key.shape[0], key.shape[1], key.shape[3], value.shape[3]))
        self.dtype, self.device = key.dtype, key.device
        return self.cache.attend(query, key, value, layer, scale=scale, softcap=softcap, sinks=sinks)

    def begin(self, num_columns: int, positions: torch.Tensor | None) -> None:
        self.cache.begin_call(num_columns, self.padding)

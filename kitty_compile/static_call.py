"""As ``cached_call``, for caches of fixed length: 16-bit buffers that the graph writes at positions of the caller's.

The buffers stay and are written as before; attention reads pages instead. The pages follow a buffer as long as calls go on
where the last one ended. After anything else (a prompt that ran without this backend, a step back) they are made anew from
the buffers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kitty_compile.cache import PagedCache
from kitty_compile.cached_call import Server, plans_of, run
from kitty_compile.config import KittyConfig
from kitty_compile.passes.bind_call import BoundCalls


@dataclasses.dataclass
class _Pages:
    """What stands behind the buffers of a model: ``newest`` is the last layer's newest key, [B, Hkv, D], which depends on
    all columns before it."""

    cache: PagedCache
    newest: torch.Tensor | None = None


# By the first layer's key buffer, gone with it. Every graph of a model finds the same.
_PAGES = WeakTensorKeyDictionary()


class StaticCall:
    """Called in place of the graph that was rewritten, with its inputs; returns what it returns."""

    def __init__(self, compiled: Callable[..., Any], bound: BoundCalls, config: KittyConfig) -> None:
        self.compiled, self.bound = compiled, bound
        self.plans, self.config = plans_of(bound, config)

    def __call__(self, *inputs: Any) -> Any:
        buffers = [self._by_heads(inputs[index], layer) for layer in self.bound.layers for index in layer.inputs or ()]
        owner = inputs[self.bound.layers[0].inputs[0]]  # type: ignore[index]
        if owner not in _PAGES:
            _PAGES[owner] = _Pages(PagedCache(self.plans, self.config))
        pages: _Pages = _PAGES[owner]
        server = _StaticServer(pages, buffers, self.bound.padding_of(inputs))
        # A call that fails half way leaves nothing to go on from.
        pages.newest = None
        outputs = run(self.compiled, inputs, server)
        pages.newest = buffers[-2][:, :, pages.cache.columns - 1].clone()
        return outputs

    @staticmethod
    def _by_heads(buffer: torch.Tensor, layer: Any) -> torch.Tensor:
        return buffer if layer.match.update.columns_dim == 2 else buffer.transpose(1, 2)


class _StaticServer(Server):
    def __init__(self, pages: _Pages, buffers: Sequence[torch.Tensor], padding: torch.Tensor | None) -> None:
        super().__init__(pages.cache, padding)
        self.newest, self.buffers = pages.newest, buffers

    def begin(self, num_columns: int, positions: torch.Tensor | None) -> None:
        assert positions is not None
        start = int(positions.flatten()[0])
        if not self._goes_on(start):
            self._take_over(start)
        self.cache.begin_call(num_columns, self._padding(start + num_columns))

    def _goes_on(self, start: int) -> bool:
        return start == self.cache.columns and (
            start == 0 or (self.newest is not None and torch.equal(self.buffers[-2][:, :, start - 1], self.newest))
        )

    def _take_over(self, start: int) -> None:
        self.cache.reset()
        if start == 0:
            return
        self.cache.begin_call(start, self._padding(start))
        for layer in range(len(self.cache.plans)):
            key, value = (buffer[:, :, :start] for buffer in self.buffers[2 * layer : 2 * layer + 2])
            self.cache.store(key, value, layer)

    def _padding(self, columns: int) -> torch.Tensor | None:
        return None if self.padding is None else self.padding[:, :columns]

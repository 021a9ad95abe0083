"""``kitty::attention``: attention over a cache that is none of the graph's inputs.

    kitty::attention     over the cache that serves the running call (who runs the graph says which, with :func:`serving`), or
                         over the one that a ``handle`` names
    kitty::materialize   a layer's K and V of all columns, for attention that reads them densely; takes in the call's own

A graph with these operators has no state among its inputs. It is compiled once for every cache, whatever its pools grow to,
and needs no guard on it.
"""

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch._compile import _disable_dynamo


class Server(Protocol):
    """Attends a layer's own columns over its past and takes them in; ``PagedCache.attend`` is one.

    Where the caller says at which ``positions`` [T] the columns are, that is one more keyword argument.
    """

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
    ) -> torch.Tensor: ...


class Holder(Protocol):
    """A cache that serves graphs by its handle, call by call without being told where one begins and ends."""

    def attend_alone(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        padding: torch.Tensor | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...


_SERVER: contextvars.ContextVar[Server | None] = contextvars.ContextVar("kitty_server", default=None)

_library = torch.library.Library("kitty", "FRAGMENT")
# The state that it reads is none of its arguments: a recording made by somebody who cannot see it would be stale at once.
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, int layer, float scale, float softcap, Tensor? sinks, "
    "Tensor? positions=None, SymInt handle=0, Tensor? padding=None) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_library.define(
    "materialize(Tensor key, Tensor value, SymInt handle, int layer, SymInt num_past) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),
)
# 0 names nobody.
_HOLDERS: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(holder: Holder) -> int:
    """A handle by which graphs find ``holder`` as long as it lives."""
    handle = next(_handles)
    _HOLDERS[handle] = holder
    return handle


def _holder_of(handle: int) -> Holder:
    holder = _HOLDERS.get(handle)
    if holder is None:
        raise RuntimeError(f"handle must name a cache that lives, got {handle}")
    return holder


@contextlib.contextmanager
def serving(server: Server) -> Iterator[None]:
    """Within this context ``kitty::attention`` is what ``server`` gives."""
    token = _SERVER.set(server)
    try:
        yield
    finally:
        _SERVER.reset(token)


# Within a compiled call Dynamo would look into it.
@_disable_dynamo
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    positions: torch.Tensor | None = None,
    handle: int = 0,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    if handle:
        holder = _holder_of(handle)
        alone = holder.attend_alone(
            query, key, value, layer, padding, scale=scale, softcap=softcap or None, sinks=sinks
        )
        return alone.contiguous()
    server = _SERVER.get()
    if server is None:
        raise RuntimeError(f"kitty::attention of layer {layer} must run within serving(...), got no cache that serves")
    where = {} if positions is None else {"positions": positions}
    output = server(query, key, value, layer, scale=scale, softcap=softcap or None, sinks=sinks, **where)
    return output.contiguous()


@_disable_dynamo
def _materialize(
    key: torch.Tensor, value: torch.Tensor, handle: int, layer: int, num_past: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return _holder_of(handle).store(key, value, layer)


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _device)
    _library.impl("materialize", _materialize, _device)


@torch.library.register_fake("kitty::materialize", lib=_library)
def _materialize_fake(
    key: torch.Tensor, value: torch.Tensor, handle: int, layer: int, num_past: int
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = num_past + key.shape[2]
    return (
        key.new_empty((*key.shape[:2], columns, key.shape[3])),
        value.new_empty((*value.shape[:2], columns, value.shape[3])),
    )


@torch.library.register_fake("kitty::attention", lib=_library)
def _attention_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``kitty::attention``.

    Args:
        query: [B, Hq, T, Dk]. key: [B, Hkv, T, Dk]. value: [B, Hkv, T, Dv], the call's own.
        layer: index of the layer in the cache that serves.
        softcap: scores become softcap * tanh(score / softcap). sinks: [Hq], learned logits of the denominator.

    Returns:
        [B, Hq, T, Dv], contiguous.

    Raises:
        RuntimeError: no cache serves.
    """
    output: torch.Tensor = torch.ops.kitty.attention(query, key, value, layer, scale, softcap or 0.0, sinks)
    return output

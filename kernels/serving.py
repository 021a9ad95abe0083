"""``kitty::attention``: attention over the cache that serves the running call, which the graph does not name.

A graph with this operator has no state among its inputs. It is compiled once for every cache, whatever its pools grow to,
and needs no guard on it. Who runs the graph says which cache serves, with :func:`serving`.
"""

import contextlib
import contextvars
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


_SERVER: contextvars.ContextVar[Server | None] = contextvars.ContextVar("kitty_server", default=None)

_library = torch.library.Library("kitty", "FRAGMENT")
# The state that it reads is none of its arguments: a recording made by somebody who cannot see it would be stale at once.
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, int layer, float scale, float softcap, Tensor? sinks, "
    "Tensor? positions=None) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)


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
) -> torch.Tensor:
    server = _SERVER.get()
    if server is None:
        raise RuntimeError(f"kitty::attention of layer {layer} must run within serving(...), got no cache that serves")
    where = {} if positions is None else {"positions": positions}
    output = server(query, key, value, layer, scale=scale, softcap=softcap or None, sinks=sinks, **where)
    return output.contiguous()


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _device)


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

"""The path ``backend``: a compiled model on its stock cache, whose phantoms stand for pages."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from kitty_compile import backend
from kitty_compile.cached_call import STORE, CachedCall
from kitty_compile.config import KittyConfig
from kitty_compile.layers import PagedLayer, SlidingLayer


class Backend:
    """The kitty backend without inductor, which takes a minute for a class and adds nothing of ours.

    Copies of one model share what Dynamo has traced, which takes most of the time; only the preset of their caches differs.
    """

    def __init__(self) -> None:
        self.preset, self.calls = "kitty", list[CachedCall]()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        call = backend.kitty(gm, example_inputs, options={"config": self.preset, "compiler": "eager"})
        inner = getattr(call, "call", call)
        if isinstance(inner, CachedCall):
            self.calls.append(inner)
        return call

    def use(self, preset: str) -> None:
        self.preset = preset
        for call in self.calls:
            call.config = KittyConfig.preset(preset)


_backends: dict[type, Backend] = {}


def compiled(model: PreTrainedModel, preset: str) -> PreTrainedModel:
    if type(model) not in _backends:
        torch._dynamo.reset()
        backend._logged.clear()
        _backends.clear()
        _backends[type(model)] = Backend()
    own = _backends[type(model)]
    own.use(preset)
    # Lengths are sizes of tensors here, as they are from the third call on in any case.
    model.compile(backend=own, dynamic=True)
    return model


def paged_layers(cache: Any) -> Iterator[PagedLayer]:
    """The paged layers behind the phantoms of a stock cache, in the order of its layers."""
    return (layer for layer in _layers_of(cache) if isinstance(layer, PagedLayer))


def count_kept_layers(cache: Any) -> int:
    """Layers behind the phantoms that are kept in raw rings."""
    return sum(not isinstance(layer, PagedLayer) for layer in _layers_of(cache))


def reasons() -> str:
    """Why attentions were left as they are."""
    return (
        "; ".join(sorted(message.split(": ", 1)[-1] for message in backend._logged)) or "its graphs attend to nothing"
    )


def _layers_of(cache: Any) -> Iterator[PagedLayer | SlidingLayer]:
    calls: dict[int, list[torch.Tensor]] = {}
    for tensor in _tensors_of(cache):
        if tensor.dim() == 4 and tensor.numel() and not any(tensor.stride()):
            calls.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for phantoms in calls.values():
        yield from STORE.resolve(sorted(phantoms, key=lambda phantom: phantom.storage_offset()), None).layers


def _tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    for layer in getattr(cache, "layers", ()):
        for name in ("keys", "values"):
            if isinstance(tensor := getattr(layer, name, None), torch.Tensor):
                yield tensor

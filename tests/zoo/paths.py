"""The ways of putting a model onto kitty pages that the zoo can judge; ``PATHS`` has one entry each."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from transformers import PreTrainedModel

import kitty_compile
from kitty_compile.cache import PagedCache
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.layers import PagedLayer
from tests.zoo import stock_cache


@dataclasses.dataclass(frozen=True)
class Path:
    """One way onto kitty pages.

    Attributes:
        prepare: (model, preset) -> what is called instead of the model, from now on on pages; TypeError or ValueError: why
            not. The model is a copy that may be changed.
        paged_layers: the quantised or raw paged layers behind the cache that came out of a forward.
        kept_layers: how many layers of it are kept in raw rings; None when ``support`` says beforehand what each layer is.
        reasons: why layers stayed as they are, when ``support`` does not say.
    """

    prepare: Callable[[PreTrainedModel, str], PreTrainedModel]
    paged_layers: Callable[[Any], Iterator[PagedLayer]]
    kept_layers: Callable[[Any], int] | None = None
    reasons: Callable[[], str] = str


def _layers_of_cache(cache: Any) -> Iterator[PagedLayer]:
    if not isinstance(cache, PagedCache):
        raise TypeError(f"a forward must give back a KittyCache, got {type(cache).__name__}")
    return (layer for layer in cache.layers if isinstance(layer, PagedLayer))


def _applied(model: PreTrainedModel, preset: str) -> PreTrainedModel:
    return kitty_compile.apply(model, preset)


def _materialised(model: PreTrainedModel, preset: str) -> PreTrainedModel:
    # It refuses configurations; better now than in a forward.
    KittyCache(model.config, preset)
    cache_argument(model)
    vars(model)["_prepare_cache_for_generation"] = functools.partial(_give_cache, model, preset)
    return model


def _give_cache(model: PreTrainedModel, preset: str, config: object, kwargs: dict[str, Any], *rest: object) -> None:
    kwargs[cache_argument(model)] = KittyCache(model.config, preset)


PATHS: dict[str, Path] = {
    # ``kitty_compile.apply``.
    "apply": Path(_applied, _layers_of_cache),
    # The model as it is on a KittyCache of its own, whatever its attention.
    "materialise": Path(_materialised, _layers_of_cache),
    # ``model.compile(backend="kitty")`` on the model's own cache.
    "backend": Path(stock_cache.compiled, stock_cache.paged_layers, stock_cache.count_kept_layers, stock_cache.reasons),
}
# What ``make zoo`` judges.
DEFAULT_PATHS = ("apply", "backend")

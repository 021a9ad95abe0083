"""``apply`` and ``remove``: the KV cache of a model becomes a KittyCache, and back.

transformers is imported for its own models alone.
"""

import sys
from collections.abc import Sequence
from typing import Any, TypeVar, overload

from torch import nn

from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.plain_module import CachedModule, attach_cache

__all__ = ["apply", "remove"]

Model = TypeVar("Model", bound=nn.Module)
_DEFAULT_MAX_LENGTH = 4096


@overload
def apply(
    model: Model,
    config: KittyConfig | str | None = None,
    *,
    compile: str | bool = "auto",
    example_inputs: None = None,
    max_length: None = None,
) -> Model: ...


@overload
def apply(
    model: nn.Module,
    config: KittyConfig | str | None = None,
    *,
    compile: str | bool = "auto",
    example_inputs: Sequence[Any],
    max_length: int | None = None,
) -> CachedModule: ...


def apply(
    model: nn.Module,
    config: KittyConfig | str | None = None,
    *,
    compile: str | bool = "auto",  # noqa: A002
    example_inputs: Sequence[Any] | None = None,
    max_length: int | None = None,
) -> nn.Module:
    """Move a causal language model onto a KittyCache.

    A transformers model is changed in place: its ``generate()`` and ``forward()`` use the cache from now on. Any other module
    is captured, and comes back as a ``CachedModule``: called with the next columns of every row, it gives what the
    module gives for them after all columns so far.

    Args:
        model: a transformers causal language model, or any module in eval mode.
        config: a ``KittyConfig``, a preset's name, or None for "kitty".
        compile: "auto" runs decode steps of a transformers model on a CUDA device as one CUDA graph, False never does.
        example_inputs: for modules that are not from transformers: positional arguments of a forward over at least
            three columns, say token ids [batch, columns]. The batch stays as it is here, the columns may be any number later.
        max_length: beside ``example_inputs``: columns that a row can come to hold, 4096 unless told.

    Returns:
        The same model, or a ``CachedModule`` that shares the module's weights.

    Raises:
        TypeError, ValueError: the model or an argument cannot be served, with the reason.
    """
    if compile is not False and compile != "auto":
        raise ValueError(f'compile must be "auto" or False, got {compile!r}')
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if is_pretrained(model):
        from kitty_compile.huggingface import pretrained

        _check_no_capture(model, example_inputs, max_length)
        pretrained.attach(model, config, graphed=compile == "auto")  # type: ignore[arg-type]
        return model
    if example_inputs is None:
        raise TypeError(
            "model must be a transformers PreTrainedModel, or come with example_inputs (the positional arguments of a "
            f"forward) to be captured, got {type(model).__name__} without"
        )
    return attach_cache(model, example_inputs, resolve_config(config), max_length=max_length or _DEFAULT_MAX_LENGTH)


def remove(model: Model) -> Model:
    """Undo ``apply`` on a transformers model; caches made meanwhile can no longer be used with its fused attention."""
    if isinstance(model, CachedModule):
        raise TypeError("model must be a transformers model, got a CachedModule: what it was made from is unchanged")
    from kitty_compile.huggingface import pretrained

    pretrained.detach(model)
    return model


def _check_no_capture(model: nn.Module, example_inputs: object, max_length: object) -> None:
    for name, value in (("example_inputs", example_inputs), ("max_length", max_length)):
        if value is not None:
            raise TypeError(
                f"{name} must be left out for a transformers model, which is not captured, got one for a "
                f"{type(model).__name__}: set generation_config.max_cache_len to bound its cache"
            )


def is_pretrained(model: nn.Module) -> bool:
    """Is it a model of transformers?"""
    # Where transformers was not imported there is no model of it.
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)

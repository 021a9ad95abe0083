"""A transformers model's forward for ``FunctionalStep``: positions are told, layers attend with ``kitty::attention``."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from kitty_compile.config import KittyConfig
from kitty_compile.functional_step import FunctionalStep, group_layers
from kitty_compile.huggingface import export_step
from kitty_compile.huggingface.attention import stepping
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument, decoder_of


class FunctionalForward(nn.Module):
    """(input_ids [B, T], position_ids [B, T]) -> logits of the last column, [B, 1, vocabulary], or of all columns."""

    def __init__(self, model: PreTrainedModel, config: KittyConfig, *, all_logits: bool) -> None:
        super().__init__()
        self.model = model
        self.all_logits = all_logits
        # Models ask the cache for masks and positions; within a step it answers with what no graph depends on.
        self._cache = {cache_argument(decoder_of(model)): KittyCache(model.config, config)}
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        keep = {"logits_to_keep": 1} if self._keeps and not self.all_logits else {}
        arguments = {"position_ids": position_ids, "use_cache": True, "return_dict": True, **keep, **self._cache}
        # The class's: an applied model's own stands before it.
        logits: torch.Tensor = type(self.model).forward(self.model, input_ids=input_ids, **arguments).logits
        return logits if self.all_logits else logits[:, -1:]


@dataclasses.dataclass(frozen=True)
class Capture:
    """A step that is ready to be traced, and what the applied model gives for ``calls`` on an empty cache."""

    step: FunctionalStep
    config: KittyConfig
    calls: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor, ...]
    max_length: int


@contextlib.contextmanager
def capturing(model: PreTrainedModel, config: KittyConfig | str | None, *, all_logits: bool) -> Iterator[Capture]:
    """Within this context the step can be called and traced; ``model`` is left as it was found.

    Raises:
        ValueError: the model cannot be served, with the reason.
    """
    export_step.check(model)
    settings = export_step.config_of(model, config)
    longest = int(getattr(model.config, "max_position_embeddings", 0) or 0) or 2**31 - 1
    with torch.no_grad(), export_step.applied(model, settings):
        calls = _example_calls(model, settings, longest)
        cache = KittyCache(model.config, settings)
        # Masks are checked here: they are left out of the graph.
        expected = tuple(_logits(model, cache, ids, all_logits=all_logits) for ids in calls)
        shapes = [layer.geometry for layer in cache.layers]
        numbers = [
            settings.parameters(index, shape.key_dim, shape.value_dim, shape.num_kv_heads)
            for index, shape in enumerate(shapes)
        ]
        groups = group_layers(numbers, [plan.window for plan in cache.plans])
        step = FunctionalStep(FunctionalForward(model, settings, all_logits=all_logits), groups).eval()
        with stepping():
            yield Capture(step, settings, calls, expected, longest)


def _example_calls(model: PreTrainedModel, config: KittyConfig, longest: int) -> tuple[torch.Tensor, ...]:
    """A row's prompt that ends shortly before a value page is full, some columns that complete it, and one column."""
    page_end = config.sink_length + config.page_size + config.value_window
    total = min(page_end + 2, longest)
    vocabulary, device = int(model.config.vocab_size), next(model.parameters()).device
    ids = (torch.arange(total, device=device).unsqueeze(0) * 7 + 3) % vocabulary
    return tuple(piece.contiguous() for piece in ids.split([total - 5, 4, 1], dim=1))


def _logits(model: PreTrainedModel, cache: KittyCache, ids: torch.Tensor, *, all_logits: bool) -> torch.Tensor:
    logits: torch.Tensor = model(ids, **{cache_argument(decoder_of(model)): cache}).logits
    return logits if all_logits else logits[:, -1:]

"""A teacher-forced generation: prefill of a left-padded batch, then one token at a time, as ``generate`` would call."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument
from tests.zoo.sizes import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Workload:
    """Token ids and their mask, ``prompt`` columns of which are read at once."""

    ids: torch.Tensor
    mask: torch.Tensor
    prompt: int

    @classmethod
    def of(cls, prompt: int, decode: int, seed: int = 0) -> "Workload":
        """Three rows of different lengths, the longest without padding."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, VOCABULARY, (3, prompt + decode), generator=generator)
        mask = torch.ones_like(ids)
        for row in (1, 2):
            mask[row, : prompt * row // 4] = 0
        return cls(ids.masked_fill(mask == 0, 0), mask, prompt)

    def without_padding(self) -> "Workload":
        return dataclasses.replace(self, mask=torch.ones_like(self.mask))

    def with_pads(self, token: int) -> "Workload":
        """The same rows with other ids in what the mask leaves out."""
        return dataclasses.replace(self, ids=self.ids.masked_fill(self.mask == 0, token))

    @property
    def columns(self) -> int:
        return self.ids.shape[1]


@dataclasses.dataclass
class Trace:
    """What a run gives: logits of every real column [tokens, vocabulary], and the cache as it was ``tail`` columns ago."""

    logits: torch.Tensor
    cache: Any
    earlier: Any


@torch.no_grad()
def run(model: PreTrainedModel, workload: Workload, cache: Any = None, tail: int = 0) -> Trace:
    """Run ``model`` over the workload, on ``cache`` or on the one that ``generate`` would make."""
    name = cache_argument(model)
    kwargs = {name: cache, "use_cache": True}
    if cache is None:
        kwargs = {"use_cache": True} | new_cache(model, workload)
    if isinstance(kwargs.get(name), KittyCache):
        # A model that is not applied does not show its mask to the cache.
        kwargs[name].set_padding(workload.mask[:, : workload.prompt])
    pieces, earlier = [], None
    for start, stop in _calls(workload):
        if tail and stop == workload.columns - tail + 1:
            earlier = copy.deepcopy(kwargs[name])
        outputs = step(model, workload, start, stop, kwargs)
        kwargs[name] = outputs[name] if outputs.get(name) is not None else kwargs[name]
        pieces.append(outputs.logits)
    return Trace(torch.cat(pieces, dim=1)[workload.mask.bool()], kwargs[name], earlier)


def sees_pads(model: PreTrainedModel) -> bool:
    """Do the logits of a model hang on what stands where the mask says that nothing is?"""
    short = Workload.of(prompt=24, decode=4)
    return not torch.equal(run(model, short).logits, run(model, short.with_pads(7)).logits)


@torch.no_grad()
def finish(model: PreTrainedModel, workload: Workload, cache: Any, tail: int) -> torch.Tensor:
    """Logits [3 * tail, vocabulary] of the last columns on a cache of ``Trace.earlier``."""
    kwargs = {cache_argument(model): cache, "use_cache": True}
    stops = range(workload.columns - tail + 1, workload.columns + 1)
    return torch.cat([step(model, workload, stop - 1, stop, kwargs).logits for stop in stops], dim=1).flatten(0, 1)


def step(model: PreTrainedModel, workload: Workload, start: int, stop: int, kwargs: dict[str, Any]) -> Any:
    """One forward over columns ``start`` to ``stop``."""
    mask = workload.mask[:, :stop].contiguous()
    position_ids = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    inputs = model.prepare_inputs_for_generation(
        workload.ids[:, :stop],
        next_sequence_length=stop - start,
        is_first_iteration=start == 0,
        attention_mask=mask,
        position_ids=position_ids,
        **kwargs,
    )
    if inputs["input_ids"].shape[1] != stop - start:
        # Musicgen takes a cache, even an empty one, for a sign that only the newest id is new.
        inputs["input_ids"] = workload.ids[:, start:stop]
    # Some classes ask for the newest logits alone.
    inputs.pop("logits_to_keep", None)
    return model(**inputs, return_dict=True)


def new_cache(model: PreTrainedModel, workload: Workload) -> dict[str, Any]:
    """The cache that ``generate`` makes, as keyword arguments of a forward."""
    config = GenerationConfig.from_model_config(model.config)
    config.use_cache = True
    kwargs: dict[str, Any] = {}
    prepare: Callable[..., None] = model._prepare_cache_for_generation
    prepare(config, kwargs, GenerationMode.GREEDY_SEARCH, workload.ids.shape[0], workload.columns)
    return kwargs


def _calls(workload: Workload) -> list[tuple[int, int]]:
    steps = range(workload.prompt, workload.columns)
    return [(0, workload.prompt), *((start, start + 1) for start in steps)]

"""Capture the forward of a transformers model as a graph without state: ``kitty::attention`` where a layer attends.

The forward is what ``apply`` runs as the device part of a decode step (``decode_step.py``), here for any number of columns.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import fx, nn
from transformers import PreTrainedModel

from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.huggingface import pretrained, support
from kitty_compile.huggingface.attention import stepping
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.hooks import ATTACHMENT
from kitty_compile.huggingface.support import cache_argument, decoder_of, layer_plans
from kitty_compile.layers import LayerPlan

TOKENS = "kitty_tokens"
INPUT_NAMES = ("input_ids", "attention_mask")


@dataclasses.dataclass(frozen=True)
class Capture:
    """A captured forward ``(input_ids i64 [b, T], attention_mask bool [b, T]) -> logits``.

    Attributes:
        gm: its graph, with the weights as attributes and a buffer ``kitty_tokens`` i64 [max_batch]: tokens of each row so far,
            from which positions come.
        plans: of the layers that the attentions name.
        inputs: the example it was captured with. dynamic_shapes: for ``torch.export.export``.
        expected: what the applied model gives for the calls of :func:`example_calls`.
    """

    gm: fx.GraphModule
    plans: tuple[LayerPlan, ...]
    config: KittyConfig
    inputs: tuple[torch.Tensor, torch.Tensor]
    dynamic_shapes: tuple[dict[int, Any], dict[int, Any]]
    expected: tuple[torch.Tensor, ...]


class StepForward(nn.Module):
    """The forward that is captured; ``logits`` are the last column's, [b, 1, vocabulary], or all columns'."""

    def __init__(self, model: PreTrainedModel, config: KittyConfig, max_batch: int, *, all_logits: bool) -> None:
        super().__init__()
        self.model = model
        self.all_logits = all_logits
        # Models ask the cache for masks and positions; within a step it answers with what no graph depends on.
        self._cache = {cache_argument(decoder_of(model)): KittyCache(model.config, config)}
        self._keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        device = next(model.parameters()).device
        self.register_buffer(TOKENS, torch.zeros(max_batch, dtype=torch.int64, device=device), persistent=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.get_buffer(TOKENS)[: input_ids.shape[0]]
        positions = (tokens.unsqueeze(1) + attention_mask.cumsum(1) - 1).clamp(min=0)
        keep = {"logits_to_keep": 1} if self._keeps and not self.all_logits else {}
        # The class's: an applied model's own stands before it.
        output = type(self.model).forward(
            self.model,
            input_ids=input_ids,
            position_ids=positions,
            use_cache=True,
            return_dict=True,
            **keep,
            **self._cache,
        )
        tokens.add_(attention_mask.sum(1))
        logits: torch.Tensor = output.logits
        return logits if self.all_logits else logits[:, -1:]


def capture(
    model: PreTrainedModel,
    config: KittyConfig | str | None,
    *,
    max_batch: int,
    max_length: int,
    all_logits: bool = False,
) -> Capture:
    """Capture the forward of ``model``, which is left as it was found.

    Raises:
        ValueError: the model cannot be served or traced, with the reason.
    """
    check(model)
    settings = config_of(model, config)
    shape = {1: torch.export.Dim("columns", min=1, max=max_length)}
    if max_batch > 1:
        shape[0] = torch.export.Dim("batch", min=1, max=max_batch)
    inputs = example_calls(model, max_batch)[0]
    with torch.no_grad(), applied(model, settings):
        expected = _expected(model, settings, max_batch, all_logits=all_logits)
        step = StepForward(model, settings, max_batch, all_logits=all_logits).eval()
        with stepping():
            program = _trace(step, inputs, (shape, shape), model)
    gm: fx.GraphModule = program.module(check_guards=False)
    return Capture(gm, tuple(layer_plans(model.config)), settings, inputs, (shape, shape), expected)


def example_calls(model: PreTrainedModel, max_batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, attention_mask) of two calls on an empty cache; the first row of a batch is padded."""
    device, vocabulary = next(model.parameters()).device, int(model.config.vocab_size)
    rows = min(2, max_batch)
    ids = (torch.arange(rows * 8, device=device).view(rows, 8) * 7 + 3) % vocabulary
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:-1, :2] = False
    # Contiguous, or sizes that happen to equal a stride would be guarded.
    pieces = zip(ids.split(5, dim=1), mask.split(5, dim=1), strict=True)
    return [(some.contiguous(), real.contiguous()) for some, real in pieces]


def check(model: PreTrainedModel) -> None:
    """Raise a ValueError unless a forward of ``model`` can be served, and told its positions."""
    if model.training:
        raise ValueError("model must be in eval mode, got one in training: call eval()")
    refusal = support.model_refusal(model)
    if refusal is not None:
        raise ValueError(f"model must be one that a KittyCache can serve, got {type(model).__name__}: {refusal}")
    decoder = type(decoder_of(model))
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise ValueError(
            f"model must take position_ids to be exported, but {decoder.__name__} has positions of its own"
        )


def config_of(model: PreTrainedModel, config: KittyConfig | str | None) -> KittyConfig:
    """What was applied to ``model``, which ``config`` may only repeat; else what ``config`` says."""
    attachment = vars(model).get(ATTACHMENT)
    if attachment is None:
        return resolve_config(config)
    applied: KittyConfig = attachment.config
    if config is not None and resolve_config(config) != applied:
        raise ValueError(f"config must be the one that was applied to the model, {applied}, got {config}")
    return applied


@contextlib.contextmanager
def applied(model: PreTrainedModel, config: KittyConfig) -> Iterator[None]:
    """Within this context ``config`` is applied to ``model``."""
    if ATTACHMENT in vars(model):
        yield
        return
    pretrained.attach(model, config, graphed=False)
    try:
        yield
    finally:
        pretrained.detach(model)


def _expected(
    model: PreTrainedModel, config: KittyConfig, max_batch: int, *, all_logits: bool
) -> tuple[torch.Tensor, ...]:
    """What the applied model gives, which also checks its masks: those are left out of the graph."""
    cache = KittyCache(model.config, config)
    name, logits, masks = cache_argument(decoder_of(model)), [], []
    tokens: Any = 0
    for ids, mask in example_calls(model, max_batch):
        masks.append(mask)
        positions = (tokens + mask.cumsum(1) - 1).clamp(min=0)
        tokens = tokens + mask.sum(1, keepdim=True)
        arguments = {"attention_mask": torch.cat(masks, dim=1), "position_ids": positions, name: cache}
        found = model(ids, **arguments).logits
        logits.append(found if all_logits else found[:, -1:])
    return tuple(logits)


def _trace(
    step: StepForward, inputs: tuple[Any, ...], shapes: Any, model: PreTrainedModel
) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False)
    # What torch.export raises is of many kinds: all of them mean that the forward is not a graph.
    except (RuntimeError, TypeError, ValueError, AssertionError, torch._dynamo.exc.TorchDynamoException) as error:
        raise ValueError(
            f"the forward of {type(model).__name__} must be one graph to be exported, but torch.export says: {_brief(error)}"
        ) from error


def _brief(error: BaseException) -> str:
    """The line that says what is wrong: of constraints, the first that is violated."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("- ")), lines[0]).removeprefix("- ")


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """What a manifest says of the model."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return {
        "model": type(model).__name__,
        "source": str(getattr(model, "name_or_path", "") or ""),
        "eos_token_ids": tuple(int(token) for token in ends),
        "transformers": transformers.__version__,
    }

"""A model's forward as a function: the packed state goes in and comes out, nothing is written in place.

A forward whose layers attend with ``kitty::attention`` has no state among its arguments. Here each of these calls is served
from the state that was passed in, and what the call adds to it is returned. All rows have one length.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kitty_compile.kernels import functional_cache, serving  # noqa: F401 (serving registers kitty::attention)
from kitty_compile.kernels.functional_cache import State
from kitty_compile.kernels.ops import OpParameters


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind and shape, which share one stacked state.

    Attributes:
        name: unique among a model's groups, "" when there is but one.
        layers: indices, in order. parameters: of each of them but for the index. window: of sliding layers.
    """

    name: str
    layers: tuple[int, ...]
    parameters: OpParameters
    window: int | None

    def empty_state(self, batch: int, dtype: torch.dtype) -> State:
        """Tensors [layers, batch, KV heads, ...] of no tokens."""
        return functional_cache.empty_state(self.parameters, len(self.layers), batch, dtype=dtype, window=self.window)

    def positions(self, state: State, columns: int) -> functional_cache.Positions:
        if self.window is not None:
            return functional_cache.window_positions(state, columns, self.window)
        return functional_cache.positions(state, columns, self.parameters)

    def advance(self, state: State, key: torch.Tensor, value: torch.Tensor) -> State:
        if self.window is not None:
            return functional_cache.advance_window(state, key, value, self.window)
        return functional_cache.advance(state, key, value, self.parameters)


def group_layers(parameters: Iterable[OpParameters], windows: Iterable[int | None]) -> tuple[LayerGroup, ...]:
    """The layers of a model, in order, by kind and shape.

    Raises:
        ValueError: a layer chooses its boosted channels at random.
    """
    found: dict[tuple[OpParameters, int | None], list[int]] = {}
    for index, (numbers, window) in enumerate(zip(parameters, windows, strict=True)):
        if numbers.seed >= 0:
            raise ValueError('selection must be "magnitude" for a program without mutation, got "random"')
        found.setdefault((numbers._replace(layer=0), window), []).append(index)
    names = [_group_name(numbers, window) for numbers, window in found]
    unique = [name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)]
    shown = unique if len(unique) > 1 else [""]
    return tuple(
        LayerGroup(name, tuple(layers), *kind) for name, (kind, layers) in zip(shown, found.items(), strict=True)
    )


def _group_name(parameters: OpParameters, window: int | None) -> str:
    if window is not None:
        return f"window{window}"
    return "raw" if parameters.key_bits == parameters.value_bits == 16 else "packed"


class FunctionalStep(nn.Module):
    """(input_ids [B, T], past_length i64 [1], states) -> (logits, length i64 [1], states): one graph for prompts and steps.

    Args:
        model: (input_ids, position_ids [B, T]) -> logits, whose layers attend with ``kitty::attention``.
    """

    def __init__(self, model: nn.Module, groups: Sequence[LayerGroup]) -> None:
        super().__init__()
        self.model, self.groups = model, tuple(groups)

    def empty_states(self, batch: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
        """One dict per group."""
        return [group.empty_state(batch, dtype).named() for group in self.groups]

    def forward(
        self, input_ids: torch.Tensor, past_length: torch.Tensor, states: list[dict[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, torch.Tensor]]]:
        """Raises a ValueError when a layer attends twice, never, or in a way that the state does not serve."""
        batch, columns = input_ids.shape
        position_ids = (torch.arange(columns, device=input_ids.device) + past_length).unsqueeze(0).expand(batch, -1)
        call = _Call(self.groups, [State.of_named(tensors) for tensors in states], columns)
        with _Interceptor(call.attend):
            logits = self.model(input_ids, position_ids)
        return logits, past_length + columns, [state.named() for state in call.finish()]


class _Call:
    """One forward: attends to the states as they were, remembers what each layer brought."""

    def __init__(self, groups: Sequence[LayerGroup], states: Sequence[State], columns: int) -> None:
        self.groups, self.states = groups, states
        self.at = [group.positions(state, columns) for group, state in zip(groups, states, strict=True)]
        self.places = {
            layer: (group, index) for group, found in enumerate(groups) for index, layer in enumerate(found.layers)
        }
        self.brought: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
        *others: Any,
    ) -> torch.Tensor:
        """Arguments of ``kitty::attention``."""
        if any(other is not None and not (isinstance(other, int) and other == 0) for other in others):
            raise ValueError(f"layer {layer} must attend without positions, handle or padding of its own, got some")
        if layer not in self.places or layer in self.brought:
            raise ValueError(
                f"each of the {len(self.places)} layers must attend once in a forward, got layer {layer} again"
            )
        group, index = self.places[layer]
        self.brought[layer] = key, value
        state = self.states[group].select(index)
        return functional_cache.attend(
            query, key, value, state, self.at[group], scale=scale, softcap=softcap, sinks=sinks
        )

    def finish(self) -> list[State]:
        missing = sorted(set(self.places) - set(self.brought))
        if missing:
            raise ValueError(f"each of the {len(self.places)} layers must attend once in a forward, but not {missing}")
        advanced = []
        for group, state in zip(self.groups, self.states, strict=True):
            keys, values = zip(*(self.brought[layer] for layer in group.layers), strict=True)
            advanced.append(group.advance(state, torch.stack(keys), torch.stack(values)))
        return advanced


class _Interceptor(TorchFunctionMode):
    """``kitty::attention`` is what ``serve`` gives, also while a graph is traced: no call of it is left there."""

    def __init__(self, serve: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.serve = serve

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attention = torch.ops.kitty.attention
        if func is attention or func is attention.default:
            return self.serve(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

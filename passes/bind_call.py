"""Move layers whose cache a graph takes in and hands out onto the cache that serves the running call.

Before                                                        After
    full_k = cat([past_k, k], 2); full_v = cat([past_v, v], 2)  out = kitty.attention(q, k, v, layer, scale, softcap, sinks)
    out = attention(q, full_k, full_v)                          return logits
    return logits, full_k, full_v

The graph no longer makes K and V of all columns: whoever runs it supplies what the caller expects in their places.

    k_cache[:, :, pos] = k; v_cache[:, :, pos] = v              k_cache[:, :, pos] = k; v_cache[:, :, pos] = v
    out = attention(q, k_cache, v_cache)                        out = kitty.attention(q, k, v, ..., positions=pos)

    k, v = kitty.materialize(k, v, handle, layer, past)         out = kitty.attention(q, k, v, ..., handle=handle)
    out = attention(q, k, v)

The first is a stock cache. The second is a cache of fixed length, moved if that is asked for: its 16-bit buffers are written as
before, and attention does not read them. The third is a KittyCache in its materialising form.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kitty_compile.passes.clean_up import clean_up
from kitty_compile.passes.nodes import arguments, op_name, value_of
from kitty_compile.passes.pipeline import Report
from kitty_compile.passes.records import AttentionMatch, MaskKind
from kitty_compile.passes.rewrite_attention import CallBinding, Rewrite, rewrite_attention

_Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class CallLayer:
    """A layer of the serving cache, in the order of the graph.

    Attributes:
        match: its attention.
        window: of a sliding layer, else None.
        kept: columns that the caller keeps of it; None for all.
        inputs: indices of past K and V among the graph's inputs; None when this is the first call.
        outputs: indices of K and V among what the graph returned before; None for a static cache.
    """

    match: AttentionMatch
    window: int | None
    kept: int | None
    inputs: tuple[int, int] | None
    outputs: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class BoundCalls:
    """The layers that a rewritten graph serves, where the mask of padded rows is among its inputs, and what was kept."""

    layers: tuple[CallLayer, ...]
    padding: int | None
    num_outputs: int
    kept: dict[fx.Node, str]
    num_fused: int = 0

    def padding_of(self, inputs: Sequence[Any]) -> Any:
        """The attention mask among what the graph is called with; None when its rows have no pads."""
        return None if self.padding is None else inputs[self.padding]

    @property
    def is_static(self) -> bool:
        return any(layer.outputs is None for layer in self.layers)


class CallBinder:
    """Takes layers whose K and V go in and out of the graph, all with the same padding.

    Args:
        takes_static: also those of caches of fixed length.
        shared: layers whose keys or values something besides their own attention reads.
    """

    def __init__(self, gm: fx.GraphModule, *, takes_static: bool = False, shared: frozenset[int] = frozenset()) -> None:
        self.takes_static, self.shared = takes_static, shared
        self.inputs = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        returned: list[fx.Node] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        # What is returned twice could not be left out in one place.
        self.outputs = {node: index for index, node in enumerate(returned) if returned.count(node) == 1}
        self.layers: list[CallLayer] = []
        self.num_fused = 0
        self.padding: fx.Node | None = None

    def bind(self, match: AttentionMatch, mask: MaskKind) -> CallBinding | str:
        if match.update.kind == "kitty":
            return self._fused(match, mask)
        places = self._static_places(match) if match.update.is_static else self._places(match, mask)
        if isinstance(places, str):
            return places
        if self.layers and mask.padding is not self.padding:
            return "its padding is not that of the layers before"
        if self.layers and (places[1] is None) != (self.layers[0].outputs is None):
            return "growing caches and caches of fixed length stand in one graph"
        self.padding = mask.padding
        self.layers.append(CallLayer(match, mask.window, match.update.kept, *places))
        return CallBinding(len(self.layers) - 1, follows_positions=places[1] is None)

    def _places(self, match: AttentionMatch, mask: MaskKind) -> tuple[_Pair | None, _Pair | None] | str:
        """Where past K and V come in and K and V go out, or why that is not served."""
        update = match.update
        if match.layer in self.shared:
            return "something besides its attention reads its keys or values"
        full = (self._returned(update.key_full, update.kept), self._returned(update.value_full, update.kept))
        if full[0] is None or full[1] is None:
            return "no cache takes up its keys and values: kitty_compile.apply(module, example_inputs=...) gives it one"
        past = (update.key_past, update.value_past)
        if any(node is not None and node not in self.inputs for node in past):
            return "the past is not an input of the graph"
        if update.columns_dim != 2:
            return "the caller keeps columns before heads"
        if mask.kind == "causal" and update.kept is not None:
            return f"its mask sees all columns, of which the caller keeps {update.kept}"
        if mask.kind == "sliding" and update.kept not in (None, mask.window, (mask.window or 0) - 1):
            return f"a window of {mask.window} does not fit the {update.kept} columns that the caller keeps"
        given = None if past[0] is None or past[1] is None else (self.inputs[past[0]], self.inputs[past[1]])
        return given, (self.outputs[full[0]], self.outputs[full[1]])

    def _static_places(self, match: AttentionMatch) -> tuple[_Pair | None, _Pair | None] | str:
        update = match.update
        if not self.takes_static:
            return 'a cache of fixed length has its memory already: options={"static_cache": True} moves its attention'
        if update.is_fresh or update.key_past not in self.inputs or update.value_past not in self.inputs:
            return "its cache of fixed length is not an input of the graph"
        return (self.inputs[update.key_past], self.inputs[update.value_past]), None

    def _fused(self, match: AttentionMatch, mask: MaskKind) -> CallBinding | str:
        """A KittyCache unpacks what attention reads: attention reads the pages instead."""
        given = arguments(match.update.key_full.args[0])  # type: ignore[arg-type]
        if match.update.value_full.args[0] is not match.update.key_full.args[0]:
            return "its keys and values are those of two caches"
        self.num_fused += 1
        return CallBinding(given["layer"], handle=given["handle"], padding=mask.padding)

    def _returned(self, node: fx.Node, kept: int | None) -> fx.Node | None:
        """What the graph returns of ``node``: itself, or its newest columns."""
        if kept is None:
            return node if node in self.outputs else None
        queue = [node]
        while queue:
            for user in queue.pop().users:
                if op_name(user) != "slice":
                    continue
                if user in self.outputs:
                    return user
                queue.append(user)  # a slice of all rows comes first where sizes are symbolic
        return None


class SharedPastError(Exception):
    """Something besides attention reads the past of these layers; the graph is of no use any more."""

    def __init__(self, layers: frozenset[int]) -> None:
        super().__init__(f"layers {sorted(layers)} share their keys or values")
        self.layers = layers


def bind_call(
    gm: fx.GraphModule, report: Report, *, takes_static: bool = False, shared: frozenset[int] = frozenset()
) -> BoundCalls:
    """Rewrite the graph in place; without a layer to serve it stays as it is.

    Raises:
        SharedPastError: something else reads what is to go. To be done again on a fresh graph, with these ``shared``.
    """
    output = gm.graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    binder = CallBinder(gm, takes_static=takes_static, shared=shared)
    rewrite = rewrite_attention(gm, report, binder)
    dropped = {index for layer in binder.layers for index in layer.outputs or ()}
    stripped = [returned[index] for index in sorted(dropped)]
    output.args = (tuple(node for index, node in enumerate(returned) if index not in dropped),)
    # Slices that the caller kept; the others go with the attention that read them.
    unread = [node for node in stripped if not node.users and node not in rewrite.replaced]
    report.erased += clean_up(gm, [*rewrite.replaced, *unread])
    gm.recompile()
    _check_unread(gm, binder, rewrite)
    padding = None if binder.padding is None else binder.inputs[binder.padding]
    return BoundCalls(tuple(binder.layers), padding, len(returned), rewrite.kept, binder.num_fused)


def _check_unread(gm: fx.GraphModule, binder: CallBinder, rewrite: Rewrite) -> None:
    """Nothing but sizes may be left to read of a past that is no longer there, or of keys that will be such a past."""
    inputs, shared = gm.graph.find_nodes(op="placeholder"), set()
    for layer in binder.layers:
        if layer.outputs is None:
            continue
        held = [*(inputs[index] for index in layer.inputs or ()), layer.match.key, layer.match.value]
        readers = {user for node in held for user in node.users if isinstance(value_of(user), torch.Tensor)}
        if readers - {*rewrite.attends}:
            shared.add(layer.match.layer)
    if shared:
        raise SharedPastError(frozenset(shared))

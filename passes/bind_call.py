"""Move layers whose cache a graph takes in and hands out onto the cache that serves the running call.

Before                                                        After
    full_k = cat([past_k, k], 2); full_v = cat([past_v, v], 2)  out = kitty.attention(q, k, v, layer, scale, softcap, sinks)
    out = attention(q, full_k, full_v)                          return logits
    return logits, full_k, full_v

The graph no longer makes K and V of all columns: whoever runs it supplies what the caller expects in their places.
"""

import dataclasses

from torch import fx

from kitty_compile.passes.clean_up import clean_up
from kitty_compile.passes.nodes import op_name
from kitty_compile.passes.pipeline import Report
from kitty_compile.passes.records import AttentionMatch, MaskKind
from kitty_compile.passes.rewrite_attention import CallBinding, rewrite_attention


@dataclasses.dataclass(frozen=True)
class CallLayer:
    """A layer of the serving cache, in the order of the graph.

    Attributes:
        match: its attention.
        window: of a sliding layer, else None.
        kept: columns that the caller keeps of it; None for all.
        inputs: indices of past K and V among the graph's inputs; None when this is the first call.
        outputs: indices of K and V among what the graph returned before.
    """

    match: AttentionMatch
    window: int | None
    kept: int | None
    inputs: tuple[int, int] | None
    outputs: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BoundCalls:
    """The layers that a rewritten graph serves, where the mask of padded rows is among its inputs, and what was kept."""

    layers: tuple[CallLayer, ...]
    padding: int | None
    num_outputs: int
    kept: dict[fx.Node, str]


class CallBinder:
    """Takes layers whose K and V go in and out of the graph, all with the same padding."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.inputs = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        returned = gm.graph.output_node().args[0]
        self.outputs = {node: index for index, node in enumerate(returned) if isinstance(node, fx.Node)}  # type: ignore[arg-type]
        self.layers: list[CallLayer] = []
        self.padding: fx.Node | None = None

    def bind(self, match: AttentionMatch, mask: MaskKind) -> CallBinding | str:
        update = match.update
        if update.is_static:
            return "a cache of fixed length has its memory already"
        full = (self._returned(update.key_full, update.kept), self._returned(update.value_full, update.kept))
        if None in full:
            return "no cache takes up its keys and values"
        past = (update.key_past, update.value_past)
        if any(node is not None and node not in self.inputs for node in past):
            return "the past is not an input of the graph"
        if update.columns_dim != 2:
            return "the caller keeps columns before heads"
        if mask.kind == "sliding" and update.kept not in (None, mask.window, (mask.window or 0) - 1):
            return f"a window of {mask.window} does not fit the {update.kept} columns that the caller keeps"
        if self.layers and mask.padding is not self.padding:
            return "its padding is not that of the layers before"
        self.padding = mask.padding
        given = None if past[0] is None or past[1] is None else (self.inputs[past[0]], self.inputs[past[1]])
        layer = CallLayer(match, mask.window, update.kept, given, (self.outputs[full[0]], self.outputs[full[1]]))  # type: ignore[index]
        self.layers.append(layer)
        return CallBinding(len(self.layers) - 1)

    def _returned(self, node: fx.Node, kept: int | None) -> fx.Node | None:
        """What the graph returns of ``node``: itself, or its newest columns."""
        if kept is None:
            return node if node in self.outputs else None
        return next((user for user in node.users if op_name(user) == "slice" and user in self.outputs), None)


def bind_call(gm: fx.GraphModule, report: Report) -> BoundCalls:
    """Rewrite the graph in place; without a layer to serve it stays as it is."""
    output = gm.graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    binder = CallBinder(gm)
    rewrite = rewrite_attention(gm, report, binder)
    dropped = {index for layer in binder.layers for index in layer.outputs}
    stripped = [returned[index] for index in sorted(dropped)]
    output.args = (tuple(node for index, node in enumerate(returned) if index not in dropped),)
    # Slices that the caller kept; the others go with the attention that read them.
    unread = [node for node in stripped if not node.users and node not in rewrite.replaced]
    report.erased += clean_up(gm, [*rewrite.replaced, *unread])
    gm.recompile()
    padding = None if binder.padding is None else binder.inputs[binder.padding]
    return BoundCalls(tuple(binder.layers), padding, len(returned), rewrite.kept)

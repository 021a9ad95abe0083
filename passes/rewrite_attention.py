"""Put ``kitty::attend`` in the place of matched attentions.

Pattern: an attention with its K and V update (``match_attention``), its mask understood (``classify_mask``)

    full_k = cat([past_k, k], 2); full_v = cat([past_v, v], 2)
    out = scaled_dot_product_attention(q, repeat_kv(full_k), repeat_kv(full_v), mask, scale=s)

Replacement: one operator over the layer's packed cache and the call's own columns, state from a binder

    out = kitty.attend(q, k, v, columns, counts, *state, parameters, s, softcap, sinks, False)

The old nodes stay where they are, unread; ``clean_up`` takes them away. A layer that the binder does not take is left as it
is and reported with the binder's reason.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from kitty_compile.kernels.ops import OpParameters
from kitty_compile.passes.nodes import NoMatchError, dtype, is_static, same_size, shape, sizes, value_of
from kitty_compile.passes.pipeline import Report
from kitty_compile.passes.records import AttentionMatch, MaskKind

_PROVENANCE = ("nn_module_stack", "stack_trace", "source_fn_stack", "from_node", "seq_nr")


@dataclasses.dataclass(frozen=True)
class LayerBinding:
    """Where the state of one layer is in the graph.

    Attributes:
        state: nodes of ``LayerTensors``, in its order.
        parameters: the operator's integers.
        columns, counts: nodes for a padded call (see ``attend_torch.attend``); None when every column holds a token.
        is_empty: every row is empty whenever the graph runs.
    """

    state: tuple[fx.Node, ...]
    parameters: OpParameters
    columns: fx.Node | None = None
    counts: fx.Node | None = None
    is_empty: bool = False


class Binder(Protocol):
    """Supplies the state of layers; a string says why a layer is left as it is."""

    def bind(self, match: AttentionMatch, mask: MaskKind) -> LayerBinding | str: ...


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What was replaced (old nodes, unread now), and which attentions were kept for which reason."""

    replaced: tuple[fx.Node, ...]
    attends: tuple[fx.Node, ...]
    kept: dict[fx.Node, str]


def rewrite_attention(gm: fx.GraphModule, report: Report, binder: Binder) -> Rewrite:
    """Replace every attention of ``report.matches`` that ``binder`` takes."""
    replaced: list[fx.Node] = []
    attends: list[fx.Node] = []
    kept: dict[fx.Node, str] = {}
    with GraphTransformObserver(gm, "kitty_rewrite_attention"):
        for match in report.matches:
            binding = binder.bind(match, report.mask_of(match))
            if isinstance(binding, str):
                kept[match.node] = binding
                continue
            attends.append(_replace(match, binding))
            replaced.append(match.node)
    report.rewritten += len(replaced)
    return Rewrite(tuple(replaced), tuple(attends), kept)


def _replace(match: AttentionMatch, binding: LayerBinding) -> fx.Node:
    build = _Builder(match)
    key, value = build.by_heads(match.key), build.by_heads(match.value)
    wanted = dtype(match.key)
    query = build.reshape(match.query, (match.batch, match.num_heads, match.num_columns, match.key_dim))
    query = build.cast(query, wanted)
    attend = build.call(
        torch.ops.kitty.attend.default,
        query,
        key,
        value,
        binding.columns,
        binding.counts,
        *binding.state,
        list(binding.parameters),
        match.scale,
        match.softcap or 0.0,
        match.sinks,
        binding.is_empty,
    )
    output = build.reshape(build.cast(attend, dtype(match.node)), shape(match.node), like=match.node)
    match.node.replace_all_uses_with(output)
    return attend


class _Builder:
    """Inserts calls before a matched node, with fake values and the node's provenance."""

    def __init__(self, match: AttentionMatch) -> None:
        self.match, self.graph = match, match.node.graph
        self.fake_mode = value_of(match.node).fake_mode
        self._sizes: dict[str, fx.Node] = {}

    def call(self, target: Any, *args: Any) -> fx.Node:
        with self.graph.inserting_before(self.match.node):
            node = self.graph.call_function(target, args)
        node.meta.update({name: self.match.node.meta[name] for name in _PROVENANCE if name in self.match.node.meta})
        with self.fake_mode:
            node.meta["val"] = target(*fx.node.map_arg(args, value_of))
        return node

    def by_heads(self, node: fx.Node) -> fx.Node:
        return node if self.match.update.columns_dim == 2 else self.call(torch.ops.aten.transpose.int, node, 1, 2)

    def cast(self, node: fx.Node, wanted: torch.dtype) -> fx.Node:
        return node if dtype(node) == wanted else self.call(torch.ops.aten.to.dtype, node, wanted)

    def reshape(self, node: fx.Node, target: Sequence[int], like: fx.Node | None = None) -> fx.Node:
        """``node`` with the sizes of ``target`` in the traced call, symbols where rows and columns are symbols."""
        symbols = sizes(like) if like is not None else self._four(target)
        current = sizes(node)
        if len(current) == len(symbols) and all(map(same_size, current, symbols)):
            return node
        wanted: list[Any] = []
        for size in symbols:
            known = size if isinstance(size, int) else self._size_node(size)
            wanted.append(-1 if known is None else known)
        if wanted.count(-1) > 1:
            raise NoMatchError(f"the sizes of {like or node} cannot be expressed in those of the keys")
        return self.call(torch.ops.aten.reshape.default, node, wanted)

    def _four(self, target: Sequence[int]) -> tuple[Any, ...]:
        """[batch, heads, T, head_dim] with the symbols of the key in the first and third place."""
        own = sizes(self.match.key)
        return (own[0], target[1], own[self.match.update.columns_dim], target[3])

    def _size_node(self, size: Any) -> fx.Node | int | None:
        """A node for the batch or the call's columns; None for any other symbol."""
        own = sizes(self.match.key)
        for dim in (0, self.match.update.columns_dim):
            if is_static(size):
                return int(size)
            if same_size(size, own[dim]):
                name = str(size)
                if name not in self._sizes:
                    self._sizes[name] = self.call(torch.ops.aten.sym_size.int, self.match.key, dim)
                return self._sizes[name]
        return None

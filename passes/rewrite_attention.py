"""Put ``kitty::attend`` in the place of matched attentions.

Pattern: an attention with its K and V update (``match_attention``), its mask understood (``classify_mask``)

    full_k = cat([past_k, k], 2); full_v = cat([past_v, v], 2)
    out = scaled_dot_product_attention(q, repeat_kv(full_k), repeat_kv(full_v), mask, scale=s)

Replacement: one operator over the layer's packed cache and the call's own columns. A binder says where its state is, in
nodes of the graph, or behind the running call

    out = kitty.attend(q, k, v, columns, counts, *state, parameters, s, softcap, sinks, False)
    out = kitty.attention(q, k, v, layer, s, softcap, sinks)

The old nodes stay where they are, unread; ``clean_up`` takes them away. A layer that the binder does not take is left as it
is and reported with the binder's reason.
"""

import dataclasses
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from kitty_compile.kernels import serving  # noqa: F401 (registers kitty::attention)
from kitty_compile.kernels.layout import HEAD_DIM_ALIGNMENT, SUPPORTED_DTYPES
from kitty_compile.kernels.ops import OpParameters
from kitty_compile.passes.insert_nodes import Inserter
from kitty_compile.passes.nodes import dtype, sizes, value_of
from kitty_compile.passes.pipeline import Report
from kitty_compile.passes.records import AttentionMatch, MaskKind


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


@dataclasses.dataclass(frozen=True)
class CallBinding:
    """The cache that serves the running call has the state, as its layer ``layer`` (see ``kernels/serving.py``).

    Attributes:
        follows_positions: the graph says at which columns of a static cache the call's own are.
        handle: names another cache than the one that serves, with the ``padding`` of the call.
    """

    layer: int
    follows_positions: bool = False
    handle: fx.Node | int = 0
    padding: fx.Node | None = None


class Binder(Protocol):
    """Supplies the state of layers; a string says why a layer is left as it is."""

    def bind(self, match: AttentionMatch, mask: MaskKind) -> LayerBinding | CallBinding | str: ...


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
            binding = _unfit(match) or binder.bind(match, report.mask_of(match))
            if isinstance(binding, str):
                kept[match.node] = binding
                continue
            attends.append(_replace(match, binding))
            replaced.append(match.node)
    report.rewritten += len(replaced)
    return Rewrite(tuple(replaced), tuple(attends), kept)


def _unfit(match: AttentionMatch) -> str | None:
    """Why pages cannot hold the layer's keys and values, whoever binds them."""
    for head_dim in (match.key_dim, match.value_dim):
        if head_dim % HEAD_DIM_ALIGNMENT:
            return f"head_dim must be a multiple of {HEAD_DIM_ALIGNMENT}, got {head_dim}"
    kinds = dtype(match.key), dtype(match.value)
    if kinds[0] not in SUPPORTED_DTYPES or kinds[0] != kinds[1]:
        return f"keys and values must be both float16, bfloat16 or float32, got {kinds[0]} and {kinds[1]}"
    return None


def _replace(match: AttentionMatch, binding: LayerBinding | CallBinding) -> fx.Node:
    insert = Inserter(match.node)
    own, columns_dim = sizes(match.key), match.update.columns_dim
    known = {str(own[dim]): (match.key, dim) for dim in (0, columns_dim)}
    wanted = (own[0], match.num_heads, own[columns_dim], match.key_dim)
    query = insert.cast(insert.reshape(match.query, wanted, known), dtype(match.key))
    key, value = (_by_heads(node, columns_dim, insert) for node in (match.key, match.value))
    target, arguments = _call_of(match, binding, insert)
    attend = insert(target, query, key, value, *arguments)
    output = insert.reshape(insert.cast(attend, dtype(match.node)), sizes(match.node), known)
    match.node.replace_all_uses_with(insert.lay_out_like(output, match.node))
    return attend


def _call_of(
    match: AttentionMatch, binding: LayerBinding | CallBinding, insert: Inserter
) -> tuple[torch._ops.OpOverload, tuple[Any, ...]]:
    """The operator, and its arguments behind query, key and value."""
    numbers = (match.scale, match.softcap or 0.0, match.sinks)
    if isinstance(binding, CallBinding):
        positions = positions_of(match, insert) if binding.follows_positions else None
        where = (positions, binding.handle, binding.padding)
        return torch.ops.kitty.attention.default, (binding.layer, *numbers, *where)
    state = (binding.columns, binding.counts, *binding.state, list(binding.parameters))
    return torch.ops.kitty.attend.default, (*state, *numbers, binding.is_empty)


def positions_of(match: AttentionMatch, insert: Inserter) -> fx.Node:
    """Where a static update writes the call's columns, or the first of them: integers of any rank."""
    positions = match.update.positions
    if isinstance(positions, fx.Node) and isinstance(value_of(positions), torch.Tensor):
        return positions
    device = value_of(match.key).device
    return insert(torch.ops.aten.scalar_tensor.default, positions, dtype=torch.int64, device=device)


def _by_heads(node: fx.Node, columns_dim: int, insert: Inserter) -> fx.Node:
    return node if columns_dim == 2 else insert(torch.ops.aten.transpose.int, node, 1, 2)

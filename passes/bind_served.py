"""Bind the attentions of a captured forward, ``kitty::attention``, to buffers of its module.

Before                                          After
    out = kitty.attention(q, k, v, 0, s, c, sinks)
                                                  columns = argsort(~mask); counts = mask.sum(1)   (once)
                                                  key_pages = self.kitty_0_key_pages; ...          (non-persistent buffers)
                                                  out = kitty.attend(q, k, v, columns, counts, *state, ..., False)
        of a layer with a sliding window          out = kitty.attend_window(q, k, v, mask, *ring, window, ...)

The buffers have ``rows`` rows, of which a call takes as many as it brings. Every row owns its pages.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from kitty_compile.kernels import serving  # noqa: F401 (registers kitty::attention)
from kitty_compile.kernels.layout import SUPPORTED_DTYPES, LayerTensors
from kitty_compile.kernels.ops import OpParameters
from kitty_compile.passes.bind_buffers import allocate_pages, allocate_table
from kitty_compile.passes.insert_nodes import Inserter, fake_mode_of
from kitty_compile.passes.nodes import dtype, sizes, value_of

PREFIX = "kitty_"
TABLE = "kitty_page_table"
_RING = ("ring_key", "ring_value", "ring_real", "position")
aten = torch.ops.aten


def bind_served(
    gm: fx.GraphModule,
    windows: Sequence[int | None],
    parameters_of: Callable[[int, int, int, int], OpParameters],
    *,
    mask: fx.Node,
    rows: int,
    max_length: int,
) -> None:
    """Replace every ``kitty::attention`` of ``gm``, in place.

    Args:
        windows: of each layer that the attentions name, None where all past tokens are seen.
        parameters_of: the operator's integers for (layer, key_dim, value_dim, KV heads).
        mask: bool [B, T], the call's columns that hold a token.
        rows: rows of the buffers, the largest batch. max_length: tokens that a row can come to hold.

    Raises:
        ValueError: a layer attends twice or never, or its keys and values cannot be paged.
    """
    served = gm.graph.find_nodes(op="call_function", target=torch.ops.kitty.attention.default)
    order = [int(node.args[3]) for node in served]
    if sorted(order) != list(range(len(windows))):
        raise ValueError(f"each of the {len(windows)} layers must attend once in a forward, got layers {sorted(order)}")
    binder = _Binder(gm, parameters_of, mask, rows, max_length)
    with GraphTransformObserver(gm, "kitty_bind_served"):
        for node, index in zip(served, order, strict=True):
            node.replace_all_uses_with(binder.bind(node, windows[index]))
            gm.graph.erase_node(node)
    gm.recompile()


class _Binder:
    def __init__(
        self,
        gm: fx.GraphModule,
        parameters_of: Callable[[int, int, int, int], OpParameters],
        mask: fx.Node,
        rows: int,
        max_length: int,
    ) -> None:
        self.gm, self.parameters_of, self.mask = gm, parameters_of, mask
        self.rows, self.max_length = rows, max_length
        self.device: torch.device = value_of(mask).device
        self.first = mask.next
        while self.first.op == "placeholder":
            self.first = self.first.next
        insert = Inserter(self.first)
        # Tokens before pads, each in its order: see ``attend_torch.attend``.
        order = insert(aten.argsort.stable, insert(aten.logical_not.default, mask), stable=True, dim=1)
        self.columns = insert(aten.to.dtype, order, torch.int32)
        self.counts = insert(aten.sum.dim_IntList, mask, [1], dtype=torch.int32)
        self.table: fx.Node | None = None

    def bind(self, node: fx.Node, window: int | None) -> fx.Node:
        query, key, value, index, scale, softcap, sinks = cast(Any, node.args[:7])
        parameters = self._parameters(index, key, value)
        call, numbers = (query, key, value), (scale, softcap, sinks)
        insert = Inserter(node)
        if window is not None:
            ring = self._ring(parameters, window, dtype(key))
            return insert(torch.ops.kitty.attend_window.default, *call, self.mask, *ring, window, *numbers)
        where = (self.columns, self.counts, *self._pages(parameters, dtype(key)))
        return insert(torch.ops.kitty.attend.default, *call, *where, list(parameters), *numbers, False)

    def _parameters(self, index: Any, key: Any, value: Any) -> OpParameters:
        kinds = dtype(key), dtype(value)
        if kinds[0] not in SUPPORTED_DTYPES or kinds[0] != kinds[1]:
            raise ValueError(
                f"keys and values must be both float16, bfloat16 or float32, got {kinds[0]} and {kinds[1]} in layer {index}"
            )
        _, num_kv_heads, _, key_dim = sizes(key)
        return self.parameters_of(index, key_dim, sizes(value)[3], num_kv_heads)

    def _pages(self, parameters: OpParameters, kind: torch.dtype) -> tuple[fx.Node, ...]:
        tensors = allocate_pages(parameters, kind, self.rows, self.max_length, self.device)
        if self.table is None:
            self.table = self._buffer(TABLE, allocate_table(parameters, self.rows, self.max_length, self.device))
        fields = [name for name in LayerTensors._fields if name != "page_table"]
        return (*(self._buffer(f"{PREFIX}{parameters.layer}_{name}", tensors[name]) for name in fields), self.table)

    def _ring(self, parameters: OpParameters, window: int, kind: torch.dtype) -> tuple[fx.Node, ...]:
        ring, heads = window + parameters.rollback_window, parameters.num_kv_heads
        tensors = (
            torch.zeros(self.rows, heads, ring, parameters.key_dim, dtype=kind, device=self.device),
            torch.zeros(self.rows, heads, ring, parameters.value_dim, dtype=kind, device=self.device),
            torch.zeros(self.rows, ring, dtype=torch.bool, device=self.device),
            torch.zeros(1, dtype=torch.int64, device=self.device),
        )
        named = zip(_RING, tensors, strict=True)
        return tuple(self._buffer(f"{PREFIX}{parameters.layer}_{name}", tensor) for name, tensor in named)

    def _buffer(self, name: str, tensor: torch.Tensor) -> fx.Node:
        self.gm.register_buffer(name, tensor, persistent=False)
        with self.gm.graph.inserting_before(self.first):
            node = self.gm.graph.get_attr(name)
        node.meta["val"] = fake_mode_of(self.gm.graph).from_tensor(tensor, static_shapes=True)
        return node

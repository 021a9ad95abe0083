"""Insert operator calls into a graph, with fake values and the provenance of what they replace."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kitty_compile.passes.nodes import NoMatchError, dtype, hint, same_size, sizes, value_of

_PROVENANCE = ("nn_module_stack", "stack_trace", "source_fn_stack", "from_node", "seq_nr")


class Inserter:
    """``insert(operator, *args)`` puts a call before ``anchor`` and returns its node."""

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor, self.graph = anchor, anchor.graph
        self.fake_mode = fake_mode_of(self.graph)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update({name: self.anchor.meta[name] for name in _PROVENANCE if name in self.anchor.meta})
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), self._fake)
        with self.fake_mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def _fake(self, node: fx.Node) -> Any:
        value = value_of(node)
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self.fake_mode.from_tensor(value, static_shapes=True) if is_real else value

    def cast(self, node: fx.Node, wanted: torch.dtype) -> fx.Node:
        return node if dtype(node) == wanted else self(torch.ops.aten.to.dtype, node, wanted)

    def reshape(self, node: fx.Node, wanted: Sequence[Any], known: dict[str, tuple[fx.Node, int]]) -> fx.Node:
        """``node`` with the sizes ``wanted``; symbols among them are read from ``known``, by name: (tensor, dimension)."""
        current = sizes(node)
        if len(current) == len(wanted) and all(map(same_size, current, wanted)):
            return node
        target: list[Any] = []
        for size in wanted:
            if isinstance(size, int):
                target.append(size)
            else:
                target.append(self(torch.ops.aten.sym_size.int, *known[str(size)]) if str(size) in known else -1)
        if target.count(-1) > 1:
            raise NoMatchError(f"sizes {list(wanted)} cannot be expressed in those of the keys")
        return self(torch.ops.aten.reshape.default, node, target)

    def lay_out_like(self, node: fx.Node, other: fx.Node) -> fx.Node:
        """``node`` with the order of dimensions in memory of ``other``, on which a later ``view`` may rest."""
        order, rank = _memory_order(other), len(sizes(node))
        if order == _memory_order(node):
            return node
        back = sorted(range(rank), key=order.__getitem__)
        packed = self(torch.ops.aten.contiguous.default, self(torch.ops.aten.permute.default, node, order))
        return self(torch.ops.aten.permute.default, packed, back)


def _memory_order(node: fx.Node) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    strides = [hint(stride) for stride in value_of(node).stride()]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph was captured in."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            mode: FakeTensorMode = value.fake_mode
            return mode
    raise ValueError("the graph must come with fake values, got none")

"""Make a graph that counts its columns from zero count them from where its cache ends.

Before                                               After
    positions = arange(t)                              positions = arange(t) + past
    x = token + wpe(positions)                         x = token + wpe(positions)
    cos = self.cos[:t]                                 cos = index_select(self.cos, 0, arange(t) + past)

``past`` is a tensor of one element, so that no size depends on it. It is to run after the attentions are rewritten and
cleaned up: the masks, which count columns too, are gone by then. Whatever else counts columns is refused.
"""

import torch
from torch import fx

from kitty_compile.passes.clean_up import clean_up
from kitty_compile.passes.evaluate import Setting, Subgraph, symbol_hints
from kitty_compile.passes.insert_nodes import Inserter
from kitty_compile.passes.nodes import (
    NoMatchError,
    arguments,
    constant_of,
    op_name,
    order_of,
    same_size,
    sizes,
    value_of,
    written_nodes,
)

_SAME_EVERYWHERE = frozenset({"ones", "zeros", "full", "empty", "new_ones", "new_zeros", "new_full", "new_empty"})
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
aten = torch.ops.aten


def shift_positions(gm: fx.GraphModule, columns: torch.SymInt, past: fx.Node) -> int:
    """Shift everything that counts the call's ``columns`` from zero by ``past``, an int64 node of one element.

    Returns:
        How many nodes were shifted.

    Raises:
        NoMatchError: something counts columns in a way that is not understood.
    """
    made = _made_from_sizes(gm, columns)
    counting = [
        node
        for node in gm.graph.nodes
        if node in made and not made & {*node.all_input_nodes} and op_name(node) not in _SAME_EVERYWHERE
    ]
    _check_sums(gm, columns, made, counting)
    for node in counting:
        _shift(gm, node, past)
    gm.graph.lint()
    return len(counting)


def _made_from_sizes(gm: fx.GraphModule, columns: torch.SymInt) -> set[fx.Node]:
    """Tensors with the call's columns as a dimension that are computed from sizes and constants alone."""
    constant: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" and constant_of(node) is not None:
            constant.add(node)
        if node.op != "call_function" or not isinstance(value_of(node), torch.Tensor) or written_nodes(node):
            continue
        if all(operand in constant or isinstance(value_of(operand), _NUMBERS) for operand in node.all_input_nodes):
            constant.add(node)
    return {node for node in constant if any(same_size(size, columns) for size in sizes(node))}


def _shift(gm: fx.GraphModule, node: fx.Node, past: fx.Node) -> None:
    match op_name(node):
        case "arange":
            _shift_arange(node, past)
        case "slice":
            _shift_slice(gm, node, past)
        case other:
            raise NoMatchError(f"{node} ({other}) counts the call's columns in a way that is not understood")


def _shift_arange(node: fx.Node, past: fx.Node) -> None:
    named = arguments(node)
    if named.get("start") not in (None, 0) or named.get("step") not in (None, 1):
        raise NoMatchError(f"{node} does not count the call's columns one by one")
    readers = list(node.users)
    moved = Inserter(node.next)(aten.add.Tensor, node, past)
    for reader in readers:
        reader.replace_input_with(node, moved)


def _shift_slice(gm: fx.GraphModule, node: fx.Node, past: fx.Node) -> None:
    """The first columns of a table become those behind ``past``."""
    named = arguments(node)
    if (named["start"] or 0) != 0 or named["step"] != 1:
        raise NoMatchError(f"{node} does not take the first columns of a table")
    insert = Inserter(node)
    own = insert(aten.arange.default, named["end"], device=value_of(node).device)
    table = insert(aten.index_select.default, named["self"], named["dim"], insert(aten.add.Tensor, own, past))
    node.replace_all_uses_with(table)
    clean_up(gm, [node])


def _check_sums(gm: fx.GraphModule, columns: torch.SymInt, made: set[fx.Node], counting: list[fx.Node]) -> None:
    """Ones may be summed up to column numbers, which would go on starting at zero."""
    order = order_of(gm.graph)
    hints = symbol_hints(value_of(node) for node in gm.graph.find_nodes(op="placeholder"))
    for node in made:
        if all(user in made for user in node.users) or _depends_on(node, counting, made):
            continue
        value = Subgraph([node], order, reader=gm.graph.output_node()).run({}, Setting(symbols=hints))[0]
        for dim, size in enumerate(sizes(node)):
            if same_size(size, columns) and not bool((value == value.narrow(dim, 0, 1)).all()):
                raise NoMatchError(f"{node} counts the call's columns in a way that is not understood")


def _depends_on(node: fx.Node, sources: list[fx.Node], made: set[fx.Node]) -> bool:
    queue, seen = [node], {node}
    while queue:
        current = queue.pop()
        if current in sources:
            return True
        for operand in current.all_input_nodes:
            if operand in made and operand not in seen:
                seen.add(operand)
                queue.append(operand)
    return False

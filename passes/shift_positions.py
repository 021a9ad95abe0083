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


def shift_positions(gm: fx.GraphModule, columns: torch.SymInt, past: fx.Node) -> int:
    """Shift everything that counts the call's ``columns`` from zero by ``past``, an int64 node of one element.

    Returns:
        How many nodes were shifted.

    Raises:
        NoMatchError: something counts columns in a way that is not understood.
    """
    made = _made_from_sizes(gm, columns)
    sources = [node for node in made if not any(operand in made for operand in node.all_input_nodes)]
    shifted = [node for node in sources if op_name(node) not in _SAME_EVERYWHERE and _shift(node, columns, past)]
    gm.graph.lint()
    _check_rest(gm, columns, made, sources)
    return len(shifted)


def _made_from_sizes(gm: fx.GraphModule, columns: torch.SymInt) -> set[fx.Node]:
    """Tensors with the call's columns as a dimension that are computed from sizes and constants alone."""
    constant: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" and constant_of(node) is not None:
            constant.add(node)
        is_tensor = isinstance(value_of(node), torch.Tensor)
        if node.op != "call_function" or not is_tensor or written_nodes(node):
            continue
        tensors = [operand for operand in node.all_input_nodes if isinstance(value_of(operand), torch.Tensor)]
        if all(operand in constant for operand in tensors):
            constant.add(node)
    return {node for node in constant if any(same_size(size, columns) for size in sizes(node))}


def _shift(node: fx.Node, columns: torch.SymInt, past: fx.Node) -> bool:
    """Shift one source of column numbers; False when it has no reader left."""
    if not node.users:
        return False
    match op_name(node):
        case "arange":
            _shift_arange(node, past)
        case "slice" | "narrow":
            _shift_slice(node, columns, past)
        case other:
            raise NoMatchError(f"{node} ({other}) counts the call's columns in a way that is not understood")
    return True


def _shift_arange(node: fx.Node, past: fx.Node) -> None:
    named = arguments(node)
    if named.get("start") not in (None, 0) or named.get("step") not in (None, 1) or named.get("dtype") == torch.float32:
        raise NoMatchError(f"{node} does not count the call's columns one by one")
    with node.graph.inserting_after(node):
        moved = node.graph.call_function(torch.ops.aten.add.Tensor, (node, past))
    moved.meta.update(node.meta)
    node.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
    _follow(moved, past)


def _shift_slice(node: fx.Node, columns: torch.SymInt, past: fx.Node) -> None:
    """The first columns of a table become those behind ``past``."""
    named = arguments(node)
    if (named.get("start") or 0) != 0 or named.get("step") not in (None, 1):
        raise NoMatchError(f"{node} does not take the first columns of a table")
    size = next(operand for operand in node.all_input_nodes if not isinstance(value_of(operand), torch.Tensor))
    graph = node.graph
    with graph.inserting_before(node):
        own = graph.call_function(torch.ops.aten.arange.default, (size,), {"device": value_of(node).device})
        own.meta["val"] = _run_fake(own)
        index = graph.call_function(torch.ops.aten.add.Tensor, (own, past))
        index.meta["val"] = own.meta["val"]
        table = graph.call_function(torch.ops.aten.index_select.default, (named["self"], named["dim"], index))
    table.meta.update(node.meta)
    for inserted in (index, table):
        _follow(inserted, past)
    node.replace_all_uses_with(table)
    clean_up(_module_of(graph), [node])


def _follow(node: fx.Node, past: fx.Node) -> None:
    """Bring ``past`` before its first reader."""
    order = order_of(node.graph)
    if order[past] > order[node]:
        raise NoMatchError(f"{node} is computed before the number of cached columns is known")


def _run_fake(node: fx.Node) -> object:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    fake_mode = next(
        value.fake_mode
        for other in node.graph.nodes
        if isinstance(value := value_of(other), torch._subclasses.FakeTensor)
    )
    with fake_mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _module_of(graph: fx.Graph) -> fx.GraphModule:
    assert isinstance(graph.owning_module, fx.GraphModule)
    return graph.owning_module


def _check_rest(gm: fx.GraphModule, columns: torch.SymInt, made: set[fx.Node], sources: list[fx.Node]) -> None:
    """Tensors that are the same everywhere may be summed up to column numbers, which then still start at zero."""
    order = order_of(gm.graph)
    hints = symbol_hints(value_of(node) for node in gm.graph.find_nodes(op="placeholder"))
    for node in made & set(order):
        is_frontier = any(user not in made for user in node.users)
        if not is_frontier or node in sources or _counts_from_past(node, made):
            continue
        subgraph = Subgraph([node], order, reader=gm.graph.output_node())
        value = subgraph.run({}, Setting(symbols=hints))[0]
        for dim, size in enumerate(sizes(node)):
            if same_size(size, columns) and not bool((value == value.narrow(dim, 0, 1)).all()):
                raise NoMatchError(f"{node} counts the call's columns in a way that is not understood")


def _counts_from_past(node: fx.Node, made: set[fx.Node]) -> bool:
    """Does it depend on a source that was shifted?"""
    queue, seen = [node], {node}
    while queue:
        for operand in queue.pop().all_input_nodes:
            if operand not in made and operand.op == "call_function" and isinstance(value_of(operand), torch.Tensor):
                return True
            if operand in made and operand not in seen:
                seen.add(operand)
                queue.append(operand)
    return False

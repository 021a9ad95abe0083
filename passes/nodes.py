"""What a node of a pre-dispatch ATen graph says: its sizes, its arguments, what it writes to."""

import functools
import operator
import re
from typing import Any

import torch
from torch import fx

# Where normalize leaves the real tensor of a parameter, a buffer or a lifted constant.
CONSTANT = "kitty_constant"

# What hands its argument through without saying so in its schema, and what claims to write but changes no element.
_ALIASES_WITHOUT_SCHEMA = frozenset({"dropout", "type_as"})
_WRITES_NOTHING = frozenset({"detach_", "squeeze_", "unsqueeze_", "transpose_", "t_"})

_READS_NO_ELEMENT = frozenset({"_assert_tensor_metadata", "sym_size", "sym_stride", "sym_numel"})


class NoMatchError(Exception):
    """A pattern does not hold; the message is the reason that a report shows."""


def op_name(node: object) -> str:
    """ "view" for a call of any overload of ``aten.view``, "kitty::attend" for other namespaces, else ""."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name: str = node.target._schema.name
    return name.removeprefix("aten::")


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator call by name, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    named: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, default)
        named[argument.name] = value
    return named


def value_of(node: fx.Node) -> Any:
    """The fake value: a tensor, a SymInt, a tuple; None when there is none."""
    value = node.meta.get("val", node.meta.get("example_value"))
    return constant_of(node) if value is None and node.op == "get_attr" else value


def hint(size: object) -> int:
    """The integer that a size has in the traced call."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        if known is None:
            raise NoMatchError("a size depends on data")
        return int(known)
    if not isinstance(size, int):
        raise NoMatchError(f"a size is a {type(size).__name__}")
    return size


def sizes(node: object) -> tuple[Any, ...]:
    """The shape of a tensor node, symbols kept."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise NoMatchError(f"{node} is not a tensor")
    return tuple(value.shape)


def shape(node: object) -> tuple[int, ...]:
    """The shape of a tensor node in the traced call."""
    return tuple(hint(size) for size in sizes(node))


def dtype(node: fx.Node) -> torch.dtype:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        raise NoMatchError(f"{node} is not a tensor")
    return value.dtype


def is_static(size: object) -> bool:
    """Is this size the same in every call of the graph?"""
    return isinstance(size, int) or (isinstance(size, torch.SymInt) and size.node.expr.is_number)


def same_size(first: object, second: object) -> bool:
    """Are two sizes equal in every call of the graph, as far as the symbols say? Adds no guard."""
    return str(_expression(first)) == str(_expression(second))


def _expression(size: object) -> object:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def constant_of(node: object) -> torch.Tensor | None:
    """The real tensor of a parameter, buffer or lifted constant; None for anything else."""
    if not isinstance(node, fx.Node):
        return None
    found: object = node.meta.get(CONSTANT)
    if node.op == "get_attr":
        found = node.graph.owning_module
        for name in str(node.target).split("."):
            found = getattr(found, name, None)
    return found if isinstance(found, torch.Tensor) else None


def is_graph_input(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op in ("placeholder", "get_attr")


@functools.lru_cache(maxsize=4096)
def _written_arguments(target: torch._ops.OpOverload) -> tuple[int, ...]:
    return tuple(
        index
        for index, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The argument nodes that a call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or op_name(node) in _WRITES_NOTHING:
        return ()
    schema = node.target._schema.arguments
    named = (
        node.args[index] if index < len(node.args) else node.kwargs.get(schema[index].name)
        for index in _written_arguments(node.target)
    )
    return tuple(argument for argument in named if isinstance(argument, fx.Node))


def is_alias(node: fx.Node) -> bool:
    """May the result share memory with the first argument (a view, or an in-place call)?"""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
        return False
    schema = node.target._schema
    return op_name(node) in _ALIASES_WITHOUT_SCHEMA or any(result.alias_info is not None for result in schema.returns)


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(graph.nodes)}


def readers(node: fx.Node) -> list[fx.Node]:
    """The users that read elements, not only sizes or dtype."""
    return [user for user in node.users if op_name(user) not in _READS_NO_ELEMENT]


def is_pointwise(node: fx.Node) -> bool:
    """Is this an operator that works element by element, in place or not?"""
    name = op_name(node)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name or packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def writers(node: fx.Node, order: dict[fx.Node, int], before: fx.Node, after: fx.Node | None = None) -> list[fx.Node]:
    """The calls that write to ``node`` or to a view of it, in graph order, before ``before`` (and after ``after``)."""
    found, queue, seen = [], [node], {node}
    while queue:
        for user in queue.pop().users:
            if user in seen or order[user] >= order[before]:
                continue
            if any(written in seen for written in written_nodes(user)) and (
                after is None or order[user] > order[after]
            ):
                found.append(user)
            if is_alias(user) and user.args and user.args[0] in seen:
                seen.add(user)
                queue.append(user)
    return sorted(found, key=order.__getitem__)


def is_written(node: fx.Node) -> bool:
    """Does any call of the graph write to ``node`` or to a view of it?"""
    order = order_of(node.graph)
    return bool(writers(node, order, before=node.graph.output_node()))


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that a node comes from, "" when the front end kept none."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    return re.sub(r"^(L\[[^\]]*\](\[[^\]]*\])*|L__self__)\.?", "", path)

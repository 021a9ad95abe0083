"""Erase what a rewrite has made dead, and nothing else.

Before                                           After
    scores = matmul(q, kT)                         attend = kitty.attend(q, k, v, ...)
    weights = softmax(scores)                      linear = linear(attend)
    out = matmul(weights, v)      <- replaced
    attend = kitty.attend(q, k, v, ...)
    linear = linear(attend)

Never ``Graph.eliminate_dead_code``: on a graph with in-place calls it takes a ``copy_`` without users for dead and drops the
write. Here a node goes only if it lost its last reader to the rewrite, and an in-place call only if what it wrote to is
gone as well.
"""

from collections.abc import Iterable

import torch
from torch import fx

from kitty_compile.passes.nodes import is_alias, op_name, order_of, written_nodes
from kitty_compile.passes.trace_axes import is_inert_dropout

_CHECKS_ONLY = frozenset({"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"})


def clean_up(gm: fx.GraphModule, replaced: Iterable[fx.Node]) -> int:
    """Erase the ``replaced`` nodes, which nothing reads any more, and all that only they have read.

    Returns:
        How many nodes were erased.

    Raises:
        ValueError: a replaced node is still read.
    """
    order = order_of(gm.graph)
    pending, erased = {*replaced}, 0
    for node in pending:
        _erase_checks(node)
        if still := [user for user in node.users if user not in pending]:
            raise ValueError(f"replaced nodes must not be read any more, but {node} is read by {still[0]}")
    first = frozenset(pending)
    while pending:
        node = max(pending, key=order.__getitem__)
        pending.discard(node)
        _erase_checks(node)
        if node.users or (node not in first and not _may_go(node, order)):
            continue
        pending.update(operand for operand in node.all_input_nodes if operand.op in ("call_function", "get_attr"))
        gm.graph.erase_node(node)
        erased += 1
    return erased


def _erase_checks(node: fx.Node) -> None:
    """Assertions about a tensor that is not made any more, and results that nobody ever read."""
    if all(op_name(user) in _CHECKS_ONLY or (not user.users and not user.is_impure()) for user in node.users):
        for user in list(node.users):
            node.graph.erase_node(user)


def _may_go(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    if node.op == "get_attr":
        return True
    if op_name(node) == "dropout" and is_inert_dropout(node):
        return True
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return False  # The generator would be left in another state.
    written = written_nodes(node)
    if not written:
        return not node.is_impure()
    root = written[0]
    while (is_alias(root) or written_nodes(root)) and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    return root.op == "call_function" and not _is_read_after(root, node, order)


def _is_read_after(root: fx.Node, write: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Does anything read ``root`` or a view of it behind ``write``?"""
    queue, seen = [root], {root}
    while queue:
        for user in queue.pop().users:
            if user is not write and order[user] > order[write]:
                return True
            if user not in seen and is_alias(user):
                seen.add(user)
                queue.append(user)
    return False

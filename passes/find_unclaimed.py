"""Find caches that a graph updates although no matched attention reads them. Reads the graph, changes nothing.

Before                                                       Report
    full = cat([past, new], 2); return full                    "a cache is updated that no attention reads"
    cache.index_copy_(2, positions, new)                       the same

What they are for is not known, so a model that has them cannot be taken for fully rewritten.
"""

from collections.abc import Sequence

import torch
from torch import fx

from kitty_compile.passes.nodes import arguments, is_graph_input, module_path, op_name, shape, value_of, written_nodes
from kitty_compile.passes.records import AttentionMatch, Match, MatchFailure
from kitty_compile.passes.trace_axes import source_of


def find_unclaimed(gm: fx.GraphModule, matches: Sequence[Match]) -> list[MatchFailure]:
    """Updates of caches [batch, heads, columns, head_dim] outside of all matches, and outside of modules that failed."""
    claimed: set[fx.Node | None] = set()
    reported = {match.module_path for match in matches if isinstance(match, MatchFailure)}
    for match in matches:
        if isinstance(match, AttentionMatch):
            claimed |= {match.update.key_full, match.update.value_full, match.update.key_past, match.update.value_past}
    return [
        MatchFailure(node, "a cache is updated that no attention reads", module_path(node))
        for node in gm.graph.nodes
        if _is_update(node) and not claimed & {node, _past_of(node)} and module_path(node) not in reported
    ]


def _is_update(node: fx.Node) -> bool:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not value.is_floating_point():
        return False
    if op_name(node) in ("index_copy_", "index_put_"):
        return any(is_graph_input(written) for written in written_nodes(node))
    if op_name(node) != "cat" or arguments(node)["dim"] % 4 == 3:
        return False
    past = _past_of(node)
    return past is not None and is_graph_input(past) and _is_returned(node)


def _past_of(node: fx.Node) -> fx.Node | None:
    if op_name(node) != "cat":
        written = written_nodes(node)
        return written[0] if written else None
    parts = [part for part in arguments(node)["tensors"] if 0 not in shape(part)]
    past: fx.Node | None = parts[0] if len(parts) == 2 else None
    while past is not None and not is_graph_input(past):
        past = source_of(past)
    return past


def _is_returned(node: fx.Node) -> bool:
    return any(
        user.op == "output" or (op_name(user) == "slice" and any(reader.op == "output" for reader in user.users))
        for user in node.users
    )

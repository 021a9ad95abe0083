"""Find how a call's keys and values join a cache. Reads the graph, changes nothing.

Before (what the model wrote)                         Record
    torch.cat([past, k], dim=-2)                          cat         past is a graph input
    cache.index_copy_(2, positions, k)                    index_copy  StaticCache
    k_cache[:, :, positions] = k                          index_put   gpt-fast
    cache[:, start : start + t] = k                       slice       reads cache[:, : start + t]
    k                                                     none        nanoGPT
    kitty.materialize(k, v, handle, layer, past)[0]       kitty       KittyCache in a model that was not applied
"""

import dataclasses
import operator
from typing import Literal, cast

import torch
from torch import fx

from kitty_compile.passes.nodes import (
    NoMatchError,
    arguments,
    constant_of,
    hint,
    is_graph_input,
    op_name,
    shape,
    sizes,
    value_of,
    writers,
    written_nodes,
)
from kitty_compile.passes.records import KVUpdate
from kitty_compile.passes.trace_axes import source_of

_CATS = frozenset({"cat", "concat", "concatenate"})
_CREATIONS = frozenset({"zeros", "empty", "full", "new_zeros", "new_empty", "zeros_like", "empty_like"})
_WRITES_IN_PLACE = frozenset({"index_copy_", "index_put_", "copy_"})


@dataclasses.dataclass(frozen=True)
class _Side:
    """The update of K alone, or of V alone."""

    kind: Literal["none", "cat", "index_copy", "index_put", "slice", "kitty"]
    new: fx.Node
    past: fx.Node | None = None
    positions: fx.Node | int | None = None
    kept: int | None = None
    write: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class MatchedUpdate:
    """A ``KVUpdate`` and the call's own key and value."""

    key: fx.Node
    value: fx.Node
    update: KVUpdate


def match_kv_update(
    key_full: fx.Node, value_full: fx.Node, columns_dim: int, consumer: fx.Node, order: dict[fx.Node, int]
) -> MatchedUpdate:
    """The update whose results are ``key_full`` and ``value_full``, which ``consumer`` reads.

    Raises:
        NoMatchError: the update is not understood, or K and V disagree.
    """
    key = _match_side(key_full, columns_dim, consumer, order)
    value = _match_side(value_full, columns_dim, consumer, order)
    if (key.kind, key.kept) != (value.kind, value.kept) or not _same_place(key.positions, value.positions):
        raise NoMatchError(f"keys are updated by {key.kind} but values by {value.kind}, or elsewhere")
    if (key.past is None) != (value.past is None):
        raise NoMatchError("keys have a past but values have none, or the other way round")
    buffer = None if key.past is None else _buffer_of(key.past)
    update = KVUpdate(
        kind=key.kind,
        key_full=key_full,
        value_full=value_full,
        key_past=key.past,
        value_past=value.past,
        positions=key.positions,
        kept=key.kept,
        columns_dim=columns_dim,
        is_fresh=buffer is not None and not is_graph_input(buffer),
        writes=tuple(side.write for side in (key, value) if side.write is not None),
    )
    return MatchedUpdate(key.new, value.new, update)


def is_update(node: fx.Node) -> bool:
    """Does this operator join new columns to a cache?"""
    return op_name(node) in _CATS | {"index_copy", "index_put", "slice_scatter"} | _WRITES_IN_PLACE


def _match_side(full: fx.Node, columns_dim: int, consumer: fx.Node, order: dict[fx.Node, int]) -> _Side:
    name = op_name(full)
    if full.target is operator.getitem and op_name(made := cast(fx.Node, full.args[0])) == "kitty::materialize":
        return _Side("kitty", cast(fx.Node, made.args[cast(int, full.args[1])]), made)
    if name in _CATS:
        return _match_cat(full, columns_dim)
    if name in ("index_copy", "index_put", "slice_scatter"):
        return _match_write(full, arguments(full), columns_dim)
    buffer = _buffer_of(full)
    if buffer is None:
        return _match_own(full, columns_dim)
    writes = [node for node in writers(buffer, order, before=consumer) if op_name(node)]
    if not writes:
        raise NoMatchError("keys and values are graph inputs that this call adds nothing to (cross attention?)")
    if len(writes) > 1 and not is_graph_input(buffer):
        raise NoMatchError(f"{buffer} is put together from parts that are cached apart (latent attention?)")
    if len(writes) > 1:
        raise NoMatchError(f"the cache is written {len(writes)} times before it is read")
    return _match_in_place(buffer, writes[0], columns_dim)


def _match_own(full: fx.Node, columns_dim: int) -> _Side:
    """Attention over the call's own columns alone: the first call of a cache where the graph returns them, else none."""
    top = full
    while (source := source_of(top)) is not None:
        top = source
    queue, is_returned = [top], False
    while queue:
        node = queue.pop()
        for user in node.users:
            if user.op == "output":
                is_returned = True
            elif any(written is not node for written in written_nodes(user)):
                raise NoMatchError(f"{user} keeps the keys or values for later calls in a way that is not understood")
            elif source_of(user) is node or op_name(user) == "slice":
                queue.append(user)
    return _Side("cat", full, kept=_kept(full, columns_dim)) if is_returned else _Side("none", full)


def _buffer_of(node: fx.Node) -> fx.Node | None:
    """The graph input, or the buffer made in this call, that ``node`` is a view or an updated version of."""
    while not is_graph_input(node) and op_name(node) not in _CREATIONS:
        source = node.args[0] if op_name(node) in _WRITES_IN_PLACE else source_of(node)
        if source is None and op_name(node) == "select":
            source = cast(fx.Node, node.args[0])
        if not isinstance(source, fx.Node):
            return None
        node = source
    return node


def _match_cat(full: fx.Node, columns_dim: int) -> _Side:
    named = arguments(full)
    parts = list(named["tensors"])
    dim = named["dim"] % len(shape(full))
    if dim != columns_dim:
        if any(_past_input(part) is not None for part in parts):
            raise NoMatchError(f"{full} joins dimension {dim}, but the columns are dimension {columns_dim}")
        return _match_own(full, columns_dim)  # the halves of a rotary embedding
    # transformers' DynamicCache starts with an empty tensor of one dimension.
    parts = [part for part in parts if 0 not in shape(part)]
    kept = _kept(full, columns_dim)
    if len(parts) == 1:
        return _Side("cat", parts[0], kept=kept)
    if len(parts) != 2:
        raise NoMatchError(f"{full} joins {len(parts)} tensors, a cache update joins two")
    past, new = parts
    if isinstance(constant_of(_past_input(past)), torch.nn.Parameter):
        raise NoMatchError(f"{full} puts learned columns before the keys or values")
    if _past_input(past) is None:
        raise NoMatchError(f"{full} joins tensors that are both computed in this call, or its past is not first")
    if _past_input(new) is not None:
        raise NoMatchError(f"{full} puts a graph input behind the new columns")
    return _Side("cat", new, past, kept=kept)


def _past_input(node: fx.Node) -> fx.Node | None:
    """The graph input that holds the past, through views, slices and joins with empty tensors."""
    current: fx.Node | None = node
    while current is not None and not is_graph_input(current):
        if op_name(current) in _CATS:
            parts = [part for part in arguments(current)["tensors"] if 0 not in shape(part)]
            current = parts[0] if len(parts) == 1 else None
        elif op_name(current) in ("select", "slice"):
            current = cast(fx.Node, current.args[0])
        else:
            current = source_of(current)
    return current


def _kept(full: fx.Node, columns_dim: int) -> int | None:
    """Columns that the next call gets, when that is a tail of ``full`` and not all of it."""
    kept: int | None = None
    queue = [full]
    while queue:
        for user in queue.pop().users:
            if op_name(user) != "slice":
                continue
            named = arguments(user)
            start = value_of(named["start"]) if isinstance(named["start"], fx.Node) else named["start"]
            if named["dim"] % len(shape(user)) != columns_dim or not start:
                queue.append(user)
            elif any(reader.op == "output" for reader in user.users):
                if hint(start) >= 0:
                    raise NoMatchError(f"{full} is given to the next call in part, but not its newest columns")
                kept = -hint(start)
    return kept


def _match_in_place(buffer: fx.Node, write: fx.Node, columns_dim: int) -> _Side:
    named = arguments(write)
    if op_name(write) == "copy_":
        return _match_slice_write(buffer, write, named, columns_dim)
    return _match_write(write, named, columns_dim)


def _match_write(write: fx.Node, named: dict[str, object], columns_dim: int) -> _Side:
    past = cast(fx.Node, named["self"])
    if _buffer_of(past) is None:
        raise NoMatchError(f"{write} writes to a tensor that is computed in this call")
    match op_name(write):
        case "index_copy" | "index_copy_":
            if cast(int, named["dim"]) % len(shape(past)) != columns_dim:
                raise NoMatchError(f"{write} writes along a dimension that is not the columns")
            new, index = cast(fx.Node, named["source"]), cast(fx.Node, named["index"])
            return _Side("index_copy", new, past, index, write=write)
        case "index_put" | "index_put_":
            return _match_index_put(write, named, past, columns_dim)
        case _:
            if cast(int, named["dim"]) % len(shape(past)) != columns_dim or named["step"] != 1:
                raise NoMatchError(f"{write} writes along a dimension that is not the columns")
            start = cast("fx.Node | int | None", named["start"]) or 0
            return _Side("slice", cast(fx.Node, named["src"]), past, start, write=write)


def _match_index_put(write: fx.Node, named: dict[str, object], past: fx.Node, columns_dim: int) -> _Side:
    indices = cast("list[fx.Node | None]", named["indices"])
    positions = indices[columns_dim] if len(indices) > columns_dim else None
    others = [index for dim, index in enumerate(indices) if dim != columns_dim and index is not None]
    if positions is None or others:
        raise NoMatchError(f"{write} writes each row at places of its own")
    if named["accumulate"] or len(shape(positions)) > 1:
        raise NoMatchError(f"{write} does not write the new columns one after another")
    new = _before_ones_went(cast(fx.Node, named["values"]))
    written = [size for dim, size in enumerate(shape(past)) if dim != columns_dim]
    if len(shape(new)) != 4 or [size for dim, size in enumerate(shape(new)) if dim != columns_dim] != written:
        raise NoMatchError(f"{write} writes one value to many places")
    return _Side("index_put", new, past, positions, write=write)


def _before_ones_went(values: fx.Node) -> fx.Node:
    """The tensor that was assigned: ``cache[:, :, positions] = k`` takes off leading dimensions of size one."""
    while len(shape(values)) < 4 and op_name(values) in ("view", "reshape", "squeeze"):
        source = cast(fx.Node, values.args[0])
        ones = len(shape(source)) - len(shape(values))
        if ones < 1 or shape(source) != (1,) * ones + shape(values):
            break
        values = source
    return values


def _match_slice_write(buffer: fx.Node, write: fx.Node, named: dict[str, object], columns_dim: int) -> _Side:
    """``buffer[..., start : start + t, ...] = new``: a copy into a chain of slices, one of which is of the columns."""
    target, start = cast(fx.Node, named["self"]), None
    if target is buffer:
        raise NoMatchError(f"{write} overwrites the whole cache (a ring that is rolled?)")
    while target is not buffer:
        if op_name(target) != "slice":
            raise NoMatchError(f"{write} writes to a part of the cache that is not understood")
        slicing = arguments(target)
        dim, source = slicing["dim"] % len(shape(target)), cast(fx.Node, slicing["self"])
        if dim == columns_dim and (start is None or shape(target) != shape(source)):
            if start or slicing["step"] != 1:
                raise NoMatchError(f"{write} writes to a part of the cache that is not understood")
            start = slicing["start"] or 0
        elif (slicing["start"] or 0) != 0:
            raise NoMatchError(f"{write} writes to some of the rows or heads")
        target = source
    new = cast(fx.Node, named["src"])
    if len(shape(new)) != 4 or [str(size) for size in sizes(new)] != [str(size) for size in sizes(named["self"])]:
        raise NoMatchError(f"{write} writes one value to many places")
    return _Side("slice", new, buffer, start or 0, write=write)


def _same_place(first: fx.Node | int | None, second: fx.Node | int | None) -> bool:
    """Are both updates at the same positions? Equal calls on equal arguments count as one node."""
    if first is second or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return first == second
    return (
        first.target == second.target
        and len(first.args) == len(second.args)
        and first.op == "call_function"
        and all(
            _same_place(a, b) if isinstance(a, fx.Node | int) and isinstance(b, fx.Node | int) else a == b
            for a, b in zip(first.args, second.args, strict=True)
        )
    )

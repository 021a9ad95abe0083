"""Find queries, keys and values behind the operands of an attention's two products, whatever repeats or packs heads.

Before                                                          Record
    k[:, :, None].expand(b, h, 4, n, d).reshape(b, 4 * h, n, d)     4 query heads per KV head (repeat_kv)
    k.repeat_interleave(4, dim=1)                                   the same
    q.view(b, h, 4, t, d) @ k[:, :, None].mT                        the same, grouped
    q.reshape(b, h, 4 * t, d) @ k.mT                                the same, packed
    k.repeat(1, 4, 1, 1)                                            refused: query head i reads KV head i % h
"""

import dataclasses
import math

from torch import fx

from kitty_compile.passes.evaluate import number_of
from kitty_compile.passes.match_kv_update import is_update
from kitty_compile.passes.nodes import (
    NoMatchError,
    arguments,
    hint,
    is_graph_input,
    is_static,
    op_name,
    same_size,
    shape,
    sizes,
)
from kitty_compile.passes.trace_axes import Axes, Factor, follow, fuse, label, source_of

Order = dict[fx.Node, int]


class _TiledHeadsError(NoMatchError):
    """Further upstream there are fewer heads than the operand has, in another order."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the two products multiply: ``query @ key^T`` and ``weights @ value``."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    key_is_transposed: bool  # the operand is [..., D, n] already
    repeats_heads: bool = False  # the operator itself repeats KV heads (SDPA's enable_gqa)


@dataclasses.dataclass(frozen=True)
class KeyHeads:
    """A key or value [batch, heads, columns, head_dim] (or columns before heads) behind an operand.

    Attributes:
        base: the tensor before heads are repeated.
        columns_dim: 2 or 1, see ``KVUpdate``.
        repeats: how often the operand repeats each head.
        batch, num_kv_heads, num_columns, head_dim: sizes.
        factor: what it is multiplied by on the way.
    """

    base: fx.Node
    columns_dim: int
    repeats: int
    batch: int
    num_kv_heads: int
    num_columns: int
    head_dim: int
    factor: float


def match_keys(operand: fx.Node, is_transposed: bool, order: Order) -> KeyHeads:
    """The keys or values behind ``operand``: what a cache holds, or else as far upstream as heads are not repeated.

    Raises:
        NoMatchError: with what stands in the way.
    """
    chain, factors = _upstream(operand, order)
    reason = f"{operand} is not laid out as [batch, heads, columns, head_dim]"
    found: list[KeyHeads] = []
    for index in reversed(range(len(chain))):
        for columns_dim, names in ((2, "bhnd"), (1, "bnhd")):
            try:
                heads = _read(chain[: index + 1], names, columns_dim, is_transposed, math.prod(factors[:index]))
            except _TiledHeadsError:
                raise
            except NoMatchError as failure:
                reason = str(failure) if columns_dim == 2 else reason
                continue
            if index == len(chain) - 1 and (is_update(chain[index]) or is_graph_input(chain[index])):
                return heads
            found.append(heads)
    if not found:
        raise NoMatchError(reason)
    # Columns before heads only count where nothing else is found, as a scale does that the call's own keys could carry.
    return min(found, key=lambda heads: (heads.columns_dim == 1, heads.num_kv_heads, heads.factor != 1))


def _upstream(operand: fx.Node, order: Order) -> tuple[list[fx.Node], list[float]]:
    """``operand`` and what it is a view, copy or multiple of, one after another, with the factor of each step."""
    chain: list[fx.Node] = [operand]
    factors: list[float] = []
    while True:
        node = chain[-1]
        source, factor = source_of(node), 1.0
        if source is None and (scaled := scaled_tensor(node, order)) is not None:
            source, factor = scaled
        if source is None:
            return chain, factors
        chain.append(source)
        factors.append(factor)


def scaled_tensor(node: fx.Node, order: Order) -> tuple[fx.Node, float] | None:
    """(tensor, factor) of a product of a tensor and a number, or of their quotient."""
    name = op_name(node).removesuffix("_")
    if name not in ("mul", "div", "true_divide", "multiply", "divide") or len(node.args) != 2:
        return None
    if arguments(node).get("rounding_mode") is not None:
        return None
    first, second = node.args
    if name in ("mul", "multiply") and number_of(second, order) is None:
        first, second = second, first
    factor = number_of(second, order)
    if factor is None or not isinstance(first, fx.Node) or factor == 0:
        return None
    return first, (factor if name in ("mul", "multiply") else 1 / factor)


def _read(chain: list[fx.Node], names: str, columns_dim: int, is_transposed: bool, factor: float) -> KeyHeads:
    """What ``chain[0]`` is of ``chain[-1]``, whose dimensions are ``names``."""
    base = chain[-1]
    if len(shape(base)) != 4:
        raise NoMatchError(f"{base} has {len(shape(base))} dimensions")
    axes = label(names, base)
    for node in reversed(chain[:-1]):
        axes = axes if source_of(node) is None else follow(axes, node)
    if len(axes) < 3:
        raise NoMatchError(f"{chain[0]} has {len(axes)} dimensions")
    columns, head_dim = axes[-2:] if not is_transposed else axes[:-3:-1]
    size = shape(base)
    if not _is_axis(columns, "n") or not _is_axis(head_dim, "d", size[3]):
        raise NoMatchError(f"{chain[0]} is not laid out as [batch, heads, columns, head_dim]")
    batch, repeats = _read_leading(axes, size[3 - columns_dim], chain[0])
    return KeyHeads(
        base, columns_dim, repeats, batch, size[3 - columns_dim], math.prod(f.size for f in columns), size[3], factor
    )


def _is_axis(dimension: tuple[Factor, ...], name: str, size: int | None = None) -> bool:
    """Is this the axis ``name``, from its start (and whole, given its size)?"""
    if not dimension:
        return size in (None, 1)
    return (
        dimension[0].axis == name
        and dimension[0].stride == 1
        and size in (None, dimension[0].size)
        and len(dimension) == 1
    )


def _read_leading(axes: Axes, num_heads: int, operand: fx.Node) -> tuple[int, int]:
    """(batch, repeats): before columns and head_dim stand rows, then heads, then repetitions of each head."""
    leading = list(fuse([factor for dimension in axes[:-2] for factor in dimension]))
    batch = leading.pop(0).size if leading and leading[0].axis == "b" else 1
    if num_heads > 1:
        if leading and not leading[0].axis:
            raise _TiledHeadsError(f"{operand} tiles heads: query head i reads KV head i modulo their number")
        if not leading or leading.pop(0) != Factor("h", 1, num_heads):
            raise NoMatchError(f"{operand} does not keep rows and heads in order")
    repeats = leading.pop(0).size if leading and not leading[0].axis else 1
    if leading:
        raise NoMatchError(f"{operand} does not keep rows and heads in order")
    return batch, repeats


@dataclasses.dataclass(frozen=True)
class QueryHeads:
    num_heads: int
    num_columns: int


def match_queries(operands: Operands, key: KeyHeads, value: KeyHeads, own_columns: object, order: Order) -> QueryHeads:
    """Query heads of an attention whose call brings ``own_columns`` new columns.

    Raises:
        NoMatchError: rows of the query operand are not the call's columns, or not head after head.
    """
    *leading, rows, head_dim = shape(operands.query)
    key_leading = shape(operands.key)[:-2]
    is_broadcast = not operands.repeats_heads and tuple(leading) != key_leading
    if head_dim != key.head_dim:
        raise NoMatchError(f"queries have head_dim {head_dim}, keys {key.head_dim}")
    if (key.batch, key.num_kv_heads, key.repeats, key.num_columns) != (
        value.batch,
        value.num_kv_heads,
        value.repeats,
        value.num_columns,
    ) or (is_broadcast and key_leading != shape(operands.value)[:-2]):
        raise NoMatchError("keys and values differ in rows, heads or columns")
    if value.factor != 1:
        raise NoMatchError("values are scaled after they are cached")
    lanes = math.prod(leading) if operands.repeats_heads else math.prod(_broadcast(tuple(leading), key_leading))
    if lanes % key.batch:
        raise NoMatchError(f"{operands.query} does not have the rows of the keys")
    num_columns = hint(own_columns)
    is_plain = same_size(sizes(operands.query)[-2], own_columns)
    if not is_plain and rows % num_columns:
        raise NoMatchError(f"{rows} queries attend from {num_columns} new columns (cross attention?)")
    num_heads = lanes // key.batch * (rows // num_columns)
    if num_heads % key.num_kv_heads:
        raise NoMatchError(f"{num_heads} query heads do not share {key.num_kv_heads} KV heads evenly")
    if num_columns > 1 and (not is_plain or is_broadcast):
        expected = (key.batch, num_heads, num_columns, head_dim)
        _check_packing(operands.query, expected, own_columns, key.num_kv_heads, order)
    return QueryHeads(num_heads, num_columns)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(first), len(second))
    padded = [(1,) * (length - len(sizes)) + sizes for sizes in (first, second)]
    for a, b in zip(*padded, strict=True):
        if a != b and 1 not in (a, b):
            raise NoMatchError(f"products of tensors of {first} and {second} lanes")
    return tuple(max(a, b) for a, b in zip(*padded, strict=True))


def _check_packing(
    operand: fx.Node, expected: tuple[int, int, int, int], own_columns: object, num_kv_heads: int, order: Order
) -> None:
    """Packed or grouped queries must stand head by head, each with its columns one after another."""
    batch, num_heads, num_columns, head_dim = expected
    # A symbol tells columns from heads even where there are as many.
    if is_static(own_columns) and num_columns in (num_heads, num_kv_heads, num_heads // num_kv_heads):
        raise NoMatchError(f"queries are packed, and {num_columns} may count their columns as well as heads")
    chain, _ = _upstream(operand, order)
    for index, node in enumerate(chain):
        for names, sizes_expected in (("bhtd", expected), ("bthd", (batch, num_columns, num_heads, head_dim))):
            if shape(node) != sizes_expected or not same_size(sizes(node)[names.index("t")], own_columns):
                continue
            axes = label(names, node)
            for step in reversed(chain[:index]):
                axes = axes if source_of(step) is None else follow(axes, step)
            wanted = [Factor(name, 1, size) for name, size in zip("bhtd", expected, strict=True) if size != 1]
            if list(fuse([factor for dimension in axes for factor in dimension])) == wanted:
                return
            raise NoMatchError(f"{operand} packs queries column by column")
    raise NoMatchError(f"{operand} packs queries in a way that is not understood")

"""Read the scores of an eager attention, from its softmax up to the product of queries and keys.

Before (any order of casts and views, in place or not)         Record
    softmax(q @ k.mT * scale + mask)                              scale, additive mask
    softmax((q @ k.mT / c).masked_fill(~mask, -inf))              scale 1 / c, visible mask
    softmax(where(mask, tanh(q @ k.mT * scale / c) * c, -inf))    scale, softcap c, visible mask
    softmax(cat([q @ k.mT + mask, sinks], -1))[..., :-1]          sinks (GPT-OSS)
"""

import dataclasses

import torch
from torch import fx

from kitty_compile.passes.evaluate import number_of
from kitty_compile.passes.match_heads import Operands, Order, scaled_tensor
from kitty_compile.passes.nodes import (
    NoMatchError,
    arguments,
    constant_of,
    is_alias,
    is_pointwise,
    is_written,
    op_name,
    shape,
    value_of,
    writers,
    written_nodes,
)
from kitty_compile.passes.records import MaskForm, MaskTerm
from kitty_compile.passes.trace_axes import source_of

PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
# A masked score must not come back into reach of the softmax, whatever the other scores are.
HIDDEN_BELOW = -1e4
_NEVER = -1e30
# Views and casts that scores may pass through; what repeats or transposes them is something else.
_PASSES = frozenset(
    {
        "to",
        "_to_copy",
        "type_as",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "view",
        "reshape",
        "_unsafe_view",
        "squeeze",
    }
    | {"unsqueeze", "unflatten", "flatten"}
)


@dataclasses.dataclass(frozen=True)
class Scores:
    """softcap * tanh(scale * product / softcap) + masks, beside ``sinks``."""

    product: fx.Node
    operands: Operands
    scale: float = 1.0
    softcap: float | None = None
    masks: tuple[MaskTerm, ...] = ()
    sinks: fx.Node | None = None
    numbers: tuple[fx.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Above:
    """What was read between the softmax and the node at hand."""

    scale: float = 1.0
    softcap: float | None = None
    masks: tuple[MaskTerm, ...] = ()
    sinks: fx.Node | None = None
    numbers: tuple[fx.Node, ...] = ()

    def scaled(self, factor: float, node: fx.Node) -> "_Above":
        return dataclasses.replace(self, scale=self.scale * factor, numbers=self.numbers + _symbolic_operands(node))

    def masked(self, mask: fx.Node, form: MaskForm, scores: fx.Node) -> "_Above":
        if self.scale != 1.0 or self.softcap is not None:
            raise NoMatchError("the mask is applied before the scale or the softcap")
        return dataclasses.replace(self, masks=(*self.masks, MaskTerm(mask, form, scores)))


def read_scores(softmax: fx.Node, order: Order) -> Scores:
    """What ``softmax`` normalises.

    Raises:
        NoMatchError: with what stands in the way.
    """
    named = arguments(softmax)
    scores = named["self"]
    if named["dim"] % len(shape(scores)) != len(shape(scores)) - 1:
        raise NoMatchError("the softmax is not over the last dimension")
    above = _Above()
    current = latest(scores, softmax, order)
    current = _without_maximum(current)
    if op_name(current) in ("cat", "concat"):
        current, above = _read_sinks(current, above)
    return _read(current, softmax, above, order)


def latest(node: fx.Node, consumer: fx.Node, order: Order) -> fx.Node:
    """``node`` as ``consumer`` sees it: the last in-place call on it, if there is one."""
    root = node
    while is_alias(root) and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    writes = writers(root, order, before=consumer, after=node)
    if not writes:
        return node
    # The tensor under all the names that in-place calls have handed it through.
    names = {node}
    while written_nodes(node):
        node = written_nodes(node)[0]
        names.add(node)
    for write in writes:
        if written_nodes(write)[0] not in names:
            raise NoMatchError(f"{write} writes to a part or a view of the scores")
        names.add(write)
    return writes[-1]


def _read(node: fx.Node, consumer: fx.Node, above: _Above, order: Order) -> Scores:
    name = op_name(node)
    if name in PRODUCTS:
        return _read_product(node, above, order)
    name = name.removesuffix("_")
    if name in _PASSES:
        source = source_of(node)
        assert source is not None
        return _step(source, node, above, order)
    if name == "add":
        return _read_add(node, above, order)
    if name == "masked_fill":
        named = arguments(node)
        _check_hidden(named["value"], order)
        return _step(named["self"], node, above.masked(named["mask"], "hidden", node), order)
    if name == "where":
        return _read_where(node, above, order)
    if (scaled := scaled_tensor(node, order)) is not None:
        return _read_scaled(*scaled, node, above, order)
    if (bounded := _bounded_below(node, order)) is not None:
        return _step(bounded, node, above, order)
    raise NoMatchError(f"scores pass through {name or node.target}")


def _step(source: fx.Node, consumer: fx.Node, above: _Above, order: Order) -> Scores:
    return _read(latest(source, consumer, order), consumer, above, order)


def _read_add(node: fx.Node, above: _Above, order: Order) -> Scores:
    named = arguments(node)
    first, second = named["self"], named["other"]
    if named.get("alpha", 1) != 1:
        raise NoMatchError("a mask is added with a factor")
    for scores, mask in ((first, second), (second, first)):
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and reaches_product(scores):
            return _step(scores, node, above.masked(mask, "additive", node), order)
    raise NoMatchError("scores are a sum that is not understood")


def _read_where(node: fx.Node, above: _Above, order: Order) -> Scores:
    condition, first, second = node.args
    assert isinstance(condition, fx.Node)
    choices: tuple[tuple[object, object, MaskForm], ...] = ((first, second, "visible"), (second, first, "hidden"))
    for scores, fill, form in choices:
        if isinstance(scores, fx.Node) and reaches_product(scores):
            _check_hidden(fill, order)
            return _step(scores, node, above.masked(condition, form, node), order)
    raise NoMatchError("scores are a choice that is not understood")


def _read_scaled(source: fx.Node, factor: float, node: fx.Node, above: _Above, order: Order) -> Scores:
    above = above.scaled(factor, node)
    source = latest(source, node, order)
    while op_name(source) in _PASSES and (inner := source_of(source)) is not None:
        source = latest(inner, source, order)
    if op_name(source).removesuffix("_") != "tanh":
        return _read(source, node, above, order)
    if above.softcap is not None:
        raise NoMatchError("scores pass through tanh twice")
    # c * tanh(f * product) with c so far: a softcap of c and a scale of c * f.
    capped = dataclasses.replace(above, softcap=above.scale)
    tanh_input = source.args[0]
    assert isinstance(tanh_input, fx.Node)
    return _step(tanh_input, source, capped, order)


def _read_product(node: fx.Node, above: _Above, order: Order) -> Scores:
    name, args = op_name(node), node.args
    is_transposed = True
    if name == "einsum":
        first, second = arguments(node)["tensors"]
        equation = arguments(node)["equation"]
        is_transposed = equation.partition("->")[0].strip()[-1] == equation.strip()[-1]
        _check_equation(equation, ("q", "d"), ("d", "k") if is_transposed else ("k", "d"), ("q", "k"))
    elif name == "baddbmm":
        named = arguments(node)
        first, second = named["batch1"], named["batch2"]
        if named["beta"] != 0:
            if named["beta"] != 1:
                raise NoMatchError("a mask is added with a factor")
            above = above.masked(named["self"], "additive", node)
        if (alpha := number_of(named["alpha"], order)) is None:
            raise NoMatchError("the scale is not a number")
        above = above.scaled(alpha, node)
    else:
        first, second = args[0], args[1]
    assert isinstance(first, fx.Node)
    assert isinstance(second, fx.Node)
    operands = Operands(first, second, second, is_transposed)
    return Scores(node, operands, above.scale, above.softcap, above.masks, above.sinks, above.numbers)


def _check_equation(equation: str, first: tuple[str, str], second: tuple[str, str], result: tuple[str, str]) -> None:
    """An einsum must be a batched matmul of these dimensions, behind equal leading ones."""
    compact = equation.replace(" ", "")
    operands, _, output = compact.partition("->")
    one, _, two = operands.partition(",")
    renamed: dict[str, str] = {}
    for letters, names in ((one[-2:], first), (two[-2:], second), (output[-2:], result)):
        for letter, name in zip(letters, names, strict=False):
            if renamed.setdefault(letter, name) != name:
                raise NoMatchError(f"einsum {compact} is not understood")
    same_leading = one[:-2] == two[:-2] == output[:-2]
    if not same_leading or len(set(renamed.values())) != len(renamed):
        raise NoMatchError(f"einsum {compact} is not understood")


def check_value_equation(equation: str) -> None:
    """The einsum of weights and values must be a batched matmul."""
    _check_equation(equation, ("q", "k"), ("k", "d"), ("q", "d"))


def _check_hidden(fill: object, order: Order) -> None:
    number = number_of(fill, order)
    if number is None or number > HIDDEN_BELOW:
        raise NoMatchError(f"masked scores are set to {fill}, which hides nothing")


def _bounded_below(node: fx.Node, order: Order) -> fx.Node | None:
    """The scores in ``maximum(scores, finfo.min)``, which is no change."""
    name = op_name(node)
    if name == "maximum" or (name == "max" and len(node.args) == 2):
        first, second = node.args
        number = number_of(second, order)
        return first if number is not None and number < _NEVER and isinstance(first, fx.Node) else None
    if name.removesuffix("_") == "clamp":
        named = arguments(node)
        number = number_of(named["min"], order)
        if named["max"] is None and number is not None and number < _NEVER:
            source: fx.Node = named["self"]
            return source
    return None


def _without_maximum(node: fx.Node) -> fx.Node:
    """The scores in ``scores - scores.max(-1, keepdim=True).values``, which softmax does not see."""
    if op_name(node) != "sub" or len(node.args) != 2:
        return node
    scores, largest = node.args
    if isinstance(largest, fx.Node) and not op_name(largest) and largest.args and largest.args[-1] == 0:
        largest = largest.args[0]  # the values of max.dim
    if not isinstance(scores, fx.Node) or not isinstance(largest, fx.Node) or op_name(largest) not in ("max", "amax"):
        return node
    named = arguments(largest)
    dim = named["dim"][0] if isinstance(named["dim"], list | tuple) and len(named["dim"]) == 1 else named["dim"]
    is_own = named["self"] is scores and named["keepdim"] and isinstance(dim, int)
    return scores if is_own and dim % len(shape(scores)) == len(shape(scores)) - 1 else node


def _read_sinks(node: fx.Node, above: _Above) -> tuple[fx.Node, _Above]:
    """``cat([scores, sinks], -1)``: one logit per head, the same for every row and query."""
    named = arguments(node)
    parts, rank = named["tensors"], len(shape(node))
    if len(parts) != 2 or named["dim"] % rank != rank - 1 or shape(parts[1])[-1] != 1:
        raise NoMatchError("scores are joined with something that is not one sink per head")
    sinks: fx.Node = parts[1]
    num_heads = shape(node)[1] if rank == 4 else 0
    while len(shape(sinks)) > 1:
        source = source_of(sinks)
        if source is None or op_name(sinks) == "transpose":
            raise NoMatchError("the sinks are not one logit per head")
        sinks = source
    if shape(sinks) != (num_heads,) or (num_heads > 1 and _head_dimension(parts[1]) != 1):
        raise NoMatchError("the sinks are not one logit per head")
    return parts[0], dataclasses.replace(above, sinks=sinks)


def _head_dimension(sinks: fx.Node) -> int | None:
    """The dimension in which a view of sinks counts the heads, before it is expanded."""
    source = source_of(sinks)
    while op_name(sinks) in ("expand", "to", "broadcast_to") and source is not None:
        sinks, source = source, source_of(source)
    counted = [dim for dim, size in enumerate(shape(sinks)) if size != 1]
    return counted[0] if len(counted) == 1 else None


def reaches_product(node: fx.Node, depth: int = 24) -> bool:
    """Is there a product of two activations above ``node``, through nothing but element-wise operators and views?"""
    if op_name(node) in PRODUCTS:
        return is_product_of_activations(node)
    passes = is_pointwise(node) or source_of(node) is not None or op_name(node) in ("cat", "dropout", "slice")
    return passes and depth > 0 and any(reaches_product(operand, depth - 1) for operand in node.all_input_nodes)


def is_product_of_activations(node: fx.Node) -> bool:
    """Does neither factor come straight from a parameter or a fixed buffer, as in a projection or a router?

    A buffer that the graph writes to is a cache.
    """
    operands = node.all_input_nodes[-2:] if op_name(node) == "baddbmm" else node.all_input_nodes
    for operand in operands:
        root: fx.Node | None = operand
        while root is not None:
            if constant_of(root) is not None and not is_written(root):
                return False
            root = source_of(root)
    return True


def _symbolic_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(node for node in node.all_input_nodes if isinstance(value_of(node), torch.SymFloat | torch.SymInt))

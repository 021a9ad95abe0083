"""Follow the axes of a tensor through views, transposes and repetitions.

Every dimension of a tensor is a list of factors, outermost first. A factor is a stretch of an axis of the base tensor, or
a repetition (no axis). ``repeat_kv`` of base [b, h, n, d] by 4, for instance, is

    unsqueeze(2)                [b] [h] [] [n] [d]
    expand(-1, -1, 4, -1, -1)   [b] [h] [x4] [n] [d]
    reshape(B, 4 * H, N, D)     [b] [h x4] [n] [d]

where tiling would give [x4 h]. Sizes are those of the traced call; a view means the same for all sizes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from torch import fx

from kitty_compile.passes.nodes import NoMatchError, arguments, hint, op_name, shape

_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "view_as"})
_UNSQUEEZES = frozenset({"unsqueeze", "squeeze"})
_SAME_ELEMENTS = frozenset(
    {"contiguous", "clone", "alias", "detach", "detach_", "lift_fresh_copy", "lift_fresh", "to", "_to_copy", "type_as"}
)
_EXPANDS = frozenset({"expand", "expand_as", "broadcast_to"})
_TRANSPOSES = frozenset({"transpose", "swapaxes", "swapdims", "permute", "t", "mT", "movedim"})


@dataclasses.dataclass(frozen=True)
class Factor:
    """``size`` steps of ``stride`` along the base axis ``axis``; a repetition when ``axis`` is ""."""

    axis: str
    stride: int
    size: int


Dimension = tuple[Factor, ...]
Axes = tuple[Dimension, ...]


def label(names: str, node: fx.Node) -> Axes:
    """The axes of ``node`` itself, one letter of ``names`` per dimension."""
    return tuple((Factor(name, 1, size),) if size != 1 else () for name, size in zip(names, shape(node), strict=True))


def source_of(node: fx.Node) -> fx.Node | None:
    """The tensor that ``node`` only views, copies, casts, moves or repeats; None for any other operator."""
    name = op_name(node)
    is_movement = name in _HANDLERS and node.args and isinstance(node.args[0], fx.Node)
    if not is_movement or (name == "dropout" and not is_inert_dropout(node)):
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def is_inert_dropout(node: fx.Node) -> bool:
    named = arguments(node)
    return named["train"] is False or named["p"] == 0


def follow(axes: Axes, node: fx.Node) -> Axes:
    """The axes of ``node``, given those of its source.

    Raises:
        NoMatchError: it takes a part of an axis that is not a prefix, or mixes axes.
    """
    moved = _HANDLERS[op_name(node)](axes, node)
    if [_size(dimension) for dimension in moved] != list(shape(node)):
        raise NoMatchError(f"{node} changes axes in a way that is not understood")
    return moved


def _size(dimension: Dimension) -> int:
    return math.prod(factor.size for factor in dimension)


def _same(axes: Axes, node: fx.Node) -> Axes:
    return axes


def _reshape(axes: Axes, node: fx.Node) -> Axes:
    return regroup([factor for dimension in axes for factor in dimension], shape(node))


def regroup(factors: Sequence[Factor], target: Sequence[int]) -> Axes:
    """Distribute factors, outermost first, over dimensions of the ``target`` sizes, splitting them where needed."""
    rest, grouped = list(factors), []
    for size in target:
        dimension: list[Factor] = []
        while size > 1:
            if not rest:
                raise NoMatchError("a view does not fit the sizes of its source")
            factor = rest.pop(0)
            if factor.size > size:
                inner = factor.size // size
                if inner * size != factor.size:
                    raise NoMatchError("a view splits an axis unevenly")
                rest.insert(0, Factor(factor.axis, factor.stride, inner))
                factor = Factor(factor.axis, factor.stride * inner, size)
            elif size % factor.size:
                raise NoMatchError("a view splits an axis unevenly")
            dimension.append(factor)
            size //= factor.size
        grouped.append(tuple(dimension))
    return tuple(grouped)


def fuse(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Neighbours that are one stretch of an axis, or one repetition, joined."""
    fused: list[Factor] = []
    for factor in factors:
        last = fused[-1] if fused else None
        if last and last.axis == factor.axis and (not factor.axis or last.stride == factor.stride * factor.size):
            fused[-1] = Factor(factor.axis, factor.stride, last.size * factor.size)
        else:
            fused.append(factor)
    return tuple(fused)


def _unsqueeze(axes: Axes, node: fx.Node) -> Axes:
    # Where dimensions of size one come and go says nothing about the others.
    return regroup([factor for dimension in axes for factor in dimension], shape(node))


def _expand(axes: Axes, node: fx.Node) -> Axes:
    target = shape(node)
    padded: Axes = ((),) * (len(target) - len(axes)) + axes
    return tuple(
        (Factor("", 0, size),) if not dimension and size != 1 else dimension
        for dimension, size in zip(padded, target, strict=True)
    )


def _transpose(axes: Axes, node: fx.Node) -> Axes:
    order = list(range(len(axes)))
    named = arguments(node)
    match op_name(node):
        case "permute":
            order = [dim % len(axes) for dim in named["dims"]]
        case "t" | "mT":
            order[-2:] = order[:-3:-1]
        case "movedim" if isinstance(named["source"], int):
            order.insert(named["destination"] % len(axes), order.pop(named["source"] % len(axes)))
        case "movedim":
            raise NoMatchError("movedim of several dimensions is not understood")
        case _:
            first, second = (value for value in named.values() if isinstance(value, int))
            order[first], order[second] = order[second], order[first]
    return tuple(axes[dim] for dim in order)


def _repeat_interleave(axes: Axes, node: fx.Node) -> Axes:
    named = arguments(node)
    if not isinstance(named["repeats"], int) or named["dim"] is None:
        raise NoMatchError("repeat_interleave must repeat a dimension by a fixed number")
    dim = named["dim"] % len(axes)
    repeated = axes[dim] + ((Factor("", 0, named["repeats"]),) if named["repeats"] != 1 else ())
    return (*axes[:dim], repeated, *axes[dim + 1 :])


def _repeat(axes: Axes, node: fx.Node) -> Axes:
    repeats = [hint(_number(count)) for count in arguments(node)["repeats"]]
    padded: Axes = ((),) * (len(repeats) - len(axes)) + axes
    return tuple(
        ((Factor("", 0, count),) if count != 1 else ()) + dimension
        for dimension, count in zip(padded, repeats, strict=True)
    )


def _number(value: object) -> object:
    return value.meta.get("val") if isinstance(value, fx.Node) else value


def _slice(axes: Axes, node: fx.Node) -> Axes:
    """A prefix of a dimension stays that dimension, only shorter; any other part is another tensor."""
    named = arguments(node)
    dim = named["dim"] % len(axes)
    size = shape(node)[dim]
    if size == _size(axes[dim]):
        return axes
    start = _number(named["start"] or 0)
    if start != 0 or named["step"] != 1 or len(axes[dim]) != 1 or axes[dim][0].axis in ("d", ""):
        raise NoMatchError(f"{node} takes a part of a dimension")
    prefix = dataclasses.replace(axes[dim][0], size=size)
    return (*axes[:dim], (prefix,) if size != 1 else (), *axes[dim + 1 :])


_HANDLERS: dict[str, Callable[[Axes, fx.Node], Axes]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_UNSQUEEZES, _unsqueeze),
    **dict.fromkeys(_SAME_ELEMENTS, _same),
    "dropout": _same,
    **dict.fromkeys(_EXPANDS, _expand),
    **dict.fromkeys(_TRANSPOSES, _transpose),
    "repeat_interleave": _repeat_interleave,
    "repeat": _repeat,
    "slice": _slice,
}

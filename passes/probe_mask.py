"""Run an attention's masks on chosen columns and collect what they let through.

A probe puts the call's columns where it wants them: every ``arange`` of the masks' subgraph that counts columns, and
every position input, is moved by a *shift* per column. So a window of 4096 shows on ten columns, eight of which are moved
4090 to the left.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import fx

from kitty_compile.passes.evaluate import Override, Setting, Subgraph
from kitty_compile.passes.match_scores import HIDDEN_BELOW
from kitty_compile.passes.nodes import NoMatchError, op_name, shape, value_of
from kitty_compile.passes.records import AttentionMatch

# From i64 columns to how far each is moved.
Shift = Callable[[torch.Tensor], torch.Tensor]


def unmoved(columns: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(columns)


def moved_by(amount: int) -> Shift:
    """All columns, by the same amount."""
    return lambda columns: torch.full_like(columns, amount)


def moved_apart(edge: int, left: int = 0, right: int = 0) -> Shift:
    """Columns before ``edge`` by ``left``, the others by ``right``."""
    return lambda columns: torch.where(columns < edge, left, right)


def reversed_around(last: int) -> Shift:
    """Columns 0 .. ``last`` in the opposite order."""
    return lambda columns: last - 2 * columns


class MaskValueError(NoMatchError):
    """A mask adds something that is neither nothing nor minus infinity."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the graph inputs of a mask are: which columns hold tokens, where columns stand, how many came before."""

    padding: tuple[fx.Node, ...] = ()
    positions: tuple[fx.Node, ...] = ()
    lengths: tuple[fx.Node, ...] = ()


@dataclasses.dataclass(frozen=True)
class Frame:
    """The columns of a probe.

    Attributes:
        setting: sizes to run with.
        past: columns before the call.
        num_columns: the call's own.
        num_keys: columns of K.
        is_static: K is a buffer that holds column j at j; otherwise its last columns are the call's own.
    """

    setting: Setting
    past: int
    num_columns: int
    num_keys: int
    is_static: bool = False

    @property
    def first_key(self) -> int:
        return 0 if self.is_static else self.past + self.num_columns - self.num_keys

    def queries(self) -> torch.Tensor:
        return self.past + torch.arange(self.num_columns)

    def keys(self) -> torch.Tensor:
        return self.first_key + torch.arange(self.num_keys)


@dataclasses.dataclass(frozen=True)
class Seen:
    """bool [B or 1, H or 1, T, n], and where queries [T] and keys [n] stood."""

    visible: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor

    def distances(self) -> torch.Tensor:
        """i64 [T, n]: how many columns before its query each key stands."""
        return self.queries.unsqueeze(1) - self.keys


class MaskProbe:
    """The masks of one attention, ready to run.

    Attributes:
        moves_queries, moves_keys: which columns a shift moves.
    """

    def __init__(self, match: AttentionMatch, order: dict[fx.Node, int]) -> None:
        self.match = match
        positions = match.update.positions
        self._positions = positions if isinstance(positions, fx.Node) and _is_tensor(positions) else None
        roots = [term.node for term in match.masks] + ([self._positions] if self._positions is not None else [])
        self.subgraph = Subgraph(roots, order, reader=match.node)
        self.column_counts = tuple(node for node in self.subgraph.nodes if op_name(node) == "arange")
        self.moves_queries = self.moves_keys = True
        self._counts_own = any(shape(node) == (match.num_columns,) for node in self.column_counts)

    def run(
        self,
        frame: Frame,
        roles: Roles,
        shift: Shift = unmoved,
        padding: torch.Tensor | None = None,
        contents: Mapping[fx.Node, torch.Tensor] | None = None,
    ) -> "Seen":
        """What the masks let through.

        Args:
            shift: how columns are moved.
            padding: bool [batch, columns], true where a column holds a token; None: everywhere.
            contents: values of some graph inputs instead of what their roles say.
        """
        is_moved = shift is not unmoved
        overrides = {node: self._mover(frame, shift) for node in self.column_counts} if is_moved else {}
        within = frame.past + frame.num_columns if is_moved else None
        setting = dataclasses.replace(frame.setting, overrides=overrides, num_columns=within)
        inputs = {node: self._content(node, frame, roles, shift, padding) for node in self.subgraph.inputs}
        try:
            values = self.subgraph.run({**inputs, **(contents or {})}, setting)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            raise NoMatchError(f"the mask cannot be run: {str(error).splitlines()[0]}") from error
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        for term, value in zip(self.match.masks, values, strict=False):
            visible = visible & self._spread(_visible(value, term.form), term.scores, frame)
        visible = visible.expand(-1, -1, frame.num_columns, frame.num_keys)
        queries, keys = frame.queries(), frame.keys()
        if self._positions is not None:
            queries = values[-1].flatten().long()
        elif self.moves_queries:
            queries = queries + shift(queries)
        if queries.numel() != frame.num_columns:
            raise NoMatchError("new columns are not written one by one")
        return Seen(visible, queries, keys + shift(keys) if self.moves_keys else keys)

    def _mover(self, frame: Frame, shift: Shift) -> Override:
        """Moves the values of an ``arange`` that counts columns; one that counts anything else is left alone."""
        first = {frame.past + frame.num_columns: 0} if self.moves_queries or self.moves_keys else {}
        for size, column, moves in (
            (frame.num_keys, frame.first_key, self.moves_keys),
            (frame.num_columns, frame.past, self.moves_queries),
        ):
            if moves:
                first[size] = column
            elif frame.num_keys != frame.num_columns:
                first.pop(size, None)

        def move(values: torch.Tensor) -> torch.Tensor:
            if values.numel() not in first or values.is_floating_point():
                return values
            columns = first[values.numel()] + torch.arange(values.numel())
            return values + shift(columns).to(values.dtype)

        return move

    def _content(
        self, node: fx.Node, frame: Frame, roles: Roles, shift: Shift, padding: torch.Tensor | None
    ) -> torch.Tensor:
        fake = value_of(node)
        size = [frame.setting.size(extent) for extent in fake.shape]
        if node in roles.padding:
            held = torch.ones(size, dtype=torch.bool)
            if padding is not None:
                width = min(size[1], padding.shape[1])
                held[:, :width] = padding[: size[0], :width]
            return held.to(fake.dtype)
        columns = frame.queries()
        shift = shift if self.moves_queries else unmoved
        if node in roles.lengths:
            # A single new column needs no arange: then the length itself says where it stands.
            moved = 0 if self._counts_own else int(shift(columns)[0])
            return torch.full(size, frame.past + moved, dtype=fake.dtype)
        if size[-1:] != [frame.num_columns]:
            raise NoMatchError(f"{node} has not a position for each column of the call")
        return (columns + shift(columns)).to(fake.dtype).expand(size).clone()

    def _spread(self, visible: torch.Tensor, scores: fx.Node, frame: Frame) -> torch.Tensor:
        """A mask over scores of any view, as [B or 1, H or 1, T, n]."""
        match = self.match
        leading, rows = self._score_rows(scores)
        if len(leading) == 2 and rows == match.num_columns and (visible.dim() < 4 or visible.shape[1] == 1):
            four = visible[(None,) * (4 - visible.dim())] if visible.dim() < 4 else visible
            if four.shape[2] in (1, frame.num_columns) and four.shape[3] in (1, frame.num_keys):
                return four
            raise NoMatchError("the mask does not have the sizes of the scores")
        rows = rows // match.num_columns * frame.num_columns
        try:
            full = visible.expand(*leading, rows, frame.num_keys)
            return full.reshape(match.batch, match.num_heads, frame.num_columns, frame.num_keys)
        except RuntimeError as error:
            raise NoMatchError("the mask does not have the sizes of the scores") from error

    def _score_rows(self, scores: fx.Node) -> tuple[tuple[int, ...], int]:
        """(leading sizes, queries) of the scores that a mask is applied to."""
        size = shape(scores)
        return size[:-2], size[-2]


def _visible(value: torch.Tensor, form: str) -> torch.Tensor:
    if form == "visible":
        return value.bool()
    if form == "hidden":
        return ~value.bool()
    visible = value == 0
    if not bool((visible | (value <= HIDDEN_BELOW)).all()):
        raise MaskValueError("the mask adds values to the scores that hide nothing (a position bias such as ALiBi?)")
    return visible


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)

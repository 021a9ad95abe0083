"""Find out where the columns of the traced call stand for a mask, and what its graph inputs mean."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from kitty_compile.passes.evaluate import Setting, symbol_hints
from kitty_compile.passes.mask_evidence import Evidence, NotCausalError
from kitty_compile.passes.nodes import NoMatchError, hint, is_static, shape, sizes, value_of
from kitty_compile.passes.probe_mask import Frame, MaskProbe, MaskValueError, Roles
from kitty_compile.passes.records import AttentionMatch

# Scores of more columns than this are probed on fewer, where the graph's sizes can be replaced.
_MANY_SCORES = 1 << 14
_FEW_COLUMNS = 37
MAX_SCORES = 1 << 24
_MAX_GUESSES = 12


@dataclasses.dataclass(frozen=True)
class Place:
    """A reading of the traced call under which its mask hides later columns, and what it showed."""

    frame: Frame
    roles: Roles
    evidence: Evidence


class ColumnPlacer:
    """Tries readings of one mask's graph inputs and sizes."""

    def __init__(self, match: AttentionMatch, probe: MaskProbe, constants: Sequence[int]) -> None:
        self.match, self.probe, self.constants = match, probe, constants
        self.own = sizes(match.key)[match.update.columns_dim]
        self.hints = symbol_hints(value_of(node) for node in match.node.graph.find_nodes(op="placeholder"))
        self._own_names = set() if is_static(self.own) else {str(symbol) for symbol in self.own.node.expr.free_symbols}

    def place(self, may_shrink: bool = True) -> Place:
        """The reading that lets the most through, of those that nothing contradicts.

        Raises:
            NoMatchError: there is none; the message says what the mask looks like instead.
        """
        failures: list[NoMatchError] = []
        places = [place for roles in self._roles() if (place := self._read(roles, may_shrink, failures)) is not None]
        if not places:
            raise _most_telling(failures)
        return max(places, key=lambda place: place.evidence.farthest_visible)

    def _read(self, roles: Roles, may_shrink: bool, failures: list[NoMatchError]) -> Place | None:
        for past in self._pasts(roles):
            for frame in self._frames(past, roles, may_shrink):
                evidence = Evidence()
                try:
                    seen = self.probe.run(frame, roles)
                    evidence.add(seen)
                except NoMatchError as failure:
                    failures.append(failure)
                    continue
                if evidence.farthest_visible < 0:
                    failures.append(NotCausalError("queries do not see their own columns"))
                elif not torch.equal(seen.queries, frame.queries()):
                    failures.append(NoMatchError("new columns are not written one after another"))
                else:
                    return Place(frame, roles, evidence)
        return None

    def _roles(self) -> Iterator[Roles]:
        """Integer inputs [batch, columns] may be paddings or positions, [columns] are positions, single ones lengths."""
        two_dimensional, positions, lengths = [], [], []
        for node in self.probe.subgraph.inputs:
            value, size = value_of(node), shape(node)
            is_integer = isinstance(value, torch.Tensor) and not value.is_floating_point()
            if is_integer and len(size) == 2:
                two_dimensional.append(node)
            elif is_integer and len(size) <= 1 and value.numel() == 1:
                lengths.append(node)
            elif is_integer and size == (self.match.num_columns,):
                positions.append(node)
            else:
                raise NoMatchError(f"the mask is made from a graph input of shape {list(size)}, before a graph break?")
        if len(two_dimensional) > 3:
            raise NoMatchError("the mask is made from more than three graph inputs [batch, columns]")
        may_place = [(True, False) if shape(node)[1] == self.match.num_columns else (True,) for node in two_dimensional]
        for kinds in itertools.product(*may_place):
            chosen = list(zip(two_dimensional, kinds, strict=True))
            padding = tuple(node for node, is_padding in chosen if is_padding)
            placed = tuple(node for node, is_padding in chosen if not is_padding)
            yield Roles(padding, (*positions, *placed), tuple(lengths))

    def _pasts(self, roles: Roles) -> list[int]:
        """How many columns may come before the call, best guess first."""
        match, update = self.match, self.match.update
        if update.is_fresh or update.key_past is None:
            return [0]
        if (start := own_start(match)) is not None:
            return [start]
        room = match.num_keys - match.num_columns
        widths = [shape(node)[1] - match.num_columns for node in roles.padding]
        guesses = [*widths, *((room // 2, 0, room) if update.is_static else (room,)), *self.constants]
        least = 0 if update.is_static else room
        return list(dict.fromkeys(guess for guess in guesses if guess >= least))[:_MAX_GUESSES]

    def _frames(self, past: int, roles: Roles, may_shrink: bool) -> Iterator[Frame]:
        """The sizes of the traced call, or fewer columns where they would be too many to probe again and again."""
        match = self.match
        traced = Frame(Setting(), past, match.num_columns, match.num_keys, match.update.is_static)
        scores = match.num_columns * match.num_keys
        if may_shrink and scores > _MANY_SCORES and (small := self._smaller(traced, roles)) is not None:
            yield small
        if scores <= MAX_SCORES:
            yield traced
        else:
            raise NoMatchError(f"the mask of {match.num_columns} x {match.num_keys} columns is too large to probe")

    def _smaller(self, frame: Frame, roles: Roles) -> Frame | None:
        size = next(size for size in itertools.count(_FEW_COLUMNS) if size not in self.constants)
        if not is_static(self.own):
            return self.resized(frame, roles, num_columns=size)
        if frame.past or frame.num_columns != frame.num_keys:
            return None
        setting = Setting(resize={frame.num_columns: size})
        return dataclasses.replace(frame, setting=setting, num_columns=size, num_keys=size)

    def resized(
        self, frame: Frame, roles: Roles, num_columns: int | None = None, past: int | None = None
    ) -> Frame | None:
        """A frame of other sizes; None where the graph fixes them, or says not how they hang together."""
        update = self.match.update
        symbols = {**self.hints, **frame.setting.symbols}
        if num_columns is not None:
            if len(self._own_names) != 1 or not self.own.node.expr.is_Symbol:
                return None
            symbols.update(dict.fromkeys(self._own_names, num_columns))
        if past is not None:
            if update.key_past is None or update.is_static:
                return None
            before = {self.match.num_keys - self.match.num_columns, frame.past}
            tied = before | {size + self.match.num_columns for size in before}
            moving = [name for name, value in self.hints.items() if name not in self._own_names and value in tied]
            if not moving:
                return None
            symbols.update({name: symbols[name] + past - frame.past for name in moving})
        return self._checked(frame, roles, Setting(symbols=symbols), num_columns, past)

    def _checked(
        self, frame: Frame, roles: Roles, setting: Setting, num_columns: int | None, past: int | None
    ) -> Frame | None:
        """The frame of a setting, if paddings keep as many columns beside the call's as they had."""
        past = frame.past if past is None else past
        num_columns = frame.num_columns if num_columns is None else num_columns
        keys = sizes(self.match.update.key_full)[self.match.update.columns_dim]
        num_keys = self.match.num_keys if is_static(keys) else setting.size(keys)
        if self.match.stops_at_own:
            num_keys = past + num_columns
        resized = Frame(setting, past, num_columns, num_keys, frame.is_static)
        for node in roles.padding:
            width, before = sizes(node)[1], hint(sizes(node)[1])
            spare = before - self.match.num_columns - frame.past if not frame.setting.symbols else None
            now = setting.size(width) - resized.num_columns - resized.past
            if not is_static(width) and spare is not None and now != spare:
                return None
        return resized


def own_start(match: AttentionMatch) -> int | None:
    """The first own column of an update that names it by a number."""
    positions = match.update.positions
    if positions is None or isinstance(positions, int):
        return positions
    value = value_of(positions)
    return hint(value) if isinstance(value, torch.SymInt | int) else None


def content_like(node: fx.Node, frame: Frame) -> torch.Tensor:
    """Zeros of the sizes that a graph input has in a frame."""
    fake = value_of(node)
    return torch.zeros([frame.setting.size(size) for size in fake.shape], dtype=fake.dtype)


def _most_telling(failures: Sequence[NoMatchError]) -> NoMatchError:
    for failure in failures:
        if isinstance(failure, MaskValueError):
            return failure
    for failure in failures:
        if isinstance(failure, NotCausalError):
            return failure
    return failures[0] if failures else NoMatchError("the mask is made from nothing that is known")

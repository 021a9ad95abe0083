"""Say what an attention's masks mean, by running them. Reads the graph, changes nothing.

Before (some subgraph that ends in a mask)                         Result
    arange(n) <= arange(t)[:, None] + past                           causal
    that, and arange(n) > arange(t)[:, None] + past - 4096           sliding, window 4096
    either, and attention_mask[:, None, None, :]                     the same with ``padding`` = attention_mask
    that, and segment[:, None] == segment[None]                      refused: packed sequences
    alibi, a prefix seen by all, chunks, no mask over 50 columns     refused, by name

A mask is taken for causal or sliding only after keys on both sides of every integer constant of its subgraph were
probed, with the columns where they are and moved as a whole, with several paddings, and at other sizes where sizes are
symbols. Parameters and buffers count with the values that they have now.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import fx

from kitty_compile.passes.evaluate import Subgraph
from kitty_compile.passes.mask_evidence import NotCausalError
from kitty_compile.passes.nodes import NoMatchError, is_static, shape, sizes, value_of
from kitty_compile.passes.place_columns import MAX_SCORES, ColumnPlacer, content_like
from kitty_compile.passes.probe_mask import (
    Frame,
    MaskProbe,
    MaskValueError,
    Seen,
    Shift,
    moved_apart,
    moved_by,
    reversed_around,
)
from kitty_compile.passes.records import AttentionMatch, MaskKind, MaskRefusal


def classify_mask(match: AttentionMatch, order: dict[fx.Node, int]) -> MaskKind | MaskRefusal:
    """What the masks of a matched attention amount to."""
    try:
        kind = _Classifier(match, order).classify() if match.masks else _without_mask(match, order)
        return _with_kept(kind, match)
    except NotCausalError as failure:
        return MaskRefusal(f"the mask is neither causal nor sliding: {failure}")
    except NoMatchError as failure:
        return MaskRefusal(str(failure))


def _without_mask(match: AttentionMatch, order: dict[fx.Node, int]) -> MaskKind:
    if match.is_causal:
        # SDPA aligns its causal mask with the first key, which must then be the first column of the call.
        if match.num_columns != match.num_keys or not _starts_empty(match, order):
            raise NoMatchError(
                "is_causal counts from the first key, but there is a past: queries see the wrong columns"
            )
        return MaskKind("causal")
    if match.num_columns != 1 or not is_static(sizes(match.key)[match.update.columns_dim]):
        raise NoMatchError("there is no mask: every column sees all others (bidirectional)")
    if match.update.is_static and not match.stops_at_own and not _starts_empty(match, order):
        raise NoMatchError("there is no mask over a cache of fixed length: columns that are not written yet are seen")
    return MaskKind("causal")


def _starts_empty(match: AttentionMatch, order: dict[fx.Node, int]) -> bool:
    """Are the call's columns the first ones, whatever the graph's inputs?"""
    positions = match.update.positions
    if match.update.is_fresh or match.update.key_past is None:
        return True
    if not match.update.is_static:
        return False
    if not isinstance(positions, fx.Node):
        return positions == 0
    written = Subgraph([positions], order, reader=match.node)
    is_fixed = not written.inputs and not isinstance(value_of(positions), torch.SymInt)
    return is_fixed and torch.equal(written.run({})[0].flatten(), torch.arange(match.num_columns))


def _with_kept(kind: MaskKind, match: AttentionMatch) -> MaskKind:
    """A cache that keeps w - 1 columns is a sliding one, even while the mask lets everything through."""
    kept = match.update.kept
    if kept is None or kind.window == kept + 1:
        return kind
    if kind.kind == "sliding":
        raise NoMatchError(f"the mask has a window of {kind.window}, but the cache keeps {kept} columns")
    if match.num_keys > kept + 1:
        raise NoMatchError(f"{match.num_keys} columns are seen, but the cache keeps {kept}")
    return dataclasses.replace(kind, kind="sliding", window=kept + 1)


class _Classifier:
    def __init__(self, match: AttentionMatch, order: dict[fx.Node, int]) -> None:
        self.match, self.order = match, order
        self.probe = MaskProbe(match, order)
        self.constants = sorted(constant for constant in self.probe.subgraph.integers() if constant > 1)
        self.placer = ColumnPlacer(match, self.probe, self.constants)

    def classify(self) -> MaskKind:
        self._take(may_shrink=True)
        try:
            return self._classify()
        except NotCausalError as failure:
            if (size := self._chunk_size()) is not None:
                raise NotCausalError(f"columns see their own chunk of {size} alone (chunked attention)") from failure
            if not any(tensor.dim() >= 2 for tensor in self.probe.subgraph.constants()):
                raise
        # Rows of a table that were moved beyond its edges say nothing.
        return self._classify(may_move=False)

    def _classify(self, may_move: bool = True) -> MaskKind:
        moves = (self._moves(queries=True), self._moves(keys=True)) if may_move else (False, False)
        self.probe.moves_queries, self.probe.moves_keys = moves
        if not self.probe.moves_keys:
            # Nothing can be probed beyond the columns that are there.
            self._take(may_shrink=False)
        padding = self._padding_input()
        self._check_padding(padding)
        self._check_positions()
        self._probe_pasts()
        if self.probe.moves_keys:
            self._probe_moved()
        self._probe_sizes()
        if not self.probe.moves_keys:
            self._check_reach()
        window = self._window()
        return MaskKind("causal", None, padding) if window is None else MaskKind("sliding", window, padding)

    def _take(self, may_shrink: bool) -> None:
        place = self.placer.place(may_shrink)
        self.frame, self.roles, self.evidence = place.frame, place.roles, place.evidence

    @property
    def _last(self) -> int:
        return self.frame.past + self.frame.num_columns - 1

    def _moves(self, queries: bool = False, keys: bool = False) -> bool:
        """Does moving the queries, or the keys, change what is seen?"""
        self.probe.moves_queries, self.probe.moves_keys = queries, keys
        far = 4 * (self._last + 1)
        plain = self.probe.run(self.frame, self.roles).visible
        shifts = (moved_by(-far if queries else far), reversed_around(self._last))
        return any(not torch.equal(plain, self.probe.run(self.frame, self.roles, shift).visible) for shift in shifts)

    # ---- graph inputs

    def _padding_input(self) -> fx.Node | None:
        """The one graph input [batch, columns] of those taken for paddings that the mask depends on."""
        used = [node for node in self.roles.padding if self._depends_on(node)]
        if len(used) > 1:
            raise NoMatchError(f"the mask is made from several paddings: {', '.join(map(str, used))}")
        return used[0] if used else None

    def _depends_on(self, node: fx.Node) -> bool:
        plain = self.probe.run(self.frame, self.roles).visible
        content = content_like(node, self.frame)
        columns = torch.arange(content.shape[1]).expand(content.shape)
        for values in (torch.zeros_like(columns), columns % 2, columns // 3, columns):
            changed = self.probe.run(self.frame, self.roles, contents={node: values.to(content.dtype)}).visible
            if not torch.equal(plain, changed):
                return True
        return False

    def _check_padding(self, padding: fx.Node | None) -> None:
        """The mask must hide exactly the keys at which ``padding`` is zero, whatever it is elsewhere."""
        if padding is None:
            return
        width, rows = self._last + 1, shape(padding)[0]
        generator = torch.Generator().manual_seed(0)
        for density in (0.3, 0.7, 0.9):
            scattered = torch.rand(rows, width, generator=generator) < density
            left = torch.arange(width) >= torch.randint(0, width, (rows, 1), generator=generator)
            for held in (scattered, left):
                self._add_padded(padding, held, self.probe.run(self.frame, self.roles, padding=held))
            if value_of(padding).dtype == torch.bool:
                continue
            content = content_like(padding, self.frame) + 1
            content[:, :width] = scattered * torch.randint(1, 4, (rows, width), generator=generator)
            try:
                seen = self.probe.run(self.frame, self.roles, contents={padding: content})
            except MaskValueError:
                continue  # (1 - padding) * minimum, which takes ones alone
            self._add_padded(padding, scattered, seen)

    def _add_padded(self, padding: fx.Node, held: torch.Tensor, seen: Seen) -> None:
        try:
            self.evidence.add_padded(seen, held, self.frame)
        except NotCausalError as failure:
            raise NotCausalError(f"{padding} is no padding (packed sequences?): {failure}") from failure

    def _check_positions(self) -> None:
        """Positions that the caller chooses freely may restart; those at which the cache is written may not."""
        if not self.roles.positions:
            return
        written: tuple[fx.Node, ...] = ()
        if isinstance(self.match.update.positions, fx.Node):
            written = Subgraph([self.match.update.positions], self.order, reader=self.match.node).inputs
        for node in self.roles.positions:
            if node not in written:
                raise NoMatchError(f"the mask depends on the values of {node}, which may restart (packed sequences)")

    # ---- probes

    def _probe_pasts(self) -> None:
        """A cache of fixed length: calls at its start, in its middle and at its end."""
        room = self.frame.num_keys - self.frame.num_columns
        if not self.frame.is_static or self.match.update.is_fresh or not (self.roles.positions or self.roles.lengths):
            return
        widths = {shape(node)[1] for node in self.roles.padding if shape(node)[1] < self.frame.num_keys}
        if widths:
            return
        for past in {0, 1, room // 3, room - 1, room} & set(range(room + 1)):
            self.evidence.add(self.probe.run(dataclasses.replace(self.frame, past=past), self.roles))

    def _probe_moved(self) -> None:
        for shift in self._shifts():
            self.evidence.add(self.probe.run(self.frame, self.roles, shift))

    def _shifts(self) -> Iterator[Shift]:
        """Moves that put keys on both sides of every constant, counted from the query and from the first column."""
        first, last = self.frame.first_key, self._last
        middle = (first + last + 1) // 2
        edges = sorted({max(self.frame.past, first + 1), middle, last} & set(range(first + 1, last + 1)))
        for constant, edge, nearer in itertools.product(self.constants, edges, (0, 1, 2)):
            yield moved_apart(edge, left=nearer - constant)
            if self.probe.moves_queries:
                yield moved_apart(edge, right=constant - nearer)
        if self.probe.moves_queries:
            for constant, place in itertools.product(self.constants, (first, middle, last)):
                yield moved_by(constant - place)

    def _chunk_size(self) -> int | None:
        """The size of chunks that explain every move, if there is one."""
        self.probe.moves_queries = self.probe.moves_keys = True
        for size in reversed(self.constants):
            places = (self.frame.first_key, (self.frame.first_key + self._last + 1) // 2, self._last)
            seen = [self.probe.run(self.frame, self.roles, moved_by(size - place)) for place in places]
            if all(_is_chunked(one, size) for one in seen):
                return size
        return None

    def _probe_sizes(self) -> None:
        """Other sizes where the graph has symbols for them, past every constant if columns cannot be moved there."""
        frame, grown = self.frame, []
        if not self.probe.moves_keys:
            grown = [size for size in (*self.constants, *self._buffer_sizes()) if size > self.evidence.farthest_probed]
        for more in (5, *(size - frame.num_keys for size in grown), *(size + 2 - frame.num_keys for size in grown)):
            for resized in (
                self.placer.resized(frame, self.roles, num_columns=frame.num_columns + more),
                self.placer.resized(frame, self.roles, past=frame.past + more),
            ):
                if resized is not None and resized.num_columns * resized.num_keys <= MAX_SCORES:
                    self._add_resized(resized)

    def _add_resized(self, frame: Frame) -> None:
        try:
            seen = self.probe.run(frame, self.roles)
        except NoMatchError:
            return  # A buffer ends here: the graph could not run at these sizes either.
        self.evidence.add(seen)

    def _buffer_sizes(self) -> list[int]:
        return [tensor.shape[-1] for tensor in self.probe.subgraph.constants() if tensor.dim() >= 2]

    def _check_reach(self) -> None:
        """Columns that cannot be moved must lie on both sides of every constant as they are."""
        if self.match.num_keys == 1 and self.match.update.kept is not None:
            return
        farthest = self.evidence.farthest_probed
        for constant in sorted(self.probe.subgraph.operands()):
            if constant > farthest + 1:
                raise NoMatchError(
                    f"the mask has a constant {constant}, but no two columns of this call are so far apart"
                )
        for tensor in self.probe.subgraph.constants():
            if self.evidence.window is None and _hides_by_distance(tensor, farthest):
                raise NoMatchError("the mask has a buffer with a window wider than this call")

    def _window(self) -> int | None:
        """The window, after probes between the farthest visible and the nearest hidden key have made them neighbours."""
        evidence = self.evidence
        while evidence.nearest_hidden is not None and evidence.nearest_hidden > evidence.farthest_visible + 1:
            bounds = (evidence.farthest_visible, evidence.nearest_hidden)
            jump = sum(bounds) // 2 - 1
            if self.probe.moves_keys:
                evidence.add(self.probe.run(self.frame, self.roles, moved_apart(self._last, left=-jump)))
            if bounds == (evidence.farthest_visible, evidence.nearest_hidden):
                raise NotCausalError(f"the mask hides keys somewhere between {bounds[0]} and {bounds[1]} columns back")
        window = evidence.window
        if window is not None and self.probe.moves_keys and not {window - 1, window, window + 1} & {*self.constants}:
            raise NotCausalError(f"the mask hides keys from {window} columns back, a number that it does not contain")
        if window is not None:
            self._check_fixed(window)
        return window

    def _check_fixed(self, window: int) -> None:
        """No symbol that may change between calls may set the window."""
        hints = self.placer.hints
        for name in (name for name, value in hints.items() if abs(value - window) <= 1):
            setting = dataclasses.replace(self.frame.setting, symbols={**hints, **self.frame.setting.symbols})
            symbols = {**setting.symbols, name: setting.symbols[name] + 1}
            changed = dataclasses.replace(self.frame, setting=dataclasses.replace(setting, symbols=symbols))
            try:
                seen = self.probe.run(changed, self.roles, moved_apart(self._last, left=1 - window))
            except NoMatchError:
                continue  # The symbol counts columns, so that the others would have to change with it.
            self.evidence.add(seen)


def _is_chunked(seen: Seen, size: int) -> bool:
    same = torch.div(seen.queries, size, rounding_mode="floor").unsqueeze(1) == torch.div(
        seen.keys, size, rounding_mode="floor"
    )
    return torch.equal(seen.visible.all(dim=(0, 1)), same & (seen.distances() >= 0))


def _hides_by_distance(tensor: torch.Tensor, probed: int) -> bool:
    """Does the last row of a constant mask change beyond the distances that were probed?"""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] <= probed + 1:
        return False
    last_row = tensor.flatten(0, -3)[0][-1] if tensor.dim() > 2 else tensor[-1]
    return bool((last_row != last_row[-1]).any())

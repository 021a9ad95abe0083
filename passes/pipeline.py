"""The passes in their order, and the report of what they found and did.

Set ``KITTY_COMPILE_DUMP`` to a folder to get the graph before and after every pass. The logger is
``kitty_compile.passes``; nothing is formatted unless it is enabled.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import torch
from torch import fx

from kitty_compile.passes.classify_mask import classify_mask
from kitty_compile.passes.evaluate import Subgraph
from kitty_compile.passes.find_unclaimed import find_unclaimed
from kitty_compile.passes.match_attention import match_attention
from kitty_compile.passes.nodes import order_of, value_of
from kitty_compile.passes.normalize import normalize
from kitty_compile.passes.records import (
    AttentionMatch,
    FusedAttention,
    MaskKind,
    MaskRefusal,
    Match,
    MatchFailure,
)

logger = logging.getLogger("kitty_compile.passes")
DUMP_VARIABLE = "KITTY_COMPILE_DUMP"
_dumps = itertools.count()


@dataclasses.dataclass
class Report:
    """What the passes found in one graph.

    Attributes:
        found: every attention, matched, fused already or not understood, in graph order.
        masks: what the masks of each match mean, by its node.
        seconds: time of each pass.
        rewritten: how many attentions were replaced; erased: how many nodes went with them.
    """

    found: list[Match] = dataclasses.field(default_factory=list)
    masks: dict[fx.Node, MaskKind | MaskRefusal] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    rewritten: int = 0
    erased: int = 0

    @property
    def matches(self) -> list[AttentionMatch]:
        """Attentions that are understood, masks included."""
        return [match for match in self._matched if isinstance(self.masks.get(match.node), MaskKind)]

    @property
    def fused(self) -> list[FusedAttention]:
        return [match for match in self.found if isinstance(match, FusedAttention)]

    @property
    def failures(self) -> list[MatchFailure]:
        """All that is not understood, masks included, each with its reason."""
        failures = [match for match in self.found if isinstance(match, MatchFailure)]
        for match in self._matched:
            if isinstance(mask := self.masks.get(match.node), MaskRefusal):
                failures.append(MatchFailure(match.node, mask.reason, match.module_path))
        return failures

    @property
    def counts(self) -> dict[str, int]:
        """Attentions by what became of them: "causal", "sliding", "fused", "refused"."""
        kinds = [mask.kind for match in self.matches if isinstance(mask := self.masks[match.node], MaskKind)]
        return dict(collections.Counter([*kinds, *["fused"] * len(self.fused), *["refused"] * len(self.failures)]))

    @property
    def _matched(self) -> list[AttentionMatch]:
        return [match for match in self.found if isinstance(match, AttentionMatch)]

    def mask_of(self, match: AttentionMatch) -> MaskKind:
        mask = self.masks[match.node]
        assert isinstance(mask, MaskKind)
        return mask


@dataclasses.dataclass
class Work:
    """The graph on its way through the passes."""

    gm: fx.GraphModule
    example_inputs: Sequence[object]
    report: Report = dataclasses.field(default_factory=Report)


Pass = Callable[[Work], None]


def _normalize(work: Work) -> None:
    work.gm = normalize(work.gm, work.example_inputs)


def _match_attention(work: Work) -> None:
    work.report.found = match_attention(work.gm)


def _find_unclaimed(work: Work) -> None:
    work.report.found += find_unclaimed(work.gm, work.report.found)


def _classify_mask(work: Work) -> None:
    order = order_of(work.gm.graph)
    known: dict[object, MaskKind | MaskRefusal] = {}
    for match in work.report.found:
        if isinstance(match, AttentionMatch):
            key = _mask_key(match)
            if key not in known:
                known[key] = classify_mask(match, order)
            work.report.masks[match.node] = known[key]


def _mask_key(match: AttentionMatch) -> object:
    """Layers that share masks and sizes share their meaning."""
    update = match.update
    return (
        tuple((term.node, term.form) for term in match.masks),
        (match.is_causal, match.num_columns, match.num_keys, match.num_heads),
        (update.kind, update.kept, update.columns_dim, update.is_fresh, update.key_past is None),
        match.node if update.is_static else None,
        str(update.key_full.meta["val"].shape),
    )


ANALYSIS: tuple[Pass, ...] = (_normalize, _match_attention, _find_unclaimed, _classify_mask)


def analyze(gm: fx.GraphModule, example_inputs: Sequence[object] = ()) -> tuple[fx.GraphModule, Report]:
    """Normalise a graph and find its attentions: (the graph in pre-dispatch ATen, the report). Nothing is rewritten."""
    work = Work(gm, example_inputs)
    run(ANALYSIS, work)
    return work.gm, work.report


def run(passes: Sequence[Pass], work: Work) -> None:
    """Run passes in order, with times, log and dumps."""
    for step in passes:
        name = step.__name__.lstrip("_")
        dump(work.gm, f"before_{name}")
        start = time.perf_counter()
        step(work)
        work.report.seconds[name] = work.report.seconds.get(name, 0.0) + time.perf_counter() - start
        logger.debug("%s took %.3f s", name, work.report.seconds[name])
        dump(work.gm, f"after_{name}")
    logger.info("attentions: %s", work.report.counts)
    for failure in work.report.failures:
        logger.info("%s at %s is refused: %s", failure.node, failure.module_path or "the top", failure.reason)


def guard_numbers(report: Report) -> int:
    """Have Dynamo compile anew when a number changes that a match took for fixed (with ``dynamic=True`` even a scale is one).

    To be called by a backend for what it rewrites, while Dynamo waits for it. Returns how many numbers are guarded.
    """
    guarded = 0
    for match in report.matches:
        nodes = [*match.numbers]
        if match.masks:
            masks = [term.node for term in match.masks]
            nodes += Subgraph(masks, order_of(match.node.graph), reader=match.node).floats()
        for node in nodes:
            value = value_of(node)
            # Reading the value of a symbol as a Python number makes it a guard.
            float(value) if isinstance(value, torch.SymFloat) else int(value)
        guarded += len(nodes)
    return guarded


def dump(gm: fx.GraphModule, label: str) -> None:
    """Write the graph to the folder that ``KITTY_COMPILE_DUMP`` names, if it does."""
    if folder := os.environ.get(DUMP_VARIABLE):
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        text = gm.print_readable(print_output=False, include_stride=False)
        (path / f"{next(_dumps):04d}_{label}.py").write_text(text)


@functools.cache
def _source_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def pass_uuid(config: object = None) -> bytes:
    """Identifies what the passes do, for inductor's cache: the sources of all passes and ``repr(config)``."""
    return hashlib.sha256(_source_digest() + repr(config).encode()).digest()

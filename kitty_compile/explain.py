"""``explain``: what the passes see in a model, without changing it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kitty_compile.passes.normalize import normalize_program
from kitty_compile.passes.pipeline import Report, analyze
from kitty_compile.passes.records import AttentionMatch, FusedAttention, MaskKind, Match, MatchFailure

_HEADINGS = ("layer", "module", "attention", "heads", "head_dim", "columns", "cache", "mask", "result")


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The report of each graph that a call made, in order; printing it gives a table."""

    reports: tuple[Report, ...]

    @property
    def matches(self) -> list[AttentionMatch]:
        return [match for report in self.reports for match in report.matches]

    @property
    def failures(self) -> list[MatchFailure]:
        return [failure for report in self.reports for failure in report.failures]

    @property
    def counts(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for report in self.reports:
            for kind, count in report.counts.items():
                totals[kind] = totals.get(kind, 0) + count
        return totals

    @property
    def seconds(self) -> float:
        return sum(sum(report.seconds.values()) for report in self.reports)

    def __str__(self) -> str:
        parts = [_table(report, index) for index, report in enumerate(self.reports)]
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items())) or "no attention"
        graphs = f"{len(self.reports)} graph{'s' if len(self.reports) != 1 else ''}"
        return "\n\n".join([*parts, f"{graphs}: {counts} ({self.seconds:.2f} s)"])


def explain(target: Callable[..., Any] | torch.export.ExportedProgram, *args: Any, **kwargs: Any) -> Explanation:
    """Capture a call with Dynamo and say which attentions the passes would move onto the cache, and why not the others.

    Args:
        target: a function or a module, called with the remaining arguments; or an exported program, taken as it is.
    """
    if isinstance(target, torch.export.ExportedProgram):
        return Explanation((analyze(normalize_program(target))[1],))
    reports: list[Report] = []

    def record(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        reports.append(analyze(gm, example_inputs)[1])
        return gm.forward

    compiled = torch.compile(target, backend=record)
    with torch.no_grad():
        compiled(*args, **kwargs)
    return Explanation(tuple(reports))


def _table(report: Report, index: int) -> str:
    rows = [_HEADINGS, *(_row(report, match) for match in report.found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"graph {index}", *lines])


def _row(report: Report, match: Match) -> tuple[str, ...]:
    if isinstance(match, MatchFailure):
        return ("", match.module_path, "", "", "", "", "", "", f"refused: {match.reason}")
    if isinstance(match, FusedAttention):
        return (str(match.layer), match.module_path, "kitty", "", "", "", "", "", "fused already")
    mask = report.masks[match.node]
    is_known = isinstance(mask, MaskKind)
    return (
        str(match.layer),
        match.module_path,
        _attention(match),
        f"{match.num_heads}/{match.num_kv_heads}",
        str(match.key_dim) if match.key_dim == match.value_dim else f"{match.key_dim}/{match.value_dim}",
        f"{match.num_columns} of {match.num_keys}",
        _cache(match),
        _mask(mask) if isinstance(mask, MaskKind) else "",
        "matched" if is_known else f"refused: {getattr(mask, 'reason', '')}",
    )


def _attention(match: AttentionMatch) -> str:
    parts = [match.idiom, f"scale {match.scale:.4g}"]
    if match.softcap is not None:
        parts.append(f"softcap {match.softcap:g}")
    if match.sinks is not None:
        parts.append("sinks")
    return ", ".join(parts)


def _cache(match: AttentionMatch) -> str:
    update = match.update
    if update.kind == "none":
        return "none"
    first = " (first call)" if update.key_past is None or update.is_fresh else ""
    return update.kind + first + (f", keeps {update.kept}" if update.kept is not None else "")


def _mask(mask: MaskKind) -> str:
    text = mask.kind if mask.window is None else f"{mask.kind} {mask.window}"
    return f"{text}, padding {mask.padding}" if mask.padding is not None else text

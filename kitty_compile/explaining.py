"""``explain``: what the passes see in a model, without changing it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kitty_compile.passes.normalize import normalize_program
from kitty_compile.passes.pipeline import Report, analyze
from kitty_compile.passes.records import AttentionMatch, FusedAttention, MaskKind, Match, MatchFailure

_HEADINGS = ("layer", "module", "node", "attention", "heads", "head_dim", "columns", "cache", "mask", "result")
# A call is captured anew each time, however often it was before.
_UNLIMITED = 1 << 30


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The report of each graph that a call made, in order; printing it gives a table.

    A row of the table is an attention: where the model computes it and which node of the normalised graph it is
    (``KITTY_COMPILE_DUMP`` writes that graph), query heads / KV heads, the call's own columns of all that K has, how the
    cache is updated, what the masks were found to mean, and whether the passes would rewrite it.

    Attributes:
        reports: what the passes found, per graph.
        names: what the inputs of the graphs are called in the model, by the name of their node, per graph.
    """

    reports: tuple[Report, ...]
    names: tuple[dict[str, str], ...]

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
    def seconds(self) -> dict[str, float]:
        """Time of each pass, over all graphs."""
        totals: dict[str, float] = {}
        for report in self.reports:
            for name, seconds in report.seconds.items():
                totals[name] = totals.get(name, 0.0) + seconds
        return totals

    def __str__(self) -> str:
        named = zip(self.reports, self.names, strict=True)
        parts = [_table(report, names, index) for index, (report, names) in enumerate(named)]
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items())) or "no attention"
        graphs = f"{len(self.reports)} graph{'s' if len(self.reports) != 1 else ''}"
        times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        return "\n\n".join([*parts, f"{graphs}: {counts}\n{times}".rstrip()])


def explain(target: Callable[..., Any] | torch.export.ExportedProgram, *args: Any, **kwargs: Any) -> Explanation:
    """Capture a call with Dynamo and say which attentions the passes would move onto the cache, and why not the others.

    The call runs as it would have (a cache among the arguments moves on); what is captured is thrown away.

    Args:
        target: a function or a module, called with the remaining arguments; or an exported program, taken as it is.
    """
    if isinstance(target, torch.export.ExportedProgram):
        return Explanation((analyze(normalize_program(target))[1],), ({},))
    reports: list[Report] = []
    names: list[dict[str, str]] = []

    def record(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        normal, report = analyze(gm, example_inputs)
        reports.append(report)
        names.append(_input_names(gm, normal))
        return gm.forward

    compiled = torch.compile(target, backend=record)
    unlimited = {"recompile_limit": _UNLIMITED, "accumulated_recompile_limit": _UNLIMITED}
    with torch.no_grad(), torch._dynamo.config.patch(unlimited):
        compiled(*args, **kwargs)
    return Explanation(tuple(reports), tuple(names))


def _input_names(captured: fx.GraphModule, normal: fx.GraphModule) -> dict[str, str]:
    """The names that Dynamo gave to the inputs of a graph, by those that they have after normalising."""
    pairs = zip(captured.graph.find_nodes(op="placeholder"), normal.graph.find_nodes(op="placeholder"), strict=True)
    return {after.name: _said(str(before.target)) for before, after in pairs}


def _said(name: str) -> str:
    """ "attention_mask" for "L_kwargs_attention_mask_"."""
    return name.strip("_").removeprefix("L_").removeprefix("args_").removeprefix("kwargs_") or name


def _table(report: Report, names: dict[str, str], index: int) -> str:
    rows = [_HEADINGS, *(_row(report, match, names) for match in report.found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"graph {index}", *lines])


def _row(report: Report, match: Match, names: dict[str, str]) -> tuple[str, ...]:
    blank = ("",) * 6
    if isinstance(match, MatchFailure):
        return ("", match.module_path, match.node.name, *blank, f"refused: {match.reason}")
    if isinstance(match, FusedAttention):
        return (str(match.layer), match.module_path, match.node.name, *blank, "fused already")
    mask = report.masks[match.node]
    is_known = isinstance(mask, MaskKind)
    return (
        str(match.layer),
        match.module_path,
        match.node.name,
        _attention(match),
        f"{match.num_heads}/{match.num_kv_heads}",
        str(match.key_dim) if match.key_dim == match.value_dim else f"{match.key_dim}/{match.value_dim}",
        f"{match.num_columns} of {match.num_keys}",
        _cache(match),
        _mask(mask, names) if isinstance(mask, MaskKind) else "",
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


def _mask(mask: MaskKind, names: dict[str, str]) -> str:
    text = mask.kind if mask.window is None else f"{mask.kind} {mask.window}"
    if mask.padding is None:
        return text
    return f"{text}, padding {names.get(mask.padding.name, mask.padding.name)}"

"""The zoo's results: a JSON file per version of transformers, and ``docs/zoo.md`` made of all of them."""

import dataclasses
import datetime
import json
import pathlib
import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from tests.zoo.judge import Row

DOCS = pathlib.Path(__file__).parents[2] / "docs"
STATUSES = ("rewritten", "kept", "refused", "cannot build", "insensitive", "WRONG")
_HEAD = """# The model zoo

Every class of transformers' causal-LM mapping, built from a tiny random configuration and run on kitty pages: three rows
with left padding, a prefill of 190 columns and 300 tokens one at a time. `make zoo` writes this file.

- **rewritten**: at least one layer is quantised and has sealed pages; `lossless` equals the stock model on its stock
  cache; `kitty`, fused, equals the stock model's own attention on the unpacked pages; zeroed pages move the logits.
- **kept**: nothing in the model can be quantised, by the reason named; the logits are the stock model's.
- **refused**: an error says why, before anything runs.
- **cannot build**: the zoo has no tiny model of the class that the stock code can run.
- **insensitive**: equal, but the logits do not hang on the pages enough to show it.
- **WRONG**: none may be.

The paths are `apply` (`kitty_compile.apply`) and `materialise` (the model as it is, on a `KittyCache`). *layers* are
quantised / kept / all. *lossless*, *fused* and *zeroed* are largest differences of logits, in standard deviations of the stock
model's; `tests/zoo/compare.py` says what is allowed.
"""


def save(rows: Iterable[Row]) -> pathlib.Path:
    """Write rows to the running version's file, beside those of other classes and paths."""
    file = DOCS / f"zoo-{transformers.__version__}.json"
    held = json.loads(file.read_text())["rows"] if file.exists() else []
    merged = {(row["name"], row["path"]): row for row in held}
    merged |= {(row.name, row.path): _rounded(row) for row in rows}
    result = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "rows": sorted(merged.values(), key=lambda row: (row["name"].lower(), row["path"])),
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file


def write() -> pathlib.Path:
    """Write ``docs/zoo.md`` from the files of all versions, the newest first."""
    files = sorted(DOCS.glob("zoo-*.json"), key=_version, reverse=True)
    sections = [_section(json.loads(file.read_text())) for file in files]
    target = DOCS / "zoo.md"
    target.write_text("\n".join([_HEAD, *sections]))
    return target


def _version(file: pathlib.Path) -> tuple[int, ...]:
    return tuple(int(part) for part in file.stem.removeprefix("zoo-").split(".") if part.isdigit())


def _rounded(row: Row) -> dict[str, Any]:
    return {
        name: float(f"{value:.1e}") if isinstance(value, float) and name != "seconds" else value
        for name, value in dataclasses.asdict(row).items()
    }


def _section(result: dict[str, Any]) -> str:
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault(row["name"], {})[row["path"]] = row
    paths = list(dict.fromkeys(row["path"] for row in result["rows"]))
    lines = [
        f"## transformers {result['transformers']}",
        "",
        f"torch {result['torch']}, Python {result['python']}, {result['date']}. {len(rows)} classes.",
        "",
        "| path | " + " | ".join(STATUSES) + " |",
        "|---|" + "---|" * len(STATUSES),
        *(_counts(path, rows) for path in paths),
        "",
        "| class | " + " | ".join(paths) + " | layers | lossless | fused | zeroed | reason |",
        "|---|" + "---|" * (len(paths) + 5),
        *(_line(name, by_path, paths) for name, by_path in rows.items()),
        "",
    ]
    return "\n".join(lines)


def _counts(path: str, rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    counts = Counter(by_path[path]["status"] for by_path in rows.values() if path in by_path)
    return f"| {path} | " + " | ".join(str(counts[status]) for status in STATUSES) + " |"


def _line(name: str, by_path: dict[str, dict[str, Any]], paths: list[str]) -> str:
    """One class; the numbers are of the first path that has any, the reasons of all paths."""
    shown = next((row for row in by_path.values() if row["lossless"] is not None), next(iter(by_path.values())))
    statuses = [by_path[path]["status"] if path in by_path else "-" for path in paths]
    layers = f"{shown['quantised']}/{shown['kept']}/{shown['layers']}"
    numbers = ["" if shown[key] is None else f"{shown[key]:.0e}" for key in ("lossless", "fused", "control")]
    reasons = "; ".join(dict.fromkeys(row["reason"] for row in by_path.values() if row["reason"]))
    return "| " + " | ".join([name, *statuses, layers, *numbers, reasons.replace("|", "\\|")]) + " |"

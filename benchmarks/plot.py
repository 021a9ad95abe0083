"""Draw the README's figures from the committed results: ``python benchmarks/plot.py`` (needs matplotlib).

``docs/throughput.png``: tokens per second and peak memory against the batch, Qwen3-8B's shape at 8k columns (the paper's
Figure 5). ``docs/speedup.png``: a decode step of attention against the length of the rows.
"""

import json
import pathlib
from typing import Any

import matplotlib.pyplot as plt
from common import RESULTS

DOCS = pathlib.Path(__file__).parents[1] / "docs"
LENGTH = 8192
NAMES = {"strict": "16 bit, nothing held back", "kitty": "kitty", "kitty-pro": "kitty-pro", "lossless": "lossless"}


def read(pattern: str) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(RESULTS.glob(pattern)):
        rows += json.loads(path.read_text())["rows"]
    return rows


def throughput() -> plt.Figure:
    """Each row that was measured up to LENGTH is a point."""
    rows = [row for row in read("throughput_qwen3-8b_*.json") if row["lengths"][-1] == LENGTH]
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for system, name in NAMES.items():
        own = sorted((row for row in rows if row["system"] == system), key=lambda row: row["batch"])
        batches = [row["batch"] for row in own]
        speed.plot(batches, [row["batch"] / row["step_ms"][-1] * 1e3 for row in own], marker="o", label=name)
        memory.plot(batches, [row["peak_bytes_at_full_length"] / 1e9 for row in own], marker="o", label=name)
    speed.set(xlabel="rows", ylabel="tokens per second", title="a decode step at 8k columns")
    memory.set(xlabel="rows", ylabel="GB", title="peak memory, weights included")
    memory.axhline(80, color="grey", linewidth=0.8, linestyle=":")
    speed.legend(frameon=False)
    return figure


def speedup() -> plt.Figure:
    rows = read("decode_attention.json")
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for batch in sorted({row["batch"] for row in rows}):
        own = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["length"])
        lengths = [row["length"] for row in own]
        axes.plot(lengths, [row["kitty_speedup"] for row in own], marker="o", label=f"{batch} row{'s' * (batch > 1)}")
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="columns", ylabel="times as fast as 16 bit", title="a decode step of attention, kitty")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    for name, figure in (("throughput", throughput()), ("speedup", speedup())):
        figure.savefig(DOCS / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()

"""What the benchmarks share: where a figure was measured, medians, result files."""

import datetime
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    """Date, device and versions: what stands beside every figure."""
    import transformers
    import triton

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def write_result(name: str, rows: list[dict[str, Any]], folder: pathlib.Path = RESULTS, **more: Any) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**environment(), **more, "rows": rows}, indent=1) + "\n")
    return path


def median_seconds(step: Callable[[], object], repeats: int, warmup: int = 3) -> float:
    """Median wall time of ``step`` on the host."""
    for _ in range(warmup):
        step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def graph_seconds(
    step: Callable[[], object],
    repeats: int = 20,
    *,
    least: float = 0.0,
    most: int = 1,
    before: Callable[[], object] | None = None,
) -> float:
    """Median device time of ``step`` in a CUDA graph, which holds as many steps as it takes to last ``least`` seconds, up to
    ``most``, so that starting it does not count; ``before`` runs once at its beginning."""
    count = 1
    seconds = _replay_seconds(_record(step, 1, before), 3)
    if seconds < least:
        count = max(1, min(most, round(least / seconds)))
    return _replay_seconds(_record(step, count, before), repeats) / count


def _record(step: Callable[[], object], count: int, before: Callable[[], object] | None) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        if before is not None:
            before()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if before is not None:
            before()
        for _ in range(count):
            step()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)

"""Attention and sealing away from the middle of the road: head sizes, groups, dtypes, ragged rows, several columns, prompts.

    python benchmarks/attention_matrix.py [--out FOLDER]

8 KV heads; how a call is timed stands in ``attention_cases.py``. Decode cases are compared with the better of cuDNN and flash
attention at the same lengths, the others with what their row names.
"""

import argparse
import pathlib
from typing import Any

import torch
from attention_cases import (
    GRAPH_SECONDS,
    KV_HEADS,
    MOST_REPEATS,
    Case,
    KittyLayers,
    kitty_seconds,
    sdpa_seconds,
    uniform,
)
from common import RESULTS, graph_seconds, write_result

from kitty_compile.config import KittyConfig
from kitty_compile.kernels import ops

KITTY = KittyConfig.preset("kitty")
DECODE = {
    "head_dim 128, group 4": {},
    "head_dim 64": {"head_dim": 64},
    "head_dim 256": {"head_dim": 256},
    "group 1": {"group": 1},
    "group 2": {"group": 2},
    "group 8": {"group": 8},
    "group 16": {"group": 16},
    "float16": {"dtype": torch.float16},
}


def decode(shape: str, name: str, changes: dict[str, Any], preset: str = "kitty") -> dict[str, Any]:
    case = uniform(shape, **changes)
    best = min(sdpa_seconds(case).values())
    torch.cuda.empty_cache()
    seconds = kitty_seconds(case, KittyConfig.preset(preset))
    return {"case": name, "shape": shape, "us": 1e6 * seconds, "sdpa_us": 1e6 * best, "speedup": best / seconds}


def ragged() -> dict[str, Any]:
    """One long row beside 31 short ones, over the long row alone."""
    long = kitty_seconds(Case((131072,)), KITTY)
    both = kitty_seconds(Case((131072,) + (1024,) * 31), KITTY)
    return {
        "case": "128k beside 31 rows of 1k, over 1 x 128k",
        "us": 1e6 * both,
        "alone_us": 1e6 * long,
        "ratio": both / long,
    }


def several_columns() -> dict[str, Any]:
    """A call of 16 draft tokens, over one of a single token."""
    one, many = kitty_seconds(uniform("8x32768"), KITTY), kitty_seconds(uniform("8x32768", columns=16), KITTY)
    return {"case": "16 columns over 1, 8 x 32k", "us": 1e6 * many, "one_us": 1e6 * one, "ratio": many / one}


def prompt_chunk() -> dict[str, Any]:
    """512 new tokens on 32k cached ones, over PyTorch's attention on 16-bit K and V."""
    case = uniform("1x32768", columns=512)
    best, seconds = min(sdpa_seconds(case).values()), kitty_seconds(case, KITTY)
    return {"case": "512 columns on 32k", "us": 1e6 * seconds, "sdpa_us": 1e6 * best, "ratio": seconds / best}


def copy_rate() -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds(lambda: target.copy_(source), least=GRAPH_SECONDS, most=8)


def sealing(name: str, batch: int, length: int, columns: int, rate: float) -> dict[str, Any]:
    """``columns`` new tokens in rows of ``length`` complete pages: what is read and written over time, beside a copy."""
    case = Case((length,) * batch, columns=columns)
    cache = KittyLayers(case, KITTY, 1)
    layer, layout = cache.layers[0], cache.parameters.page_layout(case.dtype)
    key, value = case.random(KV_HEADS, columns), case.random(KV_HEADS, columns)

    def step() -> None:
        cache.rewind()
        ops.update(key, value, None, None, layer, cache.parameters)

    seconds = graph_seconds(step, least=GRAPH_SECONDS, most=MOST_REPEATS)
    pages = max(columns // 128, 1)
    moved = batch * pages * (128 * layout.raw_bytes_per_token + layout.page_bytes)
    return {"case": name, "us": 1e6 * seconds, "tb_per_s": moved / seconds / 1e12, "of_copy": moved / seconds / rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    rate = copy_rate()
    jobs = [lambda name=name, changes=changes: decode("32x32768", name, changes) for name, changes in DECODE.items()]
    jobs += [
        lambda: decode("32x32768", "kitty-pro", {}, "kitty-pro"),
        lambda: decode("32x8192", "lossless", {}, "lossless"),
        lambda: decode("32x32768", "lossless", {}, "lossless"),
        ragged,
        several_columns,
        prompt_chunk,
        lambda: sealing("a page of 256 rows", 256, 32 + 128 * 3 - 1, 1, rate),
        lambda: sealing("a prompt of 32k", 1, 0, 32768, rate),
    ]
    rows = []
    for job in jobs:
        torch.cuda.empty_cache()
        rows.append(job())
        print(
            {name: round(value, 3) if isinstance(value, float) else value for name, value in rows[-1].items()},
            flush=True,
        )
        write_result("attention_matrix", rows, arguments.out, copy_tb_per_s=rate / 1e12)


if __name__ == "__main__":
    main()

"""One decode step of attention on the GPU: kitty pages against scaled_dot_product_attention, side by side in one process.

    python benchmarks/decode_attention.py [--shapes 32x8192,1x131072] [--out FOLDER]

32 query heads and 8 KV heads of 128 channels, bfloat16; how a step is timed stands in ``attention_cases.py``. The speed-up is
over the better of cuDNN and flash attention.
"""

import argparse
import pathlib

import torch
from attention_cases import kitty_seconds, sdpa_seconds, uniform
from common import RESULTS, write_result

from kitty_compile.config import KittyConfig

SHAPES = "1x1024,1x4096,1x32768,1x131072,8x1024,8x4096,8x8192,8x32768,32x1024,32x4096,32x8192,32x32768,64x32768"
PRESETS = ("kitty", "kitty-pro", "lossless")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="batch x length, comma separated")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = []
    for shape in arguments.shapes.split(","):
        case = uniform(shape)
        baseline = sdpa_seconds(case)
        best = min(baseline.values())
        row: dict[str, float] = {"batch": case.batch, "length": case.lengths[0]}
        row |= {f"{name}_us": 1e6 * value for name, value in baseline.items()}
        for preset in PRESETS:
            torch.cuda.empty_cache()
            seconds = kitty_seconds(case, KittyConfig.preset(preset))
            row |= {f"{preset}_us": 1e6 * seconds, f"{preset}_speedup": best / seconds}
        rows.append(row)
        print({name: round(value, 2) for name, value in row.items()}, flush=True)
    print(write_result("decode_attention", rows, arguments.out))


if __name__ == "__main__":
    main()

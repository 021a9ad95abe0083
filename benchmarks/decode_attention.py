"""One decode step of attention on the GPU: kitty pages against scaled_dot_product_attention, side by side in one process.

    python benchmarks/decode_attention.py [--shapes 32x8192,1x131072] [--out FOLDER]

Both sides include their own cache write and run as a CUDA graph over as many layers as it takes to leave the L2 cache; the
time is a layer's. The 16-bit side is the better of SDPA's cuDNN and flash backends on K and V of exactly the length.
"""

import argparse
import pathlib

import torch
from common import RESULTS, graph_seconds, write_result
from torch.nn.attention import SDPBackend, sdpa_kernel

from kitty_compile.config import KittyConfig
from kitty_compile.kernels import ops
from kitty_compile.kernels.layout import LayerTensors

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
SHAPES = "1x4096,1x32768,1x131072,8x8192,8x32768,32x1024,32x8192,32x32768,64x32768"
PRESETS = ("kitty", "kitty-pro", "lossless")
L2_BYTES = 3 * 60 * 2**20
STEPS = 64  # room for the tokens that the timed steps append


def parameters_of(config: KittyConfig) -> ops.OpParameters:
    return config.parameters(0, HEAD_DIM, HEAD_DIM, KV_HEADS)


def filled_layer(batch: int, length: int, config: KittyConfig) -> LayerTensors:
    """A layer that holds ``length`` random tokens in every row, taken in a block of rows at a time."""
    parameters = parameters_of(config)
    layout, raw = parameters.page_layout(DTYPE), parameters.raw_layout()
    pages = batch * (raw.pages_for(length + STEPS) + 1)
    device = torch.device("cuda")
    state = LayerTensors(
        torch.empty(pages, layout.key_page_bytes, dtype=torch.uint8, device=device),
        torch.empty(pages, layout.value_page_bytes, dtype=torch.uint8, device=device),
        torch.zeros(batch, KV_HEADS, raw.key_slots, HEAD_DIM, dtype=DTYPE, device=device),
        torch.zeros(batch, KV_HEADS, raw.value_slots, HEAD_DIM, dtype=DTYPE, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int32, device=device),
        torch.randperm(pages, device=device).to(torch.int32).view(batch, -1),
    )
    for row in range(batch):
        rows = state._replace(**{name: getattr(state, name)[row : row + 1] for name in state._fields[2:]})
        key, value = (torch.randn(1, KV_HEADS, length, HEAD_DIM, dtype=DTYPE, device=device) for _ in range(2))
        ops.update(key, value, None, None, rows, parameters)
    return state


def kitty_seconds(batch: int, length: int, config: KittyConfig) -> float:
    layer_bytes = parameters_of(config).page_layout(DTYPE).bytes_per_token * batch * length
    layers = [filled_layer(batch, length, config) for _ in range(max(1, int(L2_BYTES // layer_bytes)))]
    query = torch.randn(batch, HEADS, 1, HEAD_DIM, dtype=DTYPE, device="cuda")
    key, value = (torch.randn(batch, KV_HEADS, 1, HEAD_DIM, dtype=DTYPE, device="cuda") for _ in range(2))
    parameters = parameters_of(config)

    def step() -> None:
        for layer in layers:
            ops.attend(query, key, value, None, None, layer, parameters, scale=HEAD_DIM**-0.5)

    return graph_seconds(step) / len(layers)


def sdpa_seconds(batch: int, length: int) -> dict[str, float]:
    layer_bytes = 2 * batch * KV_HEADS * length * HEAD_DIM * DTYPE.itemsize
    count = max(1, L2_BYTES // layer_bytes)
    shape = (batch, KV_HEADS, length, HEAD_DIM)
    caches = [tuple(torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2)) for _ in range(count)]
    query = torch.randn(batch, HEADS, 1, HEAD_DIM, dtype=DTYPE, device="cuda")
    new = torch.randn(batch, KV_HEADS, 1, HEAD_DIM, dtype=DTYPE, device="cuda")

    def step() -> None:
        for key, value in caches:
            key[:, :, -1:].copy_(new)
            value[:, :, -1:].copy_(new)
            torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    seconds = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                seconds[name] = graph_seconds(step) / count
        except RuntimeError as error:
            print(f"{name} does not run {batch}x{length}: {str(error).splitlines()[0]}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="batch x length, comma separated")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = []
    for shape in arguments.shapes.split(","):
        batch, length = map(int, shape.split("x"))
        baseline = sdpa_seconds(batch, length)
        best = min(baseline.values())
        row = {"batch": batch, "length": length, **{f"{name}_us": 1e6 * value for name, value in baseline.items()}}
        for preset in PRESETS:
            torch.cuda.empty_cache()
            seconds = kitty_seconds(batch, length, KittyConfig.preset(preset))
            row |= {f"{preset}_us": 1e6 * seconds, f"{preset}_speedup": best / seconds}
        rows.append(row)
        print({name: round(value, 2) for name, value in row.items()}, flush=True)
    print(write_result("decode_attention", rows, arguments.out))


if __name__ == "__main__":
    main()

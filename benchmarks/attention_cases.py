"""Layers of random tokens, and one attention call timed on them: kitty pages, and PyTorch's attention on 16-bit K and V.

Both sides include their own cache write and run as a CUDA graph over enough layers to leave the L2 cache, repeated until the
graph takes milliseconds (starting a graph costs about 20 us, which 36 layers of a model share). The time is a call's.
"""

import dataclasses

import torch
from common import graph_seconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kitty_compile.config import KittyConfig
from kitty_compile.kernels import ops
from kitty_compile.kernels.layout import LayerTensors

KV_HEADS = 8
L2_BYTES = 3 * 60 * 2**20
GRAPH_SECONDS = 2e-3
MOST_REPEATS = 16
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclasses.dataclass(frozen=True)
class Case:
    """``columns`` new columns in every row, after ``lengths`` tokens; ``group`` query heads to each of 8 KV heads."""

    lengths: tuple[int, ...]
    columns: int = 1
    head_dim: int = 128
    group: int = 4
    dtype: torch.dtype = torch.bfloat16

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def random(self, heads: int, tokens: int, batch: int | None = None) -> torch.Tensor:
        return torch.randn(batch or self.batch, heads, tokens, self.head_dim, dtype=self.dtype, device="cuda")

    def parameters(self, config: KittyConfig) -> ops.OpParameters:
        return config.parameters(0, self.head_dim, self.head_dim, KV_HEADS)


def uniform(shape: str, **more: object) -> Case:
    """ "32x8192" -> a case of 32 rows with 8192 tokens each."""
    batch, length = map(int, shape.split("x"))
    return Case((length,) * batch, **more)  # type: ignore[arg-type]


class KittyLayers:
    """Layers whose rows hold random tokens; ``rewind`` undoes all calls."""

    def __init__(self, case: Case, config: KittyConfig, count: int) -> None:
        self.case, self.parameters = case, case.parameters(config)
        raw = self.parameters.raw_layout()
        slots = raw.pages_for(max(case.lengths) + case.columns * (MOST_REPEATS + 2)) + 1
        self._lengths = torch.zeros(2, count, case.batch, dtype=torch.int32, device="cuda")
        self.layers = [self._filled(slots, number) for number in range(count)]
        self._filled_lengths = self._lengths.clone()

    def _filled(self, slots: int, number: int) -> LayerTensors:
        case = self.case
        layout, raw = self.parameters.page_layout(case.dtype), self.parameters.raw_layout()
        used = sum(raw.pages_for(length + case.columns * (MOST_REPEATS + 2)) + 1 for length in case.lengths)
        table = torch.zeros(case.batch, slots, dtype=torch.int32, device="cuda")
        ids = torch.randperm(used, device="cuda").to(torch.int32)
        for row, length in enumerate(case.lengths):
            count = raw.pages_for(length + case.columns * (MOST_REPEATS + 2)) + 1
            table[row, :count], ids = ids[:count], ids[count:]
        state = LayerTensors(
            torch.empty(used, layout.key_page_bytes, dtype=torch.uint8, device="cuda"),
            torch.empty(used, layout.value_page_bytes, dtype=torch.uint8, device="cuda"),
            torch.zeros(case.batch, KV_HEADS, raw.key_slots, case.head_dim, dtype=case.dtype, device="cuda"),
            torch.zeros(case.batch, KV_HEADS, raw.value_slots, case.head_dim, dtype=case.dtype, device="cuda"),
            self._lengths[0, number],
            self._lengths[1, number],
            table,
        )
        for row, length in enumerate(case.lengths):
            if not length:
                continue
            rows = state._replace(**{name: getattr(state, name)[row : row + 1] for name in state._fields[2:]})
            ops.update(
                case.random(KV_HEADS, length, 1), case.random(KV_HEADS, length, 1), None, None, rows, self.parameters
            )
        return state

    def rewind(self) -> None:
        self._lengths.copy_(self._filled_lengths)


def kitty_seconds(case: Case, config: KittyConfig) -> float:
    """Of one ``kitty::attend`` of all rows."""
    layer_bytes = case.parameters(config).page_layout(case.dtype).bytes_per_token * sum(case.lengths)
    cache = KittyLayers(case, config, max(1, int(L2_BYTES // layer_bytes)))
    query = case.random(KV_HEADS * case.group, case.columns)
    key, value = case.random(KV_HEADS, case.columns), case.random(KV_HEADS, case.columns)

    def step() -> None:
        for layer in cache.layers:
            ops.attend(query, key, value, None, None, layer, cache.parameters, scale=case.head_dim**-0.5)

    return graph_seconds(step, least=GRAPH_SECONDS, most=MOST_REPEATS, before=cache.rewind) / len(cache.layers)


def sdpa_seconds(case: Case) -> dict[str, float]:
    """The same by cuDNN and by flash attention, on K and V of exactly the (equal) lengths with the new columns at their end.
    Several columns take PyTorch's lower-right causal mask."""
    length = max(case.lengths) + case.columns
    layer_bytes = 2 * case.batch * KV_HEADS * length * case.head_dim * case.dtype.itemsize
    count = max(1, L2_BYTES // layer_bytes)
    caches = [(case.random(KV_HEADS, length), case.random(KV_HEADS, length)) for _ in range(count)]
    query, new = case.random(KV_HEADS * case.group, case.columns), case.random(KV_HEADS, case.columns)
    mask = causal_lower_right(case.columns, length) if case.columns > 1 else None

    def step() -> None:
        for key, value in caches:
            key[:, :, -case.columns :].copy_(new)
            value[:, :, -case.columns :].copy_(new)
            torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    seconds = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                seconds[name] = graph_seconds(step, least=GRAPH_SECONDS, most=MOST_REPEATS) / count
        except RuntimeError as error:
            print(f"{name} does not run {case}: {str(error).splitlines()[0]}", flush=True)
    return seconds

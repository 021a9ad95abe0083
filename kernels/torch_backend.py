"""The CPU backend of ``ops``: the same functions as ``triton_backend``."""

from typing import Any

import torch

from kitty_compile.kernels.attend_torch import attend
from kitty_compile.kernels.layout import LayerTensors, PageLayout, RawLayout
from kitty_compile.kernels.update_torch import dequantize_pages, update

__all__ = ["attend", "attend_and_update", "dequantize_pages", "update"]


def attend_and_update(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    *,
    seed: int,
    layer: int,
    **arguments: Any,
) -> torch.Tensor:
    """``attend``, then ``update``."""
    output = attend(query, key, value, columns, counts, state, layout, raw, **arguments)
    update(key, value, columns, counts, state, layout, raw, seed=seed, layer=layer)
    return output

"""The CUDA backend of ``ops``. Nothing here reads device memory or waits for it."""

import torch

from kitty_compile.kernels.layout import LayerTensors, PageLayout, RawLayout
from kitty_compile.kernels.triton_block import attend_blocks
from kitty_compile.kernels.triton_call import Call
from kitty_compile.kernels.triton_step import attend_step
from kitty_compile.kernels.triton_update import dequantize_pages, require_half_precision, update

__all__ = ["attend", "attend_and_update", "dequantize_pages", "update"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    *,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    is_empty: bool,
) -> torch.Tensor:
    """See ``attend_torch.attend``."""
    if is_empty and columns is None and counts is None and softcap == 0 and sinks is None:
        require_half_precision(query)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        ).contiguous()
    call = Call.of(query, key, value, columns, counts, state, layout, raw, scale, softcap, sinks, is_empty)
    with torch.cuda.device_of(query):
        return attend_blocks(call)


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
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    is_empty: bool,
    seed: int,
    layer: int,
) -> torch.Tensor:
    """``attend``, then ``update``; a decode step in three launches."""
    call = Call.of(query, key, value, columns, counts, state, layout, raw, scale, softcap, sinks, is_empty)
    if call.is_step:
        with torch.cuda.device_of(query):
            return attend_step(call, seed, layer)
    output = attend(
        query, key, value, columns, counts, state, layout, raw,
        scale=scale, softcap=softcap, sinks=sinks, is_empty=is_empty,
    )  # fmt: skip
    update(key, value, columns, counts, state, layout, raw, seed=seed, layer=layer)
    return output

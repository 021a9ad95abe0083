"""Launches that change the cache on CUDA, and the dense form of pages. Nothing here reads device memory or waits for it."""

import torch
import triton

from kitty_compile.kernels import reference
from kitty_compile.kernels.append import advance_kernel, append_kernel
from kitty_compile.kernels.dequantize_pages import copy_pages_kernel, dequantize_keys_kernel, dequantize_values_kernel
from kitty_compile.kernels.launch_plan import block_sizes, is_wide_head, key_constants, num_processors, value_constants
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout, RawLayout
from kitty_compile.kernels.seal_page import seal_pages_kernel

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_APPENDED_ITEMS = 16
_MAX_APPENDED = 32
_COPY_BLOCK = 4096
# Two programs to a multiprocessor, whatever they spill: faster than one.
_SEAL_REGISTERS = 128
_SEALS_PER_PROCESSOR = 2


def update(
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
) -> None:
    """Seal the pages that the call completes, append its tokens to the raw slots, advance the lengths."""
    require_half_precision(key)
    key, value = dense_channels(key), dense_channels(value)
    columns = None if columns is None else columns.contiguous()
    with torch.cuda.device_of(key):
        seal(key, value, columns, counts, state, layout, raw, seed, layer)
        advance_kernel[(key.shape[0],)](state.lengths, state.high_water, counts, key.shape[2], num_warps=1)


def is_short(key: torch.Tensor, state: LayerTensors, raw: RawLayout) -> bool:
    """A short call, every decode step among them, is sealed and appended in one launch."""
    return key.shape[2] <= min(raw.rollback_window, _MAX_APPENDED) and state.page_table.shape[1] > 0


def seal(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    layout: PageLayout,
    raw: RawLayout,
    seed: int,
    layer: int,
) -> None:
    """Seal the pages that the call completes and append its tokens."""
    batch, num_heads, num_columns, _ = key.shape
    strides = (*key.stride()[:3], *value.stride()[:3])
    constants = {
        "NUM_HEADS": num_heads,
        "SINK": raw.sink_length,
        "KEY_RING": raw.key_ring,
        "VALUE_RING": raw.value_ring,
        **block_sizes(layout),
    }
    del constants["SLOT_BLOCK"]
    appends = is_short(key, state, raw)
    if state.page_table.shape[1] > 0:
        key_record = {name: number for name, number in key_constants(layout).items() if name != "HAS_INDEX"}
        # No more programs than there can be pages to complete, or than run at a time.
        most = 2 * batch * num_heads * triton.cdiv(num_columns, PAGE_SIZE)
        programs = min(most, _SEALS_PER_PROCESSOR * num_processors(key.device))
        seal_pages_kernel[(programs,)](
            key, value, state.raw_key, state.raw_value, state.key_pages, state.value_pages,
            state.lengths, counts, columns, state.page_table, *strides,
            batch, num_columns, state.page_table.stride(0), _hash_base(seed, layer),
            VALUE_WINDOW=raw.value_window, IS_RANDOM=seed >= 0, NUM_BOOSTED=layout.key.num_boosted,
            ROWS=triton.next_power_of_2(batch), IS_SHORT=appends, ITEMS=_APPENDED_ITEMS,
            **constants, **key_record, **value_constants(layout),
            num_warps=8, maxnreg=None if is_wide_head(layout) else _SEAL_REGISTERS,
        )  # fmt: skip
    if not appends:
        num_items = batch * num_heads * num_columns
        append_kernel[(triton.cdiv(num_items, _APPENDED_ITEMS),)](
            key, value, state.raw_key, state.raw_value, state.lengths, counts, columns, *strides, num_items, num_columns,
            KEY_DIM=layout.key_dim, VALUE_DIM=layout.value_dim, ITEMS=_APPENDED_ITEMS, **constants,
        )  # fmt: skip


def dequantize_pages(
    pages: torch.Tensor, page_table: torch.Tensor, num_pages: int, layout: PageLayout, *, is_key: bool
) -> torch.Tensor:
    """The first ``num_pages`` pages of every row, dense: [B, Hkv, num_pages * 128, D] in the layout's dtype (algorithm 1)."""
    record = layout.key if is_key else layout.value
    batch, num_heads = page_table.shape[0], layout.num_kv_heads
    dense = torch.empty(
        (batch, num_heads, num_pages * PAGE_SIZE, record.head_dim), dtype=layout.dtype, device=pages.device
    )
    require_half_precision(dense)
    if dense.numel() == 0:
        return dense
    grid = (num_pages, num_heads, batch)
    arguments = page_table, dense, page_table.stride(0), num_pages
    blocks = block_sizes(layout)
    with torch.cuda.device_of(pages):
        if record.is_raw:
            copy_pages_kernel[grid](
                pages.view(layout.dtype), *arguments, NUM_HEADS=num_heads, HEAD_DIM=record.head_dim, BLOCK=_COPY_BLOCK
            )
        elif is_key:
            constants = {name: number for name, number in key_constants(layout).items() if name != "KEY_BITS"}
            dequantize_keys_kernel[grid](
                pages, *arguments, NUM_HEADS=num_heads, NUM_BOOSTED=layout.key.num_boosted, **constants,
                KEY_BLOCK=blocks["KEY_BLOCK"], SLOT_BLOCK=blocks["SLOT_BLOCK"],
            )  # fmt: skip
        else:
            dequantize_values_kernel[grid](
                pages, *arguments, NUM_HEADS=num_heads, **value_constants(layout), VALUE_BLOCK=blocks["VALUE_BLOCK"]
            )
    return dense


def _hash_base(seed: int, layer: int) -> int:
    """The part of ``reference.random_scores`` that a launch has in common, as a signed 32-bit integer."""
    primes = reference.HASH_PRIMES
    mixed = (seed * primes[0] + layer * primes[1]) & 0xFFFFFFFF
    return mixed - (1 << 32) if mixed >> 31 else mixed


def dense_channels(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def require_half_precision(tensor: torch.Tensor) -> None:
    if tensor.dtype not in _HALF_DTYPES:
        raise ValueError(f"kitty on CUDA must run in fp16 or bf16, got {str(tensor.dtype).removeprefix('torch.')}")

"""Attention of a longer call on CUDA, a block of its columns at a time: a prompt's part, several turns, many draft tokens."""

from collections.abc import Iterator

import torch
import triton

from kitty_compile.kernels.launch_plan import BlockPlan, block_sizes, num_processors, page_constants, plan_block
from kitty_compile.kernels.prefill_attention import prefill_pages_kernel
from kitty_compile.kernels.residue_attention import attend_residue_kernel
from kitty_compile.kernels.triton_call import Call, Parts, merge

# Columns are taken in blocks whose partial outputs stay under this many bytes.
_MAX_PARTIAL_BYTES = 1 << 28
_BLOCK_COLUMNS = 64


def attend_blocks(call: Call) -> torch.Tensor:
    output, processors = call.new_output(), num_processors(call.query.device)
    for first, last in _blocks(call):
        plan = plan_block(call.heads, last - first, call.group, call.max_pages, call.layout, call.raw, processors)
        parts = call.new_parts(last - first, plan.num_parts)
        query = call.query[:, :, first:last]
        _launch_pages(call, query, plan, parts, plan.splits, 0, raw_values=False)
        _launch_raw(call, query, first, plan, parts)
        _launch_pages(call, query, plan, parts, plan.mixed_parts, plan.splits + 1, raw_values=True)
        merge(parts, call.sinks, output[:, :, first:last])
    return output


def _blocks(call: Call) -> Iterator[tuple[int, int]]:
    batch, num_heads, num_columns, _ = call.query.shape
    column_bytes = 4 * batch * num_heads * call.layout.value_dim * 4
    step = max(_MAX_PARTIAL_BYTES // column_bytes // _BLOCK_COLUMNS, 1) * _BLOCK_COLUMNS
    for first in range(0, num_columns, step):
        yield first, min(first + step, num_columns)


def _launch_pages(
    call: Call, query: torch.Tensor, plan: BlockPlan, parts: Parts, splits: int, first_part: int, *, raw_values: bool
) -> None:
    if not splits:
        return
    batch, num_heads = call.key.shape[:2]
    blocks = triton.cdiv(query.shape[2] * call.group, plan.columns)
    prefill_pages_kernel[(splits * blocks, num_heads, batch)](
        query, call.state.key_pages, call.state.value_pages, call.state.raw_value, call.state.page_table,
        call.state.lengths, *parts, *query.stride()[:3], call.state.page_table.stride(0), query.shape[2], splits,
        plan.num_parts, first_part, *call.score_factors, **call.constants(), **page_constants(call.layout),
        NUM_BOOSTED=call.layout.key.num_boosted, VALUE_WINDOW=call.raw.value_window, VALUE_RING=call.raw.value_ring,
        RAW_VALUES=raw_values, COLUMNS=plan.columns, STAGES=plan.stages, num_warps=plan.warps,
    )  # fmt: skip


def _launch_raw(call: Call, query: torch.Tensor, first: int, plan: BlockPlan, parts: Parts) -> None:
    batch, num_heads, num_new, key_dim = call.key.shape
    sizes = block_sizes(call.layout)
    blocks = triton.cdiv(query.shape[2] * call.group, plan.columns)
    attend_residue_kernel[(blocks, num_heads, batch)](
        query, call.key, call.value, call.state.raw_key, call.state.raw_value, call.state.lengths, call.counts,
        call.columns, *parts, *query.stride()[:3], *call.key.stride()[:3], *call.value.stride()[:3], first,
        query.shape[2], num_new, plan.num_parts, plan.splits, *call.score_factors, **call.constants(),
        KEY_RING=call.raw.key_ring, VALUE_RING=call.raw.value_ring, IS_EMPTY=call.is_empty, KEY_DIM=key_dim,
        VALUE_DIM=call.layout.value_dim, KEY_BLOCK=sizes["KEY_BLOCK"], VALUE_BLOCK=sizes["VALUE_BLOCK"],
        COLUMNS=plan.columns, TOKENS=plan.raw_tokens, STAGES=2, num_warps=plan.raw_warps,
    )  # fmt: skip

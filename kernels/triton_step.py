"""A decode step on CUDA: four launches, and in a CUDA graph two of them beside the pages."""

import torch
import triton

from kitty_compile.kernels.decode_attention import attend_pages_kernel
from kitty_compile.kernels.launch_plan import (
    RAW_TOKENS,
    StepPlan,
    block_sizes,
    key_constants,
    num_processors,
    page_constants,
    plan_step,
)
from kitty_compile.kernels.raw_attention import attend_raw_kernel
from kitty_compile.kernels.streams import fork
from kitty_compile.kernels.triton_call import Call, Parts, Splits, merge
from kitty_compile.kernels.triton_update import seal

_STAGES = 3
_RAW_STAGES = 2
# Dealing the splits by length costs every program a sum over the rows.
_MAX_DEALT_ROWS = 128


def attend_step(call: Call, seed: int, layer: int) -> torch.Tensor:
    """Attention of a step, and the step taken into the cache. Its tokens are appended first: nothing that it reads is
    overwritten, since raw tokens outlive their page by the rollback window, and lengths are advanced last."""
    num_columns = call.query.shape[2]
    processors = num_processors(call.query.device)
    plan = plan_step(call.heads, num_columns, call.group, call.max_pages, call.raw, processors)
    output, parts = call.new_output(), call.new_parts(num_columns, plan.raw_parts + plan.mixed_parts)
    splits = _new_splits(call, plan.splits)
    with fork(call.query.device) as side:
        _launch_pages(call, plan, splits)  # first: what comes second waits for room
        with side:
            seal(call.key, call.value, call.columns, call.counts, call.state, call.layout, call.raw, seed, layer)
            _launch_raw(call, plan, parts)
    merge(parts, call.sinks, output, splits, (call.state, call.counts, num_columns))
    return output


def _new_splits(call: Call, number: int) -> Splits:
    batch, num_heads, num_columns, _ = call.query.shape
    shape = (batch * number, num_heads * num_columns)
    partial = call.query.new_empty((*shape, call.layout.value_dim), dtype=torch.float32)
    dealt = None
    if number > 1 and 1 < batch <= _MAX_DEALT_ROWS:
        dealt = call.query.new_empty((2, batch), dtype=torch.int32)
    return Splits(number, partial, call.query.new_empty(shape, dtype=torch.float32), dealt)


def _launch_pages(call: Call, plan: StepPlan, splits: Splits) -> None:
    batch, num_heads, num_columns, _ = call.key.shape
    has_raw_pages = call.layout.key.is_raw or call.layout.value.is_raw
    attend_pages_kernel[(num_heads, batch * plan.splits * plan.blocks)](
        call.query, call.state.key_pages, call.state.value_pages, call.state.page_table, call.state.lengths,
        *splits[1:], *call.query.stride()[:3], call.state.page_table.stride(0), num_columns, plan.splits, plan.blocks,
        batch, *call.score_factors, **call.constants(), **page_constants(call.layout),
        VALUE_WINDOW=call.raw.value_window, COLUMNS=plan.columns, SPREAD=plan.spread,
        DEALT_ROWS=triton.next_power_of_2(batch) if splits.dealt is not None else 0,
        STAGES=1 if has_raw_pages else _STAGES, num_warps=1,
    )  # fmt: skip


def _launch_raw(call: Call, plan: StepPlan, parts: Parts) -> None:
    batch, num_heads, num_columns, _ = call.key.shape
    sizes = (call.raw.sink_length, call.raw.key_ring, call.raw.value_ring)
    attend_raw_kernel[((plan.raw_parts + plan.mixed_parts) * plan.blocks, num_heads, batch)](
        call.query, call.state.key_pages, call.state.raw_key, call.state.raw_value, call.state.page_table,
        call.state.lengths, call.counts, call.columns, *parts, *call.query.stride()[:3],
        call.state.page_table.stride(0), num_columns, plan.raw_parts, plan.part_tokens,
        *call.score_factors, **call.constants(), **key_constants(call.layout), **block_sizes(call.layout),
        VALUE_DIM=call.layout.value_dim, VALUE_WINDOW=call.raw.value_window, KEY_RING=call.raw.key_ring,
        VALUE_RING=call.raw.value_ring, IS_SINGLE=num_columns == 1, MIXED_PAGES=plan.mixed_parts,
        IS_ALIGNED=not any(size % RAW_TOKENS for size in sizes),
        COLUMNS=plan.columns, SPREAD=plan.spread, TOKENS=RAW_TOKENS, STAGES=_RAW_STAGES, num_warps=1,
    )  # fmt: skip

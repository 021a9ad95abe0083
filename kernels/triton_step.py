"""A decode step on CUDA in three launches: what is new is sealed and appended, then attended to, then partial outputs merge."""

import torch
import triton

from kitty_compile.kernels.launch_plan import (
    RAW_TOKENS,
    StepPlan,
    num_processors,
    page_constants,
    plan_step,
)
from kitty_compile.kernels.step_attention import attend_step_kernel
from kitty_compile.kernels.triton_call import Call, Parts, Splits, merge
from kitty_compile.kernels.triton_update import seal

# Of the software pipelines over packed pages and over raw tokens.
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
    output, parts = call.new_output(), call.new_parts(num_columns, plan.raw_parts + plan.half_pages)
    splits = _new_splits(call, plan.splits)
    seal(call.key, call.value, call.columns, call.counts, call.state, call.layout, call.raw, seed, layer)
    _launch(call, plan, splits, parts)
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


def _launch(call: Call, plan: StepPlan, splits: Splits, parts: Parts) -> None:
    batch, num_heads, num_columns, _ = call.key.shape
    has_raw_pages = call.layout.key.is_raw or call.layout.value.is_raw
    raw_sizes = (call.raw.sink_length, call.raw.key_ring, call.raw.value_ring)
    # Splits first: they take the longest.
    attend_step_kernel[(num_heads, batch * (plan.splits + plan.raw_parts + plan.half_pages) * plan.blocks)](
        call.query, call.state.key_pages, call.state.value_pages, call.state.raw_key, call.state.raw_value,
        call.state.page_table, call.state.lengths, call.counts, call.columns, *splits[1:], *parts,
        *call.query.stride()[:3], call.state.page_table.stride(0), num_columns, plan.splits, plan.blocks,
        plan.raw_parts, plan.part_tokens, batch, *call.score_factors, **call.constants(),
        **page_constants(call.layout), VALUE_WINDOW=call.raw.value_window, KEY_RING=call.raw.key_ring,
        VALUE_RING=call.raw.value_ring, IS_SINGLE=num_columns == 1,
        IS_ALIGNED=not any(size % RAW_TOKENS for size in raw_sizes), HALF_PAGES=plan.half_pages, COLUMNS=plan.columns,
        SPREAD=plan.spread, RAW_TOKENS=RAW_TOKENS,
        DEALT_ROWS=triton.next_power_of_2(batch) if splits.dealt is not None else 0,
        STAGES=1 if has_raw_pages else _STAGES, RAW_STAGES=_RAW_STAGES, num_warps=1,
    )  # fmt: skip

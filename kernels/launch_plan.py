"""How work is dealt to programs, and what kernels are compiled for: host arithmetic on shapes alone."""

import functools
from typing import NamedTuple

import torch
import triton

from kitty_compile.kernels.layout import PAGE_SIZE, PageLayout, RawLayout

_MAX_SPLITS = 256
# What starting and ending a split costs, in pages.
_SPLIT_OVERHEAD = 1.5
# Registers allow this many warps of the page kernels on a multiprocessor.
_WARPS_PER_PROCESSOR = 8
# Of a step of a raw part.
RAW_TOKENS = 16
# New columns times the GQA group that decode programs take.
MAX_STEP_PAIRS = 16


class StepPlan(NamedTuple):
    """How a decode step is dealt to programs."""

    columns: int  # of a product
    blocks: int  # of columns
    spread: int  # 2: columns stand in every other place of a product
    splits: int  # of a row's pages, on average
    raw_parts: int
    part_tokens: int  # of a raw part
    half_pages: int  # that can be packed in K alone, two programs a page


class BlockPlan(NamedTuple):
    """How a block of a longer call's columns is dealt to programs: splits of pages, one part of raw tokens, mixed pages."""

    columns: int  # of a program: wide blocks, so that pages are unpacked less often
    warps: int  # of a page program
    raw_warps: int
    raw_tokens: int  # of a raw program's step
    stages: int  # of the page program's software pipeline
    splits: int
    mixed_parts: int

    @property
    def num_parts(self) -> int:
        return self.splits + 1 + self.mixed_parts


def is_step(num_columns: int, group: int, raw: RawLayout) -> bool:
    """Is a call so short that it may be appended before it attends, and may few programs take its columns?"""
    return num_columns <= raw.rollback_window and num_columns * group <= MAX_STEP_PAIRS


def plan_step(heads: int, num_columns: int, group: int, max_pages: int, raw: RawLayout, processors: int) -> StepPlan:
    """For ``heads`` KV heads over all rows. One warp a program reads packed words straight into a tensor core's operand."""
    pairs, columns = num_columns * group, 8
    blocks, most_raw = _ceil_div(pairs, columns), raw.sink_length + PAGE_SIZE - 1 + num_columns
    room, half_pages = processors * _WARPS_PER_PROCESSOR, 2 * raw.max_mixed_pages
    # Few rows are done the sooner the more programs share their raw tokens.
    raw_parts = max(min(room // (heads * blocks) - half_pages, _ceil_div(most_raw, RAW_TOKENS)), 1)
    part_tokens = _ceil_div(_ceil_div(most_raw, raw_parts), RAW_TOKENS) * RAW_TOKENS
    return StepPlan(
        columns,
        blocks,
        spread=2 if pairs <= 4 else 1,
        splits=choose_splits(heads * blocks, max_pages, room),
        raw_parts=_ceil_div(most_raw, part_tokens),
        part_tokens=part_tokens,
        half_pages=half_pages,
    )


def plan_block(
    heads: int, num_columns: int, group: int, max_pages: int, layout: PageLayout, raw: RawLayout, processors: int
) -> BlockPlan:
    """For ``heads`` KV heads over all rows and ``max_pages`` pages, 0 where the cache is empty."""
    is_wide, pairs = is_wide_head(layout), num_columns * group
    columns = 64 if pairs <= 64 or is_wide else 128
    warps = 8 if is_wide else columns // 16
    room = processors * _WARPS_PER_PROCESSOR // warps
    return BlockPlan(
        columns,
        warps,
        raw_warps=columns // 16,
        raw_tokens=32 if is_wide else 64,
        stages=1 if is_wide else 2,
        splits=choose_splits(heads * _ceil_div(pairs, columns), max_pages, room) if max_pages else 0,
        mixed_parts=raw.max_mixed_pages if max_pages else 0,
    )


def is_wide_head(layout: PageLayout) -> bool:
    return max(layout.key_dim, layout.value_dim) > 128


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


@functools.lru_cache(maxsize=4096)
def choose_splits(programs: int, max_pages: int, room: int) -> int:
    """Into how many splits the pages of a row go. ``programs`` without splitting, ``room`` for programs at a time: the fewest
    page steps in sequence, counting whole waves of programs."""
    best, least = 1, float("inf")
    for splits in range(1, min(max_pages, _MAX_SPLITS) + 1):
        waves = -(-programs * splits // room)
        steps = waves * (-(-max_pages // splits) + _SPLIT_OVERHEAD)
        if steps < least:
            best, least = splits, steps
    return best


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def key_constants(layout: PageLayout) -> dict[str, int]:
    """What kernels know of a key record."""
    record = layout.key
    return {
        "KEY_DIM": record.head_dim,
        "KEY_BITS": record.bits,
        "NUM_SLOTS": record.num_slots,
        "HAS_INDEX": record.has_boost_index,
        "KEY_HIGH": record.high_offset,
        "KEY_SCALE": record.scale_offset,
        "KEY_ZERO": record.zero_offset,
        "KEY_BOOST": record.boost_offset,
        "KEY_BYTES": record.nbytes,
    }


@functools.cache
def value_constants(layout: PageLayout) -> dict[str, int]:
    """What kernels know of a value record."""
    record = layout.value
    return {
        "VALUE_DIM": record.head_dim,
        "VALUE_BITS": record.bits,
        "VALUE_HIGH": record.high_offset,
        "VALUE_SCALE": record.scale_offset,
        "VALUE_ZERO": record.zero_offset,
        "VALUE_BYTES": record.nbytes,
    }


@functools.cache
def block_sizes(layout: PageLayout) -> dict[str, int]:
    """Powers of two that hold a head's channels, and the boosted ones."""
    return {
        "KEY_BLOCK": triton.next_power_of_2(layout.key_dim),
        "VALUE_BLOCK": triton.next_power_of_2(layout.value_dim),
        "SLOT_BLOCK": max(16, triton.next_power_of_2(layout.key.num_slots)),
    }


def page_constants(layout: PageLayout) -> dict[str, int]:
    return {**key_constants(layout), **value_constants(layout), **block_sizes(layout)}

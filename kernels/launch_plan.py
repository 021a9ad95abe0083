"""How work is dealt to programs, and what kernels are compiled for: host arithmetic on shapes alone."""

import functools
from typing import NamedTuple

import torch
import triton

from kitty_compile.kernels.layout import PageLayout

_MAX_SPLITS = 256
# What starting and ending a split costs, in pages.
_SPLIT_OVERHEAD = 1.5


class ProgramShape(NamedTuple):
    """How the query columns of one KV head are dealt to programs."""

    columns: int  # of a program
    warps: int  # of a program of the page kernels
    rows: int  # columns of a residue program, padded to what a tensor core takes
    residue_warps: int
    tokens: int  # of a residue program's step
    stages: int  # of the page kernels' software pipeline
    is_decode: bool


def program_shape(num_pairs: int, layout: PageLayout) -> ProgramShape:
    """``num_pairs`` = new columns times the GQA group. Decode takes one block of columns and one warp, which reads packed
    words straight into a tensor core's operand; longer calls take wide blocks, so that they unpack less often."""
    is_wide = max(layout.key_dim, layout.value_dim) > 128
    if num_pairs <= 16:
        columns = 8 if num_pairs <= 8 or is_wide else 16
        return ProgramShape(columns, 1, 16, 2 if is_wide else 1, 16, 3, True)
    columns = 64 if num_pairs <= 64 or is_wide else 128
    return ProgramShape(
        columns, 8 if is_wide else columns // 16, columns, columns // 16, *((32, 1) if is_wide else (64, 2)), False
    )


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

"""A decode step in one go (``attend_and_update``), which appends before it attends, leaves the state as ``update`` does."""

import pytest
import torch
import triton
import triton.language as tl

from kitty_compile.kernels import triton_block, triton_call, triton_step, triton_update
from kitty_compile.kernels.layout import RawLayout
from kitty_compile.kernels.step_attention import deal_splits
from tests.kernel_cases import make_case, make_layout
from tests.kernel_checks import attend_and_update, check_attention, check_step

RAW = RawLayout(sink_length=32, value_window=128, rollback_window=32)


@pytest.mark.parametrize("num_columns", [1, 3])
def test_rows_that_seal_and_rows_that_do_not(num_columns):
    layout = make_layout(torch.bfloat16, key_dim=32, heads=1, num_boosted=4)
    check_step(make_case(layout, RAW, [287, 0, 300, 415], num_columns=num_columns, group=4))


def test_rows_that_bring_no_token():
    layout = make_layout(key_dim=32, heads=1, num_boosted=4)
    check_step(make_case(layout, RAW, [287, 159, 31], group=2, pads=[1, 0, 0]))


def test_longer_calls_and_no_rollback_window():
    layout = make_layout(key_dim=32, heads=1, num_boosted=4)
    check_step(make_case(layout, RAW, [150, 3], num_columns=40, group=1))
    check_step(make_case(layout, RawLayout(32, 128, 0), [287, 5], group=1))


def test_more_rows_than_programs_of_the_merge():
    layout = make_layout(key_dim=16, heads=1, num_boosted=4)
    check_step(make_case(layout, RAW, [33 + row for row in range(5)], group=1))


def test_splits_are_dealt_by_length():
    layout = make_layout(key_dim=16, heads=1, num_boosted=4)
    case = make_case(layout, RAW, [2600, 40, 0, 700], group=4)
    device = torch.device("cpu")
    counts = dealt_counts(case.state.lengths.to(device), 8)
    assert counts.sum() <= 4 * 8
    assert (counts >= 1).all()
    assert counts[0] > 20
    assert dealt_counts(torch.tensor([2600] * 4, dtype=torch.int32), 8).tolist() == [8] * 4
    check_attention(case)


def dealt_counts(lengths, num_splits):
    counts = torch.zeros_like(lengths)
    size = triton.next_power_of_2(len(lengths))
    write_dealt_counts[(1,)](lengths, counts, len(lengths), num_splits, rows=size)
    return counts


@triton.jit
def write_dealt_counts(lengths_ptr, counts_ptr, batch, num_splits, rows: tl.constexpr):
    counts, _ = deal_splits(lengths_ptr, batch, num_splits, 32, 128, rows)
    row = tl.arange(0, rows)
    tl.store(counts_ptr + row, counts, mask=row < batch)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel, launches, name):
        self.kernel, self.launches, self.name = kernel, launches, name

    def __getitem__(self, grid):
        self.launches.append(self.name)
        return self.kernel[grid]


def test_a_step_takes_three_launches(monkeypatch):
    launches = []
    for module in (triton_block, triton_call, triton_step, triton_update):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Counted(getattr(module, name), launches, name))
    layout = make_layout(key_dim=16, heads=1, num_boosted=4)
    attend_and_update(make_case(layout, RAW, [287, 40], group=2), scale=0.1)
    assert sorted(launches) == ["attend_step_kernel", "merge_splits_kernel", "seal_pages_kernel"]

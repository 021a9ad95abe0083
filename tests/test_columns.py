import pytest
import torch

from kitty_compile.columns import Call, ColumnMap
from kitty_compile.kernels.attend_torch import real_columns


def mask(*rows):
    return torch.tensor([[int(character) for character in row] for row in rows])


def written(*rows):
    """A map whose columns so far are these."""
    columns = ColumnMap()
    real = mask(*rows).bool()
    columns.write(Call.of(real.shape[1], 0, real))
    return columns


def test_a_call_numbers_the_columns_of_each_rows_tokens():
    call = Call.of(5, 7, mask("00111", "10101", "00000").bool())
    assert call.counts.tolist() == [3, 3, 0]
    assert call.columns.dtype == call.counts.dtype == torch.int32
    for row, expected in enumerate([[2, 3, 4], [0, 2, 4], []]):
        assert call.columns[row, : call.counts[row]].tolist() == expected
        assert sorted(call.columns[row].tolist()) == list(range(5))
    assert torch.equal(real_columns(call.columns, call.counts), call.real)


def test_a_call_without_pads_carries_no_tensor():
    call = Call.of(5, 7, None)
    assert (call.real, call.columns, call.counts) == (None, None, None)


def test_own_columns_takes_the_masks_of_both_lengths():
    columns = written("110", "011")
    own = mask("01", "11")
    assert columns.own_columns(None, 3, 2) is None
    assert torch.equal(columns.own_columns(own, 3, 2), own.bool())
    assert torch.equal(columns.own_columns(torch.cat([mask("110", "011"), own], 1), 3, 2), own.bool())


def test_own_columns_is_none_when_all_are_tokens():
    columns = written("110", "011")
    assert columns.own_columns(mask("11", "11"), 3, 2) is None
    assert columns.own_columns(mask("11011", "01111"), 3, 2) is None


def test_any_nonzero_mask_entry_is_a_token():
    own = ColumnMap().own_columns(torch.tensor([[0, 2, -1], [1, 1, 1]]), 0, 3)
    assert torch.equal(own, mask("011", "111").bool())


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (2,), (2, 1, 3), (2, 0)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask must have the shape \[batch, 5\].*got"):
        written("110", "011").own_columns(torch.ones(shape), 3, 2)


def test_a_mask_cannot_take_back_earlier_columns():
    message = "attention_mask must not change for columns that are already cached"
    with pytest.raises(ValueError, match=message):
        written("110", "011").own_columns(mask("11111", "01111"), 3, 2)
    with pytest.raises(ValueError, match=message):
        ColumnMap().own_columns(mask("01111", "11111"), 3, 2)


def test_nothing_is_stored_until_a_pad_is_seen():
    columns = ColumnMap()
    columns.write(Call.of(4, 0, None))
    assert columns.real is None
    assert columns.nbytes == 0
    columns.write(Call.of(2, 4, mask("01", "11").bool()))
    assert torch.equal(columns.real[:, :6], mask("111101", "111111").bool())
    assert columns.nbytes == columns.real.nbytes


def test_writing_over_cropped_columns_forgets_them():
    columns = written("0101", "1111")
    columns.write(Call.of(2, 2, None))
    assert torch.equal(columns.real[:, :4], mask("0111", "1111").bool())
    columns.write(Call.of(2, 3, mask("00", "01").bool()))
    assert torch.equal(columns.real[:, :5], mask("01100", "11101").bool())


def test_the_map_grows_by_a_quarter_so_that_decoding_seldom_copies():
    columns = written("0" + "1" * 99)
    sizes = set()
    for column in range(100, 200):
        columns.write(Call.of(1, column, None))
        sizes.add(columns.real.shape[1])
    assert len(sizes) <= 5
    assert torch.equal(columns.real[:, :200], mask("0" + "1" * 199).bool())


def test_dropped_rows_hold_no_token_and_the_others_keep_theirs():
    columns = ColumnMap()
    columns.drop_rows(torch.tensor([1]), 3, torch.empty(3))
    assert torch.equal(columns.real, mask("111", "000", "111").bool())
    columns = written("0110", "1111")
    columns.drop_rows(torch.tensor([1]), 3, torch.empty(2))
    assert torch.equal(columns.real, mask("0110", "0001").bool())


def test_select_takes_rows():
    columns = written("0110", "1111", "0000")
    columns.select(torch.tensor([2, 0, 0, 1]))
    assert torch.equal(columns.real, mask("0000", "0110", "0110", "1111").bool())
    empty = ColumnMap()
    empty.select(torch.tensor([0]))
    assert empty.real is None

"""Rows that move, multiply, empty and start over; pages that rows share."""

import copy

import pytest
import torch

from tests.cache_driver import (
    Tokens,
    equal,
    kept_tensors,
    make_cache,
    poison_what_nobody_may_read,
    read,
    same,
    snapshot,
)

WINDOWS = (None, None, 40)


def make_tokens(total, **arguments):
    tokens = Tokens(total, num_layers=3, **arguments)
    tokens.real[0, :7] = False
    return tokens


def row_of(tensors, row):
    """One row of nested lists and tuples of tensors."""
    if isinstance(tensors, torch.Tensor):
        return tensors[row]
    return [row_of(each, row) for each in tensors]


@pytest.mark.parametrize("index", [[1, 0, 2], [0, 0, 0], [2, 1], [1], [2, 2, 0, 1, 2], [0, 1, 2]])
def test_rows_by_index_are_what_they_were_elsewhere(index):
    tokens = make_tokens(700, batch=3)
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    tokens.feed(cache, 300)
    in_use = cache.pages_in_use
    cache.reorder(torch.tensor(index))
    assert cache.pages_in_use <= in_use
    assert cache.batch_size == len(index)
    moved = tokens.rows(index)
    moved.feed(clean, 300)
    for stop in (301, 340, 470, 699):
        poison_what_nobody_may_read(cache)
        start = cache.get_seq_length()
        assert equal(moved.attend(cache, start, stop), moved.attend(clean, start, stop))
    assert equal(read(cache, moved), read(clean, moved))
    assert cache.lengths.tolist() == clean.lengths.tolist()


def test_rows_that_share_pages_part_without_disturbing_each_other():
    tokens, parting = Tokens(700, batch=2, num_layers=3), Tokens(700, batch=2, num_layers=3)
    cache = make_cache(*WINDOWS)
    tokens.feed(cache, 300)
    assert cache.pages_in_use == 4
    cache.reorder(torch.tensor([1, 1]))
    assert cache.pages_in_use == 2
    table = cache.layers[0].state.page_table
    assert torch.equal(table[0, :2], table[1, :2])
    for stop in (420, 421, 699):
        parting.feed(cache, stop)
    assert not torch.equal(table[0, 2:], table[1, 2:])
    found = read(cache, parting)
    for row in range(2):
        alone = make_cache(*WINDOWS)
        tokens.rows([1]).feed(alone, 300)
        parting.rows([row]).feed(alone, 420, 421, 699)
        expected = read(alone, parting.rows([row]))
        assert equal(row_of(found, row), row_of(expected, 0))


def test_beams_that_are_reordered_at_every_step():
    tokens = Tokens(470, batch=3, num_layers=2)
    cache = make_cache()
    tokens.feed(cache, 150)
    history = [[(row, column) for column in range(150)] for row in range(3)]
    generator = torch.Generator().manual_seed(3)
    for column in range(150, 460):
        tokens.feed(cache, column + 1)
        history = [[*past, (row, column)] for row, past in enumerate(history)]
        index = torch.randint(3, (3,), generator=generator)
        cache.reorder(index)
        history = [history[row] for row in index.tolist()]
    found = read(cache, tokens)
    for row, past in enumerate(history):
        rows, columns = (torch.tensor(side) for side in zip(*past, strict=True))
        beam = Tokens(461, batch=1, num_layers=2)
        for layer in range(2):
            beam.key[layer][0, :, :460] = tokens.key[layer][rows, :, columns].transpose(0, 1)
            beam.value[layer][0, :, :460] = tokens.value[layer][rows, :, columns].transpose(0, 1)
        expected = read(beam.feed(make_cache(), 460), beam)
        for layer in range(2):
            assert torch.equal(found[layer][0][row, :, :460], expected[layer][0][0, :, :460])
            assert torch.equal(found[layer][1][row, :, :460], expected[layer][1][0, :, :460])


def test_repeat_and_select_are_reorders():
    tokens = make_tokens(400)
    for action, argument, index in (
        ("repeat", 2, [0, 0, 1, 1]),
        ("repeat", 1, [0, 1]),
        ("select", torch.tensor([1, 1]), [1, 1]),
        ("select", torch.tensor([False, True]), [1]),
        ("select", torch.tensor([1, 0], dtype=torch.int32), [1, 0]),
    ):
        cache, other = tokens.feed(make_cache(*WINDOWS), 390), tokens.feed(make_cache(*WINDOWS), 390)
        getattr(cache, action)(argument)
        other.reorder(torch.tensor(index))
        assert equal(read(cache, tokens.rows(index)), read(other, tokens.rows(index)))
        assert cache.lengths.tolist() == other.lengths.tolist()


@pytest.mark.parametrize("rows", [[0], [1, 2], torch.tensor([2]), torch.tensor([False, True, False]), []])
def test_freed_rows_are_empty_and_the_others_do_not_notice(rows):
    tokens = make_tokens(700, batch=3)
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    tokens.feed(cache, 300)
    tokens.feed(clean, 300)
    cache.free(rows)
    freed = torch.zeros(3, dtype=torch.bool)
    freed[rows] = True
    assert (cache.lengths[freed] == 0).all()
    assert torch.equal(cache.lengths[~freed], clean.lengths[~freed])
    assert cache.pages_in_use == 2 * int((~freed).sum())
    assert cache.get_seq_length() == 300
    again = copy.copy(tokens)
    again.real = tokens.real.clone()
    again.real[freed, :300] = False
    kept = (~freed).nonzero().flatten().tolist()
    for start, stop in ((300, 310), (310, 470), (470, 699)):
        poison_what_nobody_may_read(cache)
        outputs, expected = again.attend(cache, start, stop), tokens.attend(clean, start, stop)
        for output, other in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output[kept], other[kept])
    # What came to a freed row is what a row reads that had nothing but pads before.
    padded = make_cache(*WINDOWS)
    for stop in (300, 310, 470, 699):
        again.feed(padded, stop)
    assert cache.lengths.tolist() == padded.lengths.tolist()
    for found, expected in zip(read(cache, again)[:2], read(padded, again)[:2], strict=True):
        assert equal(found, expected)


def test_reset_forgets_everything_and_keeps_the_memory():
    tokens = make_tokens(400)
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    tokens.feed(cache, 399)
    cache.crop(390)
    addresses = [tensor.data_ptr() for layer in cache.layers for tensor in layer._tensors.values()]
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.lengths.tolist() == [0, 0]
    assert cache.pages_in_use == 0
    poison_what_nobody_may_read(cache)
    assert equal(tokens.attend(cache, 0, 300), tokens.attend(clean, 0, 300))
    assert equal(read(cache, tokens), read(clean, tokens))
    assert [tensor.data_ptr() for layer in cache.layers for tensor in layer._tensors.values()] == addresses


@pytest.mark.parametrize("empties", ["reset", "crop"])
@pytest.mark.parametrize("max_length", [None, 400])
@pytest.mark.parametrize("is_padded", [False, True])
def test_an_empty_cache_takes_whatever_comes(empties, max_length, is_padded):
    cache = make_cache(*WINDOWS, max_length=max_length)
    for batch, heads, dtype in (
        (2, 2, torch.float32),
        (3, 2, torch.float32),
        (1, 1, torch.float32),
        (1, 1, torch.bfloat16),
    ):
        tokens = Tokens(400, batch=batch, heads=heads, num_layers=3, dtype=dtype)
        tokens.real[0, :5] = not is_padded
        clean = make_cache(*WINDOWS, max_length=max_length)
        assert equal(tokens.attend(cache, 0, 300), tokens.attend(clean, 0, 300))
        assert equal(read(cache, tokens), read(clean, tokens))
        assert cache.lengths.tolist() == clean.lengths.tolist()
        cache.reset() if empties == "reset" else cache.crop(0)


def test_a_copy_goes_its_own_way():
    tokens, other = make_tokens(700), make_tokens(700)
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    tokens.feed(cache, 300)
    tokens.feed(clean, 300)
    fork = copy.deepcopy(cache)
    assert not {id(tensor) for tensor in kept_tensors(cache)} & {id(tensor) for tensor in kept_tensors(fork)}
    storages = [
        {tensor.untyped_storage().data_ptr() for tensor in kept_tensors(each) if tensor.numel()}
        for each in (cache, fork)
    ]
    assert not storages[0] & storages[1]
    before = snapshot(fork)
    for stop in (310, 470, 690):
        start = cache.get_seq_length()
        assert equal(tokens.attend(cache, start, stop), tokens.attend(clean, start, stop))
    cache.reorder(torch.tensor([1, 1]))
    assert same(before, snapshot(fork))
    after = snapshot(cache)
    other.feed(fork, 500)
    fork.free([0])
    assert same(after, snapshot(cache))


def test_left_padding_is_as_if_it_were_not_there():
    tokens = Tokens(460, batch=2, num_layers=3)
    tokens.real[1, :130] = False
    cache, alone = make_cache(None, None, 500), make_cache(None, None, 500)
    short = tokens.rows([1])
    for name in ("query", "key", "value"):
        setattr(short, name, [side[:, :, 130:] for side in getattr(short, name)])
    short.real = short.real[:, 130:]
    for stop in (300, 301, 459):
        start = cache.get_seq_length()
        outputs = tokens.attend(cache, start, stop)
        expected = short.attend(alone, max(start - 130, 0), stop - 130)
        for output, row in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output[1:, :, -row.shape[2] :], row)
    assert cache.lengths.tolist() == [459, 329]
    found, expected = read(cache, tokens), read(alone, short)
    for layer in (0, 1):
        assert torch.equal(found[layer][0][1, :, 130:], expected[layer][0][0])
        assert torch.equal(found[layer][1][1, :, 130:], expected[layer][1][0])
        assert (found[layer][0][1, :, :130] == 0).all()


def test_a_row_can_bring_nothing_at_all():
    tokens = Tokens(500, batch=2, num_layers=3)
    tokens.real[0, 100:300] = False
    cache = make_cache(*WINDOWS)
    for stop in (100, 250, 300, 499):
        assert all(output.isfinite().all() for output in tokens.attend(cache, cache.get_seq_length(), stop))
    assert cache.lengths.tolist() == [299, 499]
    alone = make_cache(*WINDOWS)
    tokens.rows([1]).feed(alone, 100, 250, 300, 499)
    assert equal(row_of(read(cache, tokens), 1), row_of(read(alone, tokens.rows([1])), 0))

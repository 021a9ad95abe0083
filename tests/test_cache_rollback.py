"""Crop: lossless within the rollback window, bounded beyond it, refused where a sliding layer cannot follow."""

import copy

import pytest
import torch

from kitty_compile.layers import PagedLayer
from tests.cache_driver import SCALE, Tokens, equal, make_cache, poison_what_nobody_may_read, read, same, snapshot

WINDOWS = (None, None, 40)


def make_tokens(total, **arguments):
    return Tokens(total, num_layers=3, **arguments)


def sealed_pages(cache, layer):
    state, raw = cache.layers[layer].state, cache.config.raw_layout
    return [
        pool[state.page_table[row, : int(count)].long()]
        for pool, counts in (
            (state.key_pages, raw.key_pages(state.lengths)),
            (state.value_pages, raw.value_pages(state.lengths)),
        )
        for row, count in enumerate(counts)
    ]


@pytest.mark.parametrize("dropped", [1, 32])
@pytest.mark.parametrize("kept", [0, 20, 150, 160, 287, 300])
def test_a_crop_within_the_window_leaves_no_trace(kept, dropped):
    tokens, rejected = make_tokens(700), make_tokens(kept + dropped)
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    if kept:
        tokens.feed(cache, kept)
        tokens.feed(clean, kept)
    rejected.feed(cache, kept + dropped)
    cache.crop(kept)
    assert cache.lengths.tolist() == [kept, kept]
    for stop in (kept + 1, 330, 470, 699):
        start = cache.get_seq_length()
        poison_what_nobody_may_read(cache)
        assert equal(tokens.attend(cache, start, stop), tokens.attend(clean, start, stop))
    assert equal(read(cache, tokens), read(clean, tokens))
    assert all(equal(sealed_pages(cache, layer), sealed_pages(clean, layer)) for layer in (0, 1))


@pytest.mark.parametrize("is_padded", [False, True])
def test_drafts_that_are_rejected_again_and_again(is_padded, monkeypatch):
    tokens, rejected = make_tokens(450), make_tokens(450)
    if is_padded:
        tokens.real[0, :9] = False
        rejected.real[1, 3::7] = False
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    refills = []
    monkeypatch.setattr(PagedLayer, "refill", lambda *_: refills.append(1))
    tokens.feed(cache, 100)
    tokens.feed(clean, 100)
    start = 100
    for step in range(60):
        draft, accepted = 1 + step % 7, 1 + step % 5
        cache.begin_call(draft, rejected.mask(start, start + draft))
        for layer in range(3):
            cache.attend(*rejected.new(layer, start, start + draft), layer, scale=SCALE)
        cache.end_call()
        cache.crop(start)
        stop = start + accepted
        assert equal(tokens.attend(cache, start, stop), tokens.attend(clean, start, stop))
        start = stop
    if not is_padded:
        assert not refills, "a crop within the window must not touch the rings"


def test_a_second_crop_counts_from_the_longest():
    tokens = make_tokens(700)
    cache, clean = make_cache(None, None), make_cache(None, None)
    tokens.feed(cache, 300)
    cache.crop(280)
    tokens.feed(cache, 290)
    cache.crop(268)
    tokens.feed(clean, 268)
    for stop in (300, 500, 699):
        start = cache.get_seq_length()
        assert equal(tokens.attend(cache, start, stop), tokens.attend(clean, start, stop))
    assert equal(read(cache, tokens), read(clean, tokens))


@pytest.mark.parametrize("between", [0, 10])
def test_two_crops_in_a_row_can_go_too_far_together(between):
    tokens = Tokens(600)
    cache = tokens.feed(make_cache(), 449)
    cache.crop(430)
    if between:
        tokens.feed(cache, 430 + between)
    before = read(cache, tokens)
    cache.crop(415)
    assert cache.layers[0].state.high_water.tolist() == [415, 415]
    poison_what_nobody_may_read(cache)
    for found, old in zip(read(cache, tokens), before, strict=True):
        assert all(side.isfinite().all() for side in found)
        assert torch.equal(found[0][:, :, :288], old[0][:, :, :288])


def test_pads_do_not_hide_that_a_row_went_back():
    """A row that brought pads where another grew can go back too far together with an earlier crop."""
    tokens = Tokens(600)
    cache = tokens.feed(make_cache(), 449)
    cache.crop(430)
    tokens.real[0, 430:440] = False
    tokens.feed(cache, 440)
    before = read(cache, tokens)
    cache.crop(415)
    assert cache.layers[0].state.high_water.tolist() == [415, 415]
    poison_what_nobody_may_read(cache)
    for found, old in zip(read(cache, tokens), before, strict=True):
        assert all(side.isfinite().all() for side in found)
        assert torch.equal(found[0][:, :, :288], old[0][:, :, :288])


@pytest.mark.parametrize("kept", [1, 33, 160, 161, 287, 300, 415])
@pytest.mark.parametrize(
    "overrides", [{}, {"value_window": 0}, {"rollback_window": 0, "sink_length": 0}, {"value_bits": 16}]
)
def test_a_deep_crop_restores_from_the_pages(kept, overrides):
    tokens = Tokens(700)
    cache = make_cache(**overrides)
    tokens.feed(cache, 300, 500)
    before = read(cache, tokens)
    cache.crop(kept)
    assert cache.lengths.tolist() == [kept, kept]
    poison_what_nobody_may_read(cache)
    for layer, sides in enumerate(read(cache, tokens)):
        for found, old, original in zip(sides, before[layer], (tokens.key[layer], tokens.value[layer]), strict=True):
            found, old, original = found[:, :, :kept], old[:, :, :kept], original[:, :, :kept]
            # Every token is what it was read as before, or the original where that was still there.
            assert ((found == old) | (found == original)).all()
    tokens.feed(cache, 650, 699)
    final = read(cache, tokens)
    for layer, sides in enumerate(final):
        for found, old, original in zip(sides, before[layer], (tokens.key[layer], tokens.value[layer]), strict=True):
            once = (old[:, :, :500] - original[:, :, :500]).abs().max()
            assert (found[:, :, :700] - original).abs().max() <= 2 * once + 1e-6


@pytest.mark.parametrize("overrides", [{}, {"rollback_window": 0}, {"sink_length": 0, "value_window": 1}])
@pytest.mark.parametrize("beyond", [1, 2, 3])
def test_a_crop_just_past_the_window_is_a_deep_one(overrides, beyond):
    """The crop leaves 127 tokens that have to be raw, the first of which the rings no longer hold."""
    cache, tokens = make_cache(**overrides), Tokens(600)
    kept = cache.config.sink_length + cache.config.value_window + 2 * 128 + 127
    tokens.feed(cache, 170, kept + cache.config.rollback_window + beyond)
    before = read(cache, tokens)
    cache.crop(kept)
    assert cache.layers[0].state.high_water.tolist() == [kept, kept]
    poison_what_nobody_may_read(cache)
    for layer, sides in enumerate(read(cache, tokens)):
        for found, old, original in zip(sides, before[layer], (tokens.key[layer], tokens.value[layer]), strict=True):
            found, old, original = found[:, :, :kept], old[:, :, :kept], original[:, :, :kept]
            assert ((found == old) | (found == original)).all()


def test_a_deep_crop_of_raw_pages_loses_nothing():
    tokens = Tokens(700)
    cache = make_cache(key_bits=16, value_bits=16)
    tokens.feed(cache, 690)
    cache.crop(200)
    tokens.feed(cache, 699)
    for layer, (key, value) in enumerate(tokens.store(cache, 699, 700)):
        assert torch.equal(key, tokens.key[layer])
        assert torch.equal(value, tokens.value[layer])


def test_only_rows_that_go_back_too_far_are_restored():
    tokens = Tokens(700)
    tokens.real[1, 440:500] = False
    cache = make_cache()
    tokens.feed(cache, 500)
    untouched = copy.deepcopy(cache)
    cache.crop(440)
    assert cache.layers[0].state.high_water.tolist() == [440, 440]
    assert torch.equal(cache.layers[0].state.raw_key[1], untouched.layers[0].state.raw_key[1])
    assert torch.equal(cache.layers[0].state.raw_value[1], untouched.layers[0].state.raw_value[1])


def test_sliding_layers_go_back_by_the_rollback_window():
    tokens = make_tokens(700)
    cache = make_cache(*WINDOWS)
    tokens.feed(cache, 500)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"columns must go back by at most rollback_window=32 .*sliding"):
        cache.crop(467)
    assert same(before, snapshot(cache))
    cache.crop(468)
    with pytest.raises(ValueError, match="columns must go back by at most rollback_window=32"):
        cache.crop(467)
    tokens.feed(cache, 520)
    cache.crop(488)
    cache.crop(0)
    tokens.feed(cache, 30)


def test_sliding_rings_that_never_went_round_go_back_to_anywhere():
    tokens = make_tokens(200)
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    make_tokens(72).feed(cache, 72)
    cache.crop(0)
    tokens.feed(cache, 72)
    cache.crop(3)
    tokens.feed(clean, 3)
    for stop in (50, 120, 199):
        start = cache.get_seq_length()
        outputs, expected = tokens.attend(cache, start, stop), tokens.attend(clean, start, stop)
        assert torch.equal(outputs[2], expected[2])
    assert equal(read(cache, tokens)[2], read(clean, tokens)[2])


def test_a_call_that_never_ran_does_not_cost_sliding_layers_their_rollback():
    tokens = make_tokens(300)
    cache = make_cache(*WINDOWS)
    tokens.feed(cache, 100)
    cache.begin_call(200)
    cache.abort_call()
    cache.crop(70)


@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("served", [1, 2])
@pytest.mark.parametrize("length", [0, 150, 280])
def test_a_torn_forward_is_undone_by_a_crop(size, served, length):
    tokens, rejected = make_tokens(500), make_tokens(length + size)
    cache, clean = make_cache(*WINDOWS), make_cache(*WINDOWS)
    if length:
        tokens.feed(cache, length)
        tokens.feed(clean, length)
    cache.begin_call(size)
    for layer in range(served):
        cache.attend(*rejected.new(layer, length, length + size), layer, scale=SCALE)
    cache.abort_call()
    cache.crop(length)
    for stop in (length + 5, 320, 480, 499):
        start = cache.get_seq_length()
        assert equal(tokens.attend(cache, start, stop), tokens.attend(clean, start, stop))
    assert equal(read(cache, tokens), read(clean, tokens))


def test_rows_may_move_while_a_forward_is_torn():
    """A long forward has overwritten a ring, so that the crop has to read the pages that the forward sealed."""
    tokens = Tokens(500)
    cache = tokens.feed(make_cache(), 150)
    cache.begin_call(300)
    cache.attend(*tokens.new(0, 150, 450), 0, scale=SCALE)
    cache.abort_call()
    still = copy.deepcopy(cache)
    still.crop(150)
    cache.reorder(torch.tensor([1, 0]))
    poison_what_nobody_may_read(cache)
    cache.crop(150)
    for found, expected in zip(read(cache, tokens), read(still, tokens), strict=True):
        assert equal([side[:, :, :150] for side in found], [side[[1, 0], :, :150] for side in expected])
    assert not torch.equal(still.layers[0].state.raw_key, tokens.feed(make_cache(), 150).layers[0].state.raw_key)


def test_cropping_to_what_is_there_does_nothing():
    tokens = Tokens(300)
    cache = tokens.feed(make_cache(), 290)
    before = snapshot(cache)
    cache.crop(290)
    assert same(before, snapshot(cache))

"""The protocol of a forward, its errors, and what the cache says of itself."""

import copy

import pytest
import torch

from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig
from kitty_compile.layers import LayerPlan
from tests.cache_driver import SCALE, Tokens, kept_bytes, kept_tensors, make_cache, same, snapshot
from tests.cache_model import plans_of

# ---- construction


@pytest.mark.parametrize(
    ("plans", "config", "max_length", "message"),
    [
        ([], {}, None, "plans must name at least one attention layer, got none"),
        (plans_of(None), {}, 0, "max_length must be a positive int or None, got 0"),
        (plans_of(None), {}, 2.5, "max_length must be a positive int or None, got 2.5"),
        (plans_of(None), {"skip_layers": (0, 1)}, None, r"skip_layers must name layers below 1, got \[1\]"),
    ],
)
def test_construction_refuses(plans, config, max_length, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(plans, KittyConfig(**config), max_length=max_length)


def test_a_new_cache_is_empty():
    cache = make_cache(None, 40)
    assert cache.batch_size == -1
    assert cache.lengths.tolist() == []
    assert cache.nbytes == kept_bytes(cache) == 0
    assert cache.pages_in_use == 0
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.get_mask_sizes(5, 1) == (5, 0)
    assert cache.bits_per_element() != cache.bits_per_element()
    cache.crop(0)
    cache.repeat(3)
    cache.reorder(torch.tensor([0, 0]))
    cache.free([0])
    cache.reset()
    assert not kept_tensors(cache) or kept_bytes(cache) == 0


# ---- the protocol


def test_attend_needs_a_call():
    cache, tokens = make_cache(), Tokens(3)
    query, key, value = tokens.new(0, 0, 3)
    with pytest.raises(RuntimeError, match="layer 0 must be served once between begin_call and end_call"):
        cache.attend(query, key, value, 0, scale=SCALE)
    tokens.attend(cache, 0, 3)
    with pytest.raises(RuntimeError, match="must be served once"):
        cache.attend(query, key, value, 0, scale=SCALE)


def test_a_layer_is_served_once():
    cache, tokens = make_cache(), Tokens(3)
    cache.begin_call(3)
    query, key, value = tokens.new(0, 0, 3)
    cache.attend(query, key, value, 0, scale=SCALE)
    before = snapshot(cache)
    with pytest.raises(RuntimeError, match="layer 0 must be served once"):
        cache.attend(query, key, value, 0, scale=SCALE)
    assert same(before, snapshot(cache))
    for layer in (2, -1):
        with pytest.raises(ValueError, match=f"layer must be below 2, got {layer}"):
            cache.attend(query, key, value, layer, scale=SCALE)
    cache.attend(*tokens.new(1, 0, 3), 1, scale=SCALE)
    cache.end_call()
    assert cache.lengths.tolist() == [3, 3]


def test_a_forward_must_serve_every_layer():
    cache, tokens = make_cache(None, None, None), Tokens(9, num_layers=3)
    tokens.feed(cache, 4)
    cache.begin_call(2)
    cache.attend(*tokens.new(1, 4, 6), 1, scale=SCALE)
    with pytest.raises(RuntimeError, match=r"every layer must be served in a forward, but layers \[0, 2\] were not"):
        cache.end_call()
    before = snapshot(cache)
    with pytest.raises(ValueError, match="the cache must be whole, but a forward stopped half way"):
        cache.begin_call(1)
    assert same(before, snapshot(cache))
    cache.crop(4)
    tokens.feed(cache, 9)
    assert cache.lengths.tolist() == [9, 9]


def test_a_call_that_served_nothing_leaves_no_trace():
    cache, tokens = make_cache(), Tokens(300)
    tokens.feed(cache, 100)
    other = copy.deepcopy(cache)
    cache.begin_call(20)
    cache.abort_call()
    cache.begin_call(7)
    cache.end_call()
    for one, two in zip(tokens.attend(cache, 100, 300), tokens.attend(other, 100, 300), strict=True):
        assert torch.equal(one, two)


def test_store_begins_by_itself_and_closes_behind_the_last_layer():
    cache, tokens = make_cache(), Tokens(5)
    tokens.store(cache, 0, 3)
    tokens.store(cache, 3, 5)
    assert cache.lengths.tolist() == [5, 5]
    cache.begin_call(0)
    cache.abort_call()


def test_a_failed_store_can_be_tried_again():
    cache, tokens = make_cache(), Tokens(9)
    tokens.store(cache, 0, 3)
    _, key, value = tokens.new(0, 3, 5)
    with pytest.raises(ValueError, match="key and value must have the shape"):
        cache.store(key, value[:, :, :1], 0)
    tokens.store(cache, 3, 9)
    assert cache.lengths.tolist() == [9, 9]


# ---- errors change nothing


def bad_calls():
    tokens = Tokens(8)
    query, key, value = tokens.new(0, 3, 5)
    wide = Tokens(8, key_dim=32).new(0, 3, 5)
    heads = Tokens(8, heads=4).new(0, 3, 5)
    more = Tokens(8, batch=3).new(0, 3, 5)
    return {
        "three dimensions": ((query, key[0], value), ValueError),
        "other columns in V": ((query, key, value[:, :, :1]), ValueError),
        "other columns than the call's": (tokens.new(0, 3, 6), ValueError),
        "integers": ((query, key.int(), value.int()), TypeError),
        "two dtypes": ((query, key, value.half()), TypeError),
        "another dtype than the cache's": (tuple(side.half() for side in (query, key, value)), ValueError),
        "another head_dim": (wide, ValueError),
        "another number of KV heads": (heads, ValueError),
        "another batch": (more, ValueError),
        "query heads that are no multiple": ((query[:, :3], key, value), ValueError),
        "a query of other columns": ((query[:, :, :1], key, value), ValueError),
        "a query of another batch": ((query[:1], key, value), ValueError),
        "a query of another head_dim": ((query[..., :8], key, value), ValueError),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_a_bad_tensor_is_one_line_and_changes_nothing(case):
    tensors, error = bad_calls()[case]
    cache, tokens = make_cache(), Tokens(8)
    tokens.feed(cache, 3)
    cache.begin_call(2)
    before = snapshot(cache)
    with pytest.raises(error, match="must") as caught:
        cache.attend(*tensors, 0, scale=SCALE)
    assert "\n" not in str(caught.value)
    assert same(before, snapshot(cache))
    for layer in range(2):
        cache.attend(*tokens.new(layer, 3, 5), layer, scale=SCALE)
    cache.end_call()
    tokens.feed(cache, 8)


def test_layers_of_one_forward_must_agree_on_the_batch():
    cache = make_cache()
    cache.begin_call(3)
    cache.attend(*Tokens(3, batch=2).new(0, 0, 3), 0, scale=SCALE)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"batch must stay 2.*got 3"):
        cache.attend(*Tokens(3, batch=3).new(1, 0, 3), 1, scale=SCALE)
    assert same(before, snapshot(cache))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 4), r"attention_mask must have the shape \[batch, 5\]"),
        (torch.ones(2, 1, 5), r"attention_mask must have the shape \[batch, 5\]"),
        (torch.tensor([[1, 1, 1], [0, 1, 1]])[:, :2].repeat(2, 1), "attention_mask must have 2 rows, got 4"),
        (torch.zeros(2, 5), "attention_mask must not change for columns that are already cached"),
    ],
)
def test_a_bad_mask_changes_nothing(mask, message):
    cache, tokens = make_cache(), Tokens(8)
    tokens.feed(cache, 3)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        cache.begin_call(2, mask)
    assert same(before, snapshot(cache))
    tokens.feed(cache, 8)


def test_max_length_is_checked_before_anything_changes():
    cache, tokens = make_cache(max_length=200), Tokens(300)
    tokens.feed(cache, 190)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="columns must not exceed max_length=200, got 190 \\+ 11"):
        cache.begin_call(11)
    assert same(before, snapshot(cache))
    tokens.feed(cache, 200)


def test_arguments_between_calls_are_checked_before_anything_changes():
    cache, tokens = make_cache(None, 40), Tokens(200)
    tokens.feed(cache, 199)
    before = snapshot(cache)
    for action, argument, error, message in (
        ("crop", -1, ValueError, "columns must be between 0 and the 199 cached ones, got -1"),
        ("crop", 200, ValueError, "columns must be between 0 and the 199 cached ones, got 200"),
        ("crop", 150, ValueError, "columns must go back by at most rollback_window=32"),
        ("repeat", 0, ValueError, "repeats must be at least 1, got 0"),
        ("free", [0, 2], ValueError, r"rows must be between 0 and 1, got \[0, 2\]"),
        ("free", [-1], ValueError, r"rows must be between 0 and 1, got \[-1\]"),
        ("reorder", torch.zeros(2), ValueError, "index must be a 1-D integer tensor"),
        ("reorder", torch.zeros(1, 2, dtype=torch.int64), ValueError, "index must be a 1-D integer tensor"),
        ("reorder", torch.zeros(0, dtype=torch.int64), ValueError, "index must be .*at least one row"),
        ("reorder", torch.tensor([0, 2]), IndexError, "index out of range"),
        ("select", torch.tensor([False, False]), ValueError, "at least one row"),
        ("select", torch.tensor([True]), ValueError, "index must have an entry per row"),
    ):
        with pytest.raises(error, match=message) as caught:
            getattr(cache, action)(argument)
        assert "\n" not in str(caught.value)
        assert same(before, snapshot(cache)), action
    tokens.feed(cache, 200)


# ---- both forms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("overrides", [{}, {"key_bits": 16, "value_bits": 16}, {"skip_layers": (0,)}])
def test_fused_is_dense_attention_over_what_store_returns(dtype, overrides):
    fused, stored = make_cache(None, None, 50, **overrides), make_cache(None, None, 50, **overrides)
    tokens = Tokens(440, num_layers=3, dtype=dtype)
    tokens.real = torch.rand(2, 440) < 0.9
    start = 0
    for stop in (300, 301, 310, 439, 440):
        outputs, reads = tokens.attend(fused, start, stop), tokens.store(stored, start, stop)
        for layer, (output, (key, value)) in enumerate(zip(outputs, reads, strict=True)):
            assert key.dtype == value.dtype == output.dtype == dtype
            length, offset = fused.get_mask_sizes(0, layer)
            assert key.shape[2] == value.shape[2] == min(stop, 49 + stop - start if layer == 2 else stop)
            query = tokens.new(layer, start, stop)[0]
            column = torch.arange(stop - key.shape[2], stop)
            distance = torch.arange(start, stop)[:, None] - column
            visible = (distance >= 0) & (distance < (50 if layer == 2 else stop + 1)) & tokens.real[:, None, column]
            scores = query.double() @ key.double().repeat_interleave(2, 1).mT * SCALE
            weights = torch.softmax(scores.masked_fill(~visible[:, None], -torch.inf), -1).nan_to_num(0.0)
            at = tokens.real[:, None, start:stop, None]
            expected = weights @ value.double().repeat_interleave(2, 1)
            tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}[dtype]
            torch.testing.assert_close(output * at, expected.to(dtype) * at, rtol=tolerance, atol=tolerance)
            assert length + offset == stop
        start = stop
    assert fused.lengths.tolist() == stored.lengths.tolist() == tokens.real.sum(1).tolist()


def test_two_caches_do_not_share_anything():
    one, other, alone = make_cache(), make_cache(), make_cache()
    mine, theirs = Tokens(400), Tokens(400)
    for stop in (200, 350, 400):
        theirs.feed(other, stop)
        outputs = mine.attend(one, one.get_seq_length(), stop)
        for output, expected in zip(outputs, mine.attend(alone, alone.get_seq_length(), stop), strict=True):
            assert torch.equal(output, expected)


# ---- memory


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("max_length", [None, 700])
def test_nothing_larger_than_nbytes_is_kept_alive(is_fused, max_length):
    cache, tokens = make_cache(None, 40, max_length=max_length), Tokens(700)
    tokens.real[:, 5:50] = False
    start = 0
    for stop in (400, 401, 690):
        (tokens.attend if is_fused else tokens.store)(cache, start, stop)
        assert kept_bytes(cache) == cache.nbytes
        start = stop
    for action, argument in (
        ("crop", 670),
        ("reorder", torch.tensor([1, 1, 0])),
        ("free", [1]),
        ("select", torch.tensor([1])),
    ):
        getattr(cache, action)(argument)
        assert kept_bytes(cache) == cache.nbytes, action


def test_a_bounded_cache_never_moves():
    cache, tokens = make_cache(None, 40, max_length=600), Tokens(600)
    tokens.feed(cache, 10)
    addresses = [tensor.data_ptr() for _, _, tensor in snapshot_tensors(cache)]
    tokens.feed(cache, 300, *range(301, 330), 500)
    cache.crop(480)
    cache.reorder(torch.tensor([1, 0]))
    tokens.feed(cache, 600)
    cache.free([0])
    cache.reset()
    tokens.feed(cache, 600)
    assert [tensor.data_ptr() for _, _, tensor in snapshot_tensors(cache)] == addresses


def snapshot_tensors(cache):
    groups = [layer._tensors for layer in cache.layers] + [{"table": cache._table.table}]
    return [(index, name, tensor) for index, group in enumerate(groups) for name, tensor in group.items()]


def test_an_unbounded_cache_grows_and_keeps_its_pages():
    cache, bounded, tokens = make_cache(), make_cache(max_length=1500), Tokens(1500)
    sizes = set()
    for stop in (10, 400, 900, 1000, 1499):
        tokens.feed(cache, stop)
        tokens.feed(bounded, stop)
        sizes.add(cache.layers[0].num_pages)
    assert len(sizes) > 2
    for one, other in zip(tokens.store(cache, 1499, 1500), tokens.store(bounded, 1499, 1500), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_bits_per_element_by_hand():
    cache = make_cache(None, max_length=32 + 8 * 128)
    Tokens(1056, batch=1, num_layers=1, heads=1, key_dim=128, value_dim=128, dtype=torch.float16).feed(cache, 1056)
    pages = 8 * 76.5 * 128
    raw = 2 * 128 * ((32 + 160) + (32 + 288))
    table, lengths = 4 * 8, 2 * 4
    assert cache.nbytes == pages + raw + table + lengths
    assert cache.bits_per_element() == pytest.approx(8 * cache.nbytes / (1056 * 256))
    assert cache.pages_in_use == 8


def test_skipped_layers_stay_raw():
    cache, tokens = make_cache(skip_layers=(1,)), Tokens(400)
    tokens.feed(cache, 399)
    reads = tokens.store(cache, 399, 400)
    assert not torch.equal(reads[0][0], tokens.key[0])
    assert torch.equal(reads[1][0], tokens.key[1])
    assert torch.equal(reads[1][1], tokens.value[1])


def test_plans_are_validated():
    for arguments, message in (
        (("causal",), 'kind must be "full" or "sliding"'),
        (("full", 3), "window must be given for sliding layers alone"),
        (("sliding",), "window must be given for sliding layers alone"),
        (("sliding", 0), "window must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LayerPlan(*arguments)


def test_what_inference_mode_filled_goes_on_outside_of_it():
    driver_plans = [LayerPlan(), LayerPlan("sliding", 70)]
    cache = PagedCache(driver_plans, KittyConfig())

    def call(columns):
        key = torch.randn(2, 2, columns, 16)
        cache.begin_call(columns, torch.arange(columns).expand(2, -1) > 0)
        for layer in range(2):
            cache.attend(key, key, key, layer, scale=1.0)
        cache.end_call()

    with torch.inference_mode():
        call(200)
        cache.reorder(torch.tensor([1, 0, 1]))
        cache.select(torch.tensor([0, 2]))
    call(200)
    cache.crop(390)
    cache.free([0])
    assert cache.lengths.tolist() == [0, 388]

"""One layer at a time: what it allocates, reads, refills and forgets."""

import pytest
import torch

from kitty_compile.columns import Call
from kitty_compile.config import KittyConfig
from kitty_compile.kernels import reference
from kitty_compile.layers import PagedLayer, SlidingLayer, geometry
from kitty_compile.pages import PageTable


def paged_layer(batch=2, max_pages=4, heads=2, key_dim=16, value_dim=32, dtype=torch.float16, index=0, **overrides):
    table = PageTable()
    table.allocate(batch, max_pages, torch.device("cpu"))
    layer = PagedLayer(index, KittyConfig(**overrides), table)
    layer.initialize(
        torch.empty(batch, heads, 1, key_dim, dtype=dtype), torch.empty(batch, heads, 1, value_dim, dtype=dtype)
    )
    return layer


def new_tokens(layer, total):
    """K and V [B, Hkv, total, D] for a layer."""
    found, batch = layer.geometry, layer.batch_size
    return tuple(
        torch.randn(batch, found.num_kv_heads, total, dim).to(found.dtype) for dim in (found.key_dim, found.value_dim)
    )


def fill(layer, key, value, real=None):
    layer.store(key, value, Call.of(key.shape[2], 0, real), None)


# ---- full attention


def test_a_layer_knows_nothing_until_it_is_initialized():
    layer = PagedLayer(0, KittyConfig(), PageTable())
    assert not layer.is_initialized
    assert (layer.columns, layer.nbytes, layer.elements_per_token) == (0, 0, 0)
    layer.reset()
    sliding = SlidingLayer(0, KittyConfig(), 10)
    assert not sliding.is_initialized
    assert (sliding.columns, sliding.nbytes, sliding.elements_per_token) == (0, 0, 0)
    sliding.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_a_layer_allocates(dtype):
    layer = paged_layer(dtype=dtype)
    state = layer.state
    assert state.key_pages.shape == (8, 2 * (512 + 16 * 2 * 8 + 2 * 16 + 2 * 16 + 4 * 8))
    assert state.value_pages.shape == (8, 2 * (1024 + 512))
    assert state.raw_key.shape == (2, 2, 32 + 128 + 32, 16)
    assert state.raw_value.shape == (2, 2, 32 + 128 + 128 + 32, 32)
    assert state.raw_key.dtype == state.raw_value.dtype == dtype
    assert state.lengths.dtype == state.high_water.dtype == state.page_table.dtype == torch.int32
    assert layer.num_pages == 8
    assert layer.elements_per_token == 2 * (16 + 32)
    assert layer.nbytes == sum(tensor.nbytes for tensor in state) - state.page_table.nbytes
    assert layer.geometry == geometry(torch.empty(2, 2, 5, 16, dtype=dtype), torch.empty(2, 2, 5, 32, dtype=dtype))


def test_parameters_follow_the_config():
    parameters = paged_layer(index=3, selection="random", seed=9, boost_fraction=0.25).parameters
    assert (parameters.key_bits, parameters.value_bits, parameters.num_boosted) == (2, 2, 4)
    assert (parameters.seed, parameters.layer) == (9, 3)
    assert paged_layer().parameters.seed == -1
    kept = paged_layer(index=1, skip_layers=(1,)).parameters
    assert (kept.key_bits, kept.value_bits, kept.num_boosted) == (16, 16, 0)
    assert paged_layer(index=0, skip_layers=(1,)).parameters.key_bits == 2
    assert paged_layer(key_bits=4).parameters.num_boosted == 0


def test_random_selection_differs_from_layer_to_layer():
    pages = []
    key, value = new_tokens(paged_layer(heads=1), 200)
    for index in (0, 1):
        layer = paged_layer(heads=1, index=index, selection="random")
        fill(layer, key, value)
        pages.append(layer.state.key_pages[layer.state.page_table[:, 0].long()])
    layout = layer.page_layout
    indices = [reference.boost_index(page.unsqueeze(1), layout) for page in pages]
    assert not torch.equal(*indices)


def test_materialize_puts_tokens_at_their_columns():
    layer = paged_layer(key_bits=16, value_bits=16)
    key, value = new_tokens(layer, 400)
    real = torch.rand(2, 400) < torch.tensor([[0.8], [0.3]])
    fill(layer, key.masked_fill(~real[:, None, :, None], torch.nan), value, real)
    for found, original in zip(layer.materialize(400, real), (key, value), strict=True):
        assert torch.equal(found, original.masked_fill(~real[:, None, :, None], 0))


def test_materialize_reads_pages_by_the_rule():
    layer = paged_layer()
    key, value = new_tokens(layer, 450)
    fill(layer, key, value)
    found_key, found_value = layer.materialize(450, None)
    layout = layer.page_layout
    for start in (32, 160, 288):
        page = slice(start, start + 128)
        packed = reference.unseal_keys(reference.seal_keys(key[:, :, page], layout), layout).half()
        assert torch.equal(found_key[:, :, page], packed)
        packed = reference.unseal_values(reference.seal_values(value[:, :, page], layout), layout).half()
        assert torch.equal(found_value[:, :, page], value[:, :, page] if start == 288 else packed)
    for edge in (slice(0, 32), slice(416, 450)):
        assert torch.equal(found_key[:, :, edge], key[:, :, edge])
        assert torch.equal(found_value[:, :, edge], value[:, :, edge])


def test_refill_takes_lost_tokens_from_the_pages_and_leaves_the_rest():
    layer = paged_layer()
    key, value = new_tokens(layer, 450)
    fill(layer, key, value)
    before_key, before_value = layer.materialize(450, None)
    raw = layer.config.raw_layout
    layer.refill(torch.tensor([300, 430]))
    assert layer.state.high_water.tolist() == [300, 450]
    for held, ring, packed, original in (
        (layer.state.raw_key, raw.key_ring, before_key, key),
        (layer.state.raw_value, raw.value_ring, before_value, value),
    ):
        tokens = torch.arange(300 - ring if ring < 268 else 32, 300)
        slots = raw.slots(tokens, ring)
        lost = tokens < 450 - ring
        assert lost.any()
        assert torch.equal(held[0][:, slots[lost]], packed[0][:, tokens[lost]])
        assert torch.equal(held[0][:, slots[~lost]], original[0][:, tokens[~lost]])
        newest = torch.arange(450 - ring, 450)
        assert torch.equal(held[1][:, raw.slots(newest, ring)], original[1][:, newest])


def test_growing_keeps_the_pages():
    layer = paged_layer()
    fill(layer, *new_tokens(layer, 300))
    before = layer.materialize(300, None)
    layer.table.grow(6)
    layer.grow(layer.table.num_pages)
    assert layer.num_pages == 12
    for found, expected in zip(layer.materialize(300, None), before, strict=True):
        assert torch.equal(found, expected)


def test_release_drops_every_tensor():
    layer = paged_layer()
    fill(layer, *new_tokens(layer, 30))
    layer.release()
    assert not layer.is_initialized
    assert (layer.nbytes, layer.columns) == (0, 0)


# ---- sliding


def sliding_layer(batch=2, window=10, rollback=4, dtype=torch.float32):
    layer = SlidingLayer(0, KittyConfig(rollback_window=rollback), window)
    layer.initialize(torch.empty(batch, 1, 1, 16, dtype=dtype), torch.empty(batch, 1, 1, 32, dtype=dtype))
    return layer


def test_a_sliding_layer_stores_the_window_and_the_calls_own():
    layer = sliding_layer()
    key, value = new_tokens(layer, 60)
    start = 0
    for stop in (4, 5, 12, 40, 41, 60):
        new = slice(start, stop)
        found = layer.store(key[:, :, new], value[:, :, new], Call(stop - start, start), None)
        first = max(start - 9, 0)
        assert torch.equal(found[0], key[:, :, first:stop])
        assert torch.equal(found[1], value[:, :, first:stop])
        start = stop
    assert layer.columns == 60


def test_what_a_sliding_layer_allocates():
    layer = sliding_layer()
    assert layer.ring == 14
    assert layer.nbytes == 2 * 14 * (16 + 32) * 4 + 2 * 14 + 8
    assert layer.elements_per_token == 48


def test_a_sliding_layer_goes_back():
    layer, other = sliding_layer(), sliding_layer()
    key, value = new_tokens(layer, 60)
    layer.store(key[:, :, :40], value[:, :, :40], Call(40, 0), None)
    layer.set_columns(36)
    other.store(key[:, :, :36], value[:, :, :36], Call(36, 0), None)
    again = key[:, :, 45:50], value[:, :, 45:50]
    for one, two in zip(layer.store(*again, Call(5, 36), None), other.store(*again, Call(5, 36), None), strict=True):
        assert torch.equal(one, two)

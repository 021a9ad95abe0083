import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kitty_compile.kernels import reference
from kitty_compile.kernels.layout import PAGE_SIZE, PageLayout
from tests import page_oracle

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)


def page_layout(head_dim=32, key_bits=2, value_bits=2, num_boosted=4, dtype=torch.float16, num_kv_heads=1):
    return PageLayout(head_dim, head_dim, num_kv_heads, key_bits, value_bits, num_boosted, dtype)


def normal_pages(*shape, dtype=torch.float16, spread=1.0):
    """Pages [*shape, 128, D] with channels of very different size, as real keys have."""
    *lead, head_dim = shape
    channel = torch.exp(spread * torch.randn(head_dim))
    return (torch.randn(*lead, PAGE_SIZE, head_dim) * channel + channel.flip(0)).to(dtype)


def key_parts(records, layout):
    return reference.split_key_records(records, layout.key, layout.dtype)


# ---- words


@settings(max_examples=25)
@given(hnp.arrays(np.int32, st.tuples(st.just(PAGE_SIZE), st.integers(1, 5)), elements=st.integers(0, 3)))
def test_a_word_holds_tokens_sixteen_apart(codes):
    codes = torch.from_numpy(codes)
    words = reference.pack_words(codes)
    assert words.dtype == torch.int16
    for row in (0, 7, 15):
        for field in range(8):
            field_of_words = (words[row].to(torch.int32) & 0xFFFF) >> 2 * field & 3
            assert torch.equal(field_of_words, codes[16 * field + row])
    assert torch.equal(reference.unpack_words(words), codes)


def test_every_word_survives_unpacking():
    words = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(16, -1)
    assert torch.equal(reference.pack_words(reference.unpack_words(words)), words)


ORDERS = {
    "key": (reference.order_key_words, reference.restore_key_words, page_oracle.key_order, 16),
    "high": (reference.order_high_words, reference.restore_high_words, page_oracle.high_order, 8),
    "value": (reference.order_value_words, reference.restore_value_words, page_oracle.value_order, 16),
}


@pytest.mark.parametrize("plane", ORDERS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
def test_memory_orders_are_the_documented_bijections(plane, blocks):
    order, restore, by_loops, width = ORDERS[plane]
    words = torch.arange(16 * width * blocks).view(16, width * blocks)
    ordered = order(words)
    assert ordered.tolist() == by_loops(words.tolist())
    assert torch.equal(restore(ordered), words)
    batch = torch.stack([words, words + 7]).unsqueeze(1)
    assert torch.equal(order(batch), torch.stack([ordered, ordered + 7]).unsqueeze(1))
    assert torch.equal(restore(order(batch)), batch)


# ---- whole records, against loops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_bits", "num_boosted"), [(2, 0), (2, 3), (2, 8), (2, 11), (4, 0)])
def test_key_records_equal_an_independent_implementation(dtype, key_bits, num_boosted):
    pages = normal_pages(2, 2, 16, dtype=dtype)
    layout = page_layout(16, key_bits=key_bits, num_boosted=num_boosted, dtype=dtype, num_kv_heads=2)
    records = reference.seal_keys(pages, layout)
    assert records.shape == (2, 2, layout.key.nbytes)
    for page, record in zip(pages.flatten(0, 1), records.flatten(0, 1), strict=True):
        expected = page_oracle.key_record(
            page.float().numpy(), key_bits, num_boosted, str(dtype).removeprefix("torch.")
        )
        assert bytes(record.tolist()) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 4])
def test_value_records_equal_an_independent_implementation(dtype, bits):
    pages = normal_pages(2, 1, 32, dtype=dtype)
    layout = page_layout(32, value_bits=bits, dtype=dtype)
    records = reference.seal_values(pages, layout)
    assert records.shape == (2, 1, layout.value.nbytes)
    for page, record in zip(pages[:, 0], records[:, 0], strict=True):
        assert bytes(record.tolist()) == page_oracle.value_record(
            page.float().numpy(), bits, str(dtype).removeprefix("torch.")
        )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("alpha", [0.0, 0.125, 0.25, 1.0])
def test_unsealing_gives_code_times_scale_plus_zero(head_dim, alpha):
    num_boosted = int(alpha * head_dim + 0.5)
    layout = page_layout(head_dim, num_boosted=num_boosted)
    pages = normal_pages(1, 1, head_dim)
    values = pages.float()
    records = reference.seal_keys(pages, layout)
    scores = reference.magnitude_scores(values)
    levels = torch.full((1, 1, head_dim), 3.0)
    levels.scatter_(-1, reference.boosted_channels(scores, num_boosted), 15.0)
    codes, scale, zero = reference.quantize(values, levels, -2, torch.float16)
    assert torch.equal(reference.key_codes(key_parts(records, layout)), codes)
    assert torch.equal(reference.unseal_keys(records, layout), codes * scale.float().unsqueeze(-2) + zero.unsqueeze(-2))

    levels = torch.full((1, 1, PAGE_SIZE), 3.0)
    codes, scale, zero = reference.quantize(values, levels, -1, torch.float16)
    unsealed = reference.unseal_values(reference.seal_values(pages, layout), layout)
    assert torch.equal(unsealed, codes * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sixteen_bits_keep_the_bytes(dtype):
    pages = normal_pages(3, 2, 16, dtype=dtype)
    layout = page_layout(16, key_bits=16, value_bits=16, dtype=dtype, num_kv_heads=2)
    for records in (reference.seal_keys(pages, layout), reference.seal_values(pages, layout)):
        assert torch.equal(records.view(dtype).view(pages.shape), pages)
    assert torch.equal(reference.unseal_keys(reference.seal_keys(pages, layout), layout), pages.float())
    assert torch.equal(reference.unseal_values(reference.seal_values(pages, layout), layout), pages.float())


# ---- quantiser


@settings(max_examples=60)
@given(
    values=hnp.arrays(np.float32, (6, 24), elements=st.floats(-60000, 60000, width=32)),
    bits=st.sampled_from([2, 4]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_the_error_is_half_a_stored_step_inside_the_stored_range(values, bits, dtype):
    values = torch.from_numpy(values).to(dtype).float()
    codes, scale, zero = reference.quantize(values, torch.full((6,), 2.0**bits - 1), -1, dtype)
    scale, zero = scale.float().unsqueeze(-1), zero.float().unsqueeze(-1)
    assert codes.min() >= 0
    assert codes.max() <= 2**bits - 1
    error = (codes * scale + zero - values).abs()
    # A stored scale may fall short of the range by its own rounding, 2**-9 of it.
    shortfall = (values.amax(-1, keepdim=True) - zero - (2**bits - 1) * scale).clamp(min=0)
    assert (error <= torch.maximum(scale / 2, shortfall) * (1 + 1e-5) + 1e-30).all()
    assert (shortfall <= (2**bits - 1) * torch.clamp(scale * 2**-8, min=reference.MIN_SCALE)).all()


def test_codes_are_taken_against_the_stored_scale():
    # The exact step is 1 + 2**-9, which is stored as 1: token 1.5 + 2**-9 is over half way for the stored step alone.
    step = 1 + 2**-9
    values = torch.tensor([0.0, 1.5 + 2**-10, 3 * step])
    codes, scale, _ = reference.quantize(values, torch.tensor(3.0), -1, torch.float32)
    assert scale.item() == 1.0
    assert codes.tolist() == [0, 2, 3]
    assert int(values[1] / step + 0.5) == 1


def test_codes_are_taken_against_the_stored_zero():
    # fp16 stores 1000.3 as 1000.5.
    values = torch.tensor([1000.3, 1002.1, 1003.3])
    codes, scale, zero = reference.quantize(values, torch.tensor(3.0), -1, torch.float16)
    assert zero.item() == 1000.5
    assert scale.item() == 1.0
    assert codes.tolist() == [0, 2, 3]


CONSTANTS = [
    (dtype, constant)
    for dtype in DTYPES
    for constant in (0.0, -0.0, 1.0, -3.1416, 6e-8, 65504.0, -65504.0, 1e-30, 1e5, 3e38)
    if torch.tensor(constant).to(dtype).isfinite()
]


@pytest.mark.parametrize(("dtype", "constant"), CONSTANTS)
@pytest.mark.parametrize("bits", [2, 4])
def test_constant_groups_come_back_as_the_stored_zero(dtype, constant, bits):
    pages = torch.full((1, 1, PAGE_SIZE, 16), constant).to(dtype)
    layout = page_layout(16, key_bits=bits, value_bits=bits, dtype=dtype)
    stored = pages.float().clamp(-65504, 65504).half().float() if dtype == torch.float32 else pages.float()
    assert torch.equal(reference.unseal_keys(reference.seal_keys(pages, layout), layout), stored)
    assert torch.equal(reference.unseal_values(reference.seal_values(pages, layout), layout), stored)


EXTREMES = {
    torch.float16: (65504.0, -65504.0, 6e-8, 1e-4, 0.0, 1.0, 21845.0, -1e3),
    torch.bfloat16: (1e5, -1e5, 3.38e38, -3.38e38, 1e-38, 9e-41, 0.0, 1.0),
    torch.float32: (3.4e38, -3.4e38, 1e-45, 1e-38, 0.0, 1.0, 70000.0, -1e20),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_bits", "value_bits", "num_boosted"), [(2, 2, 5), (4, 4, 0), (2, 2, 0), (16, 16, 0)])
@settings(max_examples=25)
@given(data=st.data())
def test_no_finite_input_gives_a_non_finite_output(dtype, key_bits, value_bits, num_boosted, data):
    layout = page_layout(16, key_bits=key_bits, value_bits=value_bits, num_boosted=num_boosted, dtype=dtype)
    chosen = data.draw(st.lists(st.sampled_from(EXTREMES[dtype]), min_size=1, max_size=4))
    seed = data.draw(st.integers(0, 1000))
    picks = torch.randint(len(chosen), (1, 1, PAGE_SIZE, 16), generator=torch.Generator().manual_seed(seed))
    pages = torch.tensor(chosen).to(dtype)[picks]
    assert pages.isfinite().all()
    for seal, unseal in (
        (reference.seal_keys, reference.unseal_keys),
        (reference.seal_values, reference.unseal_values),
    ):
        unsealed = unseal(seal(pages, layout), layout)
        assert unsealed.isfinite().all()
        assert unsealed.to(dtype).isfinite().all()
    records = reference.seal_values(pages, layout)
    if not layout.value.is_raw:
        parts = reference.split_value_records(records, layout.value, dtype)
        assert parts.scale.isfinite().all()
        assert parts.zero.isfinite().all()


def test_subnormal_scales_are_flushed_not_divided_by():
    values = torch.tensor([[0.0, 1e-40, 3e-40], [0.0, 1e-31, 2e-31]])
    codes, scale, zero = reference.quantize(values, torch.tensor([3.0, 3.0]), -1, torch.bfloat16)
    assert scale.float()[0].item() == 0.0
    assert scale.float()[1].item() == 0.0
    assert codes.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert zero.float().tolist() == [0.0, 0.0]


# ---- boost


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-40, 35))
def test_no_order_of_summation_changes_the_scores(seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, PAGE_SIZE, 8, generator=generator) * torch.randn(8, generator=generator).exp() * 2.0**exponent
    scores = reference.magnitude_scores(keys)
    assert scores.dtype == torch.int32
    assert torch.equal(reference.magnitude_scores(keys[:, torch.randperm(PAGE_SIZE, generator=generator)]), scores)
    assert torch.equal(reference.magnitude_scores(-keys), scores)


@pytest.mark.parametrize("largest", [3.4e38, 1.0, 1e-37, 1e-41, 1e-45])
def test_scores_neither_overflow_nor_vanish(largest):
    keys = torch.full((PAGE_SIZE, 4), largest) * torch.tensor([1.0, 0.5, 0.25, 0.0])
    scores = reference.magnitude_scores(keys)
    assert 0 <= scores.min() <= scores.max() < 2**30
    # Subnormals may count as nothing: their scales are flushed to 0 as well.
    if largest > 1e-38:
        assert scores.tolist() == sorted(set(scores.tolist()), reverse=True)


def test_scores_are_per_head():
    keys = normal_pages(1, 2, 8).float()
    scores = reference.magnitude_scores(keys)
    keys[:, 1] *= 1e10
    assert torch.equal(reference.magnitude_scores(keys)[:, 0], scores[:, 0])


def test_ties_go_to_the_lower_channel():
    scores = torch.tensor([[5, 7, 7, 7, 5, 1]], dtype=torch.int32)
    assert reference.boosted_channels(scores, 2).tolist() == [[1, 2]]
    assert reference.boosted_channels(scores, 4).tolist() == [[0, 1, 2, 3]]
    many = torch.zeros(200, dtype=torch.int32)
    assert reference.boosted_channels(many, 25).tolist() == list(range(25))


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES), num_boosted=st.integers(1, 31))
def test_boosted_channels_have_the_largest_mean_magnitude(seed, dtype, num_boosted):
    torch.manual_seed(seed)
    keys = normal_pages(1, 32, dtype=dtype)
    means = keys.double().abs().mean(-2)
    chosen = reference.boosted_channels(reference.magnitude_scores(keys.float()), num_boosted)
    threshold = means.topk(num_boosted).values.amin(-1)
    others = torch.ones_like(means, dtype=torch.bool).scatter(-1, chosen, False)
    slack = means.amax() * 2**-21
    assert (means.gather(-1, chosen) >= threshold - slack).all()
    assert (means[others] <= threshold + slack).all()


@settings(max_examples=40)
@given(num_boosted=st.integers(0, 32), seed=st.integers(0, 10**6))
def test_boost_index_invariants_of_the_paper(num_boosted, seed):
    torch.manual_seed(seed)
    layout = page_layout(32, num_boosted=num_boosted, num_kv_heads=2)
    pages = normal_pages(2, 2, 32)
    records = reference.seal_keys(pages, layout)
    index = reference.boost_index(records, layout)
    is_boosted = index < num_boosted
    assert (is_boosted.sum(-1) == num_boosted).all()
    assert (index[~is_boosted] == num_boosted + 1).all()
    # Slots ascend with the channel, each once.
    assert (index[is_boosted].view(2, 2, -1) == torch.arange(num_boosted)).all()

    parts = key_parts(records, layout)
    low = reference.unpack_words(reference.restore_key_words(parts.low))
    high = reference.unpack_words(reference.restore_high_words(parts.high))
    assert (high[..., num_boosted:] == 0).all()
    spread = torch.zeros_like(low)
    for page, head, channel in is_boosted.nonzero().tolist():
        spread[page, head, :, channel] = high[page, head, :, index[page, head, channel]]
    codes = reference.key_codes(parts)
    assert torch.equal(low | spread << 2, codes)
    assert (codes.movedim(-1, -2)[~is_boosted] <= 3).all()
    if num_boosted:
        assert codes.max() > 3
    if parts.slots is not None:
        channels = reference.slot_channels(parts.slots, 32)[..., :num_boosted]
        stored = (parts.slots[..., :num_boosted] << 16).view(torch.float32)
        assert torch.equal(stored, 4 * parts.scale.gather(-1, channels).float())


def test_every_way_to_boost_all_channels_is_the_same_page():
    pages = normal_pages(1, 1, 32)
    by_fraction = reference.seal_keys(pages, page_layout(32, num_boosted=32))
    by_bits = reference.seal_keys(pages, page_layout(32, key_bits=4, num_boosted=5))
    assert torch.equal(by_fraction, by_bits)


# ---- random selection


def random_scores(seed=1, layer=2, pages=(0, 1, 2), heads=3, head_dim=64):
    return reference.random_scores(reference.BoostSeed(seed, layer, torch.tensor(pages)), heads, head_dim)


def test_random_selection_is_deterministic_and_differs_everywhere():
    scores = random_scores()
    assert scores.shape == (3, 3, 64)
    assert scores.dtype == torch.int32
    assert scores.min() >= 0
    assert torch.equal(scores, random_scores())
    assert torch.equal(scores[[2, 0]], random_scores(pages=(2, 0)))
    chosen = reference.boosted_channels(scores, 8)
    assert len({tuple(channels) for channels in chosen.flatten(0, 1).tolist()}) == 9
    for other in (random_scores(seed=2), random_scores(layer=3)):
        assert (reference.boosted_channels(other, 8) != chosen).any(-1).all()


def test_random_selection_is_uniform():
    scores = random_scores(pages=range(500), heads=4)
    counts = reference.boosted_channels(scores, 8).flatten().bincount(minlength=64)
    # 2000 pages choose each of 64 channels with p = 1/8: 250 times, standard deviation 15.
    assert 175 < counts.min() <= counts.max() < 325


def test_random_selection_takes_large_numbers():
    for seed, page in ((2**31 - 1, 2**24), (2**31 - 1, 0)):
        scores = random_scores(seed=seed, layer=10**4, pages=(page,), head_dim=256)
        assert scores.min() >= 0
        assert len(scores.unique()) > 700


def test_sealing_with_a_seed_boosts_the_hashed_channels():
    layout = page_layout(32, num_boosted=4, num_kv_heads=2)
    seed = reference.BoostSeed(7, 1, torch.tensor([4, 9]))
    records = reference.seal_keys(normal_pages(2, 2, 32), layout, seed)
    chosen = reference.boosted_channels(reference.random_scores(seed, 2, 32), 4)
    is_boosted = reference.boost_index(records, layout) < 4
    assert torch.equal(is_boosted, torch.zeros_like(is_boosted).scatter(-1, chosen, True))

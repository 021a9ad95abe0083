"""The cache as values against the mutating one: the same pages bit for bit, the same attention, the bytes of the layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitty_compile import KittyConfig
from kitty_compile.cache import PagedCache
from kitty_compile.kernels import functional_cache, functional_pages, reference
from kitty_compile.kernels.functional_cache import State
from kitty_compile.layers import LayerPlan

HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 2, 32, 16
CONFIGS = {
    **{name: KittyConfig.preset(name) for name in KittyConfig.presets()},
    "no window": KittyConfig(value_window=0),
    "odd": KittyConfig(value_window=300, sink_length=150, boost_fraction=0.3),
    "all boosted": KittyConfig(boost_fraction=1.0),
    "raw keys": KittyConfig(key_bits=16, value_bits=4),
    "raw values": KittyConfig(value_bits=16),
}
PACKED_KEYS = [name for name, config in CONFIGS.items() if config.key_bits != 16]
PACKED_VALUES = [name for name, config in CONFIGS.items() if config.value_bits != 16]


def parameters_of(config):
    return config.parameters(0, KEY_DIM, VALUE_DIM, HEADS)


def layout_of(config):
    return parameters_of(config).page_layout(torch.float32)


def page(seed, dim, kind):
    """One page [1, HEADS, 1, 128, dim] of ordinary or of awkward numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, HEADS, 1, 128, dim, generator=generator)
    spread = torch.rand(dim, generator=generator)
    return {
        "normal": values * spread * 8,
        "ties": torch.round(values * 2),
        "constant": torch.zeros_like(values) - 0.0,
        "equal channels": values[..., :1].expand_as(values).contiguous(),
        "huge": values * 1e37,
        "tiny": values * 1e-40,
        "outliers": torch.where(spread > 0.9, values * 1e5, values),
    }[kind]


KINDS = ("normal", "ties", "constant", "equal channels", "huge", "tiny", "outliers")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PACKED_KEYS)
def test_key_pages_are_those_of_the_reference(name, kind):
    layout = layout_of(CONFIGS[name])
    keys = page(0, KEY_DIM, kind)
    ours = functional_pages.seal_keys(keys, layout)
    records = reference.seal_keys(keys[:, :, 0], layout)
    parts = reference.split_key_records(records, layout.key, torch.float32)
    assert torch.equal(ours.scale[:, :, 0], parts.scale)
    assert torch.equal(ours.zero[:, :, 0], parts.zero)
    assert torch.equal(functional_pages.unseal_keys(ours)[:, :, 0], reference.unseal_keys(records, layout))
    if parts.slots is not None:
        assert torch.equal(ours.channels[:, :, 0].int(), (parts.slots >> 16)[..., : layout.key.num_boosted])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PACKED_VALUES)
def test_value_pages_are_those_of_the_reference(name, kind):
    layout = layout_of(CONFIGS[name])
    values = page(1, VALUE_DIM, kind)
    ours = functional_pages.seal_values(values, layout)
    records = reference.seal_values(values[:, :, 0], layout)
    parts = reference.split_value_records(records, layout.value, torch.float32)
    powers = reference.value_premultipliers(torch.device("cpu"))
    assert torch.equal(ours.scale[:, :, 0] * powers, parts.scale)
    assert torch.equal(ours.zero[:, :, 0], parts.zero)
    assert torch.equal(functional_pages.unseal_values(ours)[:, :, 0], reference.unseal_values(records, layout))


@given(seed=st.integers(0, 2**31 - 1), exponent=st.integers(-149, 127), spread=st.integers(0, 40))
@settings(deadline=None, max_examples=100)
def test_scores_are_those_of_the_reference(seed, exponent, spread):
    """At every magnitude of fp32, subnormal and just below infinity."""
    generator = torch.Generator().manual_seed(seed)
    mantissas = torch.rand(1, 1, 1, 128, 16, generator=generator) + torch.randint(0, 2, (16,), generator=generator)
    powers = exponent - torch.randint(0, spread + 1, (128, 16), generator=generator)
    keys = torch.ldexp(mantissas.double(), powers.double()).clamp(max=torch.finfo(torch.float32).max).float()
    assert torch.equal(functional_pages.magnitude_scores(keys)[0], reference.magnitude_scores(keys[0]).long())


@given(scores=st.lists(st.integers(0, 3), min_size=16, max_size=16), number=st.integers(1, 16))
@settings(deadline=None)
def test_ties_go_to_the_lower_channel(scores, number):
    ours = functional_pages.boosted_channels(torch.tensor(scores, dtype=torch.int32), number)
    assert torch.equal(ours, reference.boosted_channels(torch.tensor(scores), number))


def call_of(length, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, HEADS * GROUP, length, KEY_DIM, generator=generator)
    key = torch.randn(2, HEADS, length, KEY_DIM, generator=generator)
    return query, key, torch.randn(2, HEADS, length, VALUE_DIM, generator=generator)


def run(config, pieces, call, *, window=None, softcap=0.0, sinks=None):
    """(outputs, state) of a call's columns fed in ``pieces``."""
    parameters = parameters_of(config)
    state, start, outputs = functional_cache.empty_state(parameters, 2, dtype=torch.float32, window=window), 0, []
    for length in pieces:
        query, key, value = (tensor[:, :, start : start + length] for tensor in call)
        if window is None:
            at = functional_cache.positions(state, length, parameters)
        else:
            at = functional_cache.window_positions(state, length, window)
        outputs.append(functional_cache.attend(query, key, value, state, at, scale=0.2, softcap=softcap, sinks=sinks))
        if window is None:
            state = functional_cache.advance(state, key, value, parameters)
        else:
            state = functional_cache.advance_window(state, key, value, window)
        start += length
    return torch.cat(outputs, dim=2), state


def run_mutating(config, pieces, call, *, window=None, softcap=None, sinks=None):
    cache = PagedCache([LayerPlan() if window is None else LayerPlan("sliding", window)], config)
    start, outputs = 0, []
    for length in pieces:
        cache.begin_call(length)
        piece = (tensor[:, :, start : start + length] for tensor in call)
        outputs.append(cache.attend(*piece, 0, scale=0.2, softcap=softcap, sinks=sinks))
        cache.end_call()
        start += length
    return torch.cat(outputs, dim=2), cache


def error_of(actual, config, pieces, call, **arguments):
    expected, cache = run_mutating(config, pieces, call, **arguments)
    return float((actual - expected).abs().max()), cache


def pages_of(cache, *, is_key):
    """Dequantised pages of the mutating cache, fp32 [B, H, n, 128, D]."""
    layer = cache.layers[0]
    state, layout, raw = layer.state, layer.page_layout, layer.config.raw_layout
    count = int((raw.key_pages if is_key else raw.value_pages)(state.lengths.long())[0])
    pool, nbytes = (state.key_pages, layout.key.nbytes) if is_key else (state.value_pages, layout.value.nbytes)
    records = pool[state.page_table[:, :count].long()].unflatten(-1, (-1, nbytes)).transpose(1, 2)
    return (reference.unseal_keys if is_key else reference.unseal_values)(records, layout)


chunkings = st.lists(st.one_of(st.integers(1, 9), st.integers(100, 300)), min_size=1, max_size=7)


@given(pieces=chunkings, name=st.sampled_from(sorted(CONFIGS)), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_any_chunking_is_the_mutating_cache(pieces, name, seed):
    """Attention to fp32 rounding, pages and raw tokens bit for bit."""
    config, call = CONFIGS[name], call_of(sum(pieces), seed)
    output, state = run(config, pieces, call)
    error, cache = error_of(output, config, pieces, call)
    assert error < 1e-5
    if state.key.pages is not None:
        assert torch.equal(functional_pages.unseal_keys(state.key.pages), pages_of(cache, is_key=True))
    if state.value.pages is not None:
        assert torch.equal(functional_pages.unseal_values(state.value.pages), pages_of(cache, is_key=False))
    for half, tokens in ((state.key, call[1]), (state.value, call[2])):
        first = config.sink_length + 128 * half.num_pages
        assert torch.equal(half.raw, torch.cat([tokens[:, :, : config.sink_length], tokens[:, :, first:]], dim=2))


@given(pieces=chunkings, window=st.sampled_from([1, 2, 40, 500]))
@settings(deadline=None, max_examples=25)
def test_a_sliding_layer_keeps_its_window(pieces, window):
    call = call_of(sum(pieces), 7)
    output, state = run(KittyConfig(), pieces, call, window=window)
    assert error_of(output, KittyConfig(), pieces, call, window=window)[0] < 1e-5
    kept = min(sum(pieces), window - 1)
    assert torch.equal(state.key.raw, call[1][:, :, sum(pieces) - kept :])


@pytest.mark.parametrize("window", [None, 40])
def test_softcap_and_sinks(window):
    call, sinks = call_of(400, 3), torch.tensor([-1.0, 0.5, 2.0, 4.0])
    pieces = [330, 1, 69]
    output, _ = run(KittyConfig(), pieces, call, window=window, softcap=3.0, sinks=sinks)
    assert error_of(output, KittyConfig(), pieces, call, window=window, softcap=3.0, sinks=sinks)[0] < 1e-5


def test_pages_are_read_packed_from_the_next_call_on():
    """A page that a call completes is read raw by that call."""
    config, call = KittyConfig(key_bits=2, boost_fraction=0.0), call_of(162, 5)
    whole, _ = run(config, [160, 2], call)
    early, _ = run(config, [161, 1], call)
    lossless, _ = run(KittyConfig.preset("lossless"), [162], call)
    assert (whole[:, :, 160] - lossless[:, :, 160]).abs().max() > 1e-3  # 160 tokens at the start: page 0 is packed
    assert (early[:, :, 160] - lossless[:, :, 160]).abs().max() < 1e-5  # 0 tokens at the start


def test_stacked_layers_advance_like_single_ones():
    parameters = parameters_of(KittyConfig())
    calls = [call_of(300, seed) for seed in (1, 2, 3)]
    state = functional_cache.empty_state(parameters, 3, 2, dtype=torch.float32)
    for start, stop in ((0, 200), (200, 300)):
        keys, values = (torch.stack([call[part][:, :, start:stop] for call in calls]) for part in (1, 2))
        state = functional_cache.advance(state, keys, values, parameters)
    for layer, call in enumerate(calls):
        _, single = run(KittyConfig(), [200, 100], call)
        for name, tensor in single.named().items():
            assert torch.equal(state.select(layer).named()[name], tensor), name


def test_names_and_back():
    _, state = run(KittyConfig(), [300], call_of(300, 0))
    again = State.of_named(state.named())
    assert list(again.named()) == list(state.named())
    assert all(torch.equal(tensor, again.named()[name]) for name, tensor in state.named().items())
    raw = functional_cache.empty_state(parameters_of(KittyConfig.preset("lossless")), 2, dtype=torch.float32)
    assert list(raw.named()) == ["key_raw", "value_raw"]


@pytest.mark.parametrize("length", [1, 32, 159, 160, 161, 288, 1000])
@pytest.mark.parametrize("name", ["kitty", "kitty-pro", "kivi-k2v2", "kivi-k4v4", "lossless"])
def test_bytes_are_those_of_the_layout(name, length):
    """Of heads as models have them; smaller ones have unused slots in the layout, which are not stored here."""
    config = CONFIGS[name]
    parameters = config.parameters(0, 64, 64, HEADS)
    layout, raw = parameters.page_layout(torch.float32), config.raw_layout
    tokens = torch.zeros(1, HEADS, length, 64)
    state = functional_cache.advance(
        functional_cache.empty_state(parameters, 1, dtype=torch.float32), tokens, tokens, parameters
    )
    pages = [0 if bits == 16 else int(count(torch.tensor(length))) for bits, count in (
        (config.key_bits, raw.key_pages), (config.value_bits, raw.value_pages))]  # fmt: skip
    kept = sum(length - 128 * count for count in pages)
    formula = pages[0] * layout.key_page_bytes + pages[1] * layout.value_page_bytes + kept * HEADS * 64 * 4
    actual = sum(tensor.nbytes for tensor in state.named().values())
    assert 0.98 * formula <= actual <= formula

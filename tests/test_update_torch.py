import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitty_compile.columns import Call
from kitty_compile.kernels import reference, update_torch
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, RawLayout
from tests.kernel_cases import make_case, make_layout

RAW = RawLayout(32, 128, 32)
SMALL = make_layout(key_dim=16, value_dim=32, num_boosted=2)


def fresh(total, batch=2, layout=SMALL, raw=RAW, kind="channels"):
    """Empty rows over NaN bytes, and ``total`` columns of K and V to feed them."""
    return make_case(layout, raw, [0] * batch, num_columns=total, kind=kind)


def feed(case, chunks, real=None, seed=-1, layer=0):
    """The state after the case's columns in calls of these sizes; ``real`` [B, total] says which are tokens."""
    state = LayerTensors(*(tensor.clone() for tensor in case.state))
    start = 0
    for size in chunks:
        stop = start + size
        call = Call.of(size, start, None if real is None else real[:, start:stop])
        new = case.key[:, :, start:stop], case.value[:, :, start:stop]
        update_torch.update(*new, call.columns, call.counts, state, case.layout, case.raw, seed=seed, layer=layer)
        start = stop
    assert start == case.key.shape[2]
    return state


def same_bytes(one, other):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def expected_state(case, real, seed=None):
    """What the read rule says of rows that hold the real columns, from the reference alone."""
    state = LayerTensors(*(tensor.clone() for tensor in case.state))
    layout, raw = case.layout, case.raw
    for row, is_real in enumerate(real):
        length = int(is_real.sum())
        state.lengths[row] = state.high_water[row] = length
        for is_key, source, pool, held, window, ring in (
            (True, case.key, state.key_pages, state.raw_key, 0, raw.key_ring),
            (False, case.value, state.value_pages, state.raw_value, raw.value_window, raw.value_ring),
        ):
            tokens = source[row][:, is_real]
            page, stop = 0, raw.sink_length + PAGE_SIZE
            while stop + window <= length:
                whole = tokens[None, :, stop - PAGE_SIZE : stop]
                boost = None if seed is None else reference.BoostSeed(*seed, torch.tensor([page]))
                record = reference.seal_keys(whole, layout, boost) if is_key else reference.seal_values(whole, layout)
                pool[state.page_table[row, page]] = record.flatten()
                page, stop = page + 1, stop + PAGE_SIZE
            for token in range(length):
                if token < raw.sink_length:
                    held[row, :, token] = tokens[:, token]
                elif token >= length - ring:
                    held[row, :, raw.sink_length + (token - raw.sink_length) % ring] = tokens[:, token]
    return state


def chunks_of(size, total):
    return [size] * (total // size) + [total % size] * (total % size > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 2), (4, 4), (16, 16), (2, 16)])
def test_one_call_equals_the_read_rule(dtype, key_bits, value_bits):
    layout = make_layout(dtype, key_dim=16, value_dim=32, key_bits=key_bits, value_bits=value_bits, num_boosted=2)
    case = fresh(450, layout=layout)
    assert same_bytes(feed(case, [450]), expected_state(case, torch.ones(2, 450, dtype=torch.bool)))


@pytest.mark.parametrize("size", [1, 7, 40, 128, 300])
def test_sealing_does_not_depend_on_how_the_tokens_came(size):
    case = fresh(450)
    assert same_bytes(feed(case, chunks_of(size, 450)), feed(case, [450]))


@pytest.mark.parametrize(
    "raw",
    [RawLayout(0, 128, 32), RawLayout(32, 0, 32), RawLayout(5, 1, 0), RawLayout(32, 300, 7), RawLayout(0, 0, 0)],
    ids=lambda raw: f"{raw.sink_length}-{raw.value_window}-{raw.rollback_window}",
)
def test_every_sink_and_window(raw):
    case = fresh(450, raw=raw)
    expected = expected_state(case, torch.ones(2, 450, dtype=torch.bool))
    assert same_bytes(feed(case, [450]), expected)
    assert same_bytes(feed(case, chunks_of(33, 450)), expected)


@settings(max_examples=30)
@given(data=st.data())
def test_ragged_rows_in_any_chunks(data):
    chunks = data.draw(st.lists(st.sampled_from([1, 2, 7, 31, 33, 128, 161, 300]), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    share = torch.tensor([0.0, 0.3, 0.9, 1.1])
    case = fresh(sum(chunks), batch=4)
    real = torch.rand(4, sum(chunks), generator=generator) < share.unsqueeze(1)
    hidden = ~real[:, None, :, None]
    key, value = case.key.masked_fill(hidden, torch.nan), case.value.masked_fill(hidden, torch.nan)
    case = dataclasses.replace(case, key=key, value=value)
    assert same_bytes(feed(case, chunks, real), expected_state(case, real))


def test_the_edge_of_a_page():
    for total, key_pages, value_pages in ((159, 0, 0), (160, 1, 0), (287, 1, 0), (288, 2, 1), (415, 2, 1), (416, 3, 2)):
        case = fresh(total, batch=1)
        state = feed(case, [total - 1, 1])
        sealed = [(pool[case.state.page_table[0]] != 0xFF).any(1).sum().item() for pool in state[:2]]
        assert sealed == [key_pages, value_pages], total


@pytest.mark.parametrize("chunks", [[450], [100, 200, 150]])
def test_random_selection_is_by_page_of_the_row(chunks):
    case = fresh(450)
    real = torch.ones(2, 450, dtype=torch.bool)
    real[1, :200] = False
    state = feed(case, chunks, real, seed=11, layer=3)
    assert same_bytes(state, expected_state(case, real, seed=(11, 3)))
    assert not same_bytes(state, feed(case, chunks, real, seed=11, layer=4))
    assert not same_bytes(state, feed(case, chunks, real))


def test_high_water_remembers_the_longest():
    case = fresh(100)
    state = feed(case, [60, 40])
    assert state.high_water.tolist() == [100, 100]
    state.lengths.fill_(70)
    update_torch.update(
        case.key[:, :, :5], case.value[:, :, :5], None, None, state, case.layout, case.raw, seed=-1, layer=0
    )
    assert state.lengths.tolist() == [75, 75]
    assert state.high_water.tolist() == [100, 100]


def test_nothing_moves_in_memory():
    case = fresh(300)
    addresses = [tensor.data_ptr() for tensor in case.state]
    for start in (0, 150):
        new = case.key[:, :, start : start + 150], case.value[:, :, start : start + 150]
        update_torch.update(*new, None, None, case.state, case.layout, case.raw, seed=-1, layer=0)
    assert [tensor.data_ptr() for tensor in case.state] == addresses
    assert case.state.lengths.tolist() == [300, 300]


def test_inputs_of_another_dtype_are_stored_in_the_caches():
    case = fresh(200)
    wide = dataclasses.replace(case, key=case.key.float(), value=case.value.float())
    assert same_bytes(feed(wide, [200]), feed(case, [200]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 4, 16])
def test_dequantize_pages_is_algorithm_one_with_one_cast(dtype, bits):
    layout = make_layout(dtype, key_dim=16, value_dim=32, key_bits=bits, value_bits=bits, num_boosted=2)
    case = fresh(450, layout=layout)
    state = feed(case, [450])
    for is_key, pool, unseal, num_pages in (
        (True, state.key_pages, reference.unseal_keys, 3),
        (False, state.value_pages, reference.unseal_values, 2),
    ):
        dense = update_torch.dequantize_pages(pool, state.page_table, num_pages, layout, is_key=is_key)
        width = 16 if is_key else 32
        assert dense.shape == (2, 2, num_pages * PAGE_SIZE, width)
        assert dense.dtype == dtype
        for row in range(2):
            for page in range(num_pages):
                record = pool[state.page_table[row, page]].view(2, -1)
                part = dense[row, :, page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
                assert torch.equal(part, unseal(record, layout).to(dtype))
    assert update_torch.dequantize_pages(state.key_pages, state.page_table, 0, layout, is_key=True).shape[2] == 0


def test_dequantizing_pages_that_hold_anything_does_not_fail():
    case = fresh(450)
    state = feed(case, [450])
    dense = update_torch.dequantize_pages(state.key_pages, state.page_table, 4, case.layout, is_key=True)
    assert dense[:, :, : 3 * PAGE_SIZE].isfinite().all()

"""Hypothesis drives a cache and the plain-torch model of its rules side by side."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig
from kitty_compile.layers import PagedLayer
from tests.cache_model import CacheModel, PagedModel, plans_of, small_layout

GROUP, SCALE, MAX_LENGTH = 2, 0.3, 1500
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([1, 1, 1, 2, 130, 300]))


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        bits=st.sampled_from([(2, 2), (2, 2), (16, 16), (4, 16), (2, 4)]),
        sink=st.sampled_from([0, 3, 32]),
        value_window=st.sampled_from([0, 20, 128]),
        rollback=st.sampled_from([0, 8, 32]),
        window=st.sampled_from([None, None, 5, 60]),
        heads=st.integers(1, 2),
        batch=st.integers(1, 3),
        is_bounded=st.booleans(),
        length=st.sampled_from([3, 125, 160, 290, 420]),
    )
    def start(self, bits, sink, value_window, rollback, window, heads, batch, is_bounded, length):
        self.config = KittyConfig(
            *bits, sink_length=sink, value_window=value_window, rollback_window=rollback, skip_layers=(1,)
        )
        plans = plans_of(None, None) if window is None else plans_of(None, None, window)
        self.cache = PagedCache(plans, self.config, max_length=MAX_LENGTH if is_bounded else None)
        self.layout = small_layout(self.config, heads=heads)
        self.model = CacheModel(plans, self.config, self.layout, batch)
        self.generator = torch.Generator().manual_seed(0)
        self.call(length, seed=0, share=1.0, is_fused=True, is_whole_mask=False)

    # ---- forwards

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def new_tokens(self, size):
        """query, key and value of a layer's call; channels and tokens of very different size."""
        batch, heads = self.model.batch, self.layout.num_kv_heads
        channel = torch.linspace(0.1, 3, self.layout.key_dim)
        return (
            self.random(batch, heads * GROUP, size, self.layout.key_dim),
            self.random(batch, size, heads, self.layout.key_dim).transpose(1, 2) * channel,
            self.random(batch, heads, size, self.layout.value_dim) + self.random(batch, heads, size, 1),
        )

    def new_columns(self, size, seed, share):
        generator = torch.Generator().manual_seed(seed)
        real = torch.rand(self.model.batch, size, generator=generator) < share
        if share == 0.5:  # some rows whole, some with nothing
            real[:] = torch.rand(self.model.batch, 1, generator=generator) < 0.5
        return real

    def mask(self, real, is_whole_mask):
        if bool(real.all()):
            return None
        past = torch.tensor(self.model.real, dtype=torch.bool).view(self.model.batch, -1)
        return torch.cat([past, real], dim=1).long() if is_whole_mask else real

    @precondition(lambda self: self.model.columns < MAX_LENGTH - 300)
    @rule(
        size=SIZES,
        seed=st.integers(0, 999),
        share=st.sampled_from([1.0, 1.0, 0.8, 0.5, 0.0]),
        is_fused=st.booleans(),
        is_whole_mask=st.booleans(),
    )
    def call(self, size, seed, share, is_fused, is_whole_mask):
        real = self.new_columns(size, seed, share)
        mask = self.mask(real, is_whole_mask)
        if is_fused:
            self.cache.begin_call(size, mask)
        else:
            self.cache.set_padding(mask)
        for layer in range(len(self.cache.layers)):
            query, key, value = self.new_tokens(size)
            if is_fused:
                self.check_attend(layer, query, key, value, real)
            else:
                self.check_store(self.cache, layer, key, value)
            self.model.serve(layer, key, value, real)
        self.cache.end_call()
        self.model.finish(real)

    def check_attend(self, layer, query, key, value, real):
        expected = self.model.attended(layer, query, key, value, real, scale=SCALE)
        output = self.cache.attend(query, key, value, layer, scale=SCALE)
        assert output.isfinite().all()
        at = real[:, None, :, None]
        torch.testing.assert_close(output.double() * at, expected * at, rtol=1e-4, atol=1e-4)

    def check_store(self, cache, layer, key, value):
        expected = self.model.materialized(layer)
        stored = cache.store(key, value, layer)
        for found, past, own in zip(stored, expected or (key[:, :, :0], value[:, :, :0]), (key, value), strict=True):
            assert torch.equal(found, torch.cat([past, own], dim=2))

    @precondition(lambda self: self.config.rollback_window > 0 and self.model.columns < MAX_LENGTH - 300)
    @rule(data=st.data())
    def torn_call(self, data):
        """A forward that stops half way leaves some layers ahead, until the cache is cropped back in line."""
        is_sliding = len(self.cache.layers) > 2
        size = data.draw(st.integers(1, self.config.rollback_window) if is_sliding else SIZES)
        columns, real = self.model.columns, torch.ones(self.model.batch, size, dtype=torch.bool)
        if not self.model.can_crop(columns, ahead=size):
            return
        self.cache.begin_call(size)
        for layer in range(data.draw(st.integers(1, len(self.cache.layers) - 1))):
            query, key, value = self.new_tokens(size)
            self.cache.attend(query, key, value, layer, scale=SCALE)
            self.model.serve(layer, key, value, real)
        self.cache.abort_call()
        with pytest.raises(ValueError, match="whole"):
            self.cache.begin_call(1)
        self.cache.crop(columns)
        self.model.crop(columns, ahead=size)

    # ---- between forwards

    @precondition(lambda self: self.model.columns)
    @rule(data=st.data(), is_deep=st.booleans())
    def crop(self, data, is_deep):
        most = self.config.rollback_window
        dropped = data.draw(st.integers(0, 170) | st.integers(most + 1, most + 4) if is_deep else st.integers(0, most))
        columns = max(self.model.columns - dropped, 0)
        if self.model.can_crop(columns):
            self.cache.crop(columns)
            self.model.crop(columns)
        else:
            with pytest.raises(ValueError, match="rollback_window"):
                self.cache.crop(columns)

    @rule(data=st.data(), num_rows=st.integers(0, 4))
    def reorder(self, data, num_rows):
        num_rows = num_rows or self.model.batch
        index = data.draw(st.lists(st.integers(0, self.model.batch - 1), min_size=num_rows, max_size=num_rows))
        self.cache.reorder(torch.tensor(index))
        self.model.select(index)

    @precondition(lambda self: self.model.batch <= 2)
    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats):
        self.cache.repeat(repeats)
        self.model.select([row for row in range(self.model.batch) for _ in range(repeats)])

    @rule(seed=st.integers(0, 99))
    def select(self, seed):
        chosen = torch.rand(self.model.batch, generator=torch.Generator().manual_seed(seed)) < 0.6
        if bool(chosen.any()):
            self.cache.select(chosen)
            self.model.select(chosen.nonzero().flatten().tolist())

    @rule(data=st.data())
    def free(self, data):
        rows = data.draw(st.lists(st.integers(0, self.model.batch - 1), unique=True))
        self.cache.free(rows)
        self.model.free(rows)

    @precondition(lambda self: self.model.columns > 450)
    @rule(batch=st.integers(0, 3), size=SIZES)
    def reset(self, batch, size):
        """Start over, with another number of rows when ``batch`` says so."""
        self.cache.reset()
        self.model.start_over(batch or self.model.batch)
        self.call(size, seed=batch, share=0.8, is_fused=bool(batch), is_whole_mask=False)

    @rule()
    def continue_on_a_copy(self):
        left, self.cache = self.cache, copy.deepcopy(self.cache)
        for layer in left.layers:
            for tensor in layer._tensors.values():
                tensor.view(torch.uint8).fill_(0xFF)
        left._table.table.fill_(0)

    # ---- what always holds

    @invariant()
    def columns_and_lengths(self):
        if not hasattr(self, "model"):
            return
        columns = self.model.columns
        assert self.cache.batch_size == self.model.batch
        assert self.cache.lengths.tolist() == self.model.lengths
        for index, layer in enumerate(self.cache.layers):
            assert self.cache.get_seq_length(index) == columns
            if isinstance(layer, PagedLayer):
                assert layer.lengths.tolist() == self.model.lengths
                assert layer.state.high_water.tolist() == [row.high_water for row in self.model.layers[index].rows]
                assert self.cache.get_mask_sizes(7, index) == (columns + 7, 0)
            else:
                past = min(columns, layer.window - 1)
                assert self.cache.get_mask_sizes(7, index) == (past + 7, columns - past)

    @invariant()
    def every_unsealed_slot_is_private_and_free(self):
        if not hasattr(self, "model"):
            return
        table, sink = self.cache._table.table.tolist(), self.config.sink_length
        sealed = [max(length - sink, 0) // 128 for length in self.model.lengths]
        in_use = {page for row, count in zip(table, sealed, strict=True) for page in row[:count]}
        free = [page for row, count in zip(table, sealed, strict=True) for page in row[count:]]
        assert len(set(free)) == len(free)
        assert not in_use & set(free)
        assert self.cache.pages_in_use == len(in_use)
        assert all(layer.num_pages == self.cache._table.num_pages for layer in self.cache.layers[:2])

    @invariant()
    def pages_are_bit_identical(self):
        if not hasattr(self, "model"):
            return
        for layer, model in zip(self.cache.layers, self.model.layers, strict=True):
            if not isinstance(model, PagedModel):
                continue
            for index, row in enumerate(model.rows):
                for pool, side in ((layer.state.key_pages, row.key), (layer.state.value_pages, row.value)):
                    ids = layer.state.page_table[index, : len(side.pages)].long()
                    expected = [page.flatten() for page in side.pages]
                    assert torch.equal(pool[ids], torch.stack(expected) if expected else pool[:0])

    @invariant()
    def a_materialising_call_reads_what_the_rules_say(self):
        if not hasattr(self, "model") or self.model.columns == 0:
            return
        cache = copy.deepcopy(self.cache)
        for layer in range(len(cache.layers)):
            _, key, value = self.new_tokens(1)
            assert not any(side.isnan().any() for side in self.model.materialized(layer))
            self.check_store(cache, layer, key, value)


CacheMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStateMachine = CacheMachine.TestCase


@pytest.mark.slow
class TestStateMachineAtLength(CacheMachine.TestCase):
    settings = settings(CacheMachine.TestCase.settings, max_examples=250, stateful_step_count=60)

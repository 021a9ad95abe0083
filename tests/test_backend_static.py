"""torch.compile with the kitty backend on caches of fixed length."""

import logging

import pytest
import torch
from transformers import StaticCache

from kitty_compile import KittyConfig, backend
from kitty_compile.testing import random_ids, tiny_model
from tests.models.gpt_fast import make_transformer
from tests.models.nano_gpt import make_gpt

BATCH = 2
LOSSLESS = KittyConfig.preset("lossless", sink_length=4, value_window=8, rollback_window=8)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


class Served:
    """A backend that remembers how many layers each graph serves."""

    def __init__(self, **options):
        self.options, self.layers = {"config": LOSSLESS, "compiler": "eager", **options}, []

    def __call__(self, gm, example_inputs):
        call = backend.kitty(gm, example_inputs, options=self.options)
        inner = getattr(call, "call", call)
        self.layers.append(len(inner.bound.layers) if hasattr(inner, "bound") else 0)
        return call


def run(model, ids, pieces, start=0):
    """Logits of the pieces, one after another from ``start``."""
    outputs = []
    with torch.no_grad():
        for length in pieces:
            positions = torch.arange(start, start + length)
            outputs.append(model(ids[:, start : start + length], positions))
            start += length
    return torch.cat(outputs, dim=1)


def test_gpt_fast_when_asked():
    ids, served = random_ids(2, 200), Served(static_cache=True)
    expected = run(make_transformer(BATCH, 256), ids, [150, *[1] * 10])
    model = torch.compile(make_transformer(BATCH, 256), backend=served)
    torch.testing.assert_close(run(model, ids, [150, *[1] * 10]), expected, rtol=1e-4, atol=1e-4)
    assert served.layers
    assert set(served.layers) == {2}


def test_gpt_fast_starts_over_and_steps_back():
    ids, other = random_ids(2, 200), random_ids(2, 200, seed=5)
    model, plain = (
        torch.compile(make_transformer(BATCH, 256), backend=Served(static_cache=True)),
        make_transformer(BATCH, 256),
    )
    for given, pieces, start in ((ids, [150, 1, 1], 0), (other, [90, 1, 1], 0), (ids, [1, 1], 60), (ids, [3], 0)):
        expected = run(plain, given, pieces, start)
        torch.testing.assert_close(run(model, given, pieces, start), expected, rtol=1e-4, atol=1e-4)


def test_what_ran_without_the_backend_is_taken_over():
    ids, other = random_ids(2, 200), random_ids(2, 200, seed=5)
    plain, model = make_transformer(BATCH, 256), make_transformer(BATCH, 256)
    fast = torch.compile(model, backend=Served(static_cache=True))
    for given in (ids, other):
        expected = run(plain, given, [140, 1, 1])
        actual = torch.cat([run(model, given, [140]), run(fast, given, [1, 1], 140)], dim=1)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_gpt_fast_stays_as_it_is_unless_asked(caplog):
    backend._logged.clear()
    ids, served = random_ids(BATCH, 40), Served()
    model = torch.compile(make_transformer(BATCH, 256), backend=served)
    with caplog.at_level(logging.WARNING):
        actual = run(model, ids, [30, 1, 1])
    torch.testing.assert_close(actual, run(make_transformer(BATCH, 256), ids, [30, 1, 1]), rtol=1e-4, atol=1e-4)
    assert set(served.layers) == {0}
    messages = [record.message for record in caplog.records if "static_cache" in record.message]
    assert len(messages) == 1


def test_memory_is_not_saved_and_that_is_said(caplog):
    backend._logged.clear()
    with caplog.at_level(logging.WARNING):
        run(torch.compile(make_transformer(BATCH, 256), backend=Served(static_cache=True)), random_ids(BATCH, 40), [30])
    assert any("come on top of their memory" in record.message for record in caplog.records)


def test_a_static_cache_of_transformers():
    model, served = tiny_model("llama"), Served(static_cache=True)
    ids = random_ids(2, 200)
    outputs = []
    for forward in (model, torch.compile(model, backend=served)):
        cache = StaticCache(config=model.config, max_cache_len=200)
        with torch.no_grad():
            # The first call makes the buffers.
            model(ids[:, :150], past_key_values=cache)
            outputs.append([forward(ids[:, 150 + i : 151 + i], past_key_values=cache).logits for i in range(4)])
    for expected, actual in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert 2 in served.layers


def test_a_model_without_a_cache_says_how_to_get_one(caplog):
    backend._logged.clear()
    ids = random_ids(BATCH, 40)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        actual = torch.compile(make_gpt(), backend=Served())(ids)
        torch.testing.assert_close(actual, make_gpt()(ids))
    assert any("example_inputs" in record.message for record in caplog.records)

"""torch.compile with the kitty backend on models with their stock DynamicCache, which comes to hold phantoms."""

import copy
import gc
import logging

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

from kitty_compile import KittyConfig, backend
from kitty_compile.backend import kitty
from kitty_compile.cached_call import STORE
from kitty_compile.testing import random_ids, tiny_model

# Pages of K are complete at 132 tokens, of V at 140.
EDGES = {"sink_length": 4, "value_window": 8, "rollback_window": 8}
LOSSLESS = KittyConfig.preset("lossless", **EDGES)
PROMPT = 60


class Graphs:
    def __init__(self, config=LOSSLESS, compiler="eager"):
        self.options, self.count = {"config": config, "compiler": compiler}, 0

    def __call__(self, gm, example_inputs):
        self.count += 1
        return kitty(gm, example_inputs, options=self.options)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    backend._logged.clear()
    gc.collect()


def compiled(family="llama", config=LOSSLESS, dynamic=None):
    model, graphs = tiny_model(family), Graphs(config)
    model.compile(backend=graphs, dynamic=dynamic)
    return model, graphs


def step(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(ids, past_key_values=cache, attention_mask=mask).logits


def generate(model, ids, mask, new, **arguments):
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **arguments)


def padded_prompt():
    ids, mask = random_ids(3, PROMPT), torch.ones(3, PROMPT, dtype=torch.long)
    mask[0, :17], mask[2, :5] = 0, 0
    return ids, mask


@pytest.mark.parametrize(
    ("family", "dynamic"),
    [
        ("llama", None),
        ("gpt-oss", None),
        pytest.param("gemma3", True, marks=pytest.mark.slow),
        ("mistral-windowed", None),
    ],
)
def test_generate_gives_what_the_stock_cache_gives(family, dynamic):
    ids, mask = padded_prompt()
    expected = generate(tiny_model(family), ids, mask, 90)
    model, graphs = compiled(family, dynamic=dynamic)
    assert torch.equal(generate(model, ids, mask, 90), expected)
    # The prompt, a step, and a step of any length.
    assert graphs.count <= 3
    assert not counters["graph_break"]
    assert not backend._logged
    gc.collect()
    assert len(STORE) == 0


def test_the_16_bit_cache_never_exists():
    model, _ = compiled(config=KittyConfig(**EDGES))
    cache = DynamicCache(config=model.config)
    step(model, cache, random_ids(2, 300))
    for _ in range(3):
        step(model, cache, random_ids(2, 1))
    assert cache.get_seq_length() == 303
    held = {layer.keys.untyped_storage().data_ptr(): layer.keys.untyped_storage().nbytes() for layer in cache.layers}
    assert sum(held.values()) < 64
    assert all(layer.values.shape == (2, 2, 303, 16) for layer in cache.layers)
    (paged,) = STORE.caches
    assert paged.lengths.tolist() == [303, 303]
    assert paged.pages_in_use == 4


def test_by_name_with_inductor():
    ids, mask = padded_prompt()
    expected = generate(tiny_model("llama"), ids, mask, 5)
    model = tiny_model("llama")
    model.compile(backend="kitty", options={"config": LOSSLESS, "max_autotune": False})
    assert torch.equal(generate(model, ids, mask, 5), expected)


def test_turns_with_a_mask():
    ids, mask = padded_prompt()
    more = random_ids(3, 9, seed=2)
    both = torch.ones(3, PROMPT + 9, dtype=torch.long)
    both[:, :PROMPT] = mask
    plain, caches = tiny_model("llama"), (DynamicCache(), DynamicCache())
    model, _ = compiled()
    for each, cache in zip((plain, model), caches, strict=True):
        step(each, cache, ids, mask)
    expected, actual = (step(each, cache, more, both) for each, cache in zip((plain, model), caches, strict=True))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_crop_goes_back():
    model, _ = compiled()
    cache, ids = DynamicCache(), random_ids(1, 150)
    step(model, cache, ids[:, :146])
    expected = step(model, copy.deepcopy(cache), ids[:, 146:147])
    for column in (3, 5, 7):
        step(model, cache, ids[:, column : column + 1])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :146], layer.values[:, :, :146]
    assert torch.equal(step(model, cache, ids[:, 146:147]), expected)


def test_a_deep_copy_is_a_fork():
    model, _ = compiled()
    prefix, ids = DynamicCache(), random_ids(2, 150)
    step(model, prefix, ids)
    answers = []
    for token in (3, 4, 3):
        fork = copy.deepcopy(prefix)
        answers.append(step(model, fork, torch.full((2, 1), token)))
        answers[-1] = step(model, fork, torch.full((2, 1), 9))
    assert torch.equal(answers[0], answers[2])
    assert not torch.equal(answers[0], answers[1])
    plain = DynamicCache()
    step(tiny_model("llama"), plain, torch.cat([ids, torch.full((2, 1), 4)], dim=1))
    torch.testing.assert_close(
        answers[1], step(tiny_model("llama"), plain, torch.full((2, 1), 9)), rtol=1e-4, atol=1e-4
    )


def test_a_copy_whose_original_is_gone_is_refused():
    model, _ = compiled()
    cache = DynamicCache()
    step(model, cache, random_ids(1, 20))
    fork = copy.deepcopy(cache)
    del cache
    gc.collect()
    with pytest.raises(ValueError, match="copied while their cache is held"):
        step(model, fork, random_ids(1, 1))


def test_holding_an_older_phantom_forks():
    model, _ = compiled()
    cache = DynamicCache()
    step(model, cache, random_ids(1, 30))
    older = copy.copy(cache)
    older.layers = [copy.copy(layer) for layer in cache.layers]
    first = step(model, cache, torch.tensor([[5]]))
    assert not torch.equal(step(model, older, torch.tensor([[6]])), first)
    # Each goes on with its own tokens.
    again = DynamicCache()
    step(model, again, torch.cat([random_ids(1, 30), torch.tensor([[5]])], dim=1))
    torch.testing.assert_close(
        step(model, cache, torch.tensor([[7]])), step(model, again, torch.tensor([[7]])), rtol=1e-4, atol=1e-4
    )


def test_two_caches_take_turns():
    model, _ = compiled()
    plain, ids = tiny_model("llama"), (random_ids(2, 40), random_ids(2, 23, seed=1))
    caches = {id(each): (DynamicCache(), DynamicCache()) for each in (model, plain)}
    for turn in range(4):
        for index in range(2):
            given = ids[index] if turn == 0 else torch.full((2, 1), 5 * turn + index + 2)
            expected, actual = (step(each, caches[id(each)][index], given) for each in (plain, model))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_reordering_is_refused_by_name():
    model, _ = compiled()
    with pytest.raises(ValueError, match=r"must not be reordered.*kitty_compile\.apply"):
        generate(model, random_ids(2, 20), None, 4, num_beams=2)


def test_a_cache_filled_without_the_backend_is_taken_over():
    plain, ids = tiny_model("llama"), random_ids(2, 150)
    caches = DynamicCache(), DynamicCache()
    for cache in caches:
        step(plain, cache, ids)
    model, _ = compiled()
    for token in (3, 4):
        expected, actual = (
            step(each, cache, torch.full((2, 1), token)) for each, cache in zip((plain, model), caches, strict=True)
        )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_16_bit_cache_that_has_lost_columns_stays(caplog):
    plain, ids = tiny_model("mistral-windowed"), random_ids(2, 60)
    caches = DynamicCache(config=plain.config), DynamicCache(config=plain.config)
    for cache in caches:
        step(plain, cache, ids)
    model, _ = compiled("mistral-windowed")
    for token in (3, 4):
        expected, actual = (
            step(each, cache, torch.full((2, 1), token)) for each, cache in zip((plain, model), caches, strict=True)
        )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert any("stays in 16 bits" in record.message for record in caplog.records)


def test_without_a_cache_nothing_changes():
    model, _ = compiled()
    ids = random_ids(2, 20)
    with torch.no_grad():
        expected = tiny_model("llama")(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    assert len(STORE) == 0


def test_gradients_go_through_16_bit_attention():
    model, plain = compiled()[0], tiny_model("llama")
    ids = random_ids(2, 20)
    for each in (model, plain):
        each(ids, use_cache=True).logits.square().mean().backward()
    for (name, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")
    assert any("gradients do not go through pages" in message for message in backend._logged)
    cache = DynamicCache()
    step(model, cache, ids)
    with pytest.raises(ValueError, match="must be read by what was rewritten, got: gradients do not"):
        model(ids[:, :1], past_key_values=cache)


def test_a_model_that_does_not_know_phantoms_shows_nan():
    model, _ = compiled()
    cache = DynamicCache()
    step(model, cache, random_ids(1, 20))
    assert step(tiny_model("llama"), cache, random_ids(1, 1)).isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compiler": "gcc"}, "compiler must be one of inductor, aot_eager, eager, got 'gcc'"),
        ({"config": "catty"}, "preset must be one of"),
        ({"static_cache": 1}, "static_cache must be a bool, got 1"),
        ({"no_such": 1}, "options must be config, compiler, static_cache or inductor's, got no_such"),
    ],
)
def test_options_are_checked(options, message):
    model = tiny_model("llama")
    model.compile(backend="kitty", options=options)
    # Dynamo wraps what a backend raises.
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        step(model, DynamicCache(), random_ids(1, 4))


def test_generate_of_an_optimized_module_warns_once(caplog):
    backend._logged.clear()
    optimized, other = torch.compile(tiny_model("llama"), backend="kitty"), torch.compile(tiny_model("llama"))
    with caplog.at_level(logging.WARNING):
        assert other.generate
        assert not caplog.records
        for _ in range(2):
            generate(optimized, random_ids(1, 5), None, 2)
    (record,) = caplog.records
    assert 'use model.compile(backend="kitty")' in record.message


def test_a_graph_with_a_function_transform_stays(caplog):
    class Mapped(torch.nn.Module):
        def forward(self, q):
            scale = torch.vmap(lambda row: row.sum())(q.flatten(1)).view(-1, 1, 1, 1)
            return torch.nn.functional.scaled_dot_product_attention(q * scale, q, q), q, q

    q = torch.randn(2, 2, 5, 16)
    with torch.no_grad():
        actual = torch.compile(Mapped(), backend=Graphs())(q)
        torch.testing.assert_close(actual[0], Mapped()(q)[0])
    assert any("function transform" in record.message for record in caplog.records)

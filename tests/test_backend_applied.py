"""torch.compile with the kitty backend on models that ``apply`` has prepared."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

import kitty_compile
from kitty_compile import KittyConfig
from kitty_compile.kernels import serving
from kitty_compile.testing import random_ids, tiny_model

# Pages of K are complete at 132 tokens, of V at 140.
CONFIG = KittyConfig(sink_length=4, value_window=8, rollback_window=8)
PROMPT, NEW = 60, 100


def generate(model, ids, mask=None, new=NEW, **arguments):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **arguments)


def padded_prompt():
    ids, mask = random_ids(3, PROMPT), torch.ones(3, PROMPT, dtype=torch.long)
    mask[0, :17], mask[2, :5] = 0, 0
    return ids, mask


class Graphs:
    """A backend that counts what Dynamo hands over."""

    def __init__(self, compiler="eager"):
        self.compiler, self.graphs = compiler, []

    def __call__(self, gm, example_inputs):
        from kitty_compile.backend import kitty

        self.graphs.append(gm)
        return kitty(gm, example_inputs, options={"compiler": self.compiler})


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-oss", "mistral-windowed"])
def test_decoding_is_one_graph_whatever_the_prompt(family):
    model, graphs = kitty_compile.apply(tiny_model(family), CONFIG), Graphs()
    ids, mask = padded_prompt()
    expected = generate(model, ids, mask), generate(model, ids[:, 7:], mask[:, 7:], 20)
    model.compile(backend=graphs)
    assert torch.equal(generate(model, ids, mask), expected[0])
    assert torch.equal(generate(model, ids[:, 7:], mask[:, 7:], 20), expected[1])
    assert len(graphs.graphs) == 1
    assert not counters["graph_break"]
    attends = [node for node in graphs.graphs[0].graph.nodes if str(node.target) == "kitty.attention"]
    assert len(attends) == len(kitty_compile.report(model).layers)
    # A size or a number that differs from step to step would be recorded again for each.
    inputs = graphs.graphs[0].graph.find_nodes(op="placeholder")
    assert all(isinstance(node.meta["example_value"], torch.Tensor) for node in inputs)


def test_by_name_with_inductor():
    model = kitty_compile.apply(tiny_model("llama"), CONFIG)
    ids, mask = padded_prompt()
    expected = generate(model, ids, mask)
    # Recordings of inductor's own could not see the cache: the mode must not bring them.
    model.compile(backend="kitty", mode="reduce-overhead")
    assert torch.equal(generate(model, ids, mask), expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_an_optimized_module_steps_in_one_graph():
    model = kitty_compile.apply(tiny_model("llama"), CONFIG)
    graphs, ids = Graphs(), random_ids(2, PROMPT)
    outputs = []
    for forward in (model, torch.compile(model, backend=graphs)):
        cache = kitty_compile.KittyCache(model.config, CONFIG)
        with torch.no_grad():
            forward(ids, past_key_values=cache)
            outputs.append([forward(ids[:, :1], past_key_values=cache).logits for _ in range(3)])
    assert all(map(torch.equal, *outputs))
    assert len(graphs.graphs) == 1


def test_two_caches_take_turns():
    model, graphs = kitty_compile.apply(tiny_model("llama"), CONFIG), Graphs()
    prompts = random_ids(2, PROMPT), random_ids(2, 25, seed=1)
    expected = [generate(model, ids, new=6) for ids in prompts]
    model.compile(backend=graphs)
    caches = [kitty_compile.KittyCache(model.config, CONFIG) for _ in prompts]
    rows = [list(ids.split(1, dim=1)) for ids in prompts]
    with torch.no_grad():
        for turn in range(6):
            for cache, columns, ids in zip(caches, rows, prompts, strict=True):
                given = ids if turn == 0 else columns[-1]
                columns.append(model(given, past_key_values=cache).logits[:, -1:].argmax(-1))
    for columns, tokens in zip(rows, expected, strict=True):
        assert torch.equal(torch.cat(columns, dim=1), tokens)
    assert len(graphs.graphs) == 1


def test_other_calls_run_as_they_are():
    model, graphs = kitty_compile.apply(tiny_model("llama"), CONFIG), Graphs()
    ids = random_ids(4, 20)
    for arguments in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        prompt = ids[:1] if "prompt_lookup_num_tokens" in arguments else ids
        expected = generate(model, prompt, new=12, **arguments)
        model.compile(backend=graphs)
        assert torch.equal(generate(model, prompt, new=12, **arguments), expected)
        model._compiled_call_impl = None


def test_a_step_that_fails_leaves_the_cache_usable(monkeypatch):
    model = kitty_compile.apply(tiny_model("llama"), CONFIG)
    model.compile(backend=Graphs())
    cache, ids = kitty_compile.KittyCache(model.config, CONFIG), random_ids(1, 30)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        expected = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
        attend = kitty_compile.KittyCache.attend

        def fail(self, query, key, value, layer, **arguments):
            if layer == 1:
                raise RuntimeError("out of luck")
            return attend(self, query, key, value, layer, **arguments)

        monkeypatch.setattr(kitty_compile.KittyCache, "attend", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            model(ids[:, :1], past_key_values=cache)
        monkeypatch.undo()
        # As after any forward that stopped half way: back to the columns that every layer has.
        cache.crop(0)
        assert torch.equal(model(ids[:, :1], past_key_values=cache).logits, expected)


def test_the_operator_needs_a_cache_that_serves():
    query = torch.zeros(1, 2, 1, 16)
    with pytest.raises(RuntimeError, match="must run within serving"):
        serving.attention(query, query, query, 3, scale=1.0)


def test_the_operator_passes_opcheck():
    query, key = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16)

    def dense(query, key, value, layer, *, scale, softcap, sinks):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)

    with serving.serving(dense):
        torch.library.opcheck(torch.ops.kitty.attention.default, (query, key, key, 0, 0.25, 0.0, None))

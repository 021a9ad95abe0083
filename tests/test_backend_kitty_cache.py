"""torch.compile with the kitty backend on a KittyCache in a model that was not applied: its materialising form is fused."""

import copy

import pytest
import torch

import kitty_compile
from kitty_compile import KittyConfig, backend
from kitty_compile.testing import random_ids, tiny_model

CONFIG = KittyConfig(sink_length=4, value_window=8, rollback_window=8)


class Graphs:
    """The backend, with how many attentions each graph has fused and how many still unpack."""

    def __init__(self):
        self.fused, self.left = [], []

    def __call__(self, gm, example_inputs):
        compile_graph = backend._compile

        def count(rewritten, *arguments, **options):
            targets = [str(node.target) for node in rewritten.graph.nodes]
            self.fused.append(sum("kitty.attention" in target for target in targets))
            self.left.append(sum("kitty.materialize" in target for target in targets))
            return compile_graph(rewritten, *arguments, **options)

        backend._compile = count
        try:
            return backend.kitty(gm, example_inputs, options={"compiler": "eager"})
        finally:
            backend._compile = compile_graph


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    backend._logged.clear()


def run(model, cache, ids, steps, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    outputs = []
    with torch.no_grad():
        if not cache.columns:
            cache.set_padding(mask)
        for step in range(steps + 1):
            given = ids if step == 0 else torch.full((len(ids), 1), 3 + step)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
            output = model(given, past_key_values=cache, attention_mask=mask, position_ids=positions)
            outputs.append(output.logits[:, -1:])
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow), "gpt-oss"])
def test_it_attends_to_the_pages(family):
    ids, mask = random_ids(2, 130), torch.ones(2, 130, dtype=torch.long)
    mask[0, :9] = 0
    model, graphs = tiny_model(family), Graphs()
    expected = run(model, kitty_compile.KittyCache(model.config, CONFIG), ids, 40, mask)
    model.compile(backend=graphs, dynamic=True)
    cache = kitty_compile.KittyCache(model.config, CONFIG)
    torch.testing.assert_close(run(model, cache, ids, 40, mask), expected, rtol=1e-4, atol=1e-4)
    assert cache.lengths.tolist() == [161, 170]
    layers = len(cache.layers)
    assert set(graphs.fused) == {layers}
    assert set(graphs.left) == {0}
    assert len(graphs.fused) <= 3


def test_other_caches_and_copies_are_others():
    model = tiny_model("llama")
    ids = random_ids(2, 140), random_ids(2, 135, seed=1)
    expected = [run(model, kitty_compile.KittyCache(model.config, CONFIG), given, 5) for given in ids]
    model.compile(backend=Graphs(), dynamic=True)
    caches = [kitty_compile.KittyCache(model.config, CONFIG) for _ in ids]
    actual = [run(model, cache, given, 5) for cache, given in zip(caches, ids, strict=True)]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    fork = copy.deepcopy(caches[0])
    with torch.no_grad():
        model(torch.tensor([[4], [5]]), past_key_values=fork)
    assert (fork.columns, caches[0].columns) == (146, 145)


def test_another_backend_unpacks():
    model = tiny_model("llama")
    ids = random_ids(2, 140)
    expected = run(model, kitty_compile.KittyCache(model.config, CONFIG), ids, 5)
    model.compile(backend="eager", dynamic=True)
    actual = run(model, kitty_compile.KittyCache(model.config, CONFIG), ids, 5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

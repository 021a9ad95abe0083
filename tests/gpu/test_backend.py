"""The kitty backend of torch.compile on a CUDA device: one graph, one recording; no 16-bit cache."""

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch._dynamo.utils import counters
from transformers import DynamicCache

import kitty_compile
from kitty_compile import testing
from kitty_compile.backend import kitty
from kitty_compile.cached_call import STORE
from kitty_compile.huggingface.support import cache_argument

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


class Graphs:
    def __init__(self, **options):
        self.options, self.count = options, 0

    def __call__(self, gm, example_inputs):
        self.count += 1
        return kitty(gm, example_inputs, options=self.options)


def build(family: str):
    return testing.tiny_model(family).to("cuda", torch.bfloat16).eval()


def steps(model, cache, ids, mask, count):
    """Logits of a prompt and of ``count`` steps of given tokens, fp32 on the host."""
    name = cache_argument(model)
    rows = []
    with torch.no_grad():
        rows.append(model(ids, attention_mask=mask, **{name: cache}).logits[:, -1:])
        for step in range(count):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            token = torch.full((len(ids), 1), 3 + step % 50, device="cuda")
            positions = mask.sum(dim=1, keepdim=True) - 1
            rows.append(model(token, attention_mask=mask, position_ids=positions, **{name: cache}).logits)
    return torch.cat(rows, dim=1).float().cpu()


def prompt(batch, length, seed=0):
    ids = testing.random_ids(batch, length, seed).cuda()
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : 7 * row] = 0
    return ids, mask


def assert_close(actual, expected):
    """Both are bf16 runs of the same model that round in other places."""
    error = (actual - expected).abs().mean() / expected.std()
    assert error < 0.05, float(error)


# Raw pages: where a rounding flips a code of 2 bits, two correct runs part further than this test allows.
@pytest.mark.parametrize("family", ["llama", "mistral-windowed", "qwen3"])
def test_an_applied_model_decodes_in_one_graph_and_one_recording(family):
    model = kitty_compile.apply(build(family), "lossless")
    ids, mask = prompt(3, 60)
    expected = steps(model, kitty_compile.KittyCache(model.config, "lossless", max_length=512), ids, mask, 300)
    vars(model)["forward"].graph.num_captures = 0
    graphs = Graphs()
    model.compile(backend=graphs)
    actual = steps(model, kitty_compile.KittyCache(model.config, "lossless", max_length=512), ids, mask, 300)
    assert_close(actual, expected)
    graph = vars(model)["forward"].graph
    assert graph.refusal is None
    assert (graphs.count, graph.num_captures) == (1, 1)
    assert not counters["graph_break"]
    # Another prompt, another batch of pools: compiled already, recorded once more.
    ids, mask = prompt(3, 200, seed=1)
    steps(model, kitty_compile.KittyCache(model.config, "lossless", max_length=512), ids, mask, 5)
    assert (graphs.count, graph.num_captures) == (1, 2)


@pytest.mark.parametrize("family", ["llama", "mistral-windowed"])
def test_a_stock_cache_holds_phantoms(family):
    model = build(family)
    ids, mask = prompt(2, 200)
    expected = steps(model, DynamicCache(config=model.config), ids, mask, 120)
    model.compile(backend=Graphs(config="lossless"))
    cache = DynamicCache(config=model.config)
    assert_close(steps(model, cache, ids, mask, 120), expected)
    assert sum(layer.keys.untyped_storage().nbytes() for layer in cache.layers) < 1024
    assert len(STORE.caches) == 1
    del cache
    gc.collect()
    assert STORE.caches == []

import torch
from torch import nn

from kitty_compile.explain import Explanation, explain
from kitty_compile.testing import random_ids, tiny_model
from tests.graph_cases import Stack, hidden, past_of
from tests.test_match_attention import sdpa_causal, sinks, softcap
from tests.test_match_attention_refusals import tiled_heads
from tests.test_match_kv_update import cat


def test_a_table_of_layers():
    torch._dynamo.reset()
    text = str(explain(Stack(sdpa_causal, 2), hidden()))
    assert "layers.0" in text
    assert "layers.1" in text
    assert "causal" in text
    assert text.splitlines()[-1].startswith("1 graph: 2 causal")
    widths = {line.find("module") for line in text.splitlines() if "module" in line}
    assert len(widths) == 1


def test_reasons_are_told():
    torch._dynamo.reset()
    explanation = explain(Stack(tiled_heads), hidden())
    assert [failure.reason for failure in explanation.failures]
    assert "refused: " in str(explanation)
    assert explanation.counts == {"refused": 1}


def test_scale_softcap_sinks_and_cache_are_told():
    torch._dynamo.reset()
    assert "softcap 5" in str(explain(Stack(softcap), hidden()))
    assert "sinks" in str(explain(Stack(sinks), hidden()))
    assert "  cat  " in str(explain(Stack(cat), hidden(columns=3), *past_of()))


def test_a_function():
    torch._dynamo.reset()

    def attend(q):
        return nn.functional.scaled_dot_product_attention(q.sin(), q.cos(), q.tan(), is_causal=True)

    explanation = explain(attend, torch.randn(1, 2, 5, 16))
    assert isinstance(explanation, Explanation)
    assert explanation.counts == {"causal": 1}


def test_every_graph_of_a_broken_call_is_explained():
    torch._dynamo.reset()
    model = Stack(sdpa_causal, 2)

    def broken(x):
        x, *_ = model.layers[0](x)
        torch._dynamo.graph_break()
        return model.layers[1](x)

    explanation = explain(broken, hidden())
    assert len(explanation.reports) == 2
    assert "2 graphs: 2 causal" in str(explanation)


def test_an_exported_program():
    program = torch.export.export(Stack(sdpa_causal, 2), (hidden(),))
    assert explain(program).counts == {"causal": 2}


def test_a_real_model():
    torch._dynamo.reset()
    model = tiny_model("gpt-oss")
    explanation = explain(model, random_ids(2, 20), attention_mask=torch.ones(2, 20, dtype=torch.long))
    assert explanation.counts == {"causal": 2, "sliding": 2}
    assert explanation.seconds > 0
    assert "keeps 39" in str(explanation)


def test_a_model_without_attention():
    torch._dynamo.reset()
    explanation = explain(nn.Linear(3, 3), torch.ones(1, 3))
    assert explanation.counts == {}
    assert "no attention" in str(explanation)

import pytest
import torch
from torch import nn

from kitty_compile.explaining import Explanation, explain
from kitty_compile.testing import random_ids, tiny_model
from tests.graph_cases import Stack, hidden, past_of
from tests.models.gpt_fast import make_transformer
from tests.models.nano_gpt import make_gpt
from tests.test_match_attention import sdpa_causal, sinks, softcap
from tests.test_match_attention_refusals import tiled_heads
from tests.test_match_kv_update import cat


def test_a_table_of_layers():
    torch._dynamo.reset()
    text = str(explain(Stack(sdpa_causal, 2), hidden()))
    assert "layers.0" in text
    assert "layers.1" in text
    assert "causal" in text
    assert "1 graph: 2 causal" in text.splitlines()
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


def rows_of(explanation):
    """The cells of every attention's row, by heading."""
    lines = str(explanation).splitlines()
    headings = lines[1].split()
    starts = [lines[1].index(heading) for heading in headings]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines[2:]]
    return [dict(zip(headings, row, strict=True)) for row in cells if row[-1].startswith(("matched", "refused"))]


# What tells the layers of each model apart, by heading.
REAL = {
    "qwen3": {
        "module": ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        "attention": ["sdpa, scale 0.1768"] * 2,
        "heads": ["4/2"] * 2,
        "columns": ["20 of 20"] * 2,
        "cache": ["cat (first call)"] * 2,
        "mask": ["causal, padding attention_mask"] * 2,
    },
    "gemma2": {
        "attention": ["eager, scale 0.2041, softcap 5"] * 4,
        "cache": ["cat (first call), keeps 39", "cat (first call)"] * 2,
        "mask": ["sliding 40, padding attention_mask", "causal, padding attention_mask"] * 2,
    },
    "gpt-oss": {
        "attention": ["eager, scale 0.25, sinks"] * 4,
        "cache": ["cat (first call), keeps 39", "cat (first call)"] * 2,
        "mask": ["sliding 40, padding attention_mask", "causal, padding attention_mask"] * 2,
    },
}


@pytest.mark.parametrize("family", REAL)
def test_a_transformers_model(family):
    torch._dynamo.reset()
    model = tiny_model(family)
    explanation = explain(model, random_ids(2, 20), attention_mask=torch.ones(2, 20, dtype=torch.long))
    rows = rows_of(explanation)
    for heading, expected in REAL[family].items():
        assert [row[heading] for row in rows] == expected
    assert {row["result"] for row in rows} == {"matched"}
    assert list(explanation.seconds) == ["normalize", "match_attention", "find_unclaimed", "classify_mask"]


@pytest.mark.parametrize("columns", [12, 1])
def test_a_gpt_fast_style_model(columns):
    torch._dynamo.reset()
    explanation = explain(make_transformer(2, 64), random_ids(2, columns), torch.arange(columns))
    rows = rows_of(explanation)
    assert [row["module"] for row in rows] == ["layers.0.attention", "layers.1.attention"]
    assert {(row["columns"], row["cache"], row["mask"]) for row in rows} == {
        (f"{columns} of 64", "index_put", "causal")
    }


@pytest.mark.parametrize(("flash", "attention"), [(True, "sdpa, scale 0.25"), (False, "eager, scale 0.25")])
def test_a_nano_gpt_style_model(flash, attention):
    torch._dynamo.reset()
    rows = rows_of(explain(make_gpt(flash=flash), random_ids(2, 12)))
    assert [row["module"] for row in rows] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert {(row["attention"], row["heads"], row["cache"]) for row in rows} == {(attention, "4/4", "none")}


def test_nodes_are_those_of_the_normalised_graph():
    torch._dynamo.reset()
    explanation = explain(Stack(tiled_heads), hidden())
    assert rows_of(explanation)[0]["node"] == explanation.failures[0].node.name


def test_the_same_model_is_explained_again_and_again():
    torch._dynamo.reset()
    model = Stack(sdpa_causal)
    counts = [explain(model, hidden()).counts for _ in range(2 * torch._dynamo.config.recompile_limit)]
    assert counts == [{"causal": 1}] * len(counts)


def test_a_model_without_attention():
    torch._dynamo.reset()
    explanation = explain(nn.Linear(3, 3), torch.ones(1, 3))
    assert explanation.counts == {}
    assert "no attention" in str(explanation)

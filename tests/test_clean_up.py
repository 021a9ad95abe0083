import pytest
import torch
from torch import fx

from kitty_compile.passes.clean_up import clean_up
from kitty_compile.passes.match_attention import match_attention
from kitty_compile.passes.nodes import op_name
from tests.graph_cases import Stack, capture, capture_dynamo, hidden, past_of, repeat_kv
from tests.test_match_attention import eager_mul, masked_fill_in_place, softmax_in_fp32


def names(gm):
    return [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


def replace(graph):
    """Put the query where the attention was."""
    (match,) = match_attention(graph.gm)
    match.node.replace_all_uses_with(match.query)
    return match


@pytest.mark.parametrize("front_end", ["dynamo", "export"])
@pytest.mark.parametrize("attend", [eager_mul, masked_fill_in_place, softmax_in_fp32])
def test_the_attention_goes_with_all_that_only_it_read(attend, front_end):
    graph = capture(front_end, Stack(attend), hidden())
    match = replace(graph)
    erased = clean_up(graph.gm, [match.node])
    left = set(names(graph.gm))
    assert erased > 8
    assert not left & {"matmul", "softmax", "mul", "mul_", "masked_fill", "masked_fill_", "arange", "expand"}
    graph.gm.graph.lint()
    graph.gm.recompile()
    graph.gm(*graph.inputs)


def test_what_others_read_stays():
    def attend(layer, q, k, v, past_k, past_v):
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        scores = q @ repeat_kv(k, 2).mT * 0.25
        return scores.softmax(-1) @ repeat_kv(v, 2), k, v

    graph = capture("dynamo", Stack(attend), hidden(columns=1), *past_of())
    clean_up(graph.gm, [replace(graph).node])
    assert names(graph.gm).count("cat") == 2
    assert names(graph.gm).count("linear") == 4


def test_writes_to_graph_inputs_stay():
    def attend(layer, q, k, v, cache_k, cache_v, where):
        cache_k.index_copy_(2, where, k)
        cache_v.index_copy_(2, where, v)
        scores = q @ repeat_kv(cache_k, 2).mT * 0.25
        return scores.softmax(-1) @ repeat_kv(cache_v, 2)

    caches = (torch.zeros(2, 2, 24, 16), torch.zeros(2, 2, 24, 16))
    graph = capture("dynamo", Stack(attend), hidden(columns=1), *caches, torch.tensor([5]))
    clean_up(graph.gm, [replace(graph).node])
    assert names(graph.gm).count("index_copy_") == 2
    assert "softmax" not in names(graph.gm)


def test_writes_without_users_stay_where_dead_code_elimination_would_drop_them():
    def step(x, cache):
        cache[:, :2].copy_(x)
        scratch = x.sin()
        return scratch.cos()

    (graph,) = capture_dynamo(step, torch.ones(2, 2), torch.zeros(2, 4))
    node = next(node for node in graph.gm.graph.nodes if op_name(node) == "cos")
    node.replace_all_uses_with(graph.gm.graph.find_nodes(op="placeholder")[0])
    assert clean_up(graph.gm, [node]) == 2
    assert "copy_" in names(graph.gm)
    assert "sin" not in names(graph.gm)


def test_a_scratch_tensor_goes_with_the_writes_to_it():
    def step(x):
        scratch = torch.zeros(2, 2)
        scratch.add_(x)
        return x + scratch.sum()

    (graph,) = capture_dynamo(step, torch.ones(2, 2))
    node = next(node for node in graph.gm.graph.nodes if op_name(node) == "add")
    node.replace_all_uses_with(graph.gm.graph.find_nodes(op="placeholder")[0])
    clean_up(graph.gm, [node])
    assert "sum" not in names(graph.gm)


def test_random_numbers_are_still_drawn():
    def step(x):
        return x + torch.rand(2, 2)

    (graph,) = capture_dynamo(step, torch.ones(2, 2))
    node = next(node for node in graph.gm.graph.nodes if op_name(node) == "add")
    node.replace_all_uses_with(graph.gm.graph.find_nodes(op="placeholder")[0])
    clean_up(graph.gm, [node])
    assert names(graph.gm) == ["rand"]


def test_a_node_that_is_read_is_refused():
    (graph,) = capture_dynamo(Stack(eager_mul), hidden())
    (match,) = match_attention(graph.gm)
    with pytest.raises(ValueError, match="must not be read any more"):
        clean_up(graph.gm, [match.node])


def test_nothing_replaced_nothing_erased():
    gm = fx.symbolic_trace(lambda x: x + 1)
    assert clean_up(gm, []) == 0

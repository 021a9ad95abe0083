import pytest
import torch
from torch import nn

from kitty_compile.passes.nodes import CONSTANT, constant_of, module_path, op_name
from kitty_compile.passes.normalize import is_normal, may_attend, normalize
from tests.graph_cases import Stack, capture, capture_dynamo, hidden, placeholders, repeat_kv


def eager(layer, q, k, v):
    scores = q @ repeat_kv(k, 2).transpose(-1, -2) / 4
    scores = scores.masked_fill(layer.tril[:, :, : q.shape[2], : q.shape[2]] == 0, float("-inf"))
    return scores.softmax(-1) @ repeat_kv(v, 2)


def calls(gm):
    return [node for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("front_end", ["dynamo", "export"])
def test_every_call_is_an_aten_operator(front_end):
    gm = capture(front_end, Stack(eager, 2), hidden()).gm
    assert is_normal(gm)
    names = [op_name(node) for node in calls(gm)]
    assert names.count("softmax") == 2
    assert {"linear", "view", "transpose", "matmul", "masked_fill"} <= set(names)


def test_both_front_ends_give_the_same_operators():
    dynamo, export = (capture(front_end, Stack(eager), hidden()).gm for front_end in ("dynamo", "export"))
    ignored = {"_assert_tensor_metadata", ""}
    names = [[op_name(node) for node in calls(gm) if op_name(node) not in ignored] for gm in (dynamo, export)]
    assert names[0] == names[1]


def test_the_result_computes_the_same():
    model, x = Stack(eager, 2), hidden()
    (graph,) = capture_dynamo(model, x)
    with torch.no_grad():
        torch.testing.assert_close(graph.gm(*graph.inputs)[0], model(x)[0])


def test_sizes_stay_symbols():
    (graph,) = capture_dynamo(Stack(eager), hidden(), dynamic=True)
    softmax = next(node for node in calls(graph.gm) if op_name(node) == "softmax")
    batch, heads, rows, keys = softmax.meta["val"].shape
    assert heads == 4
    assert all(isinstance(size, torch.SymInt) for size in (batch, rows, keys))
    assert rows.node.expr == keys.node.expr


@pytest.mark.parametrize("front_end", ["dynamo", "export"])
def test_module_paths_survive(front_end):
    gm = capture(front_end, Stack(eager, 2), hidden()).gm
    paths = [module_path(node) for node in calls(gm) if op_name(node) == "softmax"]
    assert paths == ["layers.0", "layers.1"]


@pytest.mark.parametrize("front_end", ["dynamo", "export"])
def test_constants_are_found(front_end):
    model = Stack(eager)
    graph = capture(front_end, model, hidden())
    held = [constant_of(node) for node in placeholders(graph.gm)]
    assert any(tensor is model.layers[0].tril for tensor in held)
    assert sum(tensor is None for tensor in held) == 1  # the input itself


def test_in_place_calls_stay_in_place():
    def write(cache, x, positions):
        cache.index_copy_(1, positions, x)
        return cache * 2

    (graph,) = capture_dynamo(write, torch.zeros(2, 8), torch.ones(2, 3), torch.arange(3))
    assert "index_copy_" in [op_name(node) for node in calls(graph.gm)]


def test_a_normal_graph_is_left_as_it_is():
    (graph,) = capture_dynamo(Stack(eager), hidden())
    assert normalize(graph.gm, graph.inputs) is graph.gm


def test_a_graph_without_fake_values_is_refused():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="fake values"):
        normalize(gm, [torch.ones(3)])


def test_inputs_that_belong_to_no_module_are_no_constants():
    (graph,) = capture_dynamo(Stack(eager), hidden())
    inputs = [node for node in placeholders(graph.gm) if CONSTANT not in node.meta]
    assert len(inputs) == 1


def test_a_graph_without_inputs():
    (graph,) = capture_dynamo(Constant())
    normal = normalize(graph.gm, graph.inputs)
    assert not placeholders(normal)
    assert torch.equal(normal()[0], torch.arange(3.0) + 1)


class Constant(torch.nn.Module):
    def forward(self):
        return torch.arange(3.0) + 1


@pytest.mark.parametrize("attend", [torch.nn.functional.scaled_dot_product_attention, None])
def test_what_may_attend(attend):
    class Layer(nn.Module):
        def forward(self, q):
            return attend(q, q, q) if attend else (q @ q.mT).softmax(-1) @ q

    (graph,) = capture_dynamo(Layer(), torch.randn(1, 2, 3, 16))
    assert may_attend(graph.gm)
    assert may_attend(normalize(graph.gm, graph.inputs))
    assert not may_attend(capture_dynamo(Constant())[0].gm)

import pytest
import torch

from kitty_compile.passes.bind_call import SharedPastError, bind_call
from kitty_compile.passes.nodes import op_name
from kitty_compile.passes.pipeline import analyze
from tests.graph_cases import Stack, capture_dynamo, causal, hidden, past_of
from tests.test_match_attention import sdpa_causal
from tests.test_match_kv_update import LENGTH, attend_masked, cat, index_put


def bound(model, *inputs, **options):
    (graph,) = capture_dynamo(model, *inputs)
    gm, report = analyze(graph.gm, graph.inputs)
    assert report.failures == []
    return gm, bind_call(gm, report, **options), report


def names(gm):
    return [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


def test_a_growing_cache_leaves_the_graph():
    gm, calls, report = bound(Stack(cat, 2), hidden(columns=3), *past_of())
    assert names(gm).count("kitty::attention") == report.rewritten == 2
    assert not {"cat", "softmax", "scaled_dot_product_attention"} & set(names(gm))
    assert [layer.window for layer in calls.layers] == [None, None]
    assert not calls.is_static
    places = [index for layer in calls.layers for index in layer.outputs]
    assert len(set(places)) == 4
    assert len(gm.graph.output_node().args[0]) == calls.num_outputs - 4
    inputs = gm.graph.find_nodes(op="placeholder")
    pasts = [inputs[index] for layer in calls.layers for index in layer.inputs]
    assert all(isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim() == 4 for node in pasts)


def test_without_a_cache_the_graph_stays_as_it_is():
    gm, calls, report = bound(Stack(sdpa_causal, 2), hidden())
    assert calls.layers == ()
    assert report.rewritten == report.erased == 0
    assert names(gm).count("scaled_dot_product_attention") == 2
    assert all("example_inputs" in reason for reason in calls.kept.values())


def test_a_cache_of_fixed_length_stays_unless_asked_for():
    inputs = (hidden(columns=3), *past_of(columns=LENGTH), torch.arange(5, 8))
    gm, calls, _ = bound(Stack(index_put), *inputs)
    assert calls.layers == ()
    assert all("static_cache" in reason for reason in calls.kept.values())
    gm, calls, _ = bound(Stack(index_put), *inputs, takes_static=True)
    assert calls.is_static
    assert names(gm).count("index_put_") == 2
    (attend,) = (node for node in gm.graph.nodes if op_name(node) == "kitty::attention")
    assert attend.args[7] is not None


def test_keys_that_are_returned_twice_stay():
    (graph,) = capture_dynamo(Stack(cat), hidden(columns=3), *past_of())
    gm, report = analyze(graph.gm, graph.inputs)
    output = gm.graph.output_node()
    output.args = ((*output.args[0], report.matches[0].update.key_full),)
    assert bind_call(gm, report).layers == ()


class Curious(torch.nn.Module):
    """Looks at the keys outside of attention."""

    def __init__(self):
        super().__init__()
        self.stack = Stack(cat)

    def forward(self, x, past_k, past_v):
        output, *full = self.stack(x, past_k, past_v)
        return output + past_k.mean(), *full


def test_keys_that_something_else_reads_stay():
    inputs = (hidden(columns=3), *past_of())
    with pytest.raises(SharedPastError) as caught:
        bound(Curious(), *inputs)
    gm, calls, _ = bound(Curious(), *inputs, shared=caught.value.layers)
    assert calls.layers == ()
    assert all("besides its attention" in reason for reason in calls.kept.values())
    assert "scaled_dot_product_attention" in names(gm)


def tail(layer, q, k, v):
    return attend_masked(q, k, v, causal(q.shape[2], q.shape[2])), k[:, :, -7:], v[:, :, -7:]


def test_a_window_that_the_mask_knows_nothing_of_stays():
    graph = capture_dynamo(Stack(tail), hidden(columns=12), dynamic=True)[0]
    gm, report = analyze(graph.gm, graph.inputs)
    calls = bind_call(gm, report)
    assert calls.layers == ()
    reasons = [*calls.kept.values(), *(failure.reason for failure in report.failures)]
    assert any("keeps 7" in reason for reason in reasons)

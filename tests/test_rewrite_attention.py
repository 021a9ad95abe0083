import pytest
import torch

from kitty_compile.kernels.layout import LayerTensors
from kitty_compile.kernels.ops import OpParameters
from kitty_compile.passes.bind_buffers import BufferBinder, owned_writes, state_of
from kitty_compile.passes.clean_up import clean_up
from kitty_compile.passes.nodes import op_name
from kitty_compile.passes.pipeline import analyze
from kitty_compile.passes.rewrite_attention import rewrite_attention
from tests.graph_cases import Stack, capture, capture_dynamo, hidden, past_of, repeat_kv
from tests.test_classify_mask import padded_bool, reading, window_of
from tests.test_match_attention import (
    cast_scores,
    eager_mul,
    einsum,
    folded,
    grouped,
    packed,
    repeat_interleave,
    scale_on_key,
    sdpa_causal,
    sdpa_gqa,
    sinks,
    softcap,
    where,
)
from tests.test_match_kv_update import cat, index_put, slice_write_columns_first

LOSSLESS = (16, 16, 0, 32, 128, 32, -1)


def parameters_of(match):
    return OpParameters(*LOSSLESS, match.layer, match.key_dim, match.value_dim, match.num_kv_heads)


def rewritten(graph, max_length=64):
    """(module, report, what the rewrite did, binder)."""
    gm, report = analyze(graph.gm, graph.inputs)
    assert report.failures == []
    binder = BufferBinder(gm, max_length, parameters_of)
    rewrite = rewrite_attention(gm, report, binder)
    report.erased += clean_up(gm, rewrite.replaced)
    gm.graph.lint()
    gm.recompile()
    return gm, report, rewrite, binder


def names(gm):
    return [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


IDIOMS = [
    eager_mul,
    scale_on_key,
    softcap,
    cast_scores,
    where,
    sinks,
    folded,
    einsum,
    repeat_interleave,
    grouped,
    packed,
    sdpa_causal,
    sdpa_gqa,
]


@pytest.mark.parametrize("attend", IDIOMS, ids=lambda function: function.__name__)
def test_the_rewritten_graph_computes_the_same(attend):
    model, x = Stack(attend, 2), hidden()
    (graph,) = capture_dynamo(model, x)
    gm, report, _, binder = rewritten(graph)
    assert report.rewritten == 2
    assert binder.layers == [0, 1]
    assert names(gm).count("kitty::attend") == 2
    assert not {"softmax", "scaled_dot_product_attention", "matmul", "bmm"} & set(names(gm))
    with torch.no_grad():
        torch.testing.assert_close(gm(*graph.inputs)[0], model(x)[0], rtol=1e-4, atol=1e-5)
    assert state_of(gm, 1).lengths.tolist() == [7, 7]


@pytest.mark.parametrize("attend", [eager_mul, grouped, packed, folded, sdpa_causal], ids=lambda f: f.__name__)
def test_symbolic_columns(attend):
    model = Stack(attend, 2)
    x = hidden()
    torch._dynamo.mark_dynamic(x, 1)
    (graph,) = capture_dynamo(model, x, dynamic=None)
    gm, *_ = rewritten(graph)
    own = [value for value in graph.inputs if isinstance(value, int)]
    other = hidden(columns=11, seed=3)
    inputs = [11 if isinstance(v, int) else other if v is x or tuple(getattr(v, "shape", ())) == (2, 7, 32) else v
              for v in graph.inputs]  # fmt: skip
    assert own
    with torch.no_grad():
        torch.testing.assert_close(gm(*inputs)[0], model(other)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front_end", ["dynamo", "export"])
def test_both_front_ends(front_end):
    model, x = Stack(eager_mul), hidden()
    graph = capture(front_end, model, x)
    gm, *_ = rewritten(graph)
    with torch.no_grad():
        torch.testing.assert_close(gm(*graph.inputs)[0], model(x)[0], rtol=1e-4, atol=1e-5)


def test_the_operator_comes_with_fake_values_and_provenance():
    (graph,) = capture_dynamo(Stack(sdpa_gqa), hidden())
    gm, _, rewrite, _ = rewritten(graph)
    (attend,) = rewrite.attends
    assert attend.meta["val"].shape == (2, 4, 7, 16)
    assert "layers.0" in str(attend.meta["nn_module_stack"])
    assert attend.args[-4] == 0.3
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")


def test_columns_before_heads_are_turned():
    model = Stack(slice_write_columns_first)
    caches = [torch.zeros(2, 24, 2, 16), torch.zeros(2, 24, 2, 16)]
    graph = capture("dynamo", model, hidden(columns=3), *caches)
    gm, *_ = rewritten(graph)
    attend = next(node for node in gm.graph.nodes if op_name(node) == "kitty::attend")
    assert [tuple(operand.meta["val"].shape) for operand in attend.args[:3]] == [(2, 4, 3, 16)] + [(2, 2, 3, 16)] * 2


# ---- what the binder does not take


def kept_reason(attend, *extra, columns=7):
    (graph,) = capture_dynamo(Stack(attend), hidden(columns=columns), *extra)
    gm, report, rewrite, _ = rewritten(graph)
    assert report.rewritten == 0
    assert "kitty::attend" not in names(gm)
    (reason,) = rewrite.kept.values()
    return reason


def test_a_sliding_layer_is_kept():
    assert "window of 4" in kept_reason(reading(window_of(4)))


def test_a_padded_layer_is_kept():
    assert "padded" in kept_reason(reading(padded_bool), torch.ones(2, 7, dtype=torch.int64))


def test_a_past_of_the_caller_is_kept():
    assert "caller holds the past" in kept_reason(cat, *past_of(), columns=3)


def test_a_free_batch_is_kept():
    (graph,) = capture_dynamo(Stack(eager_mul), hidden(), dynamic=True)
    _, _, rewrite, _ = rewritten(graph)
    assert list(rewrite.kept.values()) == ["buffers need a fixed batch"]


@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (24, torch.float32, "multiple of 16, got 24"),
        (16, torch.float64, "both float16, bfloat16 or float32, got torch.float64"),
    ],
)
def test_what_pages_cannot_hold_is_kept(dim, dtype, reason):
    model = Stack(sdpa_causal, dim=dim).to(dtype)
    (graph,) = capture_dynamo(model, hidden().to(dtype))
    gm, report, rewrite, _ = rewritten(graph)
    assert report.rewritten == 0
    assert [reason in kept for kept in rewrite.kept.values()] == [True]
    with torch.no_grad():
        torch.testing.assert_close(gm(*graph.inputs)[0], model(hidden().to(dtype))[0])


def test_some_layers_may_be_kept():
    class Every:
        def __init__(self, binder):
            self.binder = binder

        def bind(self, match, mask):
            return "not this one" if match.layer == 0 else self.binder.bind(match, mask)

    model, x = Stack(eager_mul, 2), hidden()
    (graph,) = capture_dynamo(model, x)
    gm, report = analyze(graph.gm, graph.inputs)
    rewrite = rewrite_attention(gm, report, Every(BufferBinder(gm, 64, parameters_of)))
    clean_up(gm, rewrite.replaced)
    gm.recompile()
    assert list(rewrite.kept.values()) == ["not this one"]
    assert names(gm).count("kitty::attend") == 1
    with torch.no_grad():
        torch.testing.assert_close(gm(*graph.inputs)[0], model(x)[0], rtol=1e-4, atol=1e-5)


# ---- buffers


def test_buffers_are_not_saved_and_have_fixed_addresses():
    (graph,) = capture_dynamo(Stack(eager_mul), hidden())
    gm, *_ = rewritten(graph)
    addresses = [buffer.data_ptr() for _, buffer in gm.named_buffers()]
    gm(*graph.inputs)
    assert [buffer.data_ptr() for _, buffer in gm.named_buffers()] == addresses
    assert not [name for name in gm.state_dict() if name.startswith("kitty_")]
    assert isinstance(state_of(gm, 0), LayerTensors)


def test_rows_own_their_pages():
    (graph,) = capture_dynamo(Stack(eager_mul, 2), hidden())
    gm, *_ = rewritten(graph, max_length=32 + 3 * 128)
    assert gm.kitty_page_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert gm.kitty_0_key_pages.shape[0] == 6


def test_a_model_that_writes_at_positions_stays_in_command():
    caches = [torch.zeros(2, 2, 24, 16), torch.zeros(2, 2, 24, 16)]

    class Cached(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack(index_put)
            self.register_buffer("k", caches[0].clone())
            self.register_buffer("v", caches[1].clone())

        def forward(self, x, where):
            return self.stack(x, self.k, self.v, where)

    model = Cached()
    program = torch.export.export(model, (hidden(columns=3), torch.arange(3)))
    gm, report = analyze(_unlifted(program))
    binder = BufferBinder(gm, 64, parameters_of)
    clean_up(gm, rewrite_attention(gm, report, binder).replaced)
    assert names(gm).count("index_put_") == 2
    clean_up(gm, owned_writes(report.matches[0]))
    gm.recompile()
    assert "index_put_" not in names(gm)
    assert binder.follows_positions
    with torch.no_grad():
        for _ in range(2):  # starting over is allowed
            for start in (0, 3, 6, 4):
                x, where = hidden(columns=3, seed=start), torch.arange(start, start + 3)
                torch.testing.assert_close(gm(x, where)[0], model(x, where)[0], rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="must follow the cached ones"):
            gm(hidden(columns=3), torch.arange(9, 12))


def _unlifted(program):
    gm = program.module()
    for node in gm.graph.find_nodes(op="call_module"):
        gm.graph.erase_node(node)
    return gm


def test_writes_to_the_callers_cache_are_not_owned():
    caches = [torch.zeros(2, 2, 24, 16), torch.zeros(2, 2, 24, 16)]
    graph = capture("dynamo", Stack(index_put), hidden(columns=3), *caches, torch.arange(3))
    _, report = analyze(graph.gm, graph.inputs)
    assert len(report.matches[0].update.writes) == 2
    assert owned_writes(report.matches[0]) == ()


def test_memory_order_is_kept_for_views():
    def attend(layer, q, k, v):
        out = sdpa_causal(layer, q, k, v).transpose(1, 2)
        return out.contiguous().view(q.shape[0], q.shape[2], -1).view(*q.transpose(1, 2).shape).transpose(1, 2)

    model, x = Stack(attend), hidden()
    graph = capture("export", model, x)
    gm, *_ = rewritten(graph)
    with torch.no_grad():
        torch.testing.assert_close(gm(*graph.inputs)[0], model(x)[0], rtol=1e-4, atol=1e-5)


def test_repeat_kv_goes_with_the_attention():
    (graph,) = capture_dynamo(Stack(sdpa_causal), hidden())
    gm, *_ = rewritten(graph)
    assert "expand" not in names(gm)
    assert repeat_kv(torch.ones(1, 1, 1, 1), 2).shape == (1, 2, 1, 1)

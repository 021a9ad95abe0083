import re

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kitty_compile.passes.match_attention import match_attention
from kitty_compile.passes.records import AttentionMatch, MatchFailure
from tests.attention_cases import FRONT_ENDS, additive, own_mask, product
from tests.graph_cases import Stack, capture, capture_dynamo, hidden, past_of, repeat_kv


def wrong_axis(layer, q, k, v):
    return (product(q, k) * 0.25 + additive(q)).softmax(-2) @ repeat_kv(v, 2)


def tiled_heads(layer, q, k, v):
    return (q @ k.repeat(1, 2, 1, 1).mT * 0.25).softmax(-1) @ v.repeat(1, 2, 1, 1)


def cross(layer, q, k, v, other):
    k, v = layer.k_proj(other), layer.v_proj(other)
    k, v = (x.view(*x.shape[:2], 2, 16).transpose(1, 2) for x in (k, v))
    return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2))


def active_dropout(layer, q, k, v):
    weights = nn.functional.dropout((product(q, k) * 0.25).softmax(-1), 0.5, training=True)
    return weights @ repeat_kv(v, 2)


def weights_returned(layer, q, k, v):
    weights = (product(q, k) * 0.25 + additive(q)).softmax(-1)
    return weights @ repeat_kv(v, 2), weights


def weights_thinned(layer, q, k, v):
    weights = (product(q, k) * 0.25 + additive(q)).softmax(-1)
    return (weights * (weights > 0.1)) @ repeat_kv(v, 2)


def mask_before_scale(layer, q, k, v):
    return ((product(q, k) + additive(q)) * 0.25).softmax(-1) @ repeat_kv(v, 2)


def weak_fill(layer, q, k, v):
    return (product(q, k) * 0.25).masked_fill(~own_mask(q), -5.0).softmax(-1) @ repeat_kv(v, 2)


def transposed_scores(layer, q, k, v):
    return (product(q, k).mT * 0.25 + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def part_of_scores_written(layer, q, k, v):
    scores = product(q, k) * 0.25
    scores[..., 0] = -torch.inf
    return scores.softmax(-1) @ repeat_kv(v, 2)


def sink_attended(layer, q, k, v):
    scores = product(q, k) * 0.25 + additive(q)
    combined = torch.cat([scores, layer.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
    return combined.softmax(-1) @ nn.functional.pad(repeat_kv(v, 2), (0, 0, 0, 1))


def sink_per_query(layer, q, k, v):
    scores = product(q, k) * 0.25 + additive(q)
    return torch.cat([scores, q.mean(-1, keepdim=True)], dim=-1).softmax(-1)[..., :-1] @ repeat_kv(v, 2)


def packed_by_column(layer, q, k, v):
    b, h, t, d = q.shape
    rows = q.reshape(b, 2, 2, t, d).transpose(2, 3).reshape(b, 2, -1, d)
    out = ((rows @ k.mT * 0.25).softmax(-1) @ v).reshape(b, 2, t, 2, d)
    return out.transpose(2, 3).reshape(b, h, t, d)


def scaled_values(layer, q, k, v):
    return (product(q, k) * 0.25 + additive(q)).softmax(-1) @ (repeat_kv(v, 2) * 2.0)


def score_by_relu(layer, q, k, v):
    return (product(q, k) * 0.25).relu().softmax(-1) @ repeat_kv(v, 2)


def weights_second(layer, q, k, v):
    weights = (product(q, k) + additive(q)).softmax(-1)
    return (repeat_kv(v, 2).mT @ weights.mT).mT


def weights_second_in_einsum(layer, q, k, v):
    weights = (product(q, k) + additive(q)).softmax(-1)
    return torch.einsum("bhkd,bhqk->bhqd", repeat_kv(v, 2), weights)


def einsum_of_rows(layer, q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhkq", q, repeat_kv(k, 2)) * 0.25
    return torch.einsum("bhkq,bhkd->bhqd", scores.softmax(-1), repeat_kv(v, 2))


REFUSED = {
    wrong_axis: "not over the last dimension",
    tiled_heads: "tiles heads",
    active_dropout: "dropout is active",
    weights_returned: "also read by output",
    weights_thinned: "weights (are also read by|pass through)",
    mask_before_scale: "before the scale",
    weak_fill: "hides nothing",
    transposed_scores: "pass through mT",
    part_of_scores_written: "writes to a part",
    sink_attended: "sinks are attended to",
    sink_per_query: "not one logit per head",
    packed_by_column: "column by column",
    scaled_values: "values are scaled",
    score_by_relu: "pass through relu",
    einsum_of_rows: "einsum",
    weights_second: "pass through mT|not the first factor",
    weights_second_in_einsum: "not the first factor",
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("attend", REFUSED, ids=lambda function: function.__name__)
def test_must_not_match(attend, front_end):
    graph = capture(front_end, Stack(attend), hidden())
    (failure,) = match_attention(graph.gm)
    assert isinstance(failure, MatchFailure), failure
    assert failure.module_path == "layers.0"
    assert re.search(REFUSED[attend], failure.reason), failure.reason


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_cross_attention_is_refused(front_end):
    graph = capture(front_end, Stack(cross), hidden(), hidden(columns=9, seed=1))
    (failure,) = match_attention(graph.gm)
    assert "cross attention" in failure.reason


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_cached_encoder_keys_are_refused(front_end):
    def attend(layer, q, k, v, key, value):
        return sdpa(q, repeat_kv(key, 2), repeat_kv(value, 2))

    graph = capture(front_end, Stack(attend), hidden(), *past_of())
    (failure,) = match_attention(graph.gm)
    assert "cross attention" in failure.reason


def test_shared_keys_are_refused():
    def attend(q, k, v):
        k, v = k.sin(), v.sin()
        return sdpa(sdpa(q.sin(), k, v, is_causal=True), k, v, is_causal=True)

    (graph,) = capture_dynamo(attend, *(torch.randn(1, 2, 5, 16) for _ in range(3)))
    first, second = match_attention(graph.gm)
    assert isinstance(first, AttentionMatch)
    assert "shares the keys and values" in second.reason


# ---- no attention at all


class Router(nn.Module):
    """Softmax over experts, then a product with what they give."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(32, 4))
        self.experts = nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x):
        weights = (x @ self.gate).softmax(-1)
        outputs = torch.einsum("btc,ecd->bted", x, self.experts)
        return (weights.unsqueeze(-2) @ outputs).squeeze(-2)


class LinearRouter(Router):
    def forward(self, x):
        weights = nn.functional.linear(x, self.gate.T).softmax(-1)
        return weights @ self.experts.mean(-1)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("model", [Router, LinearRouter])
def test_a_router_is_no_attention(model, front_end):
    assert match_attention(capture(front_end, model(), hidden()).gm) == []


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_sampler_is_no_attention(front_end):
    def sample(x):
        return (x @ x.mT).softmax(-1).argmax(-1)

    assert match_attention(capture(front_end, sample, hidden()).gm) == []


# ---- operators that are opaque, or ours


def test_flex_attention_is_refused():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def attend(q, k, v):
        return flex.flex_attention(q.sin(), k.sin(), v.sin())

    (graph,) = capture_dynamo(attend, *(torch.randn(1, 2, 128, 16) for _ in range(3)))
    (failure,) = match_attention(graph.gm)
    assert "does not show its mask" in failure.reason

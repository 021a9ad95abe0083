import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kitty_compile.passes.match_attention import match_attention
from kitty_compile.passes.records import AttentionMatch, FusedAttention
from tests.attention_cases import FRONT_ENDS, MINIMUM, additive, own_mask, product
from tests.graph_cases import Stack, capture, capture_dynamo, hidden, past_of, repeat_kv, replay


def eager_mul(layer, q, k, v):
    return (product(q, k) * 0.25 + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def eager_div(layer, q, k, v):
    return (product(q, k) / math.sqrt(16) + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def eager_mask_first_operand(layer, q, k, v):
    return torch.softmax(additive(q) + 0.25 * product(q, k), dim=3) @ repeat_kv(v, 2)


def scale_on_query(layer, q, k, v):
    return (product(q * 0.25, k) + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def scale_on_key(layer, q, k, v):
    return (q @ (repeat_kv(k, 2).transpose(2, 3) * 0.25) + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def scale_on_both(layer, q, k, v):
    return (product(q * 0.5, k * 0.5) + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def scale_is_a_tensor(layer, q, k, v):
    return (product(q, k) / torch.sqrt(torch.tensor(16.0)) + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def softcap(layer, q, k, v):
    scores = product(q, k) * 0.3
    return (torch.tanh(scores / 5.0) * 5.0 + additive(q)).softmax(-1) @ repeat_kv(v, 2)


def softmax_in_fp32(layer, q, k, v):
    weights = nn.functional.softmax(product(q, k) * 0.25 + additive(q), dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(nn.functional.dropout(weights, 0.1, training=False), repeat_kv(v, 2))


def cast_scores(layer, q, k, v):
    scores = product(q.float(), k.float()).float() * 0.25 + additive(q)
    return scores.softmax(-1).type_as(v) @ repeat_kv(v, 2)


def masked_fill(layer, q, k, v):
    return (product(q, k) * 0.25).masked_fill(~own_mask(q), -torch.inf).softmax(-1) @ repeat_kv(v, 2)


def masked_fill_in_place(layer, q, k, v):
    scores = product(q, k)
    scores *= 0.25
    scores.masked_fill_(~own_mask(q), -torch.inf)
    return scores.softmax(-1) @ repeat_kv(v, 2)


def where(layer, q, k, v):
    return torch.where(own_mask(q), product(q, k) * 0.25, MINIMUM).softmax(-1) @ repeat_kv(v, 2)


def where_hidden(layer, q, k, v):
    minimum = torch.full((), MINIMUM)
    return torch.where(~own_mask(q), minimum, product(q, k) * 0.25).softmax(-1) @ repeat_kv(v, 2)


def buffer_mask(layer, q, k, v):
    t = q.shape[2]
    scores = (product(q, k) * 0.25).masked_fill(layer.tril[:, :, :t, :t] == 0, float("-inf"))
    return scores.softmax(-1) @ repeat_kv(v, 2)


def two_masks(layer, q, k, v):
    scores = torch.where(own_mask(q), product(q, k) * 0.25, MINIMUM) + torch.zeros(1, 1, 1, q.shape[2])
    return torch.max(scores, torch.tensor(MINIMUM)).softmax(-1) @ repeat_kv(v, 2)


def sinks(layer, q, k, v):
    return sinks_of_any_heads(layer, q, repeat_kv(k, 2), repeat_kv(v, 2))


def sinks_of_any_heads(layer, q, k, v):
    scores = q @ k.transpose(-1, -2) * 0.25 + additive(q)
    sink = layer.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    combined = torch.cat([scores, sink], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return combined.softmax(-1)[..., :-1] @ v


def folded(layer, q, k, v):
    b, h, t, d = q.shape
    key, value = repeat_kv(k, 2).reshape(b * h, t, d), repeat_kv(v, 2).reshape(b * h, t, d)
    scores = torch.bmm(q.reshape(b * h, t, d), key.transpose(1, 2)).view(b, h, t, t) * 0.25 + additive(q)
    return torch.bmm(scores.softmax(-1).view(b * h, t, t), value)


def folded_baddbmm(layer, q, k, v):
    b, h, t, d = q.shape
    key, value = repeat_kv(k, 2).reshape(b * h, t, d), repeat_kv(v, 2).reshape(b * h, t, d)
    scores = torch.baddbmm(torch.zeros(b * h, t, t), q.reshape(b * h, t, d), key.mT, beta=0, alpha=0.25)
    return torch.bmm((scores.view(b, h, t, t) + additive(q)).softmax(-1).view(b * h, t, t), value)


def folded_by_flatten(layer, q, k, v):
    key, value = repeat_kv(k, 2).flatten(0, 1), repeat_kv(v, 2).flatten(0, 1)
    scores = torch.bmm(q.flatten(0, 1), key.mT).unflatten(0, q.shape[:2]) * 0.25 + additive(q)
    return torch.bmm(scores.softmax(-1).flatten(0, 1), value).unflatten(0, q.shape[:2])


def einsum(layer, q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, repeat_kv(k, 2)) * 0.25 + additive(q)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), repeat_kv(v, 2))


def einsum_of_transposed_keys(layer, q, k, v):
    scores = torch.einsum("bntc,bncs->bnts", q, repeat_kv(k, 2).mT) * 0.25 + additive(q)
    return torch.einsum("bnts,bnsc->bntc", scores.softmax(-1), repeat_kv(v, 2))


def repeat_interleave(layer, q, k, v):
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return (q @ k.mT * 0.25 + additive(q)).softmax(-1) @ v


def grouped(layer, q, k, v):
    b, h, t, d = q.shape
    q = q.reshape(b, 2, h // 2, t, d)
    return (q @ k[:, :, None].mT * 0.25 + additive(q[:, 0])).softmax(-1) @ v[:, :, None]


def packed(layer, q, k, v):
    b, h, t, d = q.shape
    scores = q.reshape(b, 2, -1, d) @ k.mT * 0.25 + additive(q).repeat(h // 2, 1)
    return (scores.softmax(-1) @ v).reshape(b, h, t, d)


def sdpa_causal(layer, q, k, v):
    return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True)


def sdpa_gqa(layer, q, k, v):
    return sdpa(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


def sdpa_bool(layer, q, k, v):
    return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=own_mask(q))


def sdpa_additive(layer, q, k, v):
    return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=additive(q)[None, None])


IDIOMS = [
    eager_mul,
    eager_div,
    eager_mask_first_operand,
    scale_on_query,
    scale_on_key,
    scale_on_both,
    scale_is_a_tensor,
    softcap,
    softmax_in_fp32,
    cast_scores,
    masked_fill,
    masked_fill_in_place,
    where,
    where_hidden,
    buffer_mask,
    two_masks,
    sinks,
    folded,
    folded_baddbmm,
    folded_by_flatten,
    einsum,
    einsum_of_transposed_keys,
    repeat_interleave,
    grouped,
    packed,
    sdpa_causal,
    sdpa_gqa,
    sdpa_bool,
    sdpa_additive,
]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("attend", IDIOMS, ids=lambda function: function.__name__)
def test_idiom_is_matched(attend, front_end):
    graph = capture(front_end, Stack(attend), hidden())
    (match,) = match_attention(graph.gm)
    assert isinstance(match, AttentionMatch), match
    assert (match.num_heads, match.num_kv_heads, match.num_columns, match.key_dim) == (4, 2, 7, 16)
    assert match.update.kind == "none"
    actual, recorded = replay(graph, match)
    torch.testing.assert_close(recorded, actual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", IDIOMS, ids=lambda function: function.__name__)
def test_idiom_is_matched_with_symbolic_sizes(attend):
    (graph,) = capture_dynamo(Stack(attend), hidden(), dynamic=True)
    (match,) = match_attention(graph.gm)
    assert isinstance(match, AttentionMatch), match
    actual, recorded = replay(graph, match)
    torch.testing.assert_close(recorded, actual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("attend", [grouped, packed], ids=lambda function: function.__name__)
def test_as_many_columns_as_heads_are_told_apart_by_their_symbol(attend, columns):
    x = hidden(columns=columns)
    torch._dynamo.mark_dynamic(x, 1)
    (graph,) = capture_dynamo(Stack(attend), x, dynamic=None)
    (match,) = match_attention(graph.gm)
    assert isinstance(match, AttentionMatch), match
    assert (match.num_heads, match.num_kv_heads, match.num_columns) == (4, 2, columns)
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)
    failure = match_attention(capture("dynamo", Stack(attend), x.clone()).gm)[0]
    assert "as well as heads" in failure.reason


def test_scale_softcap_and_sinks_are_numbers_and_inputs():
    by_name = {attend.__name__: match_attention(capture("dynamo", Stack(attend), hidden()).gm)[0] for attend in IDIOMS}
    assert {by_name[name].scale for name in ("eager_mul", "eager_div", "scale_on_key", "folded_baddbmm")} == {0.25}
    assert by_name["scale_on_query"].scale == 1.0  # the query of the record is scaled already
    assert by_name["sdpa_gqa"].scale == 0.3
    assert by_name["sdpa_causal"].scale == 0.25
    assert by_name["softcap"].softcap == 5.0
    assert by_name["softcap"].scale == pytest.approx(0.3)
    assert by_name["sinks"].sinks.meta["val"].shape == (4,)
    assert by_name["eager_mul"].sinks is None


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 3)])
def test_mha_mqa_and_gqa(heads, kv_heads, front_end):
    def attend(layer, q, k, v):
        k, v = (repeat_kv(x, heads // kv_heads) if heads > kv_heads else x for x in (k, v))
        return (q @ k.mT * 0.25 + additive(q)).softmax(-1) @ v

    graph = capture(front_end, Stack(attend, heads=heads, kv_heads=kv_heads), hidden())
    (match,) = match_attention(graph.gm)
    assert (match.num_heads, match.num_kv_heads) == (heads, kv_heads)
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)


def test_the_sinks_of_a_single_head():
    graph = capture("dynamo", Stack(sinks_of_any_heads, heads=1, kv_heads=1), hidden())
    (match,) = match_attention(graph.gm)
    assert match.sinks.meta["val"].shape == (1,)
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)


def test_mqa_by_broadcasting():
    def attend(layer, q, k, v):
        return (q @ k.mT * 0.25 + additive(q)).softmax(-1) @ v

    graph = capture("dynamo", Stack(attend, heads=4, kv_heads=1), hidden())
    (match,) = match_attention(graph.gm)
    assert (match.num_heads, match.num_kv_heads) == (4, 1)
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)


def test_a_single_packed_query():
    # transformers' pack_gqa: the groups stand where the columns were.
    def attend(layer, q, k, v, past_k, past_v):
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        out = sdpa(q.reshape(q.shape[0], 2, 2, -1), k, v)
        return out.reshape(q.shape), k, v

    graph = capture("dynamo", Stack(attend), hidden(columns=1), *past_of())
    (match,) = match_attention(graph.gm)
    assert (match.num_heads, match.num_kv_heads, match.num_columns, match.num_keys) == (4, 2, 1, 12)
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_layers_come_from_module_paths(front_end):
    graph = capture(front_end, Stack(eager_mul, num_layers=3), hidden())
    assert [(match.layer, match.module_path) for match in match_attention(graph.gm)] == [
        (layer, f"layers.{layer}") for layer in range(3)
    ]


def test_layers_of_a_bare_function_are_counted():
    def attend(q, k, v):
        for _ in range(2):
            q = sdpa(q.sin(), k.cos(), v.cos(), is_causal=True)
        return q

    tensors = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    (graph,) = capture_dynamo(attend, *tensors)
    matches = match_attention(graph.gm)
    assert [match.layer for match in matches] == [0, 1]


def test_matching_changes_nothing():
    graph = capture("dynamo", Stack(eager_mul, 2), hidden())
    before = (str(graph.gm.graph), graph.gm.code)
    assert match_attention(graph.gm) == match_attention(graph.gm)
    assert (str(graph.gm.graph), graph.gm.code) == before


# ---- must not match: reported with a reason


def test_a_kitty_attention_is_fused_already():
    from kitty_compile.kernels import ops
    from kitty_compile.kernels.layout import LayerTensors
    from tests.kernel_cases import make_case, make_layout  # noqa: F401

    parameters = ops.OpParameters(2, 2, 2, 32, 128, 32, -1, 5, 16, 16, 2)
    raw = parameters.raw_layout()
    layout = parameters.page_layout(torch.float32)
    state = LayerTensors(
        torch.zeros(4, layout.key_page_bytes, dtype=torch.uint8),
        torch.zeros(4, layout.value_page_bytes, dtype=torch.uint8),
        torch.zeros(2, 2, raw.key_slots, 16),
        torch.zeros(2, 2, raw.value_slots, 16),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 2, dtype=torch.int32),
    )

    def attend(q, k, v, *tensors):
        return ops.attend(q.sin(), k, v, None, None, LayerTensors(*tensors), parameters, scale=0.25)

    q, k, v = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16)
    (graph,) = capture_dynamo(attend, q, k, v, *state)
    (fused,) = match_attention(graph.gm)
    assert isinstance(fused, FusedAttention)
    assert fused.layer == 5


def test_folded_keys_beside_values_by_head():
    # GPT-NeoX Japanese: the first product is of [batch * heads], the second of [batch, heads].
    def attend(layer, q, k, v):
        b, h, t, d = q.shape
        key = repeat_kv(k, 2).reshape(b * h, t, d)
        scores = torch.baddbmm(torch.zeros(b * h, t, t), q.reshape(b * h, t, d), key.mT, beta=1.0, alpha=0.25)
        return (scores.view(b, h, t, t) + additive(q)).softmax(-1) @ repeat_kv(v, 2)

    graph = capture("dynamo", Stack(attend), hidden())
    (match,) = match_attention(graph.gm)
    assert isinstance(match, AttentionMatch), match
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)

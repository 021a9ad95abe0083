"""Layers that are masked in one way or another, captured and classified."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kitty_compile.passes.classify_mask import classify_mask
from kitty_compile.passes.match_attention import match_attention
from kitty_compile.passes.nodes import order_of
from kitty_compile.passes.records import AttentionMatch
from tests.graph_cases import Stack, capture, hidden, repeat_kv

FRONT_ENDS = ("dynamo", "export")
MINIMUM = torch.finfo(torch.float32).min
LENGTH = 24
PAST = 11


def attend(q, k, v, mask=None, **kwargs):
    return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask, **kwargs)


def classified(graph):
    (match,) = match_attention(graph.gm)
    assert isinstance(match, AttentionMatch), match
    return classify_mask(match, order_of(graph.gm.graph))


def kind_of(front_end, layer, *extra, columns=7, dynamic=False):
    return classified(capture(front_end, Stack(layer), hidden(columns=columns), *extra, dynamic=dynamic))


def reading(mask):
    """A layer without a cache, masked by ``mask(columns, *extra)``."""
    return lambda layer, q, k, v, *extra: attend(q, k, v, mask(q.shape[2], *extra))


def reading_past(mask):
    """A layer with a past, masked by ``mask(own columns, past columns, *extra)``."""

    def layer(layer, q, k, v, past_k, past_v, *extra):
        past, own = past_k.shape[2], q.shape[2]
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        return attend(q, k, v, mask(own, past, *extra)), k, v

    return layer


def by_comparison(t):
    return torch.arange(t)[None, :] <= torch.arange(t)[:, None]


def window_of(width):
    def mask(t, past=0):
        keys, queries = torch.arange(past + t), torch.arange(t)[:, None] + past
        return (keys <= queries) & (keys > queries - width)

    return mask

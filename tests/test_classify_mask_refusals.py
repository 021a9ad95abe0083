import pytest
import torch

from kitty_compile.passes.records import MaskRefusal
from tests.graph_cases import Stack, capture_dynamo, past_of
from tests.mask_cases import FRONT_ENDS, LENGTH, MINIMUM, attend, by_comparison, classified, kind_of, reading, window_of


def alibi(t):
    distance = torch.arange(t) - torch.arange(t)[:, None]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    return torch.where(distance <= 0, slopes * distance, MINIMUM)


def bidirectional(t):
    return torch.ones(t, t, dtype=torch.bool)


def prefix(t):
    return by_comparison(t) | (torch.arange(t) < 3)


def chunks_of(width):
    def mask(t):
        chunk = torch.arange(t) // width
        return by_comparison(t) & (chunk == chunk[:, None])

    return mask


def dilated(t):
    distance = torch.arange(t)[:, None] - torch.arange(t)
    return (distance >= 0) & (distance % 2 == 0)


def per_head(t):
    return by_comparison(t) & (torch.arange(t) > torch.arange(t)[:, None] - torch.tensor([2, 4, 7, 9])[:, None, None])


def anticausal(t):
    return torch.arange(t) >= torch.arange(t)[:, None]


def strictly_causal(t):
    return torch.arange(t) < torch.arange(t)[:, None]


def sinks_and_window(t):
    return window_of(4)(t) | (by_comparison(t) & (torch.arange(t) < 2))


def far_sinks_and_window(t):
    return window_of(4096)(t) | (by_comparison(t) & (torch.arange(t) < 1))


REFUSED = {
    alibi: "position bias",
    bidirectional: "bidirectional",
    prefix: "first 3 columns are seen by all",
    chunks_of(3): "neither causal nor sliding",
    chunks_of(8192): "own chunk of 8192",
    dilated: "neither causal nor sliding",
    per_head: "differs between rows or heads",
    anticausal: "later columns are seen",
    strictly_causal: "hides|hidden|neither",
    sinks_and_window: "is hidden where",
    far_sinks_and_window: "is hidden where",
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", REFUSED, ids=lambda function: function.__name__)
def test_refused_by_name(mask, dynamic):
    kind = kind_of("dynamo", reading(mask), dynamic=dynamic)
    assert isinstance(kind, MaskRefusal), kind
    with pytest.raises(ValueError, match=REFUSED[mask]):
        raise ValueError(kind.reason)


def test_no_mask_is_bidirectional():
    kind = kind_of("dynamo", lambda layer, q, k, v: attend(q, k, v))
    assert "bidirectional" in kind.reason


def test_the_flag_of_sdpa_after_a_past_is_refused():
    def layer(layer, q, k, v, past_k, past_v):
        k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        return attend(q, k, v, is_causal=True), k, v

    assert "is_causal counts from the first key" in kind_of("dynamo", layer, *past_of(), columns=3).reason


def test_no_mask_over_a_cache_of_fixed_length_is_refused():
    def layer(layer, q, k, v, cache_k, cache_v, where):
        cache_k.index_copy_(2, where, k)
        cache_v.index_copy_(2, where, v)
        return attend(q, cache_k, cache_v)

    caches = (torch.zeros(2, 2, LENGTH, 16), torch.zeros(2, 2, LENGTH, 16))
    assert "not written yet" in kind_of("dynamo", layer, *caches, torch.tensor([5]), columns=1).reason


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_packed_sequences_are_refused(front_end):
    def by_positions(t, positions):
        sequence = (positions.diff(prepend=positions[:, :1] - 1, dim=1) != 1).cumsum(-1)
        return by_comparison(t) & (sequence[:, None, None, :] == sequence[:, None, :, None])

    def by_segments(t, segments):
        return by_comparison(t) & (segments[:, None, None, :] == segments[:, None, :, None])

    positions = torch.arange(7).expand(2, -1).clone()
    assert "packed sequences" in kind_of(front_end, reading(by_positions), positions).reason
    assert isinstance(kind_of(front_end, reading(by_segments), torch.ones(2, 7, dtype=torch.int64)), MaskRefusal)


def test_positions_of_the_caller_are_refused():
    def mask(t, positions):
        return positions[:, None, None, :] <= positions[:, None, :, None]

    positions = torch.arange(7).expand(2, -1).clone()
    assert "may restart" in kind_of("dynamo", reading(mask), positions).reason


def test_a_mask_from_outside_is_refused():
    kind = kind_of("dynamo", reading(lambda t, mask: mask), torch.zeros(2, 1, 7, 7))
    assert "graph input" in kind.reason
    kind = kind_of("dynamo", reading(lambda t, mask: mask), torch.ones(7, 7, dtype=torch.bool))
    assert isinstance(kind, MaskRefusal)


def test_a_mask_from_activations_is_refused():
    def layer(layer, q, k, v):
        return attend(q, k, v, q.mean(-1, keepdim=True) > 0)

    assert isinstance(kind_of("dynamo", layer), MaskRefusal)


def test_a_window_that_a_caller_chooses_is_refused():
    def mask(t, width):
        return window_of(width)(t)

    kind = kind_of("dynamo", reading(mask), 40, dynamic=True)
    assert isinstance(kind, MaskRefusal)


def test_a_mask_from_token_ids_is_refused():
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 32)
            self.stack = Stack(reading(lambda t, ids: by_comparison(t) & (ids != 1)[:, None, None]))

        def forward(self, ids):
            return self.stack(self.embedding(ids), ids)

    (graph,) = capture_dynamo(Embedded(), torch.randint(2, 9, (2, 7)))
    assert isinstance(classified(graph), MaskRefusal)

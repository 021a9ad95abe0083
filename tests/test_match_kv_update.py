import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kitty_compile.passes.match_attention import match_attention
from kitty_compile.passes.nodes import is_graph_input
from kitty_compile.passes.records import AttentionMatch, MatchFailure
from tests.graph_cases import Stack, capture, capture_dynamo, causal, hidden, past_of, repeat_kv, replay

FRONT_ENDS = ("dynamo", "export")
LENGTH = 24


def attend_masked(q, k, v, mask):
    return sdpa(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask)


def cat(layer, q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
    return attend_masked(q, k, v, causal(q.shape[2], k.shape[2])), k, v


def cat_with_nothing(layer, q, k, v):
    empty = torch.tensor([])
    k, v = torch.cat([empty, k], dim=-2), torch.cat([empty, v], dim=-2)
    return attend_masked(q, k, v, causal(q.shape[2], k.shape[2])), k, v


def returned(layer, q, k, v):
    return attend_masked(q, k, v, causal(q.shape[2], q.shape[2])), k, v


def sliding(layer, q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    return attend_masked(q, k, v, causal(q.shape[2], k.shape[2])), k[:, :, -7:], v[:, :, -7:]


def index_copy(layer, q, k, v, cache_k, cache_v, positions):
    cache_k.index_copy_(2, positions, k)
    cache_v.index_copy_(2, positions, v)
    return attend_masked(q, cache_k, cache_v, torch.arange(LENGTH) <= positions[:, None])


def index_copy_functional(layer, q, k, v, cache_k, cache_v, positions):
    k, v = cache_k.index_copy(2, positions, k), cache_v.index_copy(2, positions, v)
    return attend_masked(q, k, v, torch.arange(LENGTH) <= positions[:, None]), k, v


def index_put(layer, q, k, v, cache_k, cache_v, positions):
    cache_k[:, :, positions] = k
    cache_v[:, :, positions] = v
    return attend_masked(q, cache_k, cache_v, torch.arange(LENGTH) <= positions[:, None])


def slice_write(layer, q, k, v, cache_k, cache_v):
    stop = 5 + q.shape[2]
    cache_k[: q.shape[0], :, 5:stop] = k
    cache_v[: q.shape[0], :, 5:stop] = v
    k, v = cache_k[: q.shape[0], :, :stop], cache_v[: q.shape[0], :, :stop]
    return attend_masked(q, k, v, causal(q.shape[2], stop))


def slice_write_columns_first(layer, q, k, v, cache_k, cache_v):
    # Meta's Llama: [batch, columns, heads, head_dim].
    stop = 5 + q.shape[2]
    cache_k[: q.shape[0], 5:stop] = k.transpose(1, 2)
    cache_v[: q.shape[0], 5:stop] = v.transpose(1, 2)
    k, v = cache_k[: q.shape[0], :stop].transpose(1, 2), cache_v[: q.shape[0], :stop].transpose(1, 2)
    return attend_masked(q, k, v, causal(q.shape[2], stop))


def slice_scatter(layer, q, k, v, cache_k, cache_v):
    stop = 5 + q.shape[2]
    k = torch.slice_scatter(cache_k, k, 2, 5, stop)
    v = torch.slice_scatter(cache_v, v, 2, 5, stop)
    return attend_masked(q, k, v, torch.arange(LENGTH) <= torch.arange(5, stop)[:, None]), k, v


def broadcast_write(layer, q, k, v, cache_k, cache_v):
    cache_k[:, :, 5:8] = k[:, :, :1]
    cache_v[:, :, 5:8] = v[:, :, :1]
    return attend_masked(q, cache_k[:, :, :8], cache_v[:, :, :8], causal(3, 8))


def positions(columns=3):
    return torch.arange(5, 5 + columns)


def buffers(layout="heads", batch=2):
    size = (batch, 2, LENGTH, 16) if layout == "heads" else (batch, LENGTH, 2, 16)
    return torch.randn(size), torch.randn(size)


CASES = {
    cat: ("cat", past_of),
    cat_with_nothing: ("cat", lambda: ()),
    returned: ("cat", lambda: ()),
    sliding: ("cat", lambda: past_of(columns=7)),
    index_copy: ("index_copy", lambda: (*buffers(), positions())),
    index_copy_functional: ("index_copy", lambda: (*buffers(), positions())),
    index_put: ("index_put", lambda: (*buffers(), positions())),
    slice_write: ("slice", lambda: buffers(batch=4)),
    slice_write_columns_first: ("slice", lambda: buffers("columns", batch=4)),
    slice_scatter: ("slice", buffers),
    broadcast_write: ("slice", buffers),
}


def match_of(front_end, attend, *extra, columns=3):
    graph = capture(front_end, Stack(attend), hidden(columns=columns), *extra)
    (match,) = match_attention(graph.gm)
    return graph, match


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("attend", CASES, ids=lambda function: function.__name__)
def test_update_is_matched(attend, front_end):
    kind, extra = CASES[attend]
    graph, match = match_of(front_end, attend, *extra())
    assert isinstance(match, AttentionMatch), match
    assert match.update.kind == kind
    assert (match.num_columns, match.num_kv_heads) == (3, 2)
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_past_is_a_graph_input_and_the_key_is_the_calls_own(front_end):
    _, match = match_of(front_end, cat, *past_of())
    assert is_graph_input(match.update.key_past)
    assert is_graph_input(match.update.value_past)
    assert match.update.key_past is not match.update.value_past
    assert match.key.meta["val"].shape == (2, 2, 3, 16)
    assert match.num_keys == 14


def test_an_empty_past_is_none():
    for attend in (cat_with_nothing, returned):
        _, match = match_of("dynamo", attend)
        assert match.update.key_past is None
        assert match.num_keys == 3


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_sliding_cache_says_how_much_it_keeps(front_end):
    _, match = match_of(front_end, sliding, *past_of(columns=7))
    assert match.update.kept == 7
    assert match_of(front_end, cat, *past_of())[1].update.kept is None


def test_kept_is_seen_when_all_columns_are_kept():
    # A slice of as many columns as there are is no different tensor, but a different cache.
    _, match = match_of("dynamo", sliding, *past_of(columns=4))
    assert match.num_keys == match.update.kept == 7


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_positions_are_the_index(front_end):
    _, match = match_of(front_end, index_put, *buffers(), positions())
    assert is_graph_input(match.update.positions)
    _, match = match_of(front_end, slice_write, *buffers())
    assert match.update.positions == 5


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_columns_before_heads(front_end):
    _, match = match_of(front_end, slice_write_columns_first, *buffers("columns"))
    assert match.update.columns_dim == 1
    assert match.key.meta["val"].shape == (2, 3, 2, 16)
    assert match_of(front_end, slice_write, *buffers())[1].update.columns_dim == 2


def test_a_buffer_of_the_module_is_found():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack(index_put)
            self.register_buffer("cache_k", buffers()[0], persistent=False)
            self.register_buffer("cache_v", buffers()[1], persistent=False)

        def forward(self, x, where):
            return self.stack(x, self.cache_k, self.cache_v, where)

    for front_end in FRONT_ENDS:
        (match,) = match_attention(capture(front_end, Cached(), hidden(columns=3), positions()).gm)
        assert match.update.kind == "index_put"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_eager_attention_over_a_buffer_of_the_module(front_end):
    """The scores are a product with a buffer, which is no weight if the call writes to it."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = Stack(self.attend, kv_heads=4)
            self.register_buffer("cache_k", torch.zeros(2, 4, LENGTH, 16), persistent=False)
            self.register_buffer("cache_v", torch.zeros(2, 4, LENGTH, 16), persistent=False)

        def attend(self, layer, q, k, v):
            self.cache_k[:, :, 5:8], self.cache_v[:, :, 5:8] = k, v
            scores = q @ self.cache_k[:, :, :8].mT * 0.25
            return scores.masked_fill(~causal(3, 8), -torch.inf).softmax(-1) @ self.cache_v[:, :, :8]

        def forward(self, x):
            return self.stack(x)

    (match,) = match_attention(capture(front_end, Cached(), hidden(columns=3)).gm)
    assert isinstance(match, AttentionMatch), match
    assert match.update.kind == "slice"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 2), (2, 1), (1, 1)])
def test_index_put_takes_off_leading_ones(front_end, batch, kv_heads):
    caches = [torch.zeros(batch, kv_heads, LENGTH, 16) for _ in range(2)]

    def attend(layer, q, k, v, cache_k, cache_v, positions):
        cache_k[:, :, positions], cache_v[:, :, positions] = k, v
        return sdpa(q, cache_k, cache_v, torch.arange(LENGTH) <= positions[:, None], enable_gqa=True)

    graph = capture(front_end, Stack(attend, kv_heads=kv_heads), hidden(batch, columns=3), *caches, positions())
    (match,) = match_attention(graph.gm)
    assert isinstance(match, AttentionMatch), match
    assert match.key.meta["val"].shape == (batch, kv_heads, 3, 16)
    torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)


def test_index_put_of_one_head_to_many_is_refused():
    def attend(layer, q, k, v, cache_k, cache_v, positions):
        cache_k[:, :, positions], cache_v[:, :, positions] = k[:, :1], v[:, :1]
        return attend_masked(q, cache_k, cache_v, torch.arange(LENGTH) <= positions[:, None])

    _, failure = match_of("dynamo", attend, *buffers(), positions())
    assert "one value to many places" in failure.reason


def test_a_buffer_made_in_the_call_is_fresh():
    def attend(layer, q, k, v, where):
        return index_copy(layer, q, k, v, torch.zeros(2, 2, LENGTH, 16), torch.zeros(2, 2, LENGTH, 16), where)

    assert match_of("dynamo", attend, positions())[1].update.is_fresh
    assert not match_of("dynamo", index_copy, *buffers(), positions())[1].update.is_fresh


def test_symbolic_lengths():
    for attend, extra in ((cat, past_of()), (index_put, (*buffers(), positions(7)))):
        (graph,) = capture_dynamo(Stack(attend), hidden(columns=7), *extra, dynamic=True)
        (match,) = match_attention(graph.gm)
        assert isinstance(match, AttentionMatch), match
        torch.testing.assert_close(*replay(graph, match), rtol=1e-4, atol=1e-5)


# ---- must not match


def past_behind(layer, q, k, v, past_k, past_v):
    k, v = torch.cat([k, past_k], dim=2), torch.cat([v, past_v], dim=2)
    return attend_masked(q, k, v, None)


def three_parts(layer, q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k, k], dim=2), torch.cat([past_v, v, v], dim=2)
    return attend_masked(q, k, v, None)


def both_computed(layer, q, k, v):
    k, v = torch.cat([k * 2, k], dim=2), torch.cat([v * 2, v], dim=2)
    return attend_masked(q, k, v, None)


def keys_only(layer, q, k, v, past_k, past_v):
    return attend_masked(q, torch.cat([past_k, k], dim=2), past_v, None)


def written_twice(layer, q, k, v, cache_k, cache_v, where):
    cache_k[:, :, where] = k
    cache_k[:, :, where + 1] = k
    cache_v[:, :, where] = v
    return attend_masked(q, cache_k, cache_v, None)


def different_places(layer, q, k, v, cache_k, cache_v, where):
    cache_k[:, :, where] = k
    cache_v[:, :, where + 1] = v
    return attend_masked(q, cache_k, cache_v, None)


def rows_of_their_own(layer, q, k, v, cache_k, cache_v, where):
    rows = torch.arange(2)[:, None]
    cache_k[rows, :, where[None]] = k.transpose(1, 2)
    cache_v[rows, :, where[None]] = v.transpose(1, 2)
    return attend_masked(q, cache_k, cache_v, None)


def rolled(layer, q, k, v, cache_k, cache_v):
    cache_k.copy_(torch.cat([cache_k[:, :, 3:], k], dim=2))
    cache_v.copy_(torch.cat([cache_v[:, :, 3:], v], dim=2))
    return attend_masked(q, cache_k, cache_v, None)


def kept_aside(layer, q, k, v, cache_k, cache_v):
    cache_k[:, :, :3] = k
    cache_v[:, :, :3] = v
    return attend_masked(q, k, v, causal(3, 3))


def read_elsewhere(layer, q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    return attend_masked(q, k, v, causal(3, 14)) + k.mean(), k, v


def oldest_kept(layer, q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    return attend_masked(q, k, v, causal(3, 14)), k[:, :, 3:], v[:, :, 3:]


def heads_joined(layer, q, k, v, past_k, past_v):
    k, v = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
    return sdpa(q, k, v, attn_mask=causal(3, 3))


def learned_prefix(layer, q, k, v):
    prefix = layer.o_proj.weight.view(1, 2, 16, 64)[..., :16].expand(2, -1, -1, -1)
    return attend_masked(q, torch.cat([prefix, k], dim=2), torch.cat([prefix, v], dim=2), None)


CACHE = lambda: (*buffers(), positions())  # noqa: E731
REFUSED = {
    past_behind: (past_of, "not first|behind the new columns"),
    three_parts: (past_of, "joins 3 tensors"),
    both_computed: (tuple, "both computed in this call"),
    keys_only: (lambda: (past_of()[0], past_of(columns=14)[1]), "adds nothing to"),
    written_twice: (CACHE, "written 2 times"),
    different_places: (CACHE, "or elsewhere"),
    rows_of_their_own: (CACHE, "places of its own"),
    rolled: (buffers, "overwrites the whole cache"),
    kept_aside: (buffers, "not understood"),
    read_elsewhere: (past_of, "also read by mean"),
    oldest_kept: (past_of, "not its newest columns"),
    heads_joined: (lambda: past_of(columns=3), "columns are dimension 2|evenly|cross"),
    learned_prefix: (tuple, "learned columns"),
}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("attend", REFUSED, ids=lambda function: function.__name__)
def test_must_not_match(attend, front_end):
    extra, reason = REFUSED[attend]
    _, failure = match_of(front_end, attend, *extra())
    assert isinstance(failure, MatchFailure), failure
    with pytest.raises(ValueError, match=reason):
        raise ValueError(failure.reason)

import pytest
import torch

from kitty_compile.passes.records import MaskKind, MaskRefusal
from tests.graph_cases import Stack, capture, capture_dynamo, hidden, past_of
from tests.mask_cases import (
    FRONT_ENDS,
    LENGTH,
    MINIMUM,
    PAST,
    attend,
    by_comparison,
    classified,
    kind_of,
    reading,
    reading_past,
    window_of,
)


def by_one_arange(t):
    columns = torch.arange(t)
    return columns[None, :] <= columns[:, None]


def by_tril(t):
    return torch.ones(t, t, dtype=torch.bool).tril()


def by_triu(t):
    return torch.triu(torch.full((t, t), float("-inf")), diagonal=1)


def by_fill(t):
    return torch.zeros(t, t).masked_fill(~by_comparison(t), MINIMUM)[None, None]


def by_product(t):
    return (1.0 - by_tril(t).float()) * MINIMUM


def in_place(t):
    mask = torch.full((t, t), MINIMUM)
    condition = torch.arange(t)
    mask.masked_fill_(condition < (condition + 1).view(t, 1), 0)
    return mask


def by_slices(t):
    mask = torch.zeros(t, t, dtype=torch.bool)
    mask[:, :] = by_comparison(t)
    return mask


CAUSAL = [by_comparison, by_one_arange, by_tril, by_triu, by_fill, by_product, in_place, by_slices]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("mask", CAUSAL, ids=lambda function: function.__name__)
def test_causal(mask, front_end):
    assert kind_of(front_end, reading(mask)) == MaskKind("causal")


@pytest.mark.parametrize("mask", CAUSAL, ids=lambda function: function.__name__)
def test_causal_with_symbolic_sizes(mask):
    assert kind_of("dynamo", reading(mask), dynamic=True) == MaskKind("causal")


def test_the_flag_of_sdpa_is_causal_without_a_past():
    assert kind_of("dynamo", lambda layer, q, k, v: attend(q, k, v, is_causal=True)) == MaskKind("causal")


def test_a_buffer_is_read():
    def layer(layer, q, k, v):
        t = q.shape[2]
        return attend(q, k, v, layer.tril[:, :, :t, :t] == 1)

    for front_end in FRONT_ENDS:
        assert kind_of(front_end, layer) == MaskKind("causal")
    assert kind_of("dynamo", layer, dynamic=True) == MaskKind("causal")


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_buffer_is_read_at_positions_beside_a_constant(front_end):
    # Keys are not counted here, and rows that are moved beyond the table's edges say nothing.
    def layer(layer, q, k, v):
        rows = layer.tril[0, 0][torch.arange(q.shape[2]), : q.shape[2]]
        return attend(q, k, v, rows.repeat(3, 1).view(3, *rows.shape)[0] == 1)

    assert kind_of(front_end, layer) == MaskKind("causal")


def after_past(t, past):
    return torch.arange(past + t) <= torch.arange(t)[:, None] + past


def after_past_tril(t, past):
    return torch.ones(t, past + t, dtype=torch.bool).tril(past)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("mask", [after_past, after_past_tril], ids=lambda function: function.__name__)
def test_causal_after_a_past(mask, columns, dynamic):
    kind = kind_of("dynamo", reading_past(mask), *past_of(), columns=columns, dynamic=dynamic)
    assert kind == MaskKind("causal")


def test_one_query_needs_no_mask():
    kind = kind_of("dynamo", reading_past(lambda t, past: None), *past_of(), columns=1)
    assert kind == MaskKind("causal")


# ---- windows


def window_by_one_arange(width):
    def mask(t, past=0):
        columns = torch.arange(past + t)
        distance = columns[past:, None] - columns
        return (distance >= 0) & (distance < width)

    return mask


def window_by_fill(width):
    def mask(t, past=0):
        distance = torch.arange(past, past + t)[:, None] - torch.arange(past + t)
        hidden = (distance < 0) | (distance >= width)
        return torch.where(hidden, MINIMUM, 0.0)

    return mask


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("width", [2, 5, 7, 8, 40, 4096, 131072])
@pytest.mark.parametrize(
    "mask", [window_of, window_by_one_arange, window_by_fill], ids=lambda function: function.__name__
)
def test_a_window_is_read_however_few_columns_there_are(mask, width, dynamic):
    assert kind_of("dynamo", reading(mask(width)), dynamic=dynamic) == MaskKind("sliding", width)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("width", [5, 12, 4096])
def test_a_window_after_a_past(width, columns):
    for dynamic in (False, True):
        kind = kind_of("dynamo", reading_past(window_of(width)), *past_of(), columns=columns, dynamic=dynamic)
        assert kind == MaskKind("sliding", width)


def test_a_window_by_tril_within_the_call():
    mask = lambda t: torch.ones(t, t).tril().bool() & ~torch.ones(t, t).tril(-3).bool()  # noqa: E731
    assert kind_of("dynamo", reading(mask)) == MaskKind("sliding", 3)


def test_a_window_by_tril_beyond_the_call_is_grown_to_or_refused():
    mask = lambda t: torch.ones(t, t).tril().bool() & ~torch.ones(t, t).tril(-100).bool()  # noqa: E731
    assert kind_of("dynamo", reading(mask), dynamic=True) == MaskKind("sliding", 100)
    fixed = kind_of("dynamo", reading(mask))
    assert isinstance(fixed, MaskRefusal)
    assert "constant 100" in fixed.reason


@pytest.mark.parametrize(("start", "dynamic"), [(5, False), (9, True)])
@pytest.mark.parametrize(("beyond", "is_causal"), [(0, True), (1, False), (-1, False)])
def test_one_query_over_the_written_part_of_a_cache_needs_no_mask(start, dynamic, beyond, is_causal):
    # Meta's Llama masks prompts alone.
    def layer(layer, q, k, v, cache_k, cache_v, start):
        stop = start + 1
        cache_k[:, :, start:stop], cache_v[:, :, start:stop] = k, v
        return attend(q, cache_k[:, :, : stop + beyond], cache_v[:, :, : stop + beyond])

    caches = [torch.zeros(2, 2, 64, 16) for _ in range(2)]
    kind = kind_of("dynamo", layer, *caches, start, columns=1, dynamic=dynamic)
    assert isinstance(kind, MaskKind) == is_causal
    assert is_causal or "not written yet" in kind.reason


def test_a_window_beside_a_buffer_is_grown_to_where_a_part_of_the_cache_is_read():
    def layer(layer, q, k, v, cache_k, cache_v, start):
        stop = start + q.shape[2]
        cache_k[:, :, start:stop], cache_v[:, :, start:stop] = k, v
        queries = torch.arange(q.shape[2])[:, None] + start
        rows = layer.tril[0, 0][queries[:, 0], :stop] == 1
        return attend(q, cache_k[:, :, :stop], cache_v[:, :, :stop], rows & (torch.arange(stop) > queries - 40))

    caches = [torch.zeros(2, 2, 64, 16) for _ in range(2)]
    kind = kind_of("dynamo", layer, *caches, 9, columns=7, dynamic=True)
    assert (kind.kind, kind.window) == ("sliding", 40)


def test_a_window_in_a_buffer_beyond_the_call_is_grown_to_or_refused():
    class Windowed(Stack):
        def __init__(self, attend):
            super().__init__(attend)
            tril = self.layers[0].tril
            self.layers[0].tril = tril - tril.tril(-20)

    def layer(layer, q, k, v):
        t = q.shape[2]
        return attend(q, k, v, layer.tril[:, :, :t, :t] == 1)

    (graph,) = capture_dynamo(Windowed(layer), hidden(), dynamic=True)
    assert classified(graph) == MaskKind("sliding", 20)
    (graph,) = capture_dynamo(Windowed(layer), hidden())
    refusal = classified(graph)
    assert isinstance(refusal, MaskRefusal)
    assert "window wider than this call" in refusal.reason


def test_a_sliding_cache_and_its_window():
    def layer(mask, kept):
        def inner(layer, q, k, v, past_k, past_v):
            past, own = past_k.shape[2], q.shape[2]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
            return attend(q, k, v, mask(own, past)), k[:, :, -kept:], v[:, :, -kept:]

        return inner

    assert kind_of("dynamo", layer(window_of(12), 11), *past_of(), columns=3) == MaskKind("sliding", 12)
    assert kind_of("dynamo", layer(lambda t, past: None, 11), *past_of(), columns=1) == MaskKind("sliding", 12)
    wrong = kind_of("dynamo", layer(window_of(9), 11), *past_of(), columns=3)
    assert "window of 9, but the cache keeps 11" in wrong.reason
    wrong = kind_of("dynamo", layer(after_past, 5), *past_of(), columns=3)
    assert "the cache keeps 5" in wrong.reason


def test_many_columns_are_probed_on_few():
    for dynamic in (False, True):
        graph = capture_dynamo(Stack(reading(window_of(4096))), hidden(batch=1, columns=300), dynamic=dynamic)[0]
        assert classified(graph) == MaskKind("sliding", 4096)
    graph = capture_dynamo(Stack(reading(window_of(300))), hidden(batch=1, columns=300))[0]
    assert classified(graph) == MaskKind("sliding", 300)


# ---- paddings


def padded_bool(t, held):
    return by_comparison(t) & held[:, None, None, :].bool()


def padded_additive(t, held):
    return by_triu(t) + (1.0 - held[:, None, None, :].float()) * MINIMUM


def padded_gathered(t, held):
    rows = torch.arange(held.shape[0])[:, None, None, None]
    return by_comparison(t) & held.bool()[rows, torch.arange(t)[None, None, None]]


def held_columns(columns=7, dtype=torch.int64):
    held = torch.ones(2, columns, dtype=dtype)
    held[0, :3] = 0
    return held


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(
    "mask", [padded_bool, padded_additive, padded_gathered], ids=lambda function: function.__name__
)
def test_padding_is_named(mask, front_end, dtype):
    graph = capture(front_end, Stack(reading(mask)), hidden(), held_columns(dtype=dtype))
    kind = classified(graph)
    assert kind.kind == "causal"
    assert kind.padding.op == "placeholder"
    assert kind.padding.meta["val"].shape == (2, 7)


def test_padding_of_many_columns_whose_sizes_hang_together_in_no_symbol():
    held, x = torch.ones(2, 200, dtype=torch.int64), hidden(columns=200)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(held, 1)

    def mask(t, held):
        return by_comparison(t) & held[:, None, None, :t].bool()

    kind = classified(capture("dynamo", Stack(reading(mask)), x, held, dynamic=None))
    assert (kind.kind, kind.padding is not None) == ("causal", True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_padding_after_a_past(dynamic):
    def mask(t, past, held):
        return after_past(t, past) & held[:, None, None, :].bool()

    kind = kind_of("dynamo", reading_past(mask), *past_of(), held_columns(PAST + 3), columns=3, dynamic=dynamic)
    assert (kind.kind, kind.padding is not None) == ("causal", True)


def test_padding_over_a_sliding_cache():
    # The cache holds the newest 11 columns of 30, the padding speaks of all of them.
    def mask(t, past, held):
        columns = torch.arange(past + t) + held.shape[1] - past - t
        own = torch.arange(t)[:, None] + held.shape[1] - t
        return (columns <= own) & (columns > own - 12) & held.bool()[:, None, None, columns]

    kind = kind_of("dynamo", reading_past(mask), *past_of(), held_columns(30), columns=1)
    assert (kind.kind, kind.window, kind.padding is not None) == ("sliding", 12, True)


def test_a_padding_that_is_never_read_is_not_named():
    mask = lambda t, held: by_comparison(t) & (held.sum() >= 0)  # noqa: E731
    kind = kind_of("dynamo", reading(mask), held_columns())
    assert kind == MaskKind("causal")


# ---- caches of fixed length


def test_a_mask_indexed_by_position():
    def layer(layer, q, k, v, cache_k, cache_v, where):
        cache_k[:, :, where] = k
        cache_v[:, :, where] = v
        return attend(q, cache_k, cache_v, layer.tril[:, :, where, :LENGTH].bool())

    caches = (torch.zeros(2, 2, LENGTH, 16), torch.zeros(2, 2, LENGTH, 16))
    for columns in (1, 4):
        for front_end in FRONT_ENDS:
            kind = kind_of(front_end, layer, *caches, torch.arange(5, 5 + columns), columns=columns)
            assert kind == MaskKind("causal")


@pytest.mark.parametrize("width", [None, 6, 4096])
def test_a_mask_by_position(width):
    def layer(layer, q, k, v, cache_k, cache_v, where):
        cache_k.index_copy_(2, where, k)
        cache_v.index_copy_(2, where, v)
        mask = torch.arange(LENGTH) <= where[:, None]
        if width:
            mask = mask & (torch.arange(LENGTH) > where[:, None] - width)
        return attend(q, cache_k, cache_v, mask)

    caches = (torch.zeros(2, 2, LENGTH, 16), torch.zeros(2, 2, LENGTH, 16))
    expected = MaskKind("sliding", width) if width else MaskKind("causal")
    for columns in (1, 4):
        assert kind_of("dynamo", layer, *caches, torch.arange(5, 5 + columns), columns=columns) == expected


def test_other_positions_than_those_written_are_refused():
    def layer(layer, q, k, v, cache_k, cache_v, where, elsewhere):
        cache_k.index_copy_(2, where, k)
        cache_v.index_copy_(2, where, v)
        return attend(q, cache_k, cache_v, torch.arange(LENGTH) <= elsewhere[:, None])

    caches = (torch.zeros(2, 2, LENGTH, 16), torch.zeros(2, 2, LENGTH, 16))
    kind = kind_of("dynamo", layer, *caches, torch.arange(5, 9), torch.arange(5, 9), columns=4)
    assert "may restart" in kind.reason


# ---- refused, by name


def test_classifying_changes_nothing():
    (graph,) = capture_dynamo(Stack(reading(padded_bool)), hidden(), held_columns(), dynamic=True)
    before = str(graph.gm.graph)
    assert classified(graph) == classified(graph)
    assert str(graph.gm.graph) == before

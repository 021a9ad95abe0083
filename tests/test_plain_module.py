import pytest
import torch
from torch import nn

from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig
from kitty_compile.layers import LayerPlan
from kitty_compile.plain_module import CachedModule, attach_cache
from tests.models.gpt_fast import make_transformer
from tests.models.nano_gpt import make_gpt

LENGTH = 420
IDS = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
PIECES = (190, 7, 1, 1, 1, 40, 1, 159, *([1] * 20))


def in_pieces(cached, ids=IDS, pieces=PIECES):
    assert sum(pieces) == ids.shape[1]
    return torch.cat([cached(piece) for piece in ids.split(list(pieces), dim=1)], dim=1)


@pytest.fixture(scope="module", params=[True, False], ids=["sdpa", "eager"])
def gpt(request):
    return make_gpt(flash=request.param)


def whole(model, *inputs):
    with torch.no_grad():
        return model(*inputs)


def test_pieces_equal_the_whole_without_loss(gpt):
    cached = attach_cache(gpt, (IDS[:, :12],), "lossless", max_length=LENGTH)
    assert isinstance(cached, CachedModule)
    torch.testing.assert_close(in_pieces(cached), whole(gpt, IDS), rtol=1e-4, atol=1e-4)
    assert cached.columns == LENGTH
    assert cached.report.counts == {"causal": 2}


def test_two_bits_equal_the_same_cache_driven_by_hand(gpt):
    """The oracle computes the same model, every attention by ``PagedCache``."""
    cached = attach_cache(gpt, (IDS[:, :12],), "kitty", max_length=LENGTH)
    cache = PagedCache([LayerPlan()] * 2, KittyConfig())
    actual, expected, start = [], [], 0
    for piece in IDS.split(list(PIECES), dim=1):
        actual.append(cached(piece))
        expected.append(_by_hand(gpt, cache, piece, start))
        start += piece.shape[1]
    torch.testing.assert_close(torch.cat(actual, 1), torch.cat(expected, 1), rtol=1e-3, atol=1e-3)
    error = (torch.cat(actual, 1) - whole(gpt, IDS)).abs()
    # Attention is exact while nothing is packed: until a call starts behind the sink and a page.
    assert float(error[:, :190].max()) < 1e-4 < float(error[:, 190:].max())


@torch.no_grad()
def _by_hand(model, cache, ids, start):
    cache.begin_call(ids.shape[1])
    x = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(start, start + ids.shape[1]))
    for index, block in enumerate(model.transformer.h):
        q, k, v = (
            part.view(*ids.shape, 4, 16).transpose(1, 2) for part in block.attn.c_attn(block.ln_1(x)).split(64, dim=2)
        )
        y = cache.attend(q, k, v, index, scale=0.25)
        x = x + block.attn.c_proj(y.transpose(1, 2).reshape(*ids.shape, -1))
        x = x + block.mlp(block.ln_2(x))
    cache.end_call()
    return model.lm_head(model.transformer.ln_f(x))


def test_reset_and_crop(gpt):
    cached = attach_cache(gpt, (IDS[:, :12],), "kitty", max_length=LENGTH)
    first = in_pieces(cached)
    cached.reset()
    torch.testing.assert_close(in_pieces(cached), first, rtol=0, atol=0)
    cached.reset()
    cached(IDS[:, :300])
    expected = cached(IDS[:, 300:320])
    cached.crop(300)
    assert cached.columns == 300
    torch.testing.assert_close(cached(IDS[:, 300:320]), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="between 0 and the 320 held"):
        cached.crop(321)
    cached.crop(0)
    torch.testing.assert_close(in_pieces(cached), first, rtol=0, atol=0)


@pytest.mark.parametrize("preset", ["lossless", "kitty"])
@pytest.mark.parametrize("columns", [33, 200, 290])
def test_a_deep_crop_restores_raw_columns_from_the_pages(gpt, columns, preset):
    cached = attach_cache(gpt, (IDS[:, :12],), preset, max_length=LENGTH)
    cache = PagedCache([LayerPlan()] * 2, KittyConfig.preset(preset))
    for start, stop in ((0, 300), (300, LENGTH)):
        cached(IDS[:, start:stop])
        _by_hand(gpt, cache, IDS[:, start:stop], start)
    cached.crop(columns)
    cache.crop(columns)
    assert cached.columns == columns
    start = columns
    for piece in IDS[:, columns:].split([1, 60, LENGTH - columns - 61], dim=1):
        expected = _by_hand(gpt, cache, piece, start)
        torch.testing.assert_close(cached(piece), expected, rtol=1e-3, atol=1e-3)
        start += piece.shape[1]
        if preset == "lossless":
            torch.testing.assert_close(expected, whole(gpt, IDS[:, :start])[:, -piece.shape[1] :], rtol=1e-3, atol=1e-3)


def test_room_is_checked_before_anything_changes(gpt):
    cached = attach_cache(gpt, (IDS[:, :12],), "kitty", max_length=64)
    cached(IDS[:, :60])
    with pytest.raises(ValueError, match="max_length=64, got 60 \\+ 5"):
        cached(IDS[:, :5])
    assert cached.columns == 60
    cached(IDS[:, :4])


def test_a_static_cache_is_replaced():
    model, oracle = make_transformer(2, LENGTH), make_transformer(2, LENGTH)
    cached = attach_cache(model, (IDS[:, :12], torch.arange(12)), "lossless", max_length=LENGTH)
    assert not [name for name, _ in cached.named_buffers() if name.endswith(("k_cache", "v_cache", "causal_mask"))]
    for _ in range(2):  # a second sequence starts at position 0 without a word
        start = 0
        for length in (200, 5, 1, 1, 93):
            positions = torch.arange(start, start + length)
            piece = IDS[:, start : start + length]
            actual, expected = cached(piece, positions), whole(oracle, piece, positions)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            start += length
    with pytest.raises(RuntimeError, match="must follow the cached ones"):
        cached(IDS[:, :1], torch.tensor([20]))


def test_a_static_cache_of_one_row():
    model, oracle = make_transformer(1, LENGTH), make_transformer(1, LENGTH)
    cached = attach_cache(model, (IDS[:1, :12], torch.arange(12)), "lossless", max_length=64)
    for start, stop in ((0, 20), (20, 21), (21, 40)):
        arguments = IDS[:1, start:stop], torch.arange(start, stop)
        torch.testing.assert_close(cached(*arguments), whole(oracle, *arguments), rtol=1e-4, atol=1e-4)


def test_it_compiles():
    model = make_gpt()
    cached = attach_cache(model, (IDS[:, :12],), "lossless", max_length=LENGTH)
    compiled = torch.compile(cached.graph_module, backend="aot_eager")
    with torch.no_grad():
        out = torch.cat([compiled(piece) for piece in IDS[:, :60].split([40, 1, 1, 18], dim=1)], dim=1)
    torch.testing.assert_close(out, whole(model, IDS)[:, :60], rtol=1e-4, atol=1e-4)


class Wrapped(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.model, self.change = make_gpt(), change
        self.eval()

    def forward(self, ids):
        return self.change(self.model, ids)


def test_the_last_column_alone_may_be_returned():
    model = Wrapped(lambda model, ids: model(ids)[:, [-1]])
    cached = attach_cache(model, (IDS[:, :12],), "lossless", max_length=64)
    cached(IDS[:, :20])
    torch.testing.assert_close(cached(IDS[:, 20:21]), whole(model, IDS[:, :21]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda model, ids: model(ids) - model(ids).mean(1, keepdim=True),
            "they differ by|must get a cache|understood",
        ),
        (lambda model, ids: model(ids).cumsum(1), "they differ by"),
        (lambda model, ids: model.transformer.wte(ids), "no attention at all"),
    ],
)
def test_what_mixes_columns_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        attach_cache(Wrapped(change), (IDS[:, :12],), "lossless", max_length=64)


def test_bad_arguments():
    with pytest.raises(ValueError, match="eval mode"):
        attach_cache(make_gpt().train(), (IDS[:, :12],))
    with pytest.raises(ValueError, match="at least 3 columns"):
        attach_cache(make_gpt(), (IDS[:, :2],))
    with pytest.raises(ValueError, match="at least 3 columns"):
        attach_cache(make_gpt(), (3,))


def test_an_attention_that_is_not_understood_is_refused():
    class Bidirectional(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(64, 64)

        def forward(self, x):
            q = self.proj(x).view(*x.shape[:2], 4, 16).transpose(1, 2)
            out = nn.functional.scaled_dot_product_attention(q, q * 2, q * 3)
            return out.transpose(1, 2).reshape(x.shape)

    with pytest.raises(ValueError, match="bidirectional"):
        attach_cache(Bidirectional().eval(), (torch.randn(2, 12, 64),))

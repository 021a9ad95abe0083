"""What the tests of ONNX files share: runs of forced tokens, how far two of them may be apart, what a state should weigh."""

import torch

from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.kernels import functional_pages
from kitty_compile.kernels.functional_cache import State
from kitty_compile.kernels.update_torch import dequantize_pages

# Two fp32 runs of one model differ in the last bit of a key. One that lies on the edge between two codes then takes the other
# one, which changes all that follows, so no run comes out exactly. What the form may cost is this share of what the
# quantisation costs.
BUDGET = 0.05


@torch.no_grad()
def forced(call, ids, pieces):
    """Last-column logits fp64 [pieces, B, vocabulary] of a call on each piece of ``ids``."""
    assert sum(pieces) == ids.shape[1]
    return torch.stack([call(piece.contiguous())[:, -1].double() for piece in ids.split(pieces, dim=1)])


def unquantised(model, ids, pieces):
    """:func:`forced` of a model on no cache at all."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    return logits[:, torch.tensor(pieces).cumsum(0) - 1].transpose(0, 1).double()


def call_of(model, cache):
    """A call of an applied model on ``cache``."""
    return lambda ids: model(ids, **{cache_argument(model): cache}).logits


def divergence(actual, expected):
    """KL(expected || actual) of next-token distributions, in nats, by piece."""
    actual, expected = actual.log_softmax(dim=-1), expected.log_softmax(dim=-1)
    return (expected.exp() * (expected - actual)).sum(dim=-1).flatten(1).mean(dim=1)


def differing_codes(runner, cache):
    """The share of elements in pages that another code stands for than in ``cache``, whose layers are all paged."""
    state = State.of_named({name: tensor for name, tensor in runner.state().items() if name != "length"})
    differing = total = 0
    for index, layer in enumerate(cache.layers):
        own = state.select(index)
        for pages, pool, is_key in (
            (functional_pages.unseal_keys(own.key.pages), layer.state.key_pages, True),
            (functional_pages.unseal_values(own.value.pages), layer.state.value_pages, False),
        ):
            table, layout = layer.state.page_table, layer.page_layout
            expected = dequantize_pages(pool, table, pages.shape[2], layout, is_key=is_key).view_as(pages)
            differing += int(((pages - expected).abs() > 1e-3 * expected.abs().amax()).sum())
            total += pages.numel()
    return differing / total


def formula_bytes(model, config, columns):
    """What the page layout says of a cache of one row whose layers are all paged."""
    cache = KittyCache(model.config, config)
    with torch.no_grad():
        call_of(model, cache)(torch.ones(1, 1, dtype=torch.int64))
    layout, raw = cache.layers[0].page_layout, config.raw_layout
    lengths = torch.tensor(columns)
    key_pages, value_pages = int(raw.key_pages(lengths)), int(raw.value_pages(lengths))
    raw_tokens = 2 * columns - 128 * (key_pages + value_pages)
    raw_bytes = raw_tokens * layout.num_kv_heads * layout.key_dim * 4
    pages = key_pages * layout.key_page_bytes + value_pages * layout.value_page_bytes
    return len(cache.layers) * (pages + raw_bytes)

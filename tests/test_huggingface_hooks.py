"""What an applied model does with each kind of forward: masks, stock caches, training, and everything it must refuse."""

import contextlib
import copy
import logging
import re

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers import masking_utils as masks

import kitty_compile
from kitty_compile.huggingface.attention import active_call, classify_mask
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.testing import FAMILIES, WINDOW, random_ids, tiny_config, tiny_model

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model():
    return kitty_compile.apply(tiny_model("llama"))


def ones(rows, columns):
    return torch.ones(rows, columns, dtype=torch.int64)


# ---- masks


@pytest.mark.parametrize("window", [1, 2, 7, 4096])
def test_a_sliding_mask_is_known_by_its_window(window):
    assert classify_mask(masks.sliding_window_causal_mask_function(window)) == window


def test_a_causal_mask_has_no_window():
    assert classify_mask(masks.causal_mask_function) is None


def lower_left(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx <= q_idx


BLOCKS = torch.zeros(1, 8, dtype=torch.int64)
UNKNOWN_MASKS = {
    "bidirectional_mask_function": masks.bidirectional_mask_function,
    "lower_left": lower_left,
    "or_masks": masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(BLOCKS)),
    "and_masks": masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(BLOCKS)),
    "chunked_overlay": masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    "sliding_window_bidirectional_overlay": masks.sliding_window_bidirectional_mask_function(4),
    "and_masks(sliding_window_overlay, lower_left)": masks.and_masks(masks.sliding_window_overlay(4), lower_left),
    "sliding_window_overlay": masks.sliding_window_overlay(4),
    "add_offsets_to_mask_function": masks.add_offsets_to_mask_function(masks.causal_mask_function, 1, 0),
}


@pytest.mark.parametrize("name", UNKNOWN_MASKS)
def test_any_other_mask_is_refused_by_name(name):
    message = "the mask must be causal or sliding for a KittyCache, got .*" + re.escape(name)
    with pytest.raises(ValueError, match=message):
        classify_mask(UNKNOWN_MASKS[name])


@torch.no_grad()
def test_the_mask_of_a_layer_must_be_the_one_of_its_cache_layer():
    """The window comes from the cache layer; a model whose mask says otherwise is not served."""
    model = kitty_compile.apply(tiny_model("mistral-windowed"))
    model.config.sliding_window = WINDOW + 1
    cache = KittyCache(tiny_config("mistral-windowed"))
    with pytest.raises(
        ValueError, match="the mask of layer 0 must be sliding with window 40 as its cache layer, got sliding"
    ):
        model(random_ids(1, 4), **{cache_argument(model): cache})
    model.config.sliding_window = None
    with pytest.raises(ValueError, match="got causal"):
        model(random_ids(1, 4), **{cache_argument(model): KittyCache(tiny_config("mistral-windowed"))})


@torch.no_grad()
def test_nothing_as_large_as_a_mask_is_made(monkeypatch, model):
    monkeypatch.setattr(masks, "sdpa_mask", None)
    monkeypatch.setitem(masks.AttentionMaskInterface._global_mapping, "sdpa", None)
    model(random_ids(2, 30), attention_mask=ones(2, 30))


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 4, 4), {"full_attention": None}], ids=["4-D", "dict"])
@torch.no_grad()
def test_prepared_masks_are_refused(model, mask):
    with pytest.raises(ValueError, match=r"attention_mask must be 2-D \[batch, columns\] with a KittyCache, got"):
        model(random_ids(1, 4), attention_mask=mask)
    assert active_call() is None


@torch.no_grad()
def test_left_padding_in_a_plain_forward():
    ids, mask = random_ids(2, 50), ones(2, 50)
    mask[1, :20] = 0
    model = tiny_model("llama")
    expected = model(ids, attention_mask=mask, use_cache=True).logits
    out = kitty_compile.apply(model)(ids, attention_mask=mask)
    torch.testing.assert_close(out.logits[0], expected[0], **CLOSE)
    torch.testing.assert_close(out.logits[1, 20:], expected[1, 20:], **CLOSE)
    assert out[cache_argument(model)].lengths.tolist() == [50, 30]


# ---- forwards that do not use a KittyCache


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_stock_cache_is_used_as_it_is_with_one_warning(family, caplog):
    model = tiny_model(family)
    name = cache_argument(model)
    ids, token = random_ids(2, 50), random_ids(2, 1)

    def run():
        cache = DynamicCache(config=model.config)
        return [model(piece, **{name: cache}).logits for piece in (ids, token)]

    expected = run()
    kitty_compile.apply(model)
    with caplog.at_level(logging.WARNING, "kitty_compile"):
        caplog.clear()
        actual = run() + run()
    assert [record.getMessage() for record in caplog.records] == [
        "a DynamicCache was passed to a model with a KittyCache applied: it is used as it is, unquantized"
    ]
    for one, other in zip(actual, expected * 2, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_generate_on_a_static_cache_is_the_stock_one(family):
    model = tiny_model(family)
    ids, name = random_ids(1, 50), cache_argument(model)

    def run():
        cache = StaticCache(config=model.config, max_cache_len=60)
        return model.generate(ids, disable_compile=True, **{name: cache}, **GREEDY)

    expected = run()
    kitty_compile.apply(model)
    assert torch.equal(run(), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@torch.no_grad()
def test_without_a_cache_the_model_is_the_stock_one(family):
    model, ids = tiny_model(family), random_ids(2, 50)
    expected = model(ids, use_cache=False).logits
    generated = model.generate(ids, use_cache=False, **GREEDY)
    kitty_compile.apply(model)
    out = model(ids, use_cache=False)
    assert out.get(cache_argument(model)) is None
    assert torch.equal(out.logits, expected)
    assert torch.equal(model.generate(ids, use_cache=False, **GREEDY), generated)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_the_stock_one(checkpointing):
    model, ids = tiny_model("qwen3"), random_ids(2, 20)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()

    def gradient():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return model.get_input_embeddings().weight.grad.clone()

    expected = gradient()
    kitty_compile.apply(model)
    assert torch.equal(gradient(), expected)


def test_gradients_through_the_cache_are_refused(model):
    with pytest.raises(ValueError, match=r"must be used without gradients.*torch.no_grad\(\)"):
        model(random_ids(1, 4))
    assert active_call() is None
    with torch.no_grad():
        model(random_ids(1, 4))
    with torch.inference_mode():
        model(random_ids(1, 4))
    model(random_ids(1, 4), use_cache=False).logits.sum().backward()


def test_only_queries_that_need_gradients_are_noticed_too(model):
    model.requires_grad_(False)
    model.get_decoder().layers[0].self_attn.q_proj.requires_grad_(True)
    with pytest.raises(ValueError, match="must be used without gradients"):
        model(random_ids(1, 4))
    model.requires_grad_(False)
    model(random_ids(1, 4))


# ---- what is refused


@torch.no_grad()
def test_attention_dropout_is_refused():
    config = LlamaConfig(**(tiny_config("llama").to_dict() | {"attention_dropout": 0.1}))
    model = kitty_compile.apply(type(tiny_model("llama"))(config)).train()
    with pytest.raises(
        ValueError, match=r"attention dropout must be 0 with a KittyCache, got 0.1: call model.eval\(\)"
    ):
        model(random_ids(1, 4))
    model.eval()(random_ids(1, 4))


@torch.no_grad()
def test_attention_weights_are_refused(model):
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(random_ids(1, 4), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model.generate(random_ids(1, 4), output_attentions=True, return_dict_in_generate=True, **GREEDY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cu_seq_lens_q", torch.tensor([0, 4])),
        ("position_bias", torch.zeros(1, 4, 4, 4)),
        ("head_mask", torch.ones(4)),
        ("is_causal", False),
    ],
)
@torch.no_grad()
def test_arguments_that_change_attention_are_refused(model, name, value):
    with pytest.raises(ValueError, match=f"{name} must|bidirectional"):
        model(random_ids(1, 4), **{name: value})
    model(random_ids(1, 4), position_ids=torch.arange(4)[None], output_hidden_states=True)


@torch.no_grad()
def test_a_kitty_cache_of_another_model_or_configuration_is_refused(model):
    name = cache_argument(model)
    for cache in (KittyCache(model.config, "kitty-pro"), KittyCache(tiny_config("gemma3"))):
        with pytest.raises(ValueError, match="the KittyCache must match what was applied to the model"):
            model(random_ids(1, 4), **{name: cache})


@torch.no_grad()
def test_another_attention_implementation_is_noticed(model):
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"the attention implementation must stay 'kitty\|sdpa'"):
        model(random_ids(1, 4))
    kitty_compile.remove(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["static", "offloaded", "dynamic", "quantized"])
def test_cache_implementation_is_refused(model, name):
    with pytest.raises(ValueError, match=f"cache_implementation must be None .* got '{name}'"):
        model.generate(random_ids(1, 4), cache_implementation=name, **GREEDY)


def test_the_cache_implementation_of_the_models_own_defaults_is_replaced(caplog):
    model = tiny_model("llama")
    model.generation_config.cache_implementation = "static"
    kitty_compile.apply(model)
    out = model.generate(random_ids(1, 4), return_dict_in_generate=True, **GREEDY)
    assert isinstance(out[cache_argument(model)], KittyCache)
    assert "cache_implementation='static'" in caplog.text
    assert model.generation_config.cache_implementation == "static"


def test_continuous_batching_is_refused(model):
    with pytest.raises(ValueError, match="continuous batching must be used on a model without a KittyCache"):
        model.generate_batch([[1, 2]])
    with pytest.raises(ValueError, match="continuous batching"):
        model.init_continuous_batching()


# ---- the caches that generate makes


def test_generate_makes_a_bounded_cache_that_can_go_on(model):
    name = cache_argument(model)
    ids = random_ids(1, 300)
    out = model.generate(ids, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    cache = out[name]
    assert cache.max_length == 309
    pools = [layer.state.key_pages.data_ptr() for layer in cache.layers]
    more = model.generate(out.sequences, max_new_tokens=200, do_sample=False, **{name: cache})
    assert more.shape[1] == 510
    assert cache.max_length is None
    assert pools != [layer.state.key_pages.data_ptr() for layer in cache.layers]


def test_max_cache_len_reserves_room_that_stays(model):
    name = cache_argument(model)
    out = model.generate(random_ids(1, 20), max_cache_len=700, return_dict_in_generate=True, **GREEDY)
    assert out[name].max_length == 700
    pools = [layer.state.key_pages.data_ptr() for layer in out[name].layers]
    model.generate(torch.cat([out.sequences, random_ids(1, 600)], 1), **{name: out[name]}, **GREEDY)
    assert pools == [layer.state.key_pages.data_ptr() for layer in out[name].layers]


# ---- state of the hooks


@torch.no_grad()
def test_an_interrupted_forward_does_not_leak_into_the_next(model):
    layer = model.get_decoder().layers[1].mlp
    original = layer.forward

    def interrupt(*args):
        raise KeyboardInterrupt

    layer.forward = interrupt
    with contextlib.suppress(KeyboardInterrupt):
        model(random_ids(1, 4))
    layer.forward = original
    assert active_call() is not None
    other = tiny_model("llama", seed=1)
    expected = other(random_ids(1, 4)).logits
    kitty_compile.apply(other)
    assert torch.equal(other(random_ids(1, 4), use_cache=False).logits, expected)
    model(random_ids(1, 4))
    assert active_call() is None


@torch.no_grad()
def test_hooks_close_after_an_error_before_the_call_opens(model):
    with pytest.raises(ValueError, match="attention_mask must have"):
        model(random_ids(1, 4), attention_mask=ones(1, 3))
    assert active_call() is None
    model(random_ids(1, 4))


@torch.no_grad()
def test_positional_arguments_and_the_inner_decoder(model):
    ids, mask = random_ids(2, 30), ones(2, 30)
    mask[1, :5] = 0
    expected = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    out = model.model(ids, mask)
    assert torch.equal(out.last_hidden_state, expected)
    assert isinstance(out[cache_argument(model)], KittyCache)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds, attention_mask=mask).logits, model(ids, mask).logits)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@torch.no_grad()
def test_the_older_name_of_the_argument_works(model):
    cache = KittyCache(model.config)
    model(random_ids(1, 10), past_key_values=cache)
    model.model(random_ids(1, 10), past_key_values=cache)
    assert cache.get_seq_length() == 20


@torch.no_grad()
def test_one_applied_model_inside_the_forward_of_another():
    outer, inner = (kitty_compile.apply(tiny_model("llama", seed=seed), "lossless") for seed in (0, 1))
    ids = random_ids(1, 40)
    expected = [outer(ids).logits, inner(ids).logits]
    seen = []
    handle = outer.model.layers[1].register_forward_pre_hook(lambda *_: seen.append(inner(ids).logits))
    torch.testing.assert_close(outer(ids).logits, expected[0])
    handle.remove()
    torch.testing.assert_close(seen[0], expected[1])


@torch.no_grad()
def test_a_copy_of_an_applied_model_is_on_its_own(model):
    twin = copy.deepcopy(model)
    ids = random_ids(1, 300)
    assert torch.equal(twin(ids).logits, model(ids).logits)
    assert torch.equal(twin.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    kitty_compile.remove(model)
    assert isinstance(twin(ids)[cache_argument(twin)], KittyCache)
    kitty_compile.remove(twin)
    assert isinstance(twin(ids)[cache_argument(twin)], DynamicCache)

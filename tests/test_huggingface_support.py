"""Which of transformers' classes a KittyCache serves, and with which reason it refuses the others, before anything runs."""

import pytest
import torch
import transformers

import kitty_compile
from kitty_compile.huggingface.support import cache_argument, decoder_of
from kitty_compile.testing import random_ids
from tests.zoo.build import CannotBuild, build


def tiny(class_name):
    built = build(class_name)
    if isinstance(built, CannotBuild):
        pytest.skip(built.reason)
    return built.model


REFUSED = {
    "DiffLlamaForCausalLM": "differential attention",
    "DogeForCausalLM": "a mask that depends on the values",
    "DoryForCausalLM": "layers that run in loops",
    "GitForCausalLM": "an image prefix",
    "HrmTextForCausalLM": "layers that run in loops",
    "JetMoeForCausalLM": "repeats keys and values for its experts",
    "MoshiForCausalLM": "a window in the cache that the mask knows nothing of",
    "MllamaForCausalLM": "cross attention is not supported",
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_that_departs_from_its_cache_is_refused(name):
    """These give one thing to the cache and attend to another: without a rule ``apply`` would take them, and fail later."""
    model = tiny(name)
    with pytest.raises(ValueError, match=REFUSED[name]):
        kitty_compile.apply(model)
    assert {layer.status for layer in kitty_compile.report(model).layers} == {"refused"}


def test_a_model_whose_layers_differ_in_shape_is_reported_when_refused():
    model = tiny("Gemma4ForCausalLM")
    model.config.is_causal = False
    layers = kitty_compile.report(model).layers
    assert [layer.status for layer in layers] == ["refused"] * 4
    assert [layer.key_dim for layer in layers] == [16, 32, 16, 32]


@torch.no_grad()
def test_layers_are_reported_with_the_heads_that_they_have():
    """MiMo doubles the KV heads of layers with a window, which its configuration does not say."""
    model = kitty_compile.apply(tiny("MiMoV2FlashForCausalLM"))
    cache = model(random_ids(1, 4))[cache_argument(model)]
    for layer, reported in zip(cache.layers, kitty_compile.report(model).layers, strict=True):
        shapes = (reported.num_kv_heads, reported.key_dim, reported.value_dim)
        assert shapes == layer.geometry[:3]


@pytest.mark.parametrize(("is_new", "num_kv_heads"), [(False, 1), (True, 4)])
@torch.no_grad()
def test_falcons_kv_heads(is_new, num_kv_heads):
    config = transformers.FalconConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, new_decoder_architecture=is_new
    )
    model = transformers.FalconForCausalLM(config).eval()
    cache = model(random_ids(1, 4), use_cache=True)[cache_argument(model)]
    assert cache.layers[0].keys.shape[1] == num_kv_heads
    assert kitty_compile.report(model).layers[0].num_kv_heads == num_kv_heads


def test_a_head_named_decoder_is_not_the_decoder():
    model = tiny("ModernBertDecoderForCausalLM")
    assert decoder_of(model) is model.model
    kitty_compile.apply(model)


@torch.no_grad()
def test_a_mask_that_nothing_attends_with_is_no_reason_to_refuse():
    """A decoder of the BART family makes a mask for its encoder even without one."""
    model = tiny("BartForCausalLM")
    ids = random_ids(2, 40)
    expected = model(ids).logits
    torch.testing.assert_close(kitty_compile.apply(model, "lossless")(ids).logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_encoder_behind_such_a_decoder_is_refused():
    model = kitty_compile.apply(tiny("BartForCausalLM"))
    with pytest.raises((RuntimeError, ValueError)):
        model(random_ids(1, 4), encoder_hidden_states=torch.zeros(1, 5, model.config.hidden_size))
    model(random_ids(1, 4))


@pytest.mark.parametrize("name", ["FalconForCausalLM", "BloomForCausalLM"])
def test_a_class_with_attention_of_its_own_is_refused(name):
    reason = f"the attention of {name} does not use transformers' attention interface"
    with pytest.raises(ValueError, match=reason):
        kitty_compile.apply(getattr(transformers, name)(build(name).model.config))

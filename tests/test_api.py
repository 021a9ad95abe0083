"""``apply`` and ``remove``: what changes, what must not, and which models are refused with which reason."""

import filecmp
import logging
import pickle
import re

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import kitty_compile
from kitty_compile import KittyConfig
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.plain_module import CachedModule
from kitty_compile.testing import FAMILIES, random_ids, tiny_model
from tests.models.nano_gpt import make_gpt

TINY = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def model():
    return tiny_model("llama")


@torch.no_grad()
def test_apply_returns_the_model_and_remove_puts_everything_back(model):
    ids, name = random_ids(1, 300), cache_argument(model)
    before = (vars(model).keys() - {"_modules"}, dict(model.model._forward_pre_hooks), dict(model.model._forward_hooks))
    expected = model(ids).logits
    assert kitty_compile.apply(model) is model
    assert isinstance(model(ids)[name], KittyCache)
    assert kitty_compile.remove(model) is model
    after = (vars(model).keys() - {"_modules"}, dict(model.model._forward_pre_hooks), dict(model.model._forward_hooks))
    assert after == before
    assert model.config._attn_implementation == "sdpa"
    out = model(ids)
    assert isinstance(out[name], DynamicCache)
    assert torch.equal(out.logits, expected)
    kitty_compile.apply(model, "lossless")
    kitty_compile.remove(model)


def test_apply_twice_and_remove_twice_say_so(model):
    kitty_compile.apply(model)
    with pytest.raises(ValueError, match="model must not have a KittyCache applied yet"):
        kitty_compile.apply(model)
    kitty_compile.remove(model)
    with pytest.raises(ValueError, match="model must have a KittyCache applied"):
        kitty_compile.remove(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_the_original(family, tmp_path):
    model = tiny_model(family)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    kitty_compile.apply(model)
    with torch.no_grad():
        model.generate(random_ids(1, 20), max_new_tokens=2)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation_config
    model.save_pretrained(tmp_path / "after")
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert sorted(path.name for path in (tmp_path / "after").iterdir()) == names
    assert filecmp.cmpfiles(tmp_path / "before", tmp_path / "after", names, shallow=False) == (names, [], [])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert "kitty" not in loaded.config._attn_implementation


def test_an_applied_model_can_be_pickled(model):
    ids = random_ids(1, 50)
    kitty_compile.apply(model)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(pickle.loads(pickle.dumps(model))(ids).logits, expected)


def test_two_models_of_one_configuration_object(model):
    other = LlamaForCausalLM(model.config).eval()
    ids = random_ids(1, 30)
    with torch.no_grad():
        expected = other(ids, use_cache=True).logits
        kitty_compile.apply(model)
        out = other(ids, use_cache=True)
    assert torch.equal(out.logits, expected)
    assert isinstance(out[cache_argument(model)], DynamicCache)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@torch.no_grad()
def test_quantized_weights(model):
    ids = random_ids(1, 300)
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    expected = model(ids).logits
    torch.testing.assert_close(kitty_compile.apply(model, "lossless")(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_half_precision_and_presets():
    ids = random_ids(2, 300)
    for dtype in (torch.bfloat16, torch.float16):
        for preset in KittyConfig.presets():
            model = kitty_compile.apply(tiny_model("qwen3", dtype=dtype), preset)
            out = model.generate(
                ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
            assert all(logits.isfinite().all() for logits in out.logits)


def test_one_line_is_logged(model, caplog):
    with caplog.at_level(logging.INFO, "kitty_compile"):
        kitty_compile.apply(model)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.records[0].getMessage().startswith("LlamaForCausalLM: 2 layers, 2 quantized, ")


def test_no_quantized_layer_is_warned_about(caplog):
    with caplog.at_level(logging.INFO, "kitty_compile"):
        kitty_compile.apply(tiny_model("mistral-windowed"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (
        caplog.records[0]
        .getMessage()
        .startswith("no layer is quantized: MistralForCausalLM: 2 layers, 2 kept (sliding")
    )


@pytest.mark.parametrize("mode", ["auto", False])
def test_eager_is_what_there_is(model, mode):
    kitty_compile.apply(model, compile=mode)


@pytest.mark.parametrize("mode", [True, None, "eager", 0])
def test_other_values_of_compile_are_refused(model, mode):
    with pytest.raises(ValueError, match='compile must be "auto" or False, got'):
        kitty_compile.apply(model, compile=mode)
    assert not kitty_compile.report(model).is_applied


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("kity", ValueError, "preset must be one of"),
        (2, TypeError, "config must be a KittyConfig, a preset's name or None, got int"),
        (
            KittyConfig(skip_layers=(1, 2)),
            ValueError,
            r"skip_layers must name layers of the model \(0 to 1\), got \[2\]",
        ),
    ],
)
def test_bad_configurations_change_nothing(model, config, error, message):
    with pytest.raises(error, match=message):
        kitty_compile.apply(model, config)
    assert not kitty_compile.report(model).is_applied
    assert model.config._attn_implementation == "sdpa"


def build(name, config_name, **arguments):
    config = getattr(transformers, config_name)(**(TINY | arguments))
    torch.manual_seed(0)
    return getattr(transformers, name)(config)


REFUSED = {
    "encoder-decoder": (
        lambda: build(
            "T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2
        ),
        "an encoder-decoder model is not supported",
    ),
    "no-head": (lambda: build("LlamaModel", "LlamaConfig"), "has no language model head to generate with"),
    "latent": (
        lambda: build(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            n_routed_experts=2,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
        ),
        "multi-head latent attention",
    ),
    "chunked": (
        lambda: build("Llama4ForCausalLM", "Llama4TextConfig", num_key_value_heads=2, head_dim=16, num_local_experts=1),
        "chunked attention is not supported",
    ),
    "linear": (
        lambda: build(
            "Qwen3NextForCausalLM",
            "Qwen3NextConfig",
            num_key_value_heads=2,
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            layer_types=["linear_attention", "full_attention"],
        ),
        "a linear attention layer has no keys and values to page",
    ),
    "recurrent": (
        lambda: build("MambaForCausalLM", "MambaConfig", state_size=4),
        "a linear attention layer has no keys and values to page",
    ),
    "head-dim": (
        lambda: build("LlamaForCausalLM", "LlamaConfig", head_dim=24),
        "head_dim must be a multiple of 16, got 24",
    ),
    "own-attention": (
        lambda: build("FalconForCausalLM", "FalconConfig"),
        "does not use transformers' attention interface",
    ),
    "bidirectional": (
        lambda: build("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=16, use_bidirectional_attention=True),
        "bidirectional attention is not supported",
    ),
    "attention-weights": (
        lambda: build("LlamaForCausalLM", "LlamaConfig", attn_implementation="eager", output_attentions=True),
        "output_attentions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    model = make()
    implementation = model.config._attn_implementation
    with pytest.raises(ValueError, match=re.escape(reason)):
        kitty_compile.apply(model)
    assert model.config._attn_implementation == implementation
    report = kitty_compile.report(model)
    assert {layer.status for layer in report.layers} <= {"refused"}
    assert all(layer.reason for layer in report.layers)


def test_shared_layers_are_refused():
    config = LlamaConfig(**TINY)
    config.num_kv_shared_layers = 1
    with pytest.raises(ValueError, match="layers that share keys and values"):
        kitty_compile.apply(LlamaForCausalLM(config))


def test_indexed_layers_are_refused():
    config = LlamaConfig(**TINY)
    model = LlamaForCausalLM(config)
    config.layer_types = ["full_attention", "deepseek_sparse_attention"]
    with pytest.raises(ValueError, match=r"layer 1: indexed \(sparse\) attention is not supported"):
        kitty_compile.apply(model)


def test_models_with_more_than_text_are_refused():
    text = TINY | {"num_key_value_heads": 2, "head_dim": 16}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=3)
    with pytest.raises(ValueError, match="is more than a text model, only text-only models are supported"):
        kitty_compile.apply(transformers.Gemma3ForConditionalGeneration(config))


def test_several_devices_are_refused(model):
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="a model spread over several devices is not supported, got cpu, meta"):
        kitty_compile.apply(model)
    other = tiny_model("llama")
    other.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(ValueError, match="several devices is not supported, got 0, cpu"):
        kitty_compile.apply(other)


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2), "llama"])
def test_what_is_no_model_is_a_type_error(model):
    with pytest.raises(TypeError, match=r"model must be a (torch\.nn\.Module, got|transformers .*example_inputs)"):
        kitty_compile.apply(model)
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got"):
        kitty_compile.report(model)
    with pytest.raises(ValueError, match="model must have a KittyCache applied"):
        kitty_compile.remove(model)


# ---- modules that are not from transformers


def test_a_plain_module_is_captured_with_example_inputs():
    model, ids = make_gpt(), random_ids(2, 60)
    cached = kitty_compile.apply(model, "lossless", example_inputs=(ids[:, :8],), max_length=64)
    assert isinstance(cached, CachedModule)
    with torch.no_grad():
        torch.testing.assert_close(cached(ids[:, :50]), model(ids[:, :50]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cached(ids[:, 50:]), model(ids)[:, 50:], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="max_length=64"):
        cached(ids[:, :5])
    with pytest.raises(TypeError, match="what it was made from is unchanged"):
        kitty_compile.remove(cached)
    assert kitty_compile.apply(model, example_inputs=(ids[:, :8],)).max_length == 4096


def test_a_plain_module_without_example_inputs_says_what_is_missing():
    with pytest.raises(TypeError, match=r"come with example_inputs .* got GPT without"):
        kitty_compile.apply(make_gpt())


@pytest.mark.parametrize("arguments", [{"example_inputs": (random_ids(1, 8),)}, {"max_length": 64}])
def test_a_transformers_model_is_not_captured(model, arguments):
    with pytest.raises(TypeError, match="must be left out for a transformers model, which is not captured"):
        kitty_compile.apply(model, **arguments)
    assert not kitty_compile.report(model).is_applied

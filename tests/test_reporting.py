"""``report``: every layer is accounted for, with the bytes of the real format."""

import gc

import pytest
import torch

import kitty_compile
from kitty_compile import KittyConfig
from kitty_compile.huggingface.support import cache_argument
from kitty_compile.testing import FAMILIES, random_ids, tiny_model


def test_a_quantized_layer_counts_its_metadata():
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    report = kitty_compile.report(kitty_compile.apply(model))
    assert [layer.status for layer in report.layers] == ["quantized", "quantized"]
    layer = report.layers[0]
    assert (layer.key_dim, layer.value_dim, layer.num_kv_heads, layer.num_boosted) == (32, 32, 2, 4)
    # Per KV head: codes, a high plane of 8 slots, scale and zero per channel, 4 bytes a slot, scale and zero per token.
    key = (32 * 128 * 2 // 8 + 8 * 128 * 2 // 8 + 32 * 4 + 8 * 4) / 128
    value = 32 * 2 / 8 + 4
    assert layer.bytes_per_token == 2 * (key + value)
    assert layer.raw_bytes_per_token == 2 * (32 + 32) * 2
    assert layer.kernel == "torch"
    assert layer.reason == ""


@torch.no_grad()
def test_bytes_now_are_those_of_the_latest_live_cache():
    model = kitty_compile.apply(tiny_model("gemma3"))
    assert kitty_compile.report(model).nbytes is None
    cache = model(random_ids(1, 300))[cache_argument(model)]
    report = kitty_compile.report(model)
    assert [layer.nbytes for layer in report.layers] == [layer.nbytes for layer in cache.layers]
    assert 0 < report.nbytes <= cache.nbytes
    del cache
    gc.collect()
    assert kitty_compile.report(model).nbytes is None


@pytest.mark.parametrize("family", FAMILIES)
def test_it_tells_what_apply_would_do(family):
    model = tiny_model(family)
    config = KittyConfig(skip_layers=(1,))
    before = kitty_compile.report(model, config)
    assert not before.is_applied
    after = kitty_compile.report(kitty_compile.apply(model, config))
    assert after.is_applied
    assert after.layers == before.layers
    assert len(after.layers) == model.config.num_hidden_layers


def test_kept_layers_say_why():
    report = kitty_compile.report(tiny_model("gpt-oss"), KittyConfig(skip_layers=(1,)))
    assert [(layer.status, layer.reason) for layer in report.layers] == [
        ("kept", "sliding window of 40 columns, kept in a raw ring"),
        ("kept", "in skip_layers, kept in raw pages"),
        ("kept", "sliding window of 40 columns, kept in a raw ring"),
        ("quantized", ""),
    ]
    lossless = kitty_compile.report(tiny_model("llama"), "lossless")
    assert {(layer.status, layer.reason) for layer in lossless.layers} == {("kept", "16 bits, kept in raw pages")}
    assert all(layer.bytes_per_token == layer.raw_bytes_per_token for layer in lossless.layers)


def test_it_prints_as_a_table():
    report = kitty_compile.report(tiny_model("gpt-oss"))
    lines = str(report).splitlines()
    assert lines[0] == report.summary()
    assert lines[0].startswith("GptOssForCausalLM: 4 layers, 2 quantized, 2 kept (sliding window of 40 columns")
    assert lines[1].split() == [
        "layer",
        "status",
        "heads",
        "dim",
        "boosted",
        "bytes/token",
        "raw",
        "bytes",
        "now",
        "kernel",
        "reason",
    ]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["0", "kept"],
        ["1", "quantized"],
        ["2", "kept"],
        ["3", "quantized"],
    ]


def test_the_configuration_of_an_applied_model_is_its_own():
    model = kitty_compile.apply(tiny_model("llama"), "kitty-pro")
    assert kitty_compile.report(model).config == KittyConfig.preset("kitty-pro")
    assert kitty_compile.report(model, "kitty-pro").is_applied
    with pytest.raises(ValueError, match="config must be None for an applied model"):
        kitty_compile.report(model, "kitty")

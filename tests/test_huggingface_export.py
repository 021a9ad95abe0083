"""Exported transformers models give the tokens and logits of the applied ones."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BartConfig,
    BartForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import kitty_compile
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument, decoder_of
from kitty_compile.testing import random_ids, tiny_model

ROWS, LENGTH = 3, 420


@functools.cache
def exported(family, preset="kitty"):
    model = tiny_model(family)
    return model, kitty_compile.export(model, max_batch=ROWS, max_length=LENGTH, config=preset)


def ragged(batch, columns, pads=(7, 0, 3)):
    mask = torch.ones(batch, columns, dtype=torch.int64)
    for row, pad in enumerate(pads[:batch]):
        mask[row, :pad] = 0
    return random_ids(batch, columns), mask


def generated(model, ids, preset="kitty", **arguments):
    kitty_compile.apply(model, preset)
    try:
        return model.generate(ids, do_sample=False, **arguments)
    finally:
        kitty_compile.remove(model)


class Applied:
    """The applied model, driven as a program is: by the call's own columns."""

    def __init__(self, model, preset="kitty"):
        self.model, self.cache = model, KittyCache(model.config, preset)
        self.mask, self.name, self.preset = None, cache_argument(decoder_of(model)), preset

    @torch.no_grad()
    def __call__(self, ids, mask):
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        kitty_compile.apply(self.model, self.preset)
        try:
            arguments = {"attention_mask": self.mask, "position_ids": positions, self.name: self.cache}
            return self.model(ids, **arguments).logits[:, -1:]
        finally:
            kitty_compile.remove(self.model)


FAMILIES = [
    "llama",
    "gemma2",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gpt-oss", "gemma3", "phi3", "gpt-neox", "qwen3", "mistral-windowed")
    ),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_the_applied_model(family):
    """Rows padded on the left, over seals, and with other sizes than the example's: a full batch, then one row."""
    model, program = exported(family)
    ids, mask = ragged(ROWS, 20)
    expected = generated(model, ids, attention_mask=mask, max_new_tokens=200)
    assert torch.equal(program.generate(ids, 200, attention_mask=mask), expected)
    assert torch.equal(program.generate(ids[1:2], 60), expected[1:2, :80])
    assert len(set(expected[1].tolist())) > 10


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_a_first_call_and_one_on_a_filled_state_give_the_applied_models_logits(family):
    model, program = exported(family)
    program.reset()
    applied = Applied(model)
    for columns, pads in ((190, (31, 0)), (1, ()), (9, (0, 4)), (150, (150, 1)), (1, ())):
        ids, mask = ragged(2, columns, pads)
        actual, expected = program(ids, mask), applied(ids, mask)
        shown = mask[:, -1].bool()
        torch.testing.assert_close(actual[shown], expected[shown], rtol=1e-3, atol=1e-3)
        assert actual.shape == (2, 1, model.config.vocab_size)


CALLS = st.lists(st.tuples(st.sampled_from([1, 1, 2, 5, 33, 129, 140]), st.integers(0, 2**16)), min_size=1, max_size=5)


@settings(max_examples=12)
@given(rows=st.integers(1, ROWS), calls=CALLS)
def test_any_ragged_calls_equal_the_applied_model(rows, calls):
    """Without quantisation, which makes small differences large: pads anywhere, rows that bring nothing."""
    model, program = exported("llama", "lossless")
    program.reset()
    applied, columns = Applied(model, "lossless"), 0
    for count, seed in calls:
        if columns + count > LENGTH:
            break
        columns += count
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(rows, count, generator=generator) > (seed % 4) / 4
        ids = random_ids(rows, count, seed=seed)
        actual, expected = program(ids, mask), applied(ids, mask)
        shown = mask[:, -1]
        torch.testing.assert_close(actual[shown], expected[shown], rtol=1e-3, atol=1e-3)
    assert program.columns == columns


def test_end_tokens_stop_rows_as_in_the_model():
    model, program = exported("llama")
    ids, mask = ragged(ROWS, 20)
    free = program.generate(ids, 40, attention_mask=mask)
    ends = [int(free[0, 25]), int(free[1, 30])]
    expected = generated(model, ids, attention_mask=mask, max_new_tokens=40, eos_token_id=ends, pad_token_id=0)
    actual = program.generate(ids, 40, attention_mask=mask, eos_token_id=ends, pad_token_id=0)
    assert torch.equal(actual, expected)
    assert program.generate(ids[:1], 40, attention_mask=mask[:1], eos_token_id=int(free[0, 25])).shape[1] <= 26


def test_the_logits_of_all_columns():
    model = tiny_model("llama")
    program = kitty_compile.export(model, max_length=64, logits="all")
    ids = random_ids(1, 12)
    expected = model(ids).logits
    torch.testing.assert_close(program(ids), expected, rtol=1e-4, atol=1e-4)
    assert program.manifest.logits == "all"


def test_the_model_is_left_as_it_was_and_shares_its_weights():
    model = tiny_model("llama")
    implementation, attributes = model.config._attn_implementation, set(vars(model))
    program = kitty_compile.export(model, max_length=64)
    assert model.config._attn_implementation == implementation
    assert set(vars(model)) == attributes
    assert not model.get_decoder()._forward_pre_hooks
    held = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in program.module.parameters()} == held
    kitty_compile.apply(model, "lossless")
    again = kitty_compile.export(model, max_length=64)
    assert again.manifest.config["key_bits"] == 16
    with pytest.raises(ValueError, match="config must be the one that was applied"):
        kitty_compile.export(model, max_length=64, config="kitty")
    assert torch.equal(again.generate(random_ids(1, 9), 9), model.generate(random_ids(1, 9), max_new_tokens=9))


def test_bfloat16():
    model = tiny_model("llama", dtype=torch.bfloat16)
    program = kitty_compile.export(model, max_length=256)
    ids = random_ids(1, 20)
    applied = Applied(model)
    for part in (ids, ids[:, :1]):
        torch.testing.assert_close(program(part), applied(part, torch.ones_like(part)), rtol=0.05, atol=0.1)
    assert program.manifest.dtype == "bfloat16"


def test_sliding_layers_stay_bounded():
    model = tiny_model("mistral-windowed")
    sizes = [kitty_compile.export(model, max_length=length).manifest.state_bytes for length in (64, 4096)]
    assert sizes[0] == sizes[1]
    _, program = exported("gemma2")
    rings = {name: buffer.shape[2] for name, buffer in program.module.named_buffers() if name.endswith("ring_key")}
    assert set(rings.values()) == {40 + 32}
    assert len(rings) == 2


def test_reset_forgets_everything():
    _, program = exported("gemma2")
    ids, mask = ragged(ROWS, 30)
    program.reset()
    first = program(ids, mask)
    program.generate(random_ids(2, 200), 100)
    program.reset()
    torch.testing.assert_close(program(ids, mask), first, rtol=0, atol=0)


def test_bad_calls_change_nothing():
    _, program = exported("llama")
    program.reset()
    program(random_ids(2, 300))
    state = {name: buffer.clone() for name, buffer in program.module.named_buffers()}
    for error, message, arguments in (
        (ValueError, r"columns must not exceed max_length=420, got 300 \+ 121", (random_ids(2, 121),)),
        (ValueError, "batch must stay 2 while the state holds tokens, got 1", (random_ids(1, 1),)),
        (TypeError, "input_ids must be an int64 tensor", (random_ids(2, 1).int(),)),
        (TypeError, "input_ids must be an int64 tensor", (random_ids(2, 1)[0],)),
        (ValueError, "at least one column", (random_ids(2, 1)[:, :0],)),
        (ValueError, "attention_mask must have the shape", (random_ids(2, 1), torch.ones(2, 301))),
    ):
        with pytest.raises(error, match=message):
            program(*arguments)
    for arguments, message in (
        ((random_ids(2, 20), 402), r"must fit max_length=420, got 20 \+ 402"),
        ((random_ids(2, 20), 0), "max_new_tokens must be a positive int, got 0"),
        ((random_ids(4, 20), 3), "batch must be from 1 to max_batch=3, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            program.generate(*arguments)
    with pytest.raises(ValueError, match="pad on the left"):
        program.generate(random_ids(1, 4), 3, attention_mask=torch.tensor([[1, 1, 1, 0]]))
    assert program.columns == 300
    for name, buffer in program.module.named_buffers():
        assert torch.equal(buffer, state[name]), name


def test_a_call_that_fails_half_way_asks_for_a_reset(monkeypatch):
    _, program = exported("llama")
    program.reset()
    expected = program(random_ids(1, 9))
    program.reset()
    with monkeypatch.context() as patch:
        patch.setattr(program, "module", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            program(random_ids(1, 9))
    with pytest.raises(ValueError, match="failed half way: call reset"):
        program(random_ids(1, 9))
    program.reset()
    assert torch.equal(program(random_ids(1, 9)), expected)


def test_bad_arguments():
    model = tiny_model("llama")
    for error, message, arguments in (
        (ValueError, "max_batch must be an int of at least 1, got 0", {"max_batch": 0}),
        (ValueError, "max_length must be an int of at least 16, got 4", {"max_length": 4}),
        (ValueError, 'logits must be "last" or "all"', {"logits": "none"}),
        (ValueError, "preset must be one of", {"config": "cat"}),
        (
            ValueError,
            "skip_layers must name layers of the model",
            {"config": kitty_compile.KittyConfig(skip_layers=(7,))},
        ),
        (TypeError, "example_inputs must be given for modules that are not", {"example_inputs": (random_ids(1, 9),)}),
    ):
        with pytest.raises(error, match=message):
            kitty_compile.export(model, **arguments)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got str"):
        kitty_compile.export("model")
    with pytest.raises(ValueError, match="eval mode"):
        kitty_compile.export(model.train())


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}


def test_what_cannot_be_served_is_refused_by_name():
    latent = DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL, num_key_value_heads=4)).eval()
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM: multi-head latent attention"):
        kitty_compile.export(latent)
    encoder = T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, vocab_size=96)
    )
    with pytest.raises(ValueError, match="an encoder-decoder model is not supported"):
        kitty_compile.export(encoder.eval())
    bart = BartForCausalLM(
        BartConfig(vocab_size=96, d_model=64, encoder_attention_heads=4, decoder_attention_heads=4)
    ).eval()
    with pytest.raises(ValueError, match="BartDecoder has positions of its own"):
        kitty_compile.export(bart)


def test_a_forward_that_depends_on_data_is_refused_and_the_model_left_alone():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=64, rope_parameters=rope)).eval()
    with pytest.raises(ValueError, match="the forward of LlamaForCausalLM must be one graph to be exported"):
        kitty_compile.export(model)
    with torch.no_grad():
        kitty_compile.apply(model)(random_ids(1, 4))

"""A sample of the model zoo, small enough for every run: what was rewritten stays so. ``make zoo`` judges all classes."""

import pytest
import transformers

from tests.zoo.build import class_names
from tests.zoo.forward import Workload
from tests.zoo.judge import judge

# The longest row fills its first value page: a sink of 32, a page and a value window of 128 each.
WORKLOAD = Workload.of(prompt=270, decode=30)

# Each is here for what it does differently from the others.
SAMPLE = {
    "BartForCausalLM": "the decoder of an encoder-decoder family, which makes a mask for an encoder that is not there",
    "BertLMHeadModel": "an encoder turned decoder, with absolute positions",
    "BioGptForCausalLM": "positions counted from the mask, with an offset",
    "CTRLLMHeadModel": "the oldest code that there is, sinusoidal positions",
    "Cohere2ForCausalLM": "full layers without rotation, attention and MLP in parallel",
    "DbrxForCausalLM": "head counts in a sub-configuration, clipped fused projections",
    "GPT2LMHeadModel": "a fused projection, scores scaled by options of the configuration",
    "GPTBigCodeForCausalLM": "one KV head for all query heads",
    "GPTNeoXForCausalLM": "queries, keys and values interleaved by head, half rotated",
    "Gemma2ForCausalLM": "a softcap, windows in every other layer, eager attention",
    "Gemma3ForCausalLM": "a rotation for windows and one for the rest",
    "Gemma4ForCausalLM": "another head size in full layers than in those with a window",
    "GlmForCausalLM": "interleaved rotation of half of a head",
    "GptOssForCausalLM": "learned sinks, experts",
    "GraniteForCausalLM": "a scale of the scores that is not that of the head size",
    "HunYuanDenseV1ForCausalLM": "norms after the rotation",
    "LlamaForCausalLM": "what most others are made of",
    "MiMoV2FlashForCausalLM": "keys and values of different sizes, other head counts in windowed layers",
    "MixtralForCausalLM": "experts; a window that is switched off",
    "ModernBertDecoderForCausalLM": "a head that goes by the name of decoder",
    "OPTForCausalLM": "learned positions with an offset, projections before and behind the layers",
    "Phi3ForCausalLM": "one projection for queries, keys and values",
    "Qwen3ForCausalLM": "norms per head on queries and keys",
    "StableLmForCausalLM": "a class that does not say that it supports other attention functions",
}


# Captures take seconds each: those whose graphs differ most, and what ``apply`` does not reach.
BACKEND_SAMPLE = {
    "BambaForCausalLM": "attention beside layers with a recurrent state",
    "FalconForCausalLM": "attention code of its own, one KV head",
    "Gemma4ForCausalLM": "sliding and full layers of different sizes",
    "GptOssForCausalLM": "learned sinks joined to the scores",
    "Lfm2ForCausalLM": "attention beside convolutions",
    "Qwen3ForCausalLM": "what most others look like",
    "XGLMForCausalLM": "attention by batched matrix products of folded heads",
}
SLOW = ("Gemma4ForCausalLM", "GptOssForCausalLM")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, "apply") for name in SAMPLE),
        *(pytest.param(name, "backend", marks=[pytest.mark.slow] * (name in SLOW)) for name in BACKEND_SAMPLE),
    ],
)
def test_what_was_rewritten_stays_rewritten(name, path):
    if name not in class_names():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    row = judge(name, path, WORKLOAD)
    assert row.status == "rewritten", row

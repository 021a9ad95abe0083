"""A model of Qwen3-8B's shape with random weights: the fused kernels inside the whole forward."""

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import transformers

import kitty_compile

pytestmark = pytest.mark.gpu

CALLS = (300, 180, *[1] * 120)  # 600 tokens: two pages are sealed in K while single tokens come, one in V


@pytest.fixture(scope="module")
def model():
    config = transformers.Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        # Wide enough for attention to be far from uniform.
        initializer_range=0.04,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    yield built.eval()
    del built
    gc.collect()
    torch.cuda.empty_cache()


@torch.no_grad()
def teacher_forced(model, ids: torch.Tensor, cache) -> torch.Tensor:
    """Log-probabilities of every position, one call after another; fp32 [positions, vocabulary]."""
    rows, start = [], 0
    name = "cache" if "cache" in model.model.forward.__code__.co_varnames else "past_key_values"
    for count in CALLS:
        output = model(ids[:, start : start + count], **{name: cache}, use_cache=True)
        rows.append(torch.log_softmax(output.logits[0].float(), dim=-1).cpu())
        start += count
    return torch.cat(rows)


@pytest.mark.parametrize("preset", ["kitty", "lossless"])
def test_fused_is_within_the_spread_of_two_materialising_runs(model, preset):
    ids = torch.randint(0, 151936, (1, sum(CALLS)), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    runs = {}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        runs[implementation] = teacher_forced(model, ids, kitty_compile.KittyCache(model.config, preset))
    model.set_attn_implementation("sdpa")
    kitty_compile.apply(model, preset)
    try:
        runs["fused"] = teacher_forced(model, ids, kitty_compile.KittyCache(model.config, preset))
    finally:
        kitty_compile.remove(model)

    def distance(one: str, other: str) -> float:
        """Mean KL divergence over the positions after the first call, where the cache is read."""
        p, q = (runs[name][CALLS[0] :] for name in (one, other))
        return float((p.exp() * (p - q)).sum(dim=-1).mean())

    spread = distance("sdpa", "eager")
    assert torch.isfinite(runs["fused"]).all()
    assert 0 < spread
    assert distance("sdpa", "fused") <= 1.5 * spread
    assert distance("eager", "fused") <= 1.5 * spread

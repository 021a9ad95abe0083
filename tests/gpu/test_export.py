"""Exported programs on a CUDA device."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import kitty_compile
from kitty_compile import testing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_program_gives_the_applied_models_tokens(family, dtype, tmp_path):
    """Up to ties of 16-bit logits: rows that part do so late, and start again alike."""
    model = testing.tiny_model(family).to("cuda", dtype)
    program = kitty_compile.export(model, max_batch=3, max_length=400)
    program.save(tmp_path / "model.pt2")
    loaded = kitty_compile.load(tmp_path / "model.pt2")
    ids, mask = testing.random_ids(3, 190).cuda(), torch.ones(3, 190, dtype=torch.int64, device="cuda")
    mask[0, :9] = 0
    tokens = program.generate(ids, 100, attention_mask=mask)
    assert torch.equal(loaded.generate(ids, 100, attention_mask=mask), tokens)
    kitty_compile.apply(model)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=100, do_sample=False)
    assert float((tokens[:, :200] == expected[:, :200]).float().mean()) > 0.95

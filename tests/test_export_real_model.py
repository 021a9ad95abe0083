"""The exported SmolLM2 against the applied one: 500 greedy steps in fp32, over seals of pages."""

import pytest
import torch

import kitty_compile
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.support import cache_argument, decoder_of
from tests.test_accuracy import real_model

pytestmark = pytest.mark.slow

STEPS = 500
PROMPTS = (
    "The history of the steam engine begins",
    "In Python, a decorator is a function that takes another function and",
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The program, from a file."""
    path = tmp_path_factory.mktemp("programs") / "smollm2.pt2"
    kitty_compile.export(real_model()[0], max_batch=2, max_length=1024).save(path)
    return kitty_compile.load(path)


def prompt():
    """Two rows, the shorter one padded on the left."""
    rows = [real_model()[1](text)["input_ids"] for text in PROMPTS]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.no_grad()
def test_500_greedy_tokens_equal_the_applied_models(loaded):
    """Up to the first step of a row whose best two logits lie closer than the two models' logits do; then it goes on."""
    ids, mask = prompt()
    tokens = loaded.generate(ids, STEPS, attention_mask=mask)
    assert tokens.shape[1] == ids.shape[1] + STEPS
    expected = tokens[:, ids.shape[1] :]
    loaded.reset()
    model = kitty_compile.apply(real_model()[0])
    try:
        chosen, differences, margins = lockstep(loaded, model, tokens, mask)
    finally:
        kitty_compile.remove(model)
    is_clear = margins > 2 * differences
    assert torch.equal(chosen[is_clear], expected[is_clear])
    # Nearly every step decides something.
    assert is_clear.float().mean() > 0.97
    assert loaded.module.kitty_0_lengths.min() > 32 + 3 * 128
    assert torch.equal(loaded.generate(ids, 60, attention_mask=mask), tokens[:, : ids.shape[1] + 60])


def lockstep(program, model, tokens, mask):
    """Both models on the same tokens: the applied one's choices, how far their logits are apart, its margins; [2, steps]."""
    cache, name = KittyCache(model.config), cache_argument(decoder_of(model))
    columns, rows = mask.shape[1], []
    piece, own = tokens[:, :columns], mask
    for stop in range(columns, tokens.shape[1]):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
        arguments = {"attention_mask": mask, "position_ids": positions, name: cache, "logits_to_keep": 1}
        applied, exported = model(piece, **arguments).logits[:, -1], program(piece, own)[:, -1]
        best = applied.topk(2, dim=-1).values
        rows.append((applied.argmax(dim=-1), (applied - exported).abs().amax(dim=-1), best[:, 0] - best[:, 1]))
        piece, own = tokens[:, stop : stop + 1], torch.ones_like(tokens[:, :1])
        mask = torch.cat([mask, own], dim=1)
    return tuple(torch.stack(column, dim=1) for column in zip(*rows, strict=True))

"""Programs of modules that are not from transformers: nanoGPT without a cache, gpt-fast with a static one."""

import pytest
import torch
from torch import nn

import kitty_compile
from tests.models.gpt_fast import make_transformer
from tests.models.nano_gpt import make_gpt

LENGTH = 420
IDS = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0))
EXAMPLES = {"nanogpt": (IDS[:, :12],), "gpt-fast": (IDS[:, :12], torch.arange(12))}


def make(name):
    return make_gpt() if name == "nanogpt" else make_transformer(2, LENGTH)


@pytest.fixture(scope="module", params=list(EXAMPLES))
def case(request):
    """(name, module, its program)"""
    module = make(request.param)
    return (
        request.param,
        module,
        kitty_compile.export(module, example_inputs=EXAMPLES[request.param], max_length=LENGTH, config="lossless"),
    )


@torch.no_grad()
def whole(name, ids):
    """Logits of all columns from a module that was never exported."""
    positions = () if name == "nanogpt" else (torch.arange(ids.shape[1]),)
    return make(name)(ids, *positions)


def test_pieces_equal_the_whole(case):
    name, _, program = case
    expected = whole(name, IDS[:, :260])
    for _ in range(2):
        program.reset()
        pieces = IDS[:, :260].split([190, 1, 1, 7, 61], dim=1)
        torch.testing.assert_close(torch.cat([program(piece) for piece in pieces], 1), expected, rtol=1e-4, atol=1e-4)


def test_generation_is_greedy_and_survives_a_file(case, tmp_path):
    name, _, program = case
    prompt = IDS[:, :30]
    tokens = program.generate(prompt, 150)
    logits = whole(name, tokens[:, :-1])[:, 29:]
    margin = logits.topk(2, dim=-1).values
    chosen = logits.argmax(dim=-1) == tokens[:, 30:]
    assert bool((chosen | (margin[..., 0] - margin[..., 1] < 1e-3)).all())
    program.save(tmp_path / "module.pt2")
    loaded = kitty_compile.load(tmp_path / "module.pt2")
    assert torch.equal(loaded.generate(prompt, 150), tokens)
    assert loaded.manifest.is_batch_fixed
    assert loaded.manifest.inputs == (("ids",) if name == "nanogpt" else ("ids", "positions"))


def test_two_bits_equal_the_module_with_a_cache():
    module = make("nanogpt")
    program = kitty_compile.export(module, example_inputs=EXAMPLES["nanogpt"], max_length=LENGTH)
    cached = kitty_compile.apply(module, example_inputs=EXAMPLES["nanogpt"], max_length=LENGTH)
    for piece in IDS.split([190, 1, 7, 150, 72], dim=1):
        torch.testing.assert_close(program(piece), cached(piece), rtol=1e-4, atol=1e-4)


def test_bad_calls(case):
    _, _, program = case
    program.reset()
    with pytest.raises(ValueError, match="batch must be from 2 to max_batch=2, got 1"):
        program(IDS[:1, :4])
    with pytest.raises(ValueError, match="all ones for a program without a mask"):
        program(IDS[:, :2], torch.tensor([[0, 1], [1, 1]]))
    assert program.columns == 0
    program(IDS[:, :2], torch.ones(2, 2))


def test_bad_arguments():
    module = make("nanogpt")
    with pytest.raises(TypeError, match="example_inputs must be given for modules that are not"):
        kitty_compile.export(module)
    with pytest.raises(TypeError, match=r"example_inputs must be token ids i64 .*, got torch.float32 \[2, 12, 64\]"):
        kitty_compile.export(module, example_inputs=(torch.zeros(2, 12, 64),))
    with pytest.raises(ValueError, match="max_batch must be the 2 rows of example_inputs"):
        kitty_compile.export(module, example_inputs=EXAMPLES["nanogpt"], max_batch=3)
    with pytest.raises(ValueError, match="no attention at all"):
        kitty_compile.export(nn.Embedding(96, 8).eval(), example_inputs=EXAMPLES["nanogpt"])

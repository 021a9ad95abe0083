import pytest
import torch

import kitty_compile
from kitty_compile import testing
from kitty_compile.passes.lower_attend import PREFIX, lower_attend
from kitty_compile.testing import random_ids, tiny_model


def pages_for(start, size):
    """The two inputs that speak by their length."""
    return [torch.empty(count, dtype=torch.uint8) for count in (max((start - 32) // 128, 1), -(-size // 128))]


def check(program, calls, rows):
    """The lowered program gives the logits, the bytes and the lengths of the program in every call."""
    lowered = lower_attend(program.exported, program.max_length)
    assert "torch.ops.kitty" not in lowered.graph_module.code
    module = lowered.module(check_guards=False)
    ours = {name.removeprefix(PREFIX): buffer for name, buffer in module.named_buffers()}
    # It shares the program's buffers, and each goes its own way from here.
    state = {name: buffer.clone() for name, buffer in ours.items() if name.startswith("kitty_")}
    start = 0
    for size, share in calls:
        ids = random_ids(rows, size, seed=start)
        mask = torch.rand(rows, size) < share
        theirs = {name: ours[name].clone() for name in state}
        expected = program(ids, mask)
        after = {name: ours[name].clone() for name in state}
        for name, buffer in state.items():
            ours[name].copy_(buffer)
        found = module(ids, mask, *pages_for(start, size))
        for name in state:
            state[name] = ours[name].clone()
            ours[name].copy_(after[name])
            if name.endswith(("_lengths", "_high_water", "_tokens", "_position")):
                assert torch.equal(state[name], after[name]), name
            elif name.startswith("kitty_0_") and state[name].numel():
                same = (state[name].view(torch.uint8) == after[name].view(torch.uint8)).float().mean()
                assert same > 0.999, (name, same)
        assert any(not torch.equal(theirs[name], after[name]) for name in state)
        shown = mask[:, -1]
        torch.testing.assert_close(found[shown], expected[shown], atol=2e-3, rtol=2e-3)
        start += size


def test_ragged_rows_over_seals():
    program = kitty_compile.export(tiny_model("llama"), max_batch=3, max_length=700)
    before = program.exported.graph_module.code
    check(program, [(200, 0.9), (1, 1.0), (1, 1.0), (130, 0.8), (300, 1.0), (3, 1.0)], rows=2)
    assert program.exported.graph_module.code == before, "the program must be left as it was"


def test_sliding_windows_and_sinks(monkeypatch):
    config = testing.tiny_config("gpt-oss")
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    monkeypatch.setitem(testing.FAMILIES, "gpt-oss", lambda: config)
    assert len(set(config.layer_types)) == 2
    program = kitty_compile.export(testing.tiny_model("gpt-oss"), max_batch=2, max_length=400)
    check(program, [(5, 1.0), (1, 1.0), (170, 0.9), (1, 1.0), (90, 0.9)], rows=2)


@pytest.mark.parametrize("max_length", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_room_for_one_page_or_none(max_length):
    program = kitty_compile.export(tiny_model("qwen2"), max_batch=1, max_length=max_length)
    check(program, [(max_length - 8, 1.0), (1, 1.0), (7, 1.0)], rows=1)


def test_all_constants_are_the_programs_own():
    """A constant made while tracing would be one of the CPU, which a package for another device cannot load."""
    program = kitty_compile.export(testing.tiny_model("llama"), max_batch=2, max_length=300)
    lowered = lower_attend(program.exported, program.max_length)
    assert all(name.startswith(PREFIX) for name in lowered.constants), list(lowered.constants)

import dataclasses
import sys
import types

import pytest
import torch

import kitty_compile
from kitty_compile.kernels import ops  # noqa: F401 (registers the operators)
from kitty_compile.program import Program
from kitty_compile.tensorrt_export import to_tensorrt
from kitty_compile.testing import random_ids, tiny_model


@pytest.fixture(scope="module")
def program():
    return kitty_compile.export(tiny_model("llama"), max_batch=2, max_length=64)


def on_cuda(program):
    """The same program, which says that it is on a device that is not here."""
    return Program(program.exported, dataclasses.replace(program.manifest, device="cuda:0"))


@dataclasses.dataclass
class Input:
    min_shape: tuple
    opt_shape: tuple
    max_shape: tuple
    dtype: torch.dtype


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in for torch_tensorrt that notes what it is asked, and hands out the program's own graph."""
    asked = {}

    def compile_program(exported, **options):
        asked.update(options, exported=exported)
        return asked.get("result") or exported.module(check_guards=False)

    module = types.ModuleType("torch_tensorrt")
    module.Input, module.dynamo = Input, types.SimpleNamespace(compile=compile_program)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", module)
    return asked


def test_kitty_operators_stay_in_torch_and_sizes_are_the_programs(program, compiler):
    target = on_cuda(program)
    module = to_tensorrt(target, min_block_size=7)
    assert target.module is module
    assert compiler["exported"] is target.exported
    assert compiler["torch_executed_ops"] == {torch.ops.kitty.attend.default, torch.ops.kitty.attend_window.default}
    assert compiler["min_block_size"] == 7
    shapes = {"min_shape": (1, 1), "opt_shape": (2, 1), "max_shape": (2, 64)}
    assert compiler["arg_inputs"] == [Input(**shapes, dtype=torch.int64), Input(**shapes, dtype=torch.bool)]


def test_the_program_runs_what_was_compiled(program, compiler):
    ids = random_ids(2, 9)
    expected = program.generate(ids, 20)
    target = on_cuda(program)
    to_tensorrt(target)
    target.manifest = program.manifest
    assert torch.equal(target.generate(ids, 20), expected)


def test_a_module_that_lost_the_state_is_refused(program, compiler):
    compiler["result"] = torch.nn.Identity()
    target = on_cuda(program)
    before = target.module
    with pytest.raises(ValueError, match="must have the program's counters as buffers"):
        to_tensorrt(target)
    assert target.module is before


def test_without_the_package_or_a_device(program, monkeypatch):
    with pytest.raises(ValueError, match="must be on a CUDA device for TensorRT, got one on cpu"):
        to_tensorrt(program)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(ImportError, match=r"kitty-compile\[tensorrt\]"):
        to_tensorrt(on_cuda(program))

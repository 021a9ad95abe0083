"""What surrounds the compiler of packages: none of these tests compiles."""

import pathlib

import pytest
import torch
from torchgen.aoti.fallback_ops import inductor_fallback_ops

import kitty_compile
from kitty_compile import testing
from kitty_compile.aot_package import _as_compiled, _check_operators, aot_compile


def small_program(monkeypatch, family, experts=None, dtype=torch.float32):
    config = testing.tiny_config(family)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    monkeypatch.setitem(testing.FAMILIES, family, lambda: config)
    model = testing.tiny_model(family, dtype=dtype)
    if experts is not None:
        model.set_experts_implementation(experts)
    return kitty_compile.export(model, max_length=200)


@pytest.mark.parametrize(
    ("dtype", "operator"),
    [(torch.bfloat16, "aten._grouped_mm.default"), (torch.float32, "transformers.grouped_mm_fallback.default")],
)
def test_experts_without_native_code_are_refused(dtype, operator, monkeypatch, tmp_path):
    """The first has a function of C since torch 2.12, the second is one of Python."""
    monkeypatch.delitem(inductor_fallback_ops, "aten._grouped_mm.default", raising=False)
    program = small_program(monkeypatch, "gpt-oss", "grouped_mm", dtype)
    with pytest.raises(
        ValueError, match=rf'native code .* got {operator};.*set_experts_implementation\("batched_mm"\)'
    ):
        aot_compile(program, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
    _check_operators(small_program(monkeypatch, "gpt-oss", "batched_mm", dtype).exported)
    if dtype == torch.bfloat16:
        monkeypatch.setitem(inductor_fallback_ops, operator, {})
        _check_operators(program.exported)


def test_every_package_is_made_in_a_folder_of_its_own(monkeypatch, tmp_path):
    """Inductor's own choice depends on the graph alone: two processes would overwrite each other's files."""
    folders = []

    def record(lowered, package_path, inductor_configs):
        folder = pathlib.Path(torch._inductor.config.aot_inductor.output_path)
        assert folder.is_dir()
        folders.append(folder)
        pathlib.Path(package_path).write_bytes(b"whole")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", record)
    program = small_program(monkeypatch, "llama")
    for name in ("one", "other"):
        aot_compile(program, tmp_path / f"{name}.pt2")
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)
    assert torch._inductor.config.aot_inductor.output_path == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"one.pt2": b"whole", "other.pt2": b"whole"}


def test_what_fails_leaves_no_file(monkeypatch, tmp_path):
    def fail(lowered, package_path, inductor_configs):
        pathlib.Path(package_path).write_bytes(b"half")
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        aot_compile(small_program(monkeypatch, "llama"), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_inputs_lie_as_those_that_were_compiled_for():
    ids = torch.arange(40).view(2, 20)
    for part in (ids, ids[:, :3], ids[:, 1:], ids[1:, 7:], ids[:1, 1:2]):
        found = _as_compiled(part)
        assert torch.equal(found, part)
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
    assert _as_compiled(ids) is ids

"""A tiny model as an ONNX file on onnxruntime, against the applied model; and what is refused."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import kitty_compile
from kitty_compile import KittyConfig, export_formats
from kitty_compile.functional_step import LayerGroup
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.testing import random_ids, tiny_config, tiny_model
from tests import onnx_cases

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

PIECES = [140, *([1] * 160), 7, 120, *([1] * 33)]  # pages of K are full at 160, 288 and 416 tokens, of V at 288 and 416


def tiny_llama(num_layers=2):
    """With heads of a size that models have."""
    config = tiny_config("llama")
    config.head_dim, config.num_hidden_layers = 64, num_layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    target = tmp_path_factory.mktemp("onnx") / "llama.onnx"
    lines = []
    manifest = kitty_compile.export_onnx(model, target, progress=lines.append)
    assert lines[0] == "running the model"
    assert lines[-1] == "checking the file"
    assert sorted(file.name for file in target.parent.iterdir()) == ["llama.onnx", "llama.onnx.json"]
    assert json.loads((target.parent / "llama.onnx.json").read_text())["states"] == manifest.states
    assert not kitty_compile.report(model).is_applied
    return target


@pytest.fixture
def runner(path):
    return kitty_compile.load_onnx(path, threads=1)


def applied(model):
    return kitty_compile.apply(copy.deepcopy(model), compile=False)


def test_forced_tokens_are_within_the_budget(model, runner):
    ids = random_ids(2, sum(PIECES))
    cache = KittyCache(model.config)
    expected = onnx_cases.forced(onnx_cases.call_of(applied(model), cache), ids, PIECES)
    actual = onnx_cases.forced(runner, ids, PIECES)
    error = onnx_cases.divergence(actual, expected)
    cost = onnx_cases.divergence(expected, onnx_cases.unquantised(model, ids, PIECES))
    assert error[:20].max() < 1e-8  # before a page is read packed
    assert cost[:20].max() < 1e-8
    assert error.mean() <= onnx_cases.BUDGET * cost.mean()
    assert [runner.state()[name].shape[3] for name in ("key_low", "value_low")] == [3, 2]
    assert onnx_cases.differing_codes(runner, cache) < 1e-3


def test_axes_are_named_and_operators_standard(path, runner):
    file = onnx.load(path)
    onnx.checker.check_model(file, full_check=True)
    assert {node.domain for node in file.graph.node} == {""}
    assert [(opset.domain, opset.version) for opset in file.opset_import] == [("", runner.manifest.opset)]
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*file.graph.input, *file.graph.output)
    }
    assert shapes["input_ids"] == ["batch", "columns"]
    assert shapes["past_key_low"] == [2, "batch", 2, "key_pages", 32, 64]
    assert shapes["past_value_raw"] == [2, "batch", 2, "value_tokens", 64]
    assert shapes["logits"] == ["batch", 1, 96]
    assert "key_pages" in shapes["present_key_low"][3]
    assert {name.removeprefix("past_") for name in shapes if name.startswith("past_")} == {
        name.removeprefix("present_") for name in shapes if name.startswith("present_")
    }


@pytest.mark.parametrize("batch", [1, 3])
def test_any_batch_and_any_chunks(model, path, batch):
    ids = random_ids(batch, 300, seed=batch)
    whole, pieces = (kitty_compile.load_onnx(path, threads=1) for _ in range(2))
    whole(ids)
    for piece in ids.split([1, 30, 1, 1, 126, 141], dim=1):
        pieces(piece)
    assert {name: value.shape for name, value in whole.state().items()} == {
        name: value.shape for name, value in pieces.state().items()
    }
    raw = [runner.state()["key_raw"][:1] for runner in (whole, pieces)]  # of the first layer, which no page has touched
    assert (raw[0] - raw[1]).abs().max() < 1e-5
    assert whole.state()["length"].item() == whole.columns == pieces.columns == 300


@pytest.mark.parametrize("columns", [1, 31, 159, 161, 300, 700])
def test_bytes_of_the_state(model, runner, columns):
    runner(random_ids(1, columns))
    expected = onnx_cases.formula_bytes(applied(model), KittyConfig(), columns)
    assert abs(runner.state_bytes - expected) <= 0.02 * expected + 8  # 8: the length


def test_generates_what_the_applied_model_generates(model, runner):
    ids = random_ids(2, 150)
    expected = applied(model).generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert torch.equal(runner.generate(ids, 20), expected)
    assert torch.equal(runner.generate(ids, 20), expected)  # from an empty state again


def test_an_end_token_ends(runner):
    ids = random_ids(1, 20)
    free = runner.generate(ids, 12)
    ended = runner.generate(ids, 12, eos_token_id=int(free[0, 22]))
    assert ended.shape[1] <= 23
    assert torch.equal(ended, free[:, : ended.shape[1]])


def test_runs_without_transformers(path):
    program = (
        "import sys, torch, kitty_compile\n"
        f"print(kitty_compile.load_onnx({str(path)!r}).generate(torch.tensor([[5, 6, 7]]), 4).tolist())\n"
        "assert not {'transformers', 'triton', 'onnx', 'onnxscript'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected = kitty_compile.load_onnx(path).generate(torch.tensor([[5, 6, 7]]), 4)
    assert json.loads(found.stdout) == expected.tolist()


def test_the_command_knows_the_file(path):
    program = export_formats.load(path)
    assert export_formats.manifest_of(program)["format"] == "kitty_compile.onnx"


@pytest.mark.parametrize(
    ("ids", "mask", "error", "match"),
    [
        (torch.ones(1, 3), None, TypeError, "input_ids must be an int64 tensor"),
        (torch.ones(3, dtype=torch.int64), None, TypeError, "input_ids must be an int64 tensor"),
        (torch.ones(1, 0, dtype=torch.int64), None, ValueError, "at least one row and one column"),
        (torch.ones(2, 3, dtype=torch.int64), None, ValueError, "batch must stay 1"),
        (torch.ones(1, 1020, dtype=torch.int64), None, ValueError, "must not exceed the model's 1024 positions, got 5"),
        (torch.ones(1, 2, dtype=torch.int64), torch.tensor([[0, 1]]), ValueError, "must be all ones"),
    ],
)
def test_calls_that_do_not_fit_change_nothing(runner, ids, mask, error, match):
    runner(random_ids(1, 5))
    before = runner.state()
    with pytest.raises(error, match=match):
        runner(ids, mask)
    assert runner.columns == 5
    assert all(torch.equal(value, before[name]) for name, value in runner.state().items())


def test_a_token_that_is_none_changes_nothing(runner):
    expected = runner(random_ids(1, 5))
    with pytest.raises(Exception, match="out of data bounds"):
        runner(torch.tensor([[100_000]]))
    assert runner.columns == 5
    runner.reset()
    assert torch.equal(runner(random_ids(1, 5)), expected)


def test_foreign_and_broken_files_are_refused(path, tmp_path):
    with pytest.raises(ValueError, match="must be an ONNX file that exists"):
        kitty_compile.load_onnx(tmp_path / "none.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="must be a whole ONNX file"):
        kitty_compile.load_onnx(broken)
    file = onnx.load(path)
    manifest = json.loads(file.metadata_props[0].value)
    file.metadata_props[0].value = json.dumps({**manifest, "layout_version": 0})
    onnx.save(file, broken)
    with pytest.raises(ValueError, match=r"layout_version of the file must be \d+, got 0: export it again"):
        kitty_compile.load_onnx(broken)
    del file.metadata_props[:]
    onnx.save(file, broken)
    with pytest.raises(ValueError, match="without its metadata"):
        kitty_compile.load_onnx(broken)


@pytest.mark.parametrize(
    ("change", "arguments", "error", "match"),
    [
        (lambda model: model.bfloat16(), {}, ValueError, "must be float32 and on the CPU to become ONNX"),
        (lambda model: model.train(), {}, ValueError, "must be in eval mode"),
        (lambda model: model, {"config": KittyConfig(selection="random")}, ValueError, 'must be "magnitude"'),
        (lambda model: model, {"config": "none"}, ValueError, "preset must be one of"),
        (lambda model: model, {"logits": "some"}, ValueError, 'logits must be "last" or "all"'),
        (lambda model: model.model, {}, ValueError, "no language model head"),
        (lambda model: torch.nn.Linear(2, 2), {}, TypeError, "must be a transformers PreTrainedModel, got Linear"),
        (lambda model: kitty_compile.apply(model, "kitty-pro"), {"config": "kitty"}, ValueError, "that was applied"),
    ],
)
def test_what_cannot_be_exported_is_refused(model, tmp_path, change, arguments, error, match):
    changed = change(copy.deepcopy(model))
    with pytest.raises(error, match=match):
        kitty_compile.export_onnx(changed, tmp_path / "model.onnx", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_that_loses_its_update_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(LayerGroup, "advance", lambda self, state, key, value: state)
    with pytest.raises(
        ValueError, match="must depend on input_ids, which it does not in present_key_raw, present_key_low"
    ):
        kitty_compile.export_onnx(tiny_llama(num_layers=1), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral-windowed", "gemma2", "gemma3", "gpt-oss", "phi3", "gpt-neox", "qwen3"])
def test_families(family, tmp_path):
    """``export_onnx`` compares the file with the model itself, across a seal."""
    model = tiny_model(family)
    if family == "gpt-oss":
        with pytest.raises(ValueError, match=r"must have a form in ONNX, .*grouped_mm"):
            kitty_compile.export_onnx(model, tmp_path / "model.onnx")
        model.set_experts_implementation("batched_mm")
    kitty_compile.export_onnx(model, tmp_path / "model.onnx")
    ids = random_ids(2, 100)
    expected = applied(model).generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(kitty_compile.load_onnx(tmp_path / "model.onnx").generate(ids, 5), expected)

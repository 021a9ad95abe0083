"""One attention layer on onnxruntime: whatever the chunks, the state that comes out is that of torch, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitty_compile import KittyConfig
from kitty_compile.kernels import functional_cache
from kitty_compile.kernels.functional_cache import State
from tests.test_functional_cache import GROUP, HEADS, KEY_DIM, VALUE_DIM

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
trace = pytest.importorskip("kitty_compile.onnx_export").trace

PARAMETERS = KittyConfig(boost_fraction=0.25, value_bits=4).parameters(0, KEY_DIM, VALUE_DIM, HEADS)
TYPES = {torch.float32: 1, torch.uint8: 2, torch.int16: 5, torch.float16: 10, torch.bfloat16: 16}


class Layer(torch.nn.Module):
    def forward(self, query, key, value, tensors):
        state = State.of_named(tensors)
        at = functional_cache.positions(state, query.shape[2], PARAMETERS)
        output = functional_cache.attend(query, key, value, state, at, scale=0.2, softcap=0.0, sinks=None)
        return output, functional_cache.advance(state, key, value, PARAMETERS).named()


def call_of(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS * GROUP, KEY_DIM), (HEADS, KEY_DIM), (HEADS, VALUE_DIM)
    made = [torch.randn(batch, number, length, dim, generator=generator) for number, dim in heads]
    made[1][..., 3] *= 4  # a channel that is always boosted
    return [torch.round(tensor * 8) / 8 for tensor in made]  # with ties


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Layer, traced where K has one page more than V and no page is completed: sizes that must not become constants."""
    _, tensors = Layer()(*call_of(2, 700, 0), functional_cache.empty_state(PARAMETERS, 2, dtype=torch.float32).named())
    dynamic = dict.fromkeys((0, 2), torch.export.Dim.DYNAMIC)
    shapes = (dynamic, dynamic, dynamic, dict.fromkeys(tensors, dynamic))
    exported = trace(Layer(), (*call_of(2, 5, 0), tensors), shapes)
    assert tensors["key_low"].shape[2] == tensors["value_low"].shape[2] + 1
    names = ["query", "key", "value", *tensors], ["output", *(f"present_{name}" for name in tensors)]
    program = torch.onnx.export(exported, dynamo=True, verbose=False, input_names=names[0], output_names=names[1])
    path = tmp_path_factory.mktemp("onnx") / "layer.onnx"
    program.save(path)
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def value_of(tensor):
    if tensor.numel() == 0:
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(tensor.shape), TYPES[tensor.dtype])
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())


def tensor_of(value):
    return torch.from_dlpack(value._ortvalue.to_dlpack())


@given(
    pieces=st.lists(st.one_of(st.integers(1, 5), st.integers(100, 300)), min_size=1, max_size=6),
    batch=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=25)
def test_state_and_attention_are_those_of_torch(session, pieces, batch, seed):
    call, start = call_of(batch, sum(pieces), seed), 0
    state = functional_cache.empty_state(PARAMETERS, batch, dtype=torch.float32).named()
    fed = {name: value_of(tensor) for name, tensor in state.items()}
    outputs = [output.name for output in session.get_outputs()]
    for length in pieces:
        piece = [tensor[:, :, start : start + length] for tensor in call]
        start += length
        own = {name: value_of(tensor) for name, tensor in zip(("query", "key", "value"), piece, strict=True)}
        result = dict(zip(outputs, session.run_with_ort_values(outputs, own | fed), strict=True))
        expected, state = Layer()(*piece, state)
        assert (tensor_of(result.pop("output")) - expected).abs().max() < 1e-5
        fed = {name.removeprefix("present_"): value for name, value in result.items()}
        for name, tensor in state.items():
            assert tuple(fed[name].shape()) == tuple(tensor.shape), name
            assert not tensor.numel() or torch.equal(tensor_of(fed[name]), tensor), name

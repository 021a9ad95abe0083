import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kitty_compile.columns import Call
from kitty_compile.kernels import attend_torch, ops, update_torch
from kitty_compile.kernels.layout import LayerTensors, RawLayout
from tests.kernel_cases import make_case, make_layout

RAW = RawLayout(32, 128, 32)


def numbers(layout, raw=RAW, seed=-1, layer=0):
    return ops.OpParameters(
        layout.key_bits,
        layout.value_bits,
        layout.num_boosted,
        raw.sink_length,
        raw.value_window,
        raw.rollback_window,
        seed,
        layer,
        layout.key_dim,
        layout.value_dim,
        layout.num_kv_heads,
    )


def filled_case(num_columns=2, padded=False):
    layout = make_layout(torch.float32, key_dim=16, value_dim=32, num_boosted=2)
    case = make_case(layout, RAW, [287, 159], num_columns=num_columns, group=3)
    call = Call.of(num_columns, 0, torch.tensor([[False, True], [True, True]])) if padded else Call(num_columns, 0)
    # Comparisons of opcheck take NaN for a difference.
    state = LayerTensors(*(tensor.nan_to_num() if tensor.is_floating_point() else tensor for tensor in case.state))
    return case, call, state


def copies(state):
    return LayerTensors(*(tensor.clone() for tensor in state))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_attend_passes_opcheck(padded, softcap):
    case, call, state = filled_case(padded=padded)
    sinks = torch.randn(6) if softcap else None
    arguments = (case.query, case.key, case.value, call.columns, call.counts, *state, list(numbers(case.layout)))
    torch.library.opcheck(torch.ops.kitty.attend.default, (*arguments, 0.25, softcap, sinks, False))


@pytest.mark.parametrize("padded", [False, True])
def test_update_passes_opcheck(padded):
    case, call, state = filled_case(padded=padded)
    arguments = (case.key, case.value, call.columns, call.counts, *state, list(numbers(case.layout)))
    torch.library.opcheck(torch.ops.kitty.update.default, arguments)


@pytest.mark.parametrize("is_key", [True, False])
def test_dequantize_passes_opcheck(is_key):
    case, _, state = filled_case()
    pages, like = (state.key_pages, state.raw_key) if is_key else (state.value_pages, state.raw_value)
    # Pages that are not sealed hold anything, and NaN differs from itself.
    arguments = (pages.clone().fill_(1), state.page_table, 2, like, list(numbers(case.layout)), is_key)
    torch.library.opcheck(torch.ops.kitty.dequantize.default, arguments)


def test_what_is_mutated_is_declared():
    for name in ("attend", "update"):
        schema = getattr(torch.ops.kitty, name).default._schema
        mutated = [
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        ]
        assert mutated == ["key_pages", "value_pages", "raw_key", "raw_value", "lengths", "high_water"]
        state = [argument.name for argument in schema.arguments if argument.name in LayerTensors._fields]
        assert state == list(LayerTensors._fields)
    schema = torch.ops.kitty.dequantize.default._schema
    assert not any(argument.alias_info for argument in schema.arguments)


def test_attend_is_the_kernel_and_then_update():
    case, call, state = filled_case(padded=True)
    parameters = numbers(case.layout, seed=5, layer=2)
    by_op, by_parts = copies(state), copies(state)
    new = case.key, case.value, call.columns, call.counts
    output = ops.attend(case.query, *new, by_op, parameters, scale=0.25, softcap=3.0)
    settings = {"scale": 0.25, "softcap": 3.0, "sinks": None, "is_empty": False}
    expected = attend_torch.attend(case.query, *new, by_parts, case.layout, RAW, **settings)
    update_torch.update(*new, by_parts, case.layout, RAW, seed=5, layer=2)
    assert torch.equal(output, expected)
    assert by_op.lengths.tolist() == [288, 161]
    for one, other in zip(by_op, by_parts, strict=True):
        assert torch.equal(one, other)

    stored = copies(state)
    ops.update(*new, stored, parameters)
    for one, other in zip(stored, by_parts, strict=True):
        assert torch.equal(one, other)


def test_dequantize_is_the_kernel():
    case, _, state = filled_case()
    dense = ops.dequantize(state.key_pages, state.page_table, 1, state.raw_key, numbers(case.layout), is_key=True)
    expected = update_torch.dequantize_pages(state.key_pages, state.page_table, 1, case.layout, is_key=True)
    assert dense.shape == (2, 2, 128, 16)
    assert torch.equal(dense[0], expected[0])


def test_fakes_give_the_real_shapes_and_dtypes():
    case, _, state = filled_case(num_columns=5)
    parameters = numbers(case.layout)
    new = [tensor.half() for tensor in (case.query, case.key, case.value)]
    with FakeTensorMode() as mode:
        query, key, value = map(mode.from_tensor, new)
        fake_state = LayerTensors(*map(mode.from_tensor, state))
        output = ops.attend(query, key, value, None, None, fake_state, parameters, scale=1.0)
        assert (output.shape, output.dtype) == ((2, 6, 5, 32), torch.float16)
        for is_key, width, like in ((True, 16, fake_state.raw_key), (False, 32, fake_state.raw_value)):
            dense = ops.dequantize(fake_state.key_pages, fake_state.page_table, 3, like, parameters, is_key)
            assert (dense.shape, dense.dtype) == ((2, 2, 384, width), torch.float32)


def test_a_step_compiles_without_a_graph_break():
    case, _, state = filled_case(num_columns=1)
    parameters = numbers(case.layout)

    def step(query, key, value, state):
        return ops.attend(query, key, value, None, None, state, parameters, scale=0.25) * 2

    eager_state, compiled_state = copies(state), copies(state)
    eager = step(case.query, case.key, case.value, eager_state)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(
        case.query, case.key, case.value, compiled_state
    )
    assert torch.equal(compiled, eager)
    for one, other in zip(compiled_state, eager_state, strict=True):
        assert torch.equal(one, other)

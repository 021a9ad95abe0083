import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.export import Dim

from kitty_compile.columns import Call
from kitty_compile.kernels import attend_static
from kitty_compile.kernels.layout import LayerTensors, RawLayout
from kitty_compile.kernels.ops import OpParameters
from tests.kernel_cases import dense_attention, make_case, make_layout, token_columns

RAW = RawLayout(32, 128, 32)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
RAWS = (
    RAW,
    RawLayout(0, 128, 32),
    RawLayout(32, 0, 32),
    RawLayout(5, 100, 0),
    RawLayout(32, 300, 7),
    RawLayout(0, 0, 0),
)


def parameters_of(case, seed=-1):
    layout, raw = case.layout, case.raw
    return OpParameters(
        layout.key_bits,
        layout.value_bits,
        layout.num_boosted,
        raw.sink_length,
        raw.value_window,
        raw.rollback_window,
        seed,
        3,
        layout.key_dim,
        layout.value_dim,
        layout.num_kv_heads,
    )


def arguments_of(case, *, softcap=0.0, sinks=None, seed=-1, is_empty=False):
    """Those of ``torch.ops.kitty.attend``, on a copy of the state."""
    state = LayerTensors(*(tensor.clone() for tensor in case.state))
    numbers = list(parameters_of(case, seed)), case.layout.key_dim**-0.5, softcap, sinks, is_empty
    return (case.query, case.key, case.value, case.columns, case.counts, *state, *numbers)


def state_in(arguments):
    return arguments[5:12]


def with_pads(case, real):
    """The case with tokens only where ``real`` [B, T]; what the other columns hold is poison."""
    call = Call.of(real.shape[1], 0, real)
    hidden = ~real[:, None, :, None]
    key, value = case.key.masked_fill(hidden, torch.nan), case.value.masked_fill(hidden, torch.inf)
    return dataclasses.replace(case, key=key, value=value, columns=call.columns, counts=call.counts)


def same_bytes(one, other):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def check_output(case, output, *, softcap=0.0, sinks=None):
    """Within the error of an eager run in the model's own dtype."""
    numbers = {"scale": case.layout.key_dim**-0.5, "softcap": softcap, "sinks": sinks}
    real = token_columns(case)
    truth = dense_attention(case, **numbers).transpose(1, 2)[real]
    eager = dense_attention(case, **numbers, dtype=case.query.dtype).transpose(1, 2)[real]
    if not len(truth):
        return
    budget = (eager.double() - truth).abs().max().item()
    if case.query.dtype == torch.float32:
        budget = max(budget, 2**-16 * truth.abs().max().item())
    error = (output.transpose(1, 2)[real].double() - truth).abs().max().item()
    # Where the eager run overflows, no more than finite numbers is asked for.
    assert error <= budget or not math.isfinite(budget), (error, budget)


def check(case, run=attend_static.attend_and_update, **options):
    """The operator's output and the operator's bytes."""
    numbers = {name: options[name] for name in ("softcap", "sinks") if name in options}
    expected, arguments = arguments_of(case, **options), arguments_of(case, **options)
    wanted = torch.ops.kitty.attend(*expected)
    output = run(*arguments)
    assert output.shape == wanted.shape
    assert output.dtype == wanted.dtype
    assert output.isfinite().all()
    assert same_bytes(state_in(arguments), state_in(expected))
    check_output(case, output, **numbers)
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_bits", [2, 4, 16])
@pytest.mark.parametrize("value_bits", [2, 4, 16])
def test_every_pair_of_bits(dtype, key_bits, value_bits):
    layout = make_layout(dtype, key_dim=32, value_dim=16, key_bits=key_bits, value_bits=value_bits, num_boosted=4)
    check(make_case(layout, RAW, [500, 0, 287, 40, 159], group=2, kind="channels", num_columns=3))


@pytest.mark.parametrize("num_boosted", [0, 1, 7, 8, 9, 31, 32])
def test_every_number_of_boosted_channels(num_boosted):
    check(make_case(make_layout(key_dim=32, num_boosted=num_boosted), RAW, [415, 287], kind="channels"))


@pytest.mark.parametrize("kind", ["outliers", "constant", "tiny", "signed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_every_kind(dtype, kind):
    layout = make_layout(dtype, key_dim=16, num_boosted=2)
    check(make_case(layout, RAW, [415, 31, 200], kind=kind, num_columns=130))


@pytest.mark.parametrize("raw", RAWS, ids=lambda raw: f"{raw.sink_length}-{raw.value_window}-{raw.rollback_window}")
@pytest.mark.parametrize("num_columns", [1, 129])
def test_ragged_rows_at_every_edge(raw, num_columns):
    sink, window = raw.sink_length, raw.value_window
    starts = (0, sink, sink + 128, sink + window, sink + 128 + window, sink + 256)
    lengths = sorted({max(start + step, 0) for start in starts for step in (-1, 0, 1)})
    check(make_case(make_layout(key_dim=16, heads=1, num_boosted=2), raw, lengths, num_columns=num_columns))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks(softcap, with_sinks):
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, [430, 20], group=3, num_columns=4)
    sinks = torch.randn(6).half() * 3 if with_sinks else None
    plain = check(case)
    output = check(case, softcap=softcap, sinks=sinks)
    assert torch.equal(plain, output) == (softcap == 0 and not with_sinks)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_an_empty_cache(softcap):
    check(
        make_case(make_layout(key_dim=16, num_boosted=2), RAW, [0, 0], num_columns=200), softcap=softcap, is_empty=True
    )


def test_random_selection_of_channels():
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, [150, 280], num_columns=140)
    check(case, seed=5)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_query_that_sees_nothing_gives_zero(softcap):
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, [0, 0, 40], num_columns=3)
    case = with_pads(case, torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 0]]).bool())
    output = check(case, softcap=softcap)
    assert (output[0, :, :2] == 0).all()
    assert (output[1] == 0).all()


def test_a_table_without_room_for_a_page():
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, [20, 0], num_columns=3)
    state = case.state._replace(page_table=case.state.page_table[:, :0])
    check(dataclasses.replace(case, state=state))


def test_pages_beyond_those_that_are_read_do_not_matter():
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, [430, 20], num_columns=140, room=1000)
    few = check(case, lambda *arguments: attend_static.attend_and_update(*arguments, num_pages=3, num_sealed=2))
    assert torch.allclose(few.float(), check(case).float(), atol=1e-2)


def test_a_state_with_more_rows_than_the_call():
    case = make_case(make_layout(torch.float32, key_dim=16, num_boosted=2), RAW, [287, 400, 159], num_columns=3)
    two = dataclasses.replace(case, query=case.query[:2], key=case.key[:2], value=case.value[:2])
    arguments, expected = arguments_of(two), arguments_of(two)
    output = attend_static.attend_and_update(*arguments)
    assert torch.allclose(output, torch.ops.kitty.attend(*expected), atol=1e-3)
    assert same_bytes(state_in(arguments), state_in(expected))
    assert state_in(arguments)[4].tolist() == [290, 403, 159]


@settings(max_examples=25)
@given(data=st.data())
def test_ragged_calls_one_after_another(data):
    """Each state goes its own way over all calls: the pages stay the same bit for bit."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 7, 33, 128, 161, 300]), min_size=1, max_size=5))
    raw = data.draw(st.sampled_from(RAWS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    whole = make_case(
        make_layout(key_dim=16, value_dim=32, num_boosted=2), raw, [0] * 4, num_columns=sum(sizes), group=2
    )
    real = torch.rand(4, sum(sizes), generator=generator) < torch.tensor([0.0, 0.3, 0.9, 1.1]).unsqueeze(1)
    states = [LayerTensors(*(tensor.clone() for tensor in whole.state)) for _ in range(2)]
    start = 0
    for size in sizes:
        columns = slice(start, start + size)
        tensors = {name: getattr(whole, name)[:, :, columns] for name in ("query", "key", "value")}
        case = with_pads(dataclasses.replace(whole, **tensors), real[:, columns])
        call = (case.query, case.key, case.value, case.columns, case.counts)
        numbers = (list(parameters_of(case)), 0.25, 0.0, None, False)
        expected = torch.ops.kitty.attend(*call, *states[0], *numbers)
        output = attend_static.attend_and_update(*call, *states[1], *numbers)
        shown = real[:, columns]
        error = (output.transpose(1, 2)[shown].float() - expected.transpose(1, 2)[shown].float()).abs()
        assert error.max() < 1e-2 if len(error) else True
        assert same_bytes(*states)
        start += size


class Attend(torch.nn.Module):
    """One layer over buffers, as an exported program has it."""

    def __init__(self, case, attend):
        super().__init__()
        for name, tensor in case.state._asdict().items():
            self.register_buffer(name, tensor.clone())
        self.numbers = (list(parameters_of(case)), 0.25, 0.0, None, False)
        self.attend = attend

    def forward(self, query, key, value, real):
        call = Call.of(query.shape[2], 0, real)
        state = [self.get_buffer(name) for name in LayerTensors._fields]
        return self.attend(query, key, value, call.columns, call.counts, *state, *self.numbers)


def test_one_trace_serves_every_size():
    """Batch and columns are symbols in it, no operator of ours is left, and what it writes are the buffers."""
    layout = make_layout(torch.float32, key_dim=16, num_boosted=2)
    case = make_case(layout, RAW, [0, 0, 0], num_columns=5, group=2, room=600)
    example = (case.query, case.key, case.value, torch.ones(3, 5, dtype=torch.bool))
    batch, columns = Dim("batch", min=1, max=3), Dim("columns", min=1, max=600)
    shapes = (*({0: batch, 2: columns} for _ in range(3)), {0: batch, 1: columns})
    program = torch.export.export(
        Attend(case, attend_static.attend_and_update), example, dynamic_shapes=shapes, strict=False
    )
    program = program.run_decompositions()
    assert not [node for node in program.graph.nodes if "kitty" in str(node.target)]
    written = {"key_pages", "value_pages", "raw_key", "raw_value", "lengths", "high_water"}
    assert set(program.graph_signature.buffers_to_mutate.values()) == written
    for batch_size, sizes in ((3, [300, 1, 129]), (1, [1, 160])):
        expected, traced = Attend(case, torch.ops.kitty.attend), program.module()
        for name, tensor in case.state._asdict().items():
            traced.get_buffer(name).copy_(tensor)
        for size in sizes:
            call = make_case(layout, RAW, [0] * batch_size, num_columns=size, group=2, seed=size)
            real = torch.rand(batch_size, size) < 0.9
            inputs = (call.query, call.key, call.value, real)
            assert torch.allclose(traced(*inputs)[real.any(1)], expected(*inputs)[real.any(1)], atol=1e-3)
            assert same_bytes([traced.get_buffer(name) for name in LayerTensors._fields], list(expected.buffers()))


def ring_arguments(num_columns, *, rows=3, ring=37, window=30, seed=0, softcap=0.0, sinks=None):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, heads, num_columns, 16, generator=generator) for heads in (4, 2, 2))
    real = torch.rand(2, num_columns, generator=generator) < 0.8
    state = (
        torch.full((rows, 2, ring, 16), torch.nan),
        torch.full((rows, 2, ring, 16), torch.nan),
        torch.zeros(rows, ring, dtype=torch.bool),
        torch.zeros(1, dtype=torch.int64),
    )
    return (query, key, value, real), state, (window, 0.25, softcap, sinks)


@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, None), (5.0, None), (0.0, torch.ones(4))])
@pytest.mark.parametrize("sizes", [[1, 1, 5, 36], [37, 1, 38, 2], [100, 3, 74, 1]])
def test_a_sliding_window(sizes, softcap, sinks):
    _, one, _ = ring_arguments(1)
    other = tuple(tensor.clone() for tensor in one)
    for size in sizes:
        call, _, numbers = ring_arguments(size, seed=size, softcap=softcap, sinks=sinks)
        expected = torch.ops.kitty.attend_window(*call, *one, *numbers)
        output = attend_static.attend_window_and_append(*call, *other, *numbers)
        real = call[3]
        assert torch.allclose(output.transpose(1, 2)[real], expected.transpose(1, 2)[real], atol=1e-5)
        assert output.isfinite().all()
        assert same_bytes([tensor.contiguous() for tensor in one], other)


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 159, 160])
def test_a_bias_says_what_a_mask_says(num_tokens):
    """And its rows start where CUDA's kernels want them; a row that sees nothing is hidden whole."""
    mask = torch.rand(2, 1, 6, num_tokens) < 0.5
    mask[0, 0, 3], mask[1, 0, 2] = False, True
    bias = attend_static._bias(mask, torch.bfloat16)
    assert bias.shape == mask.shape
    assert torch.equal(bias == 0, mask)
    assert torch.equal(bias == -torch.inf, ~mask)
    assert all(stride % 8 == 0 for stride in bias.stride()[:-1])
    assert bias.stride(-1) == 1
    query, key, value = (torch.randn(2, 3, size, 16) for size in (6, num_tokens, num_tokens))
    expected = attend_static._fused(query, key, value, mask, 0.25)
    found = torch.softmax(query @ key.mT * 0.25 + bias.float(), dim=-1).nan_to_num(0.0) @ value
    torch.testing.assert_close(found, expected)

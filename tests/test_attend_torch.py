import dataclasses

import pytest
import torch

from kitty_compile.columns import Call
from kitty_compile.kernels import attend_torch, update_torch
from kitty_compile.kernels.layout import RawLayout
from tests.kernel_cases import dense_attention, make_case, make_layout, token_columns

RAW = RawLayout(32, 128, 32)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 192, 256)


def edges(raw):
    """Lengths around every edge of the read rule."""
    sink, page, window = raw.sink_length, 128, raw.value_window
    starts = (sink, sink + page, sink + window, sink + page + window, sink + 2 * page)
    return sorted({max(start + step, 0) for start in (0, *starts) for step in (-1, 0, 1)})


def with_pads(case, real):
    """The case with tokens only where ``real`` [B, T]; what the other columns hold is poison."""
    call = Call.of(real.shape[1], 0, real)
    hidden = ~real[:, None, :, None]
    key, value = case.key.masked_fill(hidden, torch.nan), case.value.masked_fill(hidden, torch.inf)
    return dataclasses.replace(case, key=key, value=value, columns=call.columns, counts=call.counts)


def attend(case, *, softcap=0.0, sinks=None, scale=None):
    return attend_torch.attend(
        case.query,
        case.key,
        case.value,
        case.columns,
        case.counts,
        case.state,
        case.layout,
        case.raw,
        scale=case.layout.key_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        sinks=sinks,
        is_empty=not any(case.lengths),
    )


def check(case, *, softcap=0.0, sinks=None, scale=None):
    """Within the error of an eager run in the model's own dtype; folding scale and zero costs fp32 some bits of its 24."""
    before = [tensor.clone() for tensor in case.state]
    output = attend(case, softcap=softcap, sinks=sinks, scale=scale)
    for tensor, copy in zip(case.state, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
    assert output.shape == (*case.query.shape[:3], case.layout.value_dim)
    assert output.dtype == case.query.dtype
    assert output.isfinite().all()
    arguments = {"scale": case.layout.key_dim**-0.5 if scale is None else scale, "softcap": softcap, "sinks": sinks}
    real = token_columns(case)
    truth = dense_attention(case, **arguments).transpose(1, 2)[real]
    eager = dense_attention(case, **arguments, dtype=case.query.dtype).transpose(1, 2)[real]
    budget = (eager.double() - truth).abs().max().item()
    if case.query.dtype == torch.float32:
        budget = max(budget, 2**-16 * truth.abs().max().item())
    error = (output.transpose(1, 2)[real].double() - truth).abs().max().item()
    assert error <= budget, (error, budget)
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_bits", [2, 4, 16])
@pytest.mark.parametrize("value_bits", [2, 4, 16])
def test_every_pair_of_bits(dtype, key_bits, value_bits):
    layout = make_layout(dtype, key_dim=32, key_bits=key_bits, value_bits=value_bits, num_boosted=4)
    check(make_case(layout, RAW, [500, 0, 291, 40], group=2, kind="channels"))


@pytest.mark.parametrize("num_boosted", [0, 1, 7, 8, 9, 31, 32])
def test_every_number_of_boosted_channels(num_boosted):
    layout = make_layout(key_dim=32, num_boosted=num_boosted)
    check(make_case(layout, RAW, [420, 291], kind="channels"))


@pytest.mark.parametrize("key_dim", HEAD_DIMS)
def test_head_dims_that_differ_between_keys_and_values(key_dim):
    value_dim = HEAD_DIMS[HEAD_DIMS.index(key_dim) - 3]
    layout = make_layout(key_dim=key_dim, value_dim=value_dim, heads=1, num_boosted=key_dim // 8)
    check(make_case(layout, RAW, [330], kind="channels", num_columns=2))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_groups(group):
    check(make_case(make_layout(key_dim=16, num_boosted=2), RAW, [330, 170], group=group, num_columns=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("lengths", [[0, 0], [430, 20]])
def test_softcap_sinks_and_scale(dtype, softcap, with_sinks, lengths):
    case = make_case(make_layout(dtype, key_dim=16, num_boosted=2), RAW, lengths, group=3, num_columns=4)
    sinks = torch.randn(6).to(dtype) * 3 if with_sinks else None
    plain = attend(case, scale=0.7)
    output = check(case, softcap=softcap, sinks=sinks, scale=0.7)
    assert torch.equal(plain, output) == (softcap == 0 and not with_sinks)


@pytest.mark.parametrize(
    "raw",
    [
        RAW,
        RawLayout(0, 128, 32),
        RawLayout(32, 0, 32),
        RawLayout(32, 1, 32),
        RawLayout(5, 100, 0),
        RawLayout(32, 300, 7),
        RawLayout(0, 0, 0),
    ],
    ids=lambda raw: f"{raw.sink_length}-{raw.value_window}-{raw.rollback_window}",
)
@pytest.mark.parametrize("num_columns", [1, 3])
def test_ragged_rows_at_every_edge(raw, num_columns):
    layout = make_layout(key_dim=16, heads=1, num_boosted=2)
    check(make_case(layout, raw, edges(raw), num_columns=num_columns, kind="channels"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [300, 0, 31, 161]])
def test_pads_are_seen_by_nobody(dtype, lengths):
    case = make_case(make_layout(dtype, key_dim=16, num_boosted=2), RAW, lengths, group=2, num_columns=6)
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    check(with_pads(case, real))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("length", [0, 200])
def test_pads_in_a_batch_of_one(length, softcap):
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, [length], num_columns=5)
    check(with_pads(case, torch.tensor([[False, False, True, True, True]])), softcap=softcap)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_query_that_sees_nothing_gives_zero(softcap):
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, [0, 0, 40], num_columns=3)
    real = torch.tensor([[0, 0, 1], [0, 0, 0], [0, 0, 0]]).bool()
    case = dataclasses.replace(with_pads(case, real), key=case.key, value=case.value)
    output = attend(case, softcap=softcap)
    assert (output[0, :, :2] == 0).all()
    assert (output[1] == 0).all()
    assert (output[2] != 0).any()


@pytest.mark.parametrize("lengths", [[0, 0], [290, 33]])
def test_many_columns_over_a_filled_cache(lengths):
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, lengths, group=2, num_columns=200)
    check(case)
    real = torch.ones(2, 200, dtype=torch.bool)
    real[0, :150] = False
    real[1, 20:60] = False
    check(with_pads(case, real))


@pytest.mark.parametrize("max_scores", [1, 3000, 20000])
def test_blocks_of_query_columns_change_nothing(max_scores, monkeypatch):
    case = make_case(make_layout(torch.float32, key_dim=16, num_boosted=2), RAW, [290, 33], group=2, num_columns=11)
    real = torch.ones(2, 11, dtype=torch.bool)
    real[1, 2:5] = False
    case = with_pads(case, real)
    whole = attend(case, softcap=3.0)
    monkeypatch.setattr(attend_torch, "_MAX_SCORES", max_scores)
    torch.testing.assert_close(check(case, softcap=3.0), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [[0, 0], [290, 33]])
def test_views_with_offsets(lengths):
    case = make_case(make_layout(key_dim=16, num_boosted=2), RAW, lengths, group=2, num_columns=4)
    fused = torch.full((2, 5, 2 * 4 * 16 + 3), torch.nan, dtype=torch.float16)
    parts = fused[:, 1:, 3:].unflatten(-1, (8, 16)).transpose(1, 2)
    query, key, value = parts[:, :4], parts[:, 4:6], parts[:, 6:]
    query.copy_(case.query)
    key.copy_(case.key)
    value.copy_(case.value)
    assert not key.is_contiguous()
    output = attend(dataclasses.replace(case, query=query, key=key, value=value))
    assert torch.equal(output, attend(case))


def test_extreme_values_stay_finite():
    for dtype in DTYPES:
        for kind in ("outliers", "constant", "tiny"):
            case = make_case(make_layout(dtype, key_dim=16, num_boosted=2), RAW, [330, 161], kind=kind, num_columns=2)
            assert attend(case).isfinite().all(), (dtype, kind)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_largest_half_floats_stay_finite(bits):
    """A stored scale is rounded, so that the last level of a page may lie past the largest fp16."""
    case = make_case(make_layout(key_dim=16, num_boosted=2, key_bits=bits, value_bits=bits), RAW, [0], num_columns=330)
    for side in (case.key, case.value):
        side.copy_(torch.where(torch.rand(side.shape) < 0.5, 65504.0, -65504.0))
        side[:, :, :, 1] = 65504.0
    parts = case.key, case.value, None, None, case.state, case.layout, case.raw
    update_torch.update(*parts, seed=-1, layer=0)
    # Looks at the tokens whose channel 1 is alike, which is all of them: the average is the stored extreme.
    query = torch.zeros(1, 2, 1, 16, dtype=torch.float16)
    new = [torch.full((1, 2, 1, 16), 65504.0, dtype=torch.float16) for _ in range(2)]
    for direction in (0.0, 1e-4, 1e-2):
        query[..., 1] = direction
        call = dataclasses.replace(case, query=query, key=new[0], value=new[1])
        assert attend(call).isfinite().all()


def test_attend_dense_is_attention():
    query, key, value = torch.randn(2, 6, 3, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 32)
    mask = torch.rand(2, 1, 3, 9) < 0.6
    mask[1, 0, 2] = False
    output = attend_torch.attend_dense(query, key, value, mask, scale=0.3, softcap=0.0, sinks=None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    expected[1, :, 2] = 0
    torch.testing.assert_close(output, expected)

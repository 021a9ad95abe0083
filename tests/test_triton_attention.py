"""Attention of the Triton backend against dense fp64 over the dequantised cache, on poisoned states (see kernel_cases)."""

import pytest
import torch

from kitty_compile.kernels.launch_plan import choose_splits
from kitty_compile.kernels.layout import RawLayout
from tests.kernel_cases import make_case, make_layout
from tests.kernel_checks import attend, check_attention

RAW = RawLayout(sink_length=32, value_window=128, rollback_window=32)
EDGES = [0, 7, 32, 33, 159, 160, 287, 288, 416]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "channels"])
def test_decode(dtype, kind):
    check_attention(make_case(make_layout(dtype), RAW, [700, 0, 289], group=4, kind=kind))


def test_decode_at_every_edge():
    check_attention(make_case(make_layout(heads=1, key_dim=32), RAW, EDGES, group=2))


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 16])
def test_groups(group):
    check_attention(make_case(make_layout(key_dim=32), RAW, [450], group=group))


@pytest.mark.parametrize("bits", [(2, 4), (4, 2), (4, 16), (16, 4), (16, 16)])
def test_bits(bits):
    layout = make_layout(torch.bfloat16, key_dim=32, key_bits=bits[0], value_bits=bits[1], num_boosted=4)
    check_attention(make_case(layout, RAW, [430, 31], group=2, kind="channels"))


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "num_boosted"),
    [(16, 32, 3), (64, 64, 0), (80, 112, 10), (96, 16, 96), (64, 32, 61), (192, 80, 24)],
)
def test_head_dims_and_boost_counts(key_dim, value_dim, num_boosted):
    layout = make_layout(key_dim=key_dim, value_dim=value_dim, heads=1, num_boosted=num_boosted)
    check_attention(make_case(layout, RAW, [430], group=2, kind="channels"))


@pytest.mark.parametrize(("num_columns", "group"), [(5, 2), (3, 8), (75, 3)])
def test_several_columns(num_columns, group):
    layout = make_layout(key_dim=32, num_boosted=4)
    check_attention(make_case(layout, RAW, [420, 3, 200], num_columns=num_columns, group=group))


@pytest.mark.parametrize(("num_columns", "pads"), [(1, [0, 1, 1]), (6, [0, 2, 6]), (70, [69, 0, 33])])
def test_padding(num_columns, pads):
    layout = make_layout(torch.bfloat16, key_dim=32, heads=1, num_boosted=4)
    case = make_case(layout, RAW, [290, 0, 40], num_columns=num_columns, group=2, pads=pads)
    check_attention(case, sinks=torch.randn(2))


@pytest.mark.parametrize("is_empty", [False, True])
def test_softcap_and_sinks_on_an_empty_cache(is_empty):
    case = make_case(make_layout(key_dim=32), RAW, [0, 0], num_columns=80, group=2, pads=[0, 5])
    case.query *= 4
    check_attention(case, softcap=3.0, sinks=2 * torch.randn(4), is_empty=is_empty)


@pytest.mark.parametrize("num_columns", [1, 20])
def test_softcap_and_sinks_on_a_filled_cache(num_columns):
    case = make_case(make_layout(key_dim=32), RAW, [300, 430], num_columns=num_columns, group=2)
    case.query *= 4
    check_attention(case, softcap=3.0, sinks=2 * torch.randn(4))


@pytest.mark.parametrize("raw", [RawLayout(0, 0, 0), RawLayout(5, 300, 1)], ids=["bare", "wide"])
@pytest.mark.parametrize("num_columns", [1, 20])
def test_windows(raw, num_columns):
    layout = make_layout(key_dim=32, heads=1, num_boosted=4)
    check_attention(make_case(layout, raw, [128, 500, 4], num_columns=num_columns, group=4))


def test_prefill_of_an_empty_cache_takes_sdpa():
    check_attention(make_case(make_layout(), RAW, [0, 0], num_columns=9, group=2), is_empty=True)


def test_nothing_visible_gives_zero():
    case = make_case(make_layout(key_dim=32), RAW, [0, 0], num_columns=4, group=2, pads=[4, 0])
    case.columns[1] = torch.tensor([2, 3, 9, 9])
    case.counts[1] = 2
    output = attend(case, scale=1.0)
    assert (output[0] == 0).all()
    assert (output[1, :, :2] == 0).all()
    assert (output[1, :, 2:] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outliers_stay_finite(dtype):
    case = make_case(make_layout(dtype), RAW, [450], group=2, kind="outliers")
    case.query[..., ::5] = (3e4 * case.query[..., ::5]).clamp(-6e4, 6e4)
    assert torch.isfinite(attend(case, scale=0.125)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_scales_beside_a_large_one(dtype):
    """One channel and one token of V a thousand times the rest: what is rounded beside them must still count."""
    case = make_case(make_layout(dtype, key_dim=32, heads=1), RAW, [430], group=2)
    for pages_of in (case.past_key, case.past_value):
        pages_of[..., 3] *= 1000
        pages_of[:, :, 77] *= 10
    case = make_case(case.layout, RAW, [430], group=2, past=(case.past_key, case.past_value))
    case.query[..., 3] = 0.001
    check_attention(case)


def test_splits_fill_the_device_once():
    assert choose_splits(8, 1024, 1056) == 128
    assert choose_splits(8, 31, 1056) == 31
    assert choose_splits(4096, 256, 1056) == 1

"""Sealing, appending and advancing in Triton against ``update_torch``, byte for byte."""

import pytest
import torch

from kitty_compile.kernels.layout import RawLayout
from tests.kernel_cases import make_case, make_layout
from tests.kernel_checks import check_update, update

RAW = RawLayout(sink_length=32, value_window=128, rollback_window=32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "channels", "outliers", "constant", "tiny", "signed"])
def test_pages_equal_reference(dtype, kind):
    case = make_case(make_layout(dtype), RAW, [287, 150], num_columns=9, kind=kind)
    check_update(case)


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "num_boosted"),
    [(16, 32, 3), (32, 16, 16), (64, 64, 0), (80, 96, 10), (96, 80, 12), (112, 112, 14), (128, 64, 128), (192, 16, 24)],
)
def test_head_dims_and_boost_counts(key_dim, value_dim, num_boosted):
    layout = make_layout(key_dim=key_dim, value_dim=value_dim, heads=1, num_boosted=num_boosted)
    check_update(make_case(layout, RAW, [287], num_columns=1, kind="channels"))


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 4), (4, 2), (4, 16), (16, 4), (16, 16)])
def test_bits(key_bits, value_bits):
    layout = make_layout(torch.bfloat16, key_dim=32, heads=2, key_bits=key_bits, value_bits=value_bits, num_boosted=4)
    check_update(make_case(layout, RAW, [286, 20], num_columns=4, kind="channels"))


def test_random_selection():
    case = make_case(make_layout(key_dim=80, num_boosted=10), RAW, [158, 159], num_columns=2)
    check_update(case, seed=123456789012, layer=7)


@pytest.mark.parametrize(
    "raw",
    [RAW, RawLayout(0, 128, 32), RawLayout(4, 0, 0), RawLayout(32, 300, 1)],
    ids=["kitty", "nosink", "bare", "wide"],
)
def test_long_call_seals_from_ring_and_call(raw):
    layout = make_layout(key_dim=32, heads=1, num_boosted=4)
    case = make_case(layout, raw, [0, 5, 31, 160, 459], num_columns=700, pads=[0, 700, 1, 333, 12])
    check_update(case)


@pytest.mark.parametrize("num_columns", [32, 33])
def test_calls_about_as_long_as_the_rollback_window(num_columns):
    """Up to that length sealing and appending share a launch."""
    layout = make_layout(key_dim=32, heads=1, num_boosted=4)
    check_update(make_case(layout, RAW, [259, 287, 128, 0], num_columns=num_columns, pads=[0, 0, 1, 31]))


def test_channels_that_are_not_dense():
    case = make_case(make_layout(heads=1), RAW, [159], num_columns=3)
    case.key = case.key.mT.contiguous().mT
    case.value = case.value.mT.contiguous().mT
    check_update(case)


def test_ties_go_to_the_lower_channel():
    case = make_case(make_layout(key_dim=32, heads=1, num_boosted=5), RAW, [159], num_columns=1)
    for tensor in (case.state.raw_key, case.key):
        tensor.copy_(tensor[..., :1].expand_as(tensor))
    check_update(case)


def test_float32_is_refused():
    case = make_case(make_layout(torch.float32, heads=1), RAW, [3])
    with pytest.raises(ValueError, match="must run in fp16 or bf16, got float32"):
        update(case)

"""The materialising kernels against the torch ones, bit for bit."""

import pytest
import torch

from kitty_compile.kernels import triton_backend, update_torch
from kitty_compile.kernels.layout import RawLayout
from tests.kernel_cases import make_case, make_layout

RAW = RawLayout(sink_length=4, value_window=0, rollback_window=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [(2, 2), (4, 4), (16, 16)])
@pytest.mark.parametrize(("head_dim", "num_boosted"), [(64, 8), (80, 10), (32, 0), (16, 15)])
def test_dense_pages_equal_reference(dtype, bits, head_dim, num_boosted):
    layout = make_layout(
        dtype, key_dim=head_dim, heads=2, key_bits=bits[0], value_bits=bits[1], num_boosted=num_boosted
    )
    state = make_case(layout, RAW, [260, 263], kind="channels").state
    for pages, is_key in ((state.key_pages, True), (state.value_pages, False)):
        arguments = pages, state.page_table, 2, layout
        mine = triton_backend.dequantize_pages(*arguments, is_key=is_key)
        right = update_torch.dequantize_pages(*arguments, is_key=is_key)
        assert mine.shape == right.shape
        assert torch.equal(mine.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extremes_saturate(dtype):
    layout = make_layout(dtype)
    state = make_case(layout, RAW, [260], kind="outliers").state
    for pages, is_key in ((state.key_pages, True), (state.value_pages, False)):
        arguments = pages, state.page_table, 2, layout
        mine = triton_backend.dequantize_pages(*arguments, is_key=is_key)
        right = update_torch.dequantize_pages(*arguments, is_key=is_key)
        assert torch.isfinite(mine).all()
        assert torch.equal(mine.view(torch.int16), right.view(torch.int16))


def test_no_pages():
    layout = make_layout()
    state = make_case(layout, RAW, [3]).state
    assert triton_backend.dequantize_pages(state.key_pages, state.page_table, 0, layout, is_key=True).shape == (
        1,
        2,
        0,
        64,
    )

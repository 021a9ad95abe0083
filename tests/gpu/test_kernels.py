"""The Triton kernels on a GPU: many more sizes than the interpreter can take, big pools, CUDA graphs."""

import pytest
import torch

from kitty_compile.kernels import triton_backend, update_torch
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, RawLayout
from tests.kernel_cases import make_case, make_layout, random_tokens
from tests.kernel_checks import assert_same_state, attend, attend_and_update, check_attention, check_update, update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RAW = RawLayout(sink_length=32, value_window=128, rollback_window=32)
HEAD_DIMS = [16, 32, 64, 80, 96, 112, 128, 192, 256]
DTYPES = [torch.float16, torch.bfloat16]
BITS = [(2, 2), (2, 4), (4, 2), (4, 4), (2, 16), (16, 2), (16, 16)]
RAGGED = [0, 31, 33, 159, 160, 287, 288, 416, 1500]


def gpu_case(layout, raw, lengths, **kwargs):
    return make_case(layout, raw, lengths, **kwargs).to("cuda")


def boosted(head_dim, fraction=0.125):
    return int(head_dim * fraction + 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "channels", "outliers", "constant", "tiny", "signed"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_seal_bit_for_bit(head_dim, kind, dtype):
    layout = make_layout(dtype, key_dim=head_dim, num_boosted=boosted(head_dim))
    check_update(gpu_case(layout, RAW, [0, 5, 159, 287, 460], num_columns=300, pads=[0, 300, 3, 200, 77], kind=kind))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", [64, 112, 128, 256])
def test_seal_bits(head_dim, bits):
    layout = make_layout(
        torch.bfloat16, key_dim=head_dim, key_bits=bits[0], value_bits=bits[1], num_boosted=boosted(head_dim)
    )
    check_update(gpu_case(layout, RAW, [287, 20, 159], num_columns=140, kind="channels"))


@pytest.mark.parametrize("num_boosted", [0, 1, 7, 8, 9, 61, 120, 127, 128])
@pytest.mark.parametrize("seed", [-1, 4242424242])
def test_seal_boost_counts(num_boosted, seed):
    layout = make_layout(key_dim=128, num_boosted=num_boosted)
    check_update(gpu_case(layout, RAW, [287, 20, 159], num_columns=140, kind="channels"), seed=seed, layer=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 40])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, num_columns, dtype):
    layout = make_layout(dtype, key_dim=head_dim, num_boosted=boosted(head_dim))
    # Far-apart channels make attention nearly one-hot, where a single close race decides the largest error: many rows.
    check_attention(gpu_case(layout, RAW, 4 * RAGGED, num_columns=num_columns, group=4, kind="channels"))


@pytest.mark.parametrize("num_columns", [1, 40])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (64, 128), (128, 64), (80, 256), (16, 112)])
def test_value_dim_of_its_own(key_dim, value_dim, num_columns):
    layout = make_layout(key_dim=key_dim, value_dim=value_dim, num_boosted=boosted(key_dim))
    check_attention(gpu_case(layout, RAW, RAGGED, num_columns=num_columns, group=2, kind="channels"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [1, 40])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", [64, 112, 128, 256])
def test_bits(head_dim, bits, num_columns, dtype):
    layout = make_layout(dtype, key_dim=head_dim, key_bits=bits[0], value_bits=bits[1], num_boosted=boosted(head_dim))
    check_attention(gpu_case(layout, RAW, RAGGED, num_columns=num_columns, group=2, kind="channels"))


@pytest.mark.parametrize("num_columns", [1, 2, 3, 5, 17, 130, 600])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 24])
def test_groups_and_columns(group, num_columns):
    check_attention(
        gpu_case(make_layout(key_dim=128, num_boosted=16), RAW, RAGGED, num_columns=num_columns, group=group)
    )


@pytest.mark.parametrize("num_boosted", [0, 1, 8, 25, 61, 127, 128])
@pytest.mark.parametrize("num_columns", [1, 40])
def test_boost_counts(num_boosted, num_columns):
    layout = make_layout(key_dim=128, num_boosted=num_boosted)
    # Far-apart channels make attention nearly one-hot, where a single close race decides the largest error: many rows.
    check_attention(gpu_case(layout, RAW, 4 * RAGGED, num_columns=num_columns, group=4, kind="channels"))


@pytest.mark.parametrize("raw", [RawLayout(0, 0, 0), RawLayout(5, 300, 1), RawLayout(64, 1000, 40)], ids=str)
@pytest.mark.parametrize("num_columns", [1, 40])
def test_windows(raw, num_columns):
    check_attention(gpu_case(make_layout(), raw, RAGGED, num_columns=num_columns, group=4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [300, 0, 1200]], ids=str)
@pytest.mark.parametrize(("num_columns", "pads"), [(1, [0, 1, 0]), (9, [9, 3, 0]), (333, [100, 0, 332])])
def test_padding_softcap_and_sinks(num_columns, pads, lengths, dtype):
    is_empty = not any(lengths)
    case = gpu_case(make_layout(dtype, key_dim=128), RAW, lengths, num_columns=num_columns, group=4, pads=pads)
    case.query *= 4
    sinks = 2 * torch.randn(8, device="cuda")
    check_attention(case, is_empty=is_empty)
    check_attention(case, is_empty=is_empty, softcap=5.0)
    check_attention(case, is_empty=is_empty, sinks=sinks.to(dtype))
    check_attention(case, is_empty=is_empty, softcap=5.0, sinks=sinks)


@pytest.mark.parametrize("num_columns", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers(dtype, num_columns):
    case = gpu_case(make_layout(dtype, key_dim=128), RAW, RAGGED, num_columns=num_columns, group=4, kind="outliers")
    case.query[..., ::5] = (3e4 * case.query[..., ::5]).clamp(-6e4, 6e4)
    assert torch.isfinite(attend(case, scale=0.125)).all()


@pytest.mark.parametrize("num_columns", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_row(dtype, num_columns):
    """Errors must not grow with the number of pages of a split."""
    layout = make_layout(dtype, key_dim=128, heads=1, num_boosted=16)
    case = gpu_case(layout, RAW, [32000, 20011], num_columns=num_columns, group=4, kind="channels")
    check_attention(case)


@pytest.mark.parametrize("num_columns", [1, 40])
def test_pool_over_two_gigabytes(num_columns):
    layout = make_layout(key_dim=128, heads=8, num_boosted=16)
    case = gpu_case(layout, RAW, [700, 300], num_columns=num_columns, group=4)
    num_pages = (1 << 31) // layout.value_page_bytes + 1000
    moved = case.state.page_table.numel()
    pools = []
    for pages in (case.state.key_pages, case.state.value_pages):
        pool = torch.full((num_pages, pages.shape[1]), 0xFF, dtype=torch.uint8, device="cuda")
        pool[-moved - 3 :] = pages
        pools.append(pool)
    offset = num_pages - case.state.key_pages.shape[0]
    case.state = case.state._replace(
        key_pages=pools[0], value_pages=pools[1], page_table=case.state.page_table + offset
    )
    check_attention(case)
    small = case.state._replace(key_pages=pools[0][offset:].clone(), value_pages=pools[1][offset:].clone())
    small = LayerTensors(*(part.clone() for part in small))._replace(page_table=case.state.page_table - offset)
    case.state.lengths.add_(99)  # the next token completes a page of K and one of V
    small.lengths.add_(99)
    call = case.key, case.value, case.columns, case.counts
    case.state.raw_key.nan_to_num_()
    case.state.raw_value.nan_to_num_()
    small.raw_key.nan_to_num_()
    small.raw_value.nan_to_num_()
    update(case)
    triton_backend.update(*call, small, layout, RAW, seed=-1, layer=0)
    assert torch.equal(pools[0][offset:], small.key_pages)
    assert torch.equal(pools[1][offset:], small.value_pages)
    assert (pools[0][:offset] == 0xFF).all()
    assert (pools[1][:offset] == 0xFF).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [(2, 2), (4, 4), (16, 16)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dequantize_bit_for_bit(head_dim, bits, dtype):
    layout = make_layout(dtype, key_dim=head_dim, key_bits=bits[0], value_bits=bits[1], num_boosted=boosted(head_dim))
    state = make_case(layout, RawLayout(4, 0, 0), [4 + 5 * PAGE_SIZE, 3 + 6 * PAGE_SIZE], kind="channels").state
    on_gpu = LayerTensors(*(part.cuda() for part in state))
    for name, is_key in (("key_pages", True), ("value_pages", False)):
        right = update_torch.dequantize_pages(getattr(state, name), state.page_table, 5, layout, is_key=is_key)
        mine = triton_backend.dequantize_pages(getattr(on_gpu, name), on_gpu.page_table, 5, layout, is_key=is_key)
        assert torch.equal(mine.cpu().view(torch.int16), right.view(torch.int16))


class Decoder:
    """Decode steps over one case, eagerly or as a CUDA graph."""

    def __init__(self, case):
        self.case = case
        self.output = torch.empty(
            (*case.query.shape[:3], case.layout.value_dim), dtype=case.layout.dtype, device="cuda"
        )
        self.graph = None

    def step(self):
        self.output.copy_(attend_and_update(self.case, scale=0.1))

    def capture(self):
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def run(self, query, key, value):
        self.case.query.copy_(query)
        self.case.key.copy_(key)
        self.case.value.copy_(value)
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()
        return self.output.clone()


@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("key_bits", [2, 16])
def test_cuda_graph_equals_eager_over_seals(key_bits, num_columns):
    """One capture serves every step: rows of different lengths cross page edges at different times."""
    layout = make_layout(torch.bfloat16, key_dim=128, num_boosted=16, key_bits=key_bits)
    steps = 330
    case = make_case(layout, RAW, [0, 31, 500], num_columns=num_columns, group=4, room=steps * num_columns)
    eager, graphed = Decoder(case.to("cuda")), Decoder(case.to("cuda"))
    Decoder(case.to("cuda")).step()  # compiles
    graphed.capture()
    assert_same_state(graphed.case.state, case.state)
    generator = torch.Generator().manual_seed(1)
    inputs = [
        [random_tokens(3, heads, num_columns, 128, torch.bfloat16, generator).cuda() for heads in (2 * 4, 2, 2)]
        for _ in range(steps)
    ]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = [eager.run(*tokens) for tokens in inputs]
        outputs = [graphed.run(*tokens) for tokens in inputs]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, (mine, right) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(mine, right), f"step {step}"
    assert_same_state(graphed.case.state, eager.case.state)
    assert graphed.case.lengths == [steps * num_columns + length for length in (0, 31, 500)]


def test_one_call_or_many_give_the_same_pages():
    layout = make_layout(key_dim=128, num_boosted=16)
    whole = make_case(layout, RAW, [0, 0], num_columns=700, group=1)
    states = []
    for chunk in (700, 1, 7, 133):
        case = whole.to("cuda")
        key, value = case.key, case.value
        for first in range(0, 700, chunk):
            case.key, case.value = key[:, :, first : first + chunk], value[:, :, first : first + chunk]
            update(case)
        states.append(case.state)
    for state in states[1:]:
        assert_same_state(state, states[0])


def test_side_stream_and_other_strides():
    case = gpu_case(make_layout(key_dim=128), RAW, [500, 100], num_columns=5, group=4)
    dense = attend(case, scale=0.1)
    case.query = case.query.mT.contiguous().mT
    case.key = case.key.mT.contiguous().mT
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        strided = attend(case, scale=0.1)
    stream.synchronize()
    assert torch.equal(dense, strided)

import pytest
import torch

from kitty_compile.kernels import attend_window

WINDOW, RING = 7, 12
HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 3, 16, 32


class Columns:
    """A row's columns so far, kept whole, and the ring that the kernel sees (poisoned where nothing was written)."""

    def __init__(self, batch, dtype=torch.float32, ring=RING):
        self.key = torch.zeros(batch, HEADS, 0, KEY_DIM, dtype=dtype)
        self.value = torch.zeros(batch, HEADS, 0, VALUE_DIM, dtype=dtype)
        self.real = torch.zeros(batch, 0, dtype=torch.bool)
        self.ring = (
            torch.full((batch, HEADS, ring, KEY_DIM), torch.nan, dtype=dtype),
            torch.full((batch, HEADS, ring, VALUE_DIM), torch.nan, dtype=dtype),
            torch.zeros(batch, ring, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
        )

    def call(self, num_columns, real=None, softcap=0.0, sinks=None):
        """Attend and append; returns the kernel's output and the dense one in fp64, [B, Hq, T, Dv]."""
        batch, dtype = self.real.shape[0], self.key.dtype
        query = torch.randn(batch, HEADS * GROUP, num_columns, KEY_DIM, dtype=dtype)
        key = torch.randn(batch, num_columns, HEADS, KEY_DIM, dtype=dtype).transpose(1, 2)
        value = torch.randn(batch, num_columns, HEADS, VALUE_DIM, dtype=dtype).transpose(1, 2)
        if real is not None:
            key = key.masked_fill(~real[:, None, :, None], torch.nan)
            value = value.masked_fill(~real[:, None, :, None], torch.inf)
        before = [tensor.clone() for tensor in self.ring]
        output = attend_window.attend(
            query, key, value, real, *self.ring, window=WINDOW, scale=0.3, softcap=softcap, sinks=sinks
        )
        for tensor, copy in zip(self.ring, before, strict=True):
            torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)
        attend_window.append(key, value, real, *self.ring)
        own = torch.ones(batch, num_columns, dtype=torch.bool) if real is None else real
        self.key = torch.cat([self.key, key], dim=2)
        self.value = torch.cat([self.value, value], dim=2)
        self.real = torch.cat([self.real, own], dim=1)
        return output, self.dense(query, softcap, sinks)

    def dense(self, query, softcap, sinks):
        batch, _, num_columns, _ = query.shape
        output = torch.zeros(*query.shape[:3], VALUE_DIM, dtype=torch.float64)
        for row in range(batch):
            for index in range(num_columns):
                column = self.real.shape[1] - num_columns + index
                seen = [c for c in range(max(column - WINDOW + 1, 0), column + 1) if self.real[row, c]]
                for head in range(query.shape[1]):
                    key = self.key[row, head // GROUP, seen].double()
                    scores = key @ query[row, head, index].double() * 0.3
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks[head : head + 1].double()])
                    weights = torch.softmax(scores, 0)[: len(seen)]
                    output[row, head, index] = weights @ self.value[row, head // GROUP, seen].double()
        return output


def check(output, expected, real=None):
    assert output.isfinite().all()
    if real is not None:
        output, expected = output.transpose(1, 2)[real], expected.transpose(1, 2)[real]
    budget = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[output.dtype]
    torch.testing.assert_close(output.double(), expected, rtol=budget, atol=budget)


@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (2.0, False), (0.0, True), (2.0, True)])
def test_a_query_sees_its_window_of_columns(softcap, with_sinks):
    columns = Columns(2)
    sinks = torch.randn(HEADS * GROUP) if with_sinks else None
    for num_columns in (1, 5, 1, 1, 3, 12, 2, 30, 1, 1):
        check(*columns.call(num_columns, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_dtypes(dtype):
    columns = Columns(2, dtype)
    for num_columns in (9, 1, 6):
        output, expected = columns.call(num_columns)
        assert output.dtype == dtype
        check(output, expected)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_pads_are_columns_that_nobody_sees(softcap):
    columns = Columns(3)
    for _ in range(8):
        num_columns = int(torch.randint(1, 9, ()))
        real = torch.rand(3, num_columns) < torch.tensor([[0.5], [0.9], [0.1]])
        check(*columns.call(num_columns, real, softcap=softcap), real)


def test_a_ring_without_room_for_rollback():
    columns = Columns(1, ring=WINDOW)
    for num_columns in (3, 1, 10, 2, 1, 1):
        check(*columns.call(num_columns))


def test_the_ring_holds_the_newest_columns():
    columns = Columns(2)
    for num_columns in (5, 30, 4):
        columns.call(num_columns)
        total = columns.real.shape[1]
        for column in range(max(total - RING, 0), total):
            assert torch.equal(columns.ring[0][:, :, column % RING], columns.key[:, :, column])
            assert torch.equal(columns.ring[1][:, :, column % RING], columns.value[:, :, column])
        assert columns.ring[3].item() == total


@pytest.mark.parametrize(("length", "drops"), [(40, (RING - WINDOW, 2)), (11, (9, 3))])
def test_rolling_back_within_the_room_forgets_the_dropped_columns(length, drops):
    columns = Columns(2)
    columns.call(length)
    for dropped in drops:
        kept = columns.real.shape[1] - dropped
        columns.key, columns.value = columns.key[:, :, :kept], columns.value[:, :, :kept]
        columns.real = columns.real[:, :kept]
        columns.ring[3].fill_(kept)
        check(*columns.call(3))


def test_nothing_moves_in_memory():
    columns = Columns(2)
    addresses = [tensor.data_ptr() for tensor in columns.ring]
    columns.call(4)
    columns.call(20)
    assert [tensor.data_ptr() for tensor in columns.ring] == addresses

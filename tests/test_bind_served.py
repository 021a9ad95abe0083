"""Captured attentions bound to buffers, and the operator of sliding layers."""

import pytest
import torch
from torch import nn

from kitty_compile.config import KittyConfig
from kitty_compile.kernels import attend_window, serving
from kitty_compile.passes.bind_served import bind_served

ROWS, LENGTH = 3, 300


class Attentions(nn.Module):
    """One attention per layer named, over projections of a vector per column."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.project = layers, nn.Linear(16, 64)

    def forward(self, x, mask):
        for layer in self.layers:
            q = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
            out = serving.attention(q, q[:, :2], q[:, 2:], layer, scale=0.25)
            x = x + out.transpose(1, 2).sum(2)
        return x


def captured(layers):
    inputs = (torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool))
    batch, columns = torch.export.Dim("batch", min=1, max=ROWS), torch.export.Dim("columns", min=1, max=LENGTH)
    with torch.no_grad():
        program = torch.export.export(
            Attentions(layers).eval(), inputs, dynamic_shapes=({0: batch, 1: columns},) * 2, strict=False
        )
    return program.module(check_guards=False)


def bind(gm, windows):
    mask = gm.graph.find_nodes(op="placeholder")[1]
    bind_served(gm, windows, KittyConfig().parameters, mask=mask, rows=ROWS, max_length=LENGTH)
    return gm


def test_every_attention_is_replaced_and_has_its_buffers():
    gm = bind(captured([0, 1]), [None, 24])
    targets = [
        str(node.target) for node in gm.graph.nodes if "kitty" in str(node.target) and node.op == "call_function"
    ]
    assert targets == ["kitty.attend.default", "kitty.attend_window.default"]
    buffers = {name: tuple(buffer.shape) for name, buffer in gm.named_buffers()}
    assert buffers["kitty_page_table"] == (ROWS, 2)
    assert buffers["kitty_0_raw_key"] == (ROWS, 2, 32 + 128 + 32, 16)
    assert buffers["kitty_1_ring_key"] == (ROWS, 2, 24 + 32, 16)
    assert not [name for name in gm.state_dict() if name.startswith("kitty")]
    gm.graph.lint()


def test_columns_are_counted_once_for_all_layers():
    gm = bind(captured([0, 1]), [None, None])
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.argsort.stable)) == 1
    assert len(gm.graph.find_nodes(op="get_attr", target="kitty_page_table")) == 1


@torch.no_grad()
def test_fewer_rows_than_the_buffers_have_are_the_first_ones():
    """Rows attend for themselves, in a batch or alone; those that no call brought stay empty."""
    gm, alone = bind(captured([0, 1]), [None, 24]), bind(captured([0, 1]), [None, 24])
    alone.load_state_dict(gm.state_dict())
    for columns in (200, 1, 7):
        x, mask = torch.randn(2, columns, 16), torch.ones(2, columns, dtype=torch.bool)
        torch.testing.assert_close(alone(x[:1], mask[:1]), gm(x, mask)[:1], rtol=1e-4, atol=1e-4)
    assert gm.kitty_0_lengths.tolist() == [208, 208, 0]
    assert alone.kitty_0_lengths.tolist() == [208, 0, 0]
    assert not gm.kitty_1_ring_real[2].any()


@pytest.mark.parametrize("layers", [[0, 0], [0], [0, 1, 2]])
def test_layers_that_attend_twice_or_never_are_refused(layers):
    gm = captured(layers)
    code = gm.code
    with pytest.raises(ValueError, match="each of the 2 layers must attend once in a forward, got layers"):
        bind(gm, [None, None])
    assert gm.code == code


def ring_case(columns, rows=2):
    query, key, value = torch.randn(2, 4, columns, 16), torch.randn(2, 2, columns, 16), torch.randn(2, 2, columns, 32)
    ring = torch.zeros(rows, 2, 20, 16), torch.zeros(rows, 2, 20, 32), torch.zeros(rows, 20, dtype=torch.bool)
    return (query, key, value), (*ring, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_window_operator_passes_opcheck(with_sinks):
    call, ring = ring_case(3)
    sinks, softcap = (torch.randn(4), 5.0) if with_sinks else (None, 0.0)
    real = torch.tensor([[True] * 3, [False, True, True]])
    torch.library.opcheck(torch.ops.kitty.attend_window.default, (*call, real, *ring, 12, 0.25, softcap, sinks))
    torch.library.opcheck(torch.ops.kitty.attend_window.default, (*call, None, *ring, 12, 0.25, softcap, sinks))


def test_the_window_operator_attends_then_appends():
    _, ring = ring_case(1, rows=ROWS)
    expected_ring = tuple(tensor.clone()[:2] if tensor.dim() > 1 else tensor.clone() for tensor in ring)
    for columns in (5, 30, 1, 19):
        call, _ = ring_case(columns)
        real = torch.rand(2, columns) > 0.3
        actual = torch.ops.kitty.attend_window(*call, real, *ring, 12, 0.25, 0.0, None)
        expected = attend_window.attend(*call, real, *expected_ring, window=12, scale=0.25, softcap=0.0, sinks=None)
        attend_window.append(*call[1:], real, *expected_ring)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for mine, theirs in zip(ring, expected_ring, strict=True):
        assert torch.equal(mine[:2], theirs)


def test_state_without_memory_is_refused():
    call, ring = ring_case(1)
    with pytest.raises(ValueError, match=r"read saved programs with kitty_compile.load"):
        torch.ops.kitty.attend_window(*call, None, torch.empty(0), *ring[1:], 12, 0.25, 0.0, None)

import pytest
import torch
from torch import nn

from kitty_compile.passes.insert_nodes import Inserter
from kitty_compile.passes.nodes import NoMatchError
from kitty_compile.passes.shift_positions import shift_positions

PAST = 5


class Embedded(nn.Module):
    """Adds ``table_rows(self, t)`` [t, width] to its input [b, t, width]."""

    def __init__(self, table_rows):
        super().__init__()
        self.table_rows = table_rows
        self.wpe = nn.Embedding(40, 8)
        self.prefix = nn.Parameter(torch.randn(40, 8))
        self.register_buffer("table", torch.randn(40, 8))
        self.register_buffer("frequencies", torch.rand(8))
        self.register_buffer("past", torch.tensor([PAST]))

    def forward(self, x):
        return x + self.table_rows(self, x.shape[1])


def learned(model, t):
    return model.wpe(torch.arange(0, t))


def rotary(model, t):
    angles = torch.outer(torch.arange(t).float(), model.frequencies)
    return torch.cos(angles) + torch.sin(angles)


def sliced_buffer(model, t):
    return model.table[:t]


def sliced_parameter(model, t):
    return model.prefix[:t] * 2


def position_ids(model, t):
    return model.wpe(torch.arange(t, dtype=torch.long).unsqueeze(0))


def plus_ones(model, t):
    return model.wpe(torch.arange(t)) * torch.ones(t, 1)


def captured(table_rows):
    model = Embedded(table_rows)
    program = torch.export.export(model, (torch.randn(2, 7, 8),), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
    gm = program.module()
    for node in gm.graph.find_nodes(op="call_module"):
        gm.graph.erase_node(node)
    (given,) = gm.graph.find_nodes(op="placeholder")
    gm.past = model.past
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        past = gm.graph.get_attr("past")
    return model, gm, given.meta["val"].shape[1], past


@pytest.mark.parametrize(
    "table_rows",
    [learned, rotary, sliced_buffer, sliced_parameter, position_ids, plus_ones],
    ids=lambda function: function.__name__,
)
def test_positions_go_on_where_the_cache_ends(table_rows):
    model, gm, columns, past = captured(table_rows)
    assert shift_positions(gm, columns, past) == 1
    gm.recompile()
    x = torch.randn(2, PAST + 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(gm(x[:, PAST:]), model(x)[:, PAST:])
        model.past.zero_()
        torch.testing.assert_close(gm(x), model(x))


def test_nothing_to_shift():
    _, gm, columns, past = captured(lambda model, t: torch.ones(t, 1))
    assert shift_positions(gm, columns, past) == 0


def summed_up(model, t):
    return model.wpe(torch.ones(t, dtype=torch.long).cumsum(0) - 1)


def from_the_end(model, t):
    return model.table[-t:]


def every_second(model, t):
    return model.wpe(torch.arange(0, 2 * t, 2))


def from_one(model, t):
    return model.wpe(torch.arange(1, t + 1))


@pytest.mark.parametrize("table_rows", [summed_up, from_the_end, every_second, from_one], ids=lambda f: f.__name__)
def test_must_not_match(table_rows):
    _, gm, columns, past = captured(table_rows)
    with pytest.raises(NoMatchError):
        shift_positions(gm, columns, past)


def test_a_call_is_inserted_with_its_value():
    _, gm, _, past = captured(learned)
    insert = Inserter(gm.graph.output_node())
    node = insert(torch.ops.aten.add.Tensor, past, 1)
    assert node.meta["val"].shape == (1,)
    assert insert.cast(node, torch.int64) is node
    assert insert.cast(node, torch.int32).meta["val"].dtype == torch.int32

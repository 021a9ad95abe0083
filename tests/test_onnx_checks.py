"""Graphs that would lose their update, or that only this package could run, are errors."""

import pytest
import torch

from kitty_compile.kernels import serving  # noqa: F401 (registers kitty::attention)
from kitty_compile.onnx_checks import check_operators, check_program, check_updates

onnx = pytest.importorskip("onnx")
ir = pytest.importorskip("onnx_ir")


def graph_of(nodes, outputs=("present",)):
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    inputs = [
        helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["batch", "columns"]),
        helper.make_tensor_value_info("past", floats, ["batch", "tokens"]),
    ]
    made = [helper.make_tensor_value_info(name, floats, ["batch", "more"]) for name in outputs]
    model = helper.make_model(helper.make_graph(nodes, "graph", inputs, made))
    return ir.from_proto(model).graph


def node(op, inputs, output, **attributes):
    return onnx.helper.make_node(op, inputs, [output], **attributes)


EMBED = node("Cast", ["input_ids"], "key", to=1)


def test_a_state_that_takes_up_the_tokens_is_fine():
    graph = graph_of([EMBED, node("Concat", ["past", "key"], "present", axis=1)])
    check_operators(graph)
    check_updates(graph, "input_ids", ["present"])


@pytest.mark.parametrize(
    "nodes",
    [
        [EMBED, node("Identity", ["past"], "present")],
        # As many tokens as came in, but not they.
        [node("Shape", ["input_ids"], "size"), node("Expand", ["past", "size"], "present")],
        [node("Shape", ["input_ids"], "size"), node("ConstantOfShape", ["size"], "zeros"),
         node("Concat", ["past", "zeros"], "present", axis=1)],
    ],
    ids=["past as it was", "sizes alone", "zeros"],
)  # fmt: skip
def test_a_lost_update_is_an_error(nodes):
    with pytest.raises(ValueError, match="must depend on input_ids, which it does not in present"):
        check_updates(graph_of(nodes), "input_ids", ["present"])


def test_one_lost_layer_among_others_is_named():
    nodes = [EMBED, node("Concat", ["past", "key"], "present_0", axis=1), node("Identity", ["past"], "present_1")]
    with pytest.raises(ValueError, match=r"not in present_1$"):
        check_updates(graph_of(nodes, ("present_0", "present_1")), "input_ids", ["present_0", "present_1"])


def test_a_counter_may_depend_on_sizes_but_must_on_them():
    graph = graph_of([node("Shape", ["input_ids"], "size"), node("Cast", ["size"], "present", to=1)])
    check_updates(graph, "input_ids", [], counters=["present"])
    with pytest.raises(ValueError, match="must depend on input_ids"):
        check_updates(graph_of([node("Identity", ["past"], "present")]), "input_ids", [], counters=["present"])


def test_what_a_branch_reads_counts():
    then, other = (
        onnx.helper.make_graph(
            [node(op, [source], "out")], "branch", [], [onnx.helper.make_tensor_value_info("out", 1, None)]
        )
        for op, source in (("Identity", "key"), ("Identity", "past"))
    )
    condition = node("Constant", [], "yes", value=onnx.helper.make_tensor("yes", onnx.TensorProto.BOOL, [], [True]))
    branch = node("If", ["yes"], "present", then_branch=then, else_branch=other)
    check_updates(graph_of([EMBED, condition, branch]), "input_ids", ["present"])


def test_operators_of_others_are_an_error():
    graph = graph_of([EMBED, node("Attend", ["past", "key"], "present", domain="kitty")])
    with pytest.raises(ValueError, match=r"must be one of the ONNX standard, got \['kitty::Attend'\]"):
        check_operators(graph)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.seen.add_(1)
        return x + self.seen


class Writing(torch.nn.Module):
    def forward(self, x):
        return x.add_(1)


class Attending(torch.nn.Module):
    def forward(self, x):
        return torch.ops.kitty.attention(x, x, x, 0, 1.0, 0.0, None)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Counting(), r"must change nothing that outlives a call to become ONNX, got changes of \['seen'\]"),
        (Writing(), "must change nothing that outlives a call"),
        (Attending(), "must be served from the graph's own state, got calls of .*kitty.attention"),
    ],
)
def test_a_program_that_mutates_is_an_error(module, match):
    exported = torch.export.export(module, (torch.ones(1, 1, 2, 4),)).run_decompositions({})
    with pytest.raises(ValueError, match=match):
        check_program(exported)

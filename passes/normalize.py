"""Bring a captured graph into pre-dispatch ATen, the one form that all other passes read.

Pattern: a Dynamo graph, whose nodes are Python functions and methods

    x = self.q_proj(h).view(b, t, 8, 64).transpose(1, 2)
    scores = x @ k.transpose(-1, -2) * scale

Replacement: what ``torch.export`` gives too

    view = torch.ops.aten.view.default(linear, [b, t, 8, 64]);  transpose = torch.ops.aten.transpose.int(view, 1, 2)
    matmul = torch.ops.aten.matmul.default(transpose, ...);     mul = torch.ops.aten.mul.Tensor(matmul, 0.125)

Symbolic sizes stay symbolic, in-place calls stay in place, ``nn_module_stack`` survives. The real tensors of parameters,
buffers and lifted constants are left in ``meta[CONSTANT]`` of their placeholders, since masks are made from them.
"""

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from kitty_compile.passes.nodes import CONSTANT, value_of


def normalize(gm: fx.GraphModule, example_inputs: Sequence[object]) -> fx.GraphModule:
    """The same computation in pre-dispatch ATen, with one placeholder per placeholder of ``gm`` in the same order.

    Args:
        gm: a graph from Dynamo (as a ``torch.compile`` backend gets it), or one that is in the form already.
        example_inputs: what Dynamo passes beside it. Tensors that belong to a module are taken as constants.
    """
    normal: fx.GraphModule = gm if is_normal(gm) else _retrace(gm)
    owned = {
        index: value
        for index, value in enumerate(example_inputs)
        if isinstance(value, torch.Tensor) and getattr(value, "_dynamo_static_input_type", None) is not None
    }
    for index, node in enumerate(normal.graph.find_nodes(op="placeholder")):
        if index in owned:
            node.meta[CONSTANT] = owned[index]
    return normal


def _retrace(gm: fx.GraphModule) -> fx.GraphModule:
    fakes = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    # Not the mode of the tracing context: within a backend that is a new one, and modes do not mix. A graph without inputs,
    # of the tensors that a call makes from nothing, has it in its nodes.
    values = (value_of(node) for node in gm.graph.nodes)
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    if not modes:
        raise ValueError("gm must come with fake values of its inputs, got a graph that was not captured by Dynamo")
    run = fx.Interpreter(gm).run
    trace = make_fx(run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)
    with modes[0], fx.traceback.preserve_node_meta():
        traced: fx.GraphModule = trace(*fakes)
    return traced


def normalize_program(program: ExportedProgram) -> fx.GraphModule:
    """The graph of an exported program, whose form is right already, with its constants found."""
    signature = program.graph_signature
    sources: Mapping[str, str] = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    for node in program.graph_module.graph.find_nodes(op="placeholder"):
        name = sources.get(node.name, "")
        value = program.state_dict.get(name, program.constants.get(name))
        if isinstance(value, torch.Tensor):
            node.meta[CONSTANT] = value
    gm: fx.GraphModule = program.graph_module
    return gm


def may_attend(gm: fx.GraphModule) -> bool:
    """Can there be an attention in a graph, in whatever form? Without one there is no need to touch it."""
    return any("softmax" in _name(node) or "attention" in _name(node) for node in gm.graph.nodes)


def obstacle(gm: fx.GraphModule) -> str | None:
    """Why a graph cannot be brought into ATen, or None."""
    for node in gm.graph.nodes:
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            return f"{_name(node)}, part of a function transform, does not survive being traced again"
    return None


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).lower() if node.op.startswith("call_") else ""


def is_normal(gm: fx.GraphModule) -> bool:
    """Does every call that makes a tensor go to an ATen (or custom) operator already?"""
    return not any(_is_python_call(node) for node in gm.graph.nodes)


def _is_python_call(node: fx.Node) -> bool:
    if node.op in ("call_method", "call_module"):
        return True
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return False
    if node.target is operator.getitem:
        return isinstance(value_of(node.args[0]), torch.Tensor) if isinstance(node.args[0], fx.Node) else False
    return isinstance(value_of(node), torch.Tensor)

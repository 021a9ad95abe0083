"""What a graph must be before it is written: nothing in it mutates, and no layer's tokens are lost on the way.

An ONNX graph drops a mutation without a word: such a model would answer from an empty cache for ever.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.export import ExportedProgram

# What they give depends on their input's sizes alone.
_SIZES = ("Shape", "Size")
_STANDARD = ("", "ai.onnx")


def check_program(exported: ExportedProgram) -> None:
    """Raise a ValueError when a program mutates what outlives a call, or still calls an operator of this package.

    It must have been decomposed: before, its signature does not name what is mutated.
    """
    signature = exported.graph_signature
    mutated = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if mutated:
        raise ValueError(f"the model must change nothing that outlives a call to become ONNX, got changes of {mutated}")
    own = {str(node.target) for node in exported.graph.nodes if str(node.target).startswith("kitty")}
    if own:
        raise ValueError(f"every layer must be served from the graph's own state, got calls of {sorted(own)}")


def check_operators(graph: Any) -> None:
    """Raise a ValueError unless every operator of an ``onnx_ir`` graph is one of the ONNX standard."""
    foreign = {f"{node.domain}::{node.op_type}" for node in graph.all_nodes() if node.domain not in _STANDARD}
    if foreign:
        raise ValueError(f"every operator must be one of the ONNX standard, got {sorted(foreign)}")


def check_updates(graph: Any, tokens: str, states: Iterable[str], counters: Iterable[str] = ()) -> None:
    """Raise a ValueError unless each of the outputs ``states`` depends on the values of the input ``tokens``.

    Args:
        graph: an ``onnx_ir`` graph.
        counters: outputs that depend on the number of tokens alone.
    """
    outputs = {output.name: output for output in graph.outputs}
    lost = [name for name in states if tokens not in _sources(outputs[name], through_sizes=False)]
    lost += [name for name in counters if tokens not in _sources(outputs[name], through_sizes=True)]
    if lost:
        raise ValueError(f"the state that goes out must depend on {tokens}, which it does not in {', '.join(lost)}")


def _sources(value: Any, *, through_sizes: bool) -> set[str]:
    """Names of the graph inputs that ``value`` is computed from."""
    found, seen, queue = set(), {value}, [value]
    while queue:
        value = queue.pop()
        node = value.producer()
        if node is None:
            found.add(value.name)
            continue
        if node.op_type in _SIZES and not through_sizes:
            continue
        for source in _read(node):
            if source not in seen:
                seen.add(source)
                queue.append(source)
    return found


def _read(node: Any) -> Iterator[Any]:
    """All values that a node reads, those of its subgraphs included."""
    yield from (source for source in node.inputs if source is not None)
    for attribute in node.attributes.values():
        if attribute.type.name in ("GRAPH", "GRAPHS"):
            graphs = [attribute.value] if attribute.type.name == "GRAPH" else attribute.value
            for graph in graphs:
                for inner in graph.all_nodes():
                    yield from (source for source in inner.inputs if source is not None)

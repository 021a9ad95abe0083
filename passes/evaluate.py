"""Run a part of a graph on concrete inputs, whatever device and sizes it was captured for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kitty_compile.passes.nodes import NoMatchError, constant_of, op_name, value_of, writers

# Operators that take a tensor for its sizes and dtype alone, and which argument that is.
_READS_METADATA = {
    "new_ones": 0,
    "new_zeros": 0,
    "new_full": 0,
    "new_empty": 0,
    "ones_like": 0,
    "zeros_like": 0,
    "full_like": 0,
    "empty_like": 0,
    "type_as": 1,
    "expand_as": 1,
    "view_as": 1,
}
_MAX_NODES = 2000
_SMALL = 16

Symbols = Mapping[str, int]
Override = Callable[[torch.Tensor], torch.Tensor]


class Subgraph:
    """What ``roots`` are computed from, in-place writes included.

    Attributes:
        roots: the wanted nodes.
        nodes: the calls to run, in graph order.
        inputs: tensors that come from outside and are no constants.
    """

    def __init__(self, roots: Sequence[fx.Node], order: dict[fx.Node, int]) -> None:
        self.roots = tuple(roots)
        last = max(roots, key=order.__getitem__)
        self._needed: set[fx.Node] = set()
        self._has_writes = False
        queue = list(roots)
        while queue:
            self._collect(queue)
            queue = [
                writer
                for node in self._needed
                for writer in writers(node, order, before=last)
                if writer not in self._needed
            ]
            self._has_writes |= bool(queue)
        ordered = sorted(self._needed, key=order.__getitem__)
        self.nodes = tuple(node for node in ordered if node.op == "call_function")
        self.inputs = tuple(node for node in ordered if node.op == "placeholder" and constant_of(node) is None)

    def _collect(self, queue: list[fx.Node]) -> None:
        while queue:
            node = queue.pop()
            if node in self._needed or _is_number(node):
                continue
            self._needed.add(node)
            if len(self._needed) > _MAX_NODES:
                raise NoMatchError("the mask is computed from the model's activations")
            queue.extend(operand for operand in node.all_input_nodes if operand not in _metadata_operands(node))

    def integers(self) -> set[int]:
        """Every integer constant of the subgraph, and every size or number that reaches it in the traced call."""
        found: set[int] = set()

        def visit(value: Any) -> Any:
            if isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
                found.add(abs(int(value)))
            return value

        for node in self.nodes:
            fx.node.map_aggregate((node.args, node.kwargs), visit)
            for operand in node.all_input_nodes:
                value = value_of(operand)
                if isinstance(value, torch.SymInt) and value.node.hint is not None:
                    found.add(abs(int(value.node.hint)))
                constant = constant_of(operand)
                if constant is not None and constant.numel() <= _SMALL:
                    fx.node.map_aggregate(constant.tolist(), visit)
        return {value for value in found if value < 2**31}

    def run(
        self,
        inputs: Mapping[fx.Node, torch.Tensor],
        symbols: Symbols | None = None,
        overrides: Mapping[fx.Node, Override] | None = None,
        clamp_index: bool = False,
    ) -> list[torch.Tensor]:
        """The roots' values.

        Args:
            inputs: a tensor for each of ``self.inputs``.
            symbols: values of size symbols, by name; None: those of the traced call.
            overrides: what to make of the results of some nodes before others read them.
            clamp_index: bring indices of ``aten.index`` into range, for positions that lie outside.
        """
        results: dict[fx.Node, Any] = {}

        def load(node: fx.Node) -> Any:
            if node not in results:
                results[node] = self._leaf(node, inputs, symbols)
            return results[node]

        with unset_fake_temporarily(), torch.no_grad():
            for node in self.nodes:
                skipped = _metadata_operands(node)
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs),
                    lambda operand, skipped=skipped: _stand_in(operand, symbols) if operand in skipped else load(operand),
                )
                args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
                if clamp_index and op_name(node) == "index":
                    args = (args[0], _clamped(args[0], args[1]))
                assert callable(node.target)
                result = node.target(*args, **kwargs)
                if overrides and node in overrides:
                    result = overrides[node](result)
                results[node] = result
            return [load(root) for root in self.roots]

    def _leaf(self, node: fx.Node, inputs: Mapping[fx.Node, torch.Tensor], symbols: Symbols | None) -> Any:
        if _is_number(node):
            return concrete(value_of(node), symbols)
        if node in inputs:
            return inputs[node].clone() if self._has_writes else inputs[node]
        constant = constant_of(node)
        if constant is None:
            if node.op == "get_attr" and node.graph.owning_module is not None:
                return node.graph.owning_module.get_submodule(str(node.target))
            raise NoMatchError(f"no value is known for {node}")
        value = constant.detach().cpu()
        return value.clone() if self._has_writes else value


def number_of(node: object, order: dict[fx.Node, int]) -> float | None:
    """The number that an argument is in the traced call: a literal, a symbol's value, or computed from constants alone."""
    if isinstance(node, bool):
        return None
    if isinstance(node, int | float):
        return float(node)
    if not isinstance(node, fx.Node):
        return None
    if _is_number(node):
        return float(concrete(value_of(node), None))
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dtype == torch.bool:
        return None
    try:
        subgraph = Subgraph([node], order)
        return None if subgraph.inputs else float(subgraph.run({})[0])
    except NoMatchError:
        return None


def concrete(value: Any, symbols: Symbols | None) -> Any:
    """A Python number for a symbolic one."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    if not symbols:
        if value.node.hint is None:
            raise NoMatchError("a size depends on data")
        return kind(value.node.hint)
    expression = value.node.expr
    free = {symbol: symbols[str(symbol)] for symbol in expression.free_symbols if str(symbol) in symbols}
    if len(free) < len(expression.free_symbols):
        raise NoMatchError(f"the size {expression} has no known value")
    return kind(expression.subs(free))


def symbol_hints(values: Iterable[Any]) -> dict[str, int]:
    """Values that the symbols of some sizes have in the traced call."""
    hints: dict[str, int] = {}
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                hints[str(size.node.expr)] = int(size.node.hint)
    return hints


def _is_number(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _metadata_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    index = _READS_METADATA.get(op_name(node))
    if index is None or len(node.args) <= index or not isinstance(node.args[index], fx.Node):
        return ()
    operand = node.args[index]
    assert isinstance(operand, fx.Node)
    return (operand,)


def _stand_in(node: fx.Node, symbols: Symbols | None) -> torch.Tensor:
    value = value_of(node)
    return torch.empty([concrete(size, symbols) for size in value.shape], dtype=value.dtype)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _clamped(source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    clamped: list[torch.Tensor | None] = []
    for dim, index in enumerate(indices):
        is_position = index is not None and index.dtype in (torch.int64, torch.int32)
        clamped.append(index.clamp(0, source.shape[dim] - 1) if index is not None and is_position else index)
    return clamped

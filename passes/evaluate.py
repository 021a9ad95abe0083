"""Run a part of a graph on concrete inputs, whatever device and sizes it was captured for."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kitty_compile.passes.nodes import NoMatchError, arguments, constant_of, op_name, value_of, writers, written_nodes

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
# Arguments that hold sizes or bounds, where a graph of fixed sizes has literals.
_SIZE_ARGUMENTS = frozenset({"size", "sizes", "shape", "start", "end", "length", "pad", "repeats"})
_OPERAND_ARGUMENTS = frozenset({"self", "other", "min", "max", "value", "fill_value"})
_MAX_NODES = 2000
_SMALL = 16

Override = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run differs from the traced call.

    Attributes:
        symbols: values of size symbols, by name; all of them, or none.
        resize: replacements of literal sizes, for graphs without symbols.
        overrides: what to make of the results of some nodes before others read them.
        num_columns: bring indices of ``aten.index`` below this, for columns that were moved elsewhere; None: leave them.
    """

    symbols: Mapping[str, int] = dataclasses.field(default_factory=dict)
    resize: Mapping[int, int] = dataclasses.field(default_factory=dict)
    overrides: Mapping[fx.Node, Override] = dataclasses.field(default_factory=dict)
    num_columns: int | None = None

    def size(self, size: Any) -> int:
        """The concrete value of a size of the graph."""
        return int(concrete(size, self)) if not isinstance(size, int) else self.resize.get(size, size)


AS_TRACED = Setting()


class Subgraph:
    """What ``roots`` are computed from, in-place writes included.

    Attributes:
        roots: the wanted nodes.
        nodes: the calls to run, in graph order.
        inputs: tensors that come from outside and are no constants.

    Args:
        reader: the call that reads the roots; writes after it do not count.
    """

    def __init__(self, roots: Sequence[fx.Node], order: dict[fx.Node, int], reader: fx.Node) -> None:
        self.roots = tuple(roots)
        self._needed: set[fx.Node] = set()
        queue = list(roots)
        while queue:
            self._collect(queue)
            queue = [
                writer
                for node in self._needed
                for writer in writers(node, order, before=reader)
                if writer not in self._needed
            ]
        ordered = sorted(self._needed, key=order.__getitem__)
        self.nodes = tuple(node for node in ordered if node.op == "call_function")
        self.inputs = tuple(node for node in ordered if node.op == "placeholder" and constant_of(node) is None)
        self._has_writes = any(written_nodes(node) for node in self.nodes)

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
        for node in self.nodes:
            _collect_integers((node.args, node.kwargs), found)
        return found

    def floats(self) -> list[fx.Node]:
        """Numbers from outside that are read as they are in the traced call."""
        operands = (operand for node in self.nodes for operand in node.all_input_nodes)
        return [operand for operand in operands if isinstance(value_of(operand), torch.SymFloat)]

    def operands(self) -> set[int]:
        """The integers among them that columns are compared with or moved by, no sizes and no fill values."""
        found: set[int] = set()
        for node in self.nodes:
            for name, value in arguments(node).items() if isinstance(node.target, torch._ops.OpOverload) else ():
                is_fill = isinstance(value, float) and value < 0
                if name == "diagonal" or (name in _OPERAND_ARGUMENTS and not is_fill):
                    _collect_integers(value, found)
        return found

    def constants(self) -> list[torch.Tensor]:
        """The parameters, buffers and lifted constants that are read."""
        found = (constant_of(node) for node in self._needed)
        return [tensor for tensor in found if tensor is not None]

    def run(self, inputs: Mapping[fx.Node, torch.Tensor], setting: Setting = AS_TRACED) -> list[torch.Tensor]:
        """The roots' values, given a tensor for each of ``self.inputs``."""
        results: dict[fx.Node, Any] = {}

        def load(node: fx.Node) -> Any:
            if node not in results:
                results[node] = self._leaf(node, inputs, setting)
            return results[node]

        with unset_fake_temporarily(), torch.no_grad():
            for node in self.nodes:
                results[node] = _call(node, load, setting)
            return [load(root) for root in self.roots]

    def _leaf(self, node: fx.Node, inputs: Mapping[fx.Node, torch.Tensor], setting: Setting) -> Any:
        if _is_number(node):
            return concrete(value_of(node), setting)
        if node in inputs:
            return inputs[node].clone() if self._has_writes else inputs[node]
        constant = constant_of(node)
        if constant is None:
            if node.op == "get_attr" and node.graph.owning_module is not None:
                return node.graph.owning_module.get_submodule(str(node.target))
            raise NoMatchError(f"no value is known for {node}")
        value = constant.detach().cpu()
        return value.clone() if self._has_writes else value


def _call(node: fx.Node, load: Callable[[fx.Node], Any], setting: Setting) -> Any:
    skipped = _metadata_operands(node)

    def argument(operand: fx.Node) -> Any:
        return _stand_in(operand, setting) if operand in skipped else load(operand)

    given: Any = _resized(node, setting) if setting.resize else (node.args, node.kwargs)
    given = fx.node.map_arg(given, argument)
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_aggregate(given, _on_cpu)
    if setting.num_columns is not None and op_name(node) == "index":
        args = (args[0], _clamped(args[0], args[1], setting.num_columns))
    assert callable(node.target)
    result = node.target(*args, **kwargs)
    override = setting.overrides.get(node)
    return result if override is None else override(result)


def _resized(node: fx.Node, setting: Setting) -> tuple[Any, Any]:
    """The arguments of a call with literal sizes replaced."""

    def replace(value: Any) -> Any:
        is_size = isinstance(value, int) and not isinstance(value, bool)
        return setting.resize.get(value, value) if is_size else value

    if not isinstance(node.target, torch._ops.OpOverload):
        return node.args, node.kwargs
    names = [argument.name for argument in node.target._schema.arguments]
    args = tuple(
        fx.node.map_aggregate(value, replace) if name in _SIZE_ARGUMENTS else value
        for name, value in zip(names, node.args, strict=False)
    )
    kwargs = {
        name: fx.node.map_aggregate(value, replace) if name in _SIZE_ARGUMENTS else value
        for name, value in node.kwargs.items()
    }
    return args, kwargs


def number_of(node: object, order: dict[fx.Node, int]) -> float | None:
    """The number that an argument is in the traced call: a literal, a symbol's value, or computed from constants alone."""
    if isinstance(node, bool):
        return None
    if isinstance(node, int | float):
        return float(node)
    if not isinstance(node, fx.Node):
        return None
    if _is_number(node):
        return float(concrete(value_of(node), AS_TRACED))
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dtype == torch.bool:
        return None
    try:
        subgraph = Subgraph([node], order, reader=node)
        return None if subgraph.inputs else float(subgraph.run({})[0])
    except NoMatchError:
        return None


def concrete(value: Any, setting: Setting) -> Any:
    """A Python number for a symbolic one."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    if not setting.symbols:
        if value.node.hint is None:
            raise NoMatchError("a size depends on data")
        return kind(value.node.hint)
    expression = value.node.expr
    known = {symbol: setting.symbols.get(str(symbol)) for symbol in expression.free_symbols}
    if None in known.values():
        raise NoMatchError(f"the size {expression} has no known value")
    return kind(expression.subs(known))


def symbol_hints(values: Iterable[Any]) -> dict[str, int]:
    """Values that the symbols of some sizes have in the traced call."""
    hints: dict[str, int] = {}
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.hint is not None:
                hints[str(size.node.expr)] = int(size.node.hint)
    return hints


def _collect_integers(value: Any, found: set[int]) -> None:
    """Add the magnitudes of all integers in an argument, through symbols and small constant tensors."""

    def visit(item: Any) -> Any:
        if isinstance(item, fx.Node):
            constant, symbol = constant_of(item), value_of(item)
            if isinstance(symbol, torch.SymInt) and symbol.node.hint is not None:
                visit(int(symbol.node.hint))
            elif constant is not None and constant.numel() <= _SMALL:
                fx.node.map_aggregate(constant.tolist(), visit)
        elif isinstance(item, int | float) and not isinstance(item, bool) and item == item // 1 and abs(item) < 2**31:
            found.add(abs(int(item)))
        return item

    fx.node.map_aggregate(value, visit)


def _is_number(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _metadata_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    index = _READS_METADATA.get(op_name(node))
    if index is None or len(node.args) <= index or not isinstance(node.args[index], fx.Node):
        return ()
    operand = node.args[index]
    assert isinstance(operand, fx.Node)
    return (operand,)


def _stand_in(node: fx.Node, setting: Setting) -> torch.Tensor:
    value = value_of(node)
    return torch.empty([setting.size(size) for size in value.shape], dtype=value.dtype)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _clamped(
    source: torch.Tensor, indices: Sequence[torch.Tensor | None], num_columns: int
) -> list[torch.Tensor | None]:
    clamped: list[torch.Tensor | None] = []
    for dim, index in enumerate(indices):
        is_position = index is not None and index.dtype in (torch.int64, torch.int32)
        last = min(source.shape[dim], num_columns) - 1
        clamped.append(index.clamp(0, last) if index is not None and is_position else index)
    return clamped

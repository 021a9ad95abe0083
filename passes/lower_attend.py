"""Replace the kitty operators of an exported program by plain torch ones, for runtimes without Python.

Before                                          After
    out = kitty.attend(q, k, v, ..., *state)      aten operators that read and write the same buffers in place
    out = kitty.attend_window(q, k, v, ...)

Such a graph cannot ask the device how many pages are in use, and work on all that there is room for would make every step as
slow as the last. Two more inputs say it by their length alone:

    cached_pages   one element for every page that the longest row may hold when the call starts, at least one
    sealed_pages   one for every page that a row can complete in the call, ceil(T / 128)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram

from kitty_compile.kernels import attend_static
from kitty_compile.kernels.layout import PAGE_SIZE
from kitty_compile.passes.nodes import sizes

# What the names of the lowered program's buffers have before those of the program.
PREFIX = "program."
# Sizes of an example: those below two would be taken for constants.
_EXAMPLE_PAGES = 2


def lower_attend(exported: ExportedProgram, max_length: int) -> ExportedProgram:
    """The same program without kitty operators and with two more inputs, see above. ``exported`` is left as it is, and
    the new one shares its buffers.

    Args:
        max_length: columns that a row can come to hold.
    """
    gm: fx.GraphModule = exported.module(check_guards=False)
    limits = (_table_pages(gm), -(-max_length // PAGE_SIZE))
    device = next(tensor.device for tensor in (*gm.parameters(), *gm.buffers()))
    pages = [torch.zeros(min(_EXAMPLE_PAGES, limit), dtype=torch.uint8, device=device) for limit in limits]
    names = ("cached_pages", "sealed_pages")
    varies = (limits[0] > 1, limits[1] > 1)
    page_shapes = [
        {0: Dim(name, min=1, max=limit)} if limit > 1 else None for name, limit in zip(names, limits, strict=True)
    ]
    args, kwargs = exported.example_inputs
    shapes = [*_dynamic_shapes(gm, exported), *page_shapes]
    with torch.no_grad():
        return torch.export.export(
            _Lowered(gm, varies), (*args, *kwargs.values(), *pages), dynamic_shapes=(tuple(shapes),), strict=False
        )


class _Lowered(nn.Module):
    """Runs a graph; ``varies`` says of the numbers of cached and of sealed pages whether they are more than the constant 1."""

    def __init__(self, program: fx.GraphModule, varies: tuple[bool, bool]) -> None:
        super().__init__()
        self.program, self.varies = program, varies

    def forward(self, *inputs: torch.Tensor) -> Any:
        *given, cached, sealed = inputs
        counts = (
            cached.shape[0] if self.varies[0] else None,
            sealed.shape[0] if self.varies[1] else 1,
        )
        return _Replacing(self.program, *counts).run(*given)


class _Replacing(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, num_pages: int | None, num_sealed: int) -> None:
        super().__init__(gm)
        self.num_pages, self.num_sealed = num_pages, num_sealed

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.kitty.attend.default:
            attend: Callable[..., torch.Tensor] = attend_static.attend_and_update
            return attend(*args, **kwargs, num_pages=self.num_pages, num_sealed=self.num_sealed)
        if target is torch.ops.kitty.attend_window.default:
            return attend_static.attend_window_and_append(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _table_pages(gm: fx.GraphModule) -> int:
    """Pages that a row has room for; 1 where no layer has pages."""
    attends = gm.graph.find_nodes(op="call_function", target=torch.ops.kitty.attend.default)
    return max([1, *(int(sizes(node.args[11])[1]) for node in attends)])


def _dynamic_shapes(gm: fx.GraphModule, exported: ExportedProgram) -> list[dict[int, Any]]:
    """What varies in the program's inputs, and from where to where."""
    dims: dict[str, Any] = {}
    shapes = []
    for node in gm.graph.find_nodes(op="placeholder"):
        shape: dict[int, Any] = {}
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                shape[axis] = dims.setdefault(str(size), _dim(size, exported))
        shapes.append(shape)
    return shapes


def _dim(size: torch.SymInt, exported: ExportedProgram) -> Any:
    values = exported.range_constraints.get(size.node.expr)
    if values is None:
        return Dim.DYNAMIC
    upper = int(values.upper) if values.upper.is_finite else None
    return Dim(str(size), min=int(values.lower), max=upper)

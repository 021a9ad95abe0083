"""Modules that are not from transformers: capture one, give it a packed cache in buffers, call it piece by piece."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.kernels.ops import OpParameters
from kitty_compile.layers import PagedLayer
from kitty_compile.passes.bind_buffers import BufferBinder, owned_writes, state_of
from kitty_compile.passes.clean_up import clean_up
from kitty_compile.passes.insert_nodes import Inserter
from kitty_compile.passes.pipeline import Report, analyze
from kitty_compile.passes.records import AttentionMatch
from kitty_compile.passes.rewrite_attention import rewrite_attention
from kitty_compile.passes.shift_positions import shift_positions

_CHECK_TOLERANCE = 2e-2
_COUNTER = "kitty_columns"


class CachedModule(nn.Module):
    """A module that remembers the columns of earlier calls.

    Called with the next columns of every row, it gives what the original module gives for them after all columns so far.

    Attributes:
        columns: columns that the cache holds.
        report: what the passes found.
    """

    def __init__(
        self, gm: fx.GraphModule, report: Report, binder: BufferBinder, config: KittyConfig, source: tuple[int, int]
    ) -> None:
        super().__init__()
        self.graph_module = gm
        self.report, self.max_length, self.config = report, binder.max_length, config
        self.layers, self.follows_positions = tuple(binder.layers), binder.follows_positions
        self.columns = 0
        self._numbers = {match.layer: binder.parameters_of(match) for match in report.matches}
        self._source = source

    def forward(self, *args: Any) -> Any:
        """Arguments of the original module, for the next columns alone.

        Raises:
            ValueError: the cache has no room for them.
        """
        index, dim = self._source
        count = pytree.tree_leaves(args)[index].shape[dim]
        columns = 0 if self.follows_positions else self.columns
        if columns + count > self.max_length:
            raise ValueError(f"columns must not exceed max_length={self.max_length}, got {columns} + {count}")
        with torch.no_grad():
            output = self.graph_module(*args)
        self.columns = columns + count
        return output

    def reset(self) -> None:
        """Forget all columns."""
        self._set_lengths(0)
        for layer in self.layers:
            state_of(self.graph_module, layer).high_water.zero_()

    def crop(self, columns: int) -> None:
        """Keep the first ``columns`` columns.

        Dropping up to ``rollback_window`` columns since the cache was longest loses nothing. Going back further restores the
        raw edges from the pages, with their quantisation error.

        Raises:
            ValueError: ``columns`` is negative or more than is held.
        """
        if not 0 <= columns <= self.columns:
            raise ValueError(f"columns must be between 0 and the {self.columns} held, got {columns}")
        if columns == 0:
            self.reset()
            return
        most = int(state_of(self.graph_module, self.layers[0]).high_water.max())
        if columns < most - self.config.rollback_window:
            self._refill(columns)
        self._set_lengths(columns)

    def _refill(self, columns: int) -> None:
        for layer in self.layers:
            state = state_of(self.graph_module, layer)
            paged = PagedLayer.over(state, self.config, self._numbers[layer])
            paged.refill(torch.full_like(state.lengths, columns, dtype=torch.int64))

    def _set_lengths(self, columns: int) -> None:
        for layer in self.layers:
            state_of(self.graph_module, layer).lengths.fill_(columns)
        if not self.follows_positions:
            self.graph_module.get_buffer(_COUNTER).fill_(columns)
        self.columns = columns


def attach_cache(
    module: nn.Module,
    example_inputs: Sequence[Any],
    config: KittyConfig | str | None = None,
    *,
    max_length: int = 4096,
) -> CachedModule:
    """Capture ``module`` and give it a packed cache.

    Args:
        example_inputs: positional arguments of a forward over at least three columns, say token ids [batch, columns]. The
            batch stays as it is here, the columns may be any number later.
        max_length: columns that a row can come to hold.

    Raises:
        ValueError: an attention is not understood, or calls piece by piece do not give what one call gives.
    """
    settings = resolve_config(config)
    if module.training:
        raise ValueError("module must be in eval mode, got one in training: call eval()")
    inputs = tuple(example_inputs)
    gm, columns, source = _capture(module, inputs)
    gm, report = analyze(gm)
    if report.failures or not report.matches:
        reasons = [f"{failure.module_path or failure.node}: {failure.reason}" for failure in report.failures]
        raise ValueError(f"every attention must be understood, got {'; '.join(reasons) or 'no attention at all'}")
    binder = BufferBinder(gm, max_length, lambda match: _parameters(match, settings))
    rewrite = rewrite_attention(gm, report, binder)
    if rewrite.kept:
        raise ValueError(f"every attention must get a cache, got {'; '.join(sorted(set(rewrite.kept.values())))}")
    report.erased += clean_up(gm, rewrite.replaced)
    for match in report.matches:
        report.erased += clean_up(gm, owned_writes(match))
    if not binder.follows_positions:
        shift_positions(gm, columns, _count_columns(gm, source))
    _drop_unread(gm)
    gm.recompile()
    cached = CachedModule(gm, report, binder, settings, source)
    if not binder.follows_positions:
        _check(module, cached, inputs)
    return cached


def _capture(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[fx.GraphModule, torch.SymInt, tuple[int, int]]:
    """(graph with parameters as attributes, symbol of the columns, which input has them in which dimension)."""
    count = next((leaf.shape[1] for leaf in pytree.tree_leaves(inputs) if _rank(leaf) >= 2), None)
    if count is None or count < 3:
        raise ValueError(f"example_inputs must hold a tensor [batch, columns] of at least 3 columns, got {count}")
    dynamic = torch.export.Dim.DYNAMIC
    shapes = pytree.tree_map(lambda leaf: dict.fromkeys(_column_dims(leaf, count), dynamic) or None, inputs)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
    gm: fx.GraphModule = program.module()
    for node in gm.graph.find_nodes(op="call_module"):
        gm.graph.erase_node(node)
    leaves = pytree.tree_leaves(inputs)
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        for dim in _column_dims(leaves[index], count):
            size = node.meta["val"].shape[dim]
            if isinstance(size, torch.SymInt):
                return gm, size, (index, dim)
    raise ValueError(f"the columns of example_inputs must be free to vary, but the module works for {count} alone")


def _rank(leaf: Any) -> int:
    return leaf.dim() if isinstance(leaf, torch.Tensor) else 0


def _column_dims(leaf: Any, count: int) -> tuple[int, ...]:
    """Dimension 1 of tensors [batch, columns, ...], dimension 0 of [columns]."""
    dim = {0: None, 1: 0}.get(_rank(leaf), 1)
    return (dim,) if dim is not None and leaf.shape[dim] == count else ()


def _parameters(match: AttentionMatch, config: KittyConfig) -> OpParameters:
    return config.parameters(match.layer, match.key_dim, match.value_dim, match.num_kv_heads)


def _drop_unread(gm: fx.GraphModule) -> None:
    """Forget tensors that the rewritten graph does not read: masks, and the 16-bit caches that the pages replace."""
    read = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    held = [name for name, _ in (*gm.named_buffers(), *gm.named_parameters())]
    for name in held:
        if name not in read:
            owner, _, leaf = name.rpartition(".")
            delattr(gm.get_submodule(owner), leaf)


def _count_columns(gm: fx.GraphModule, source: tuple[int, int]) -> fx.Node:
    """A counter of columns, read as it stands before the call and moved on at the end of it.

    The layers' lengths say the same, but inductor may repeat a read of them behind the operator that writes to them.
    """
    index, dim = source
    given = gm.graph.find_nodes(op="placeholder")[index]
    gm.register_buffer(_COUNTER, torch.zeros(1, dtype=torch.int64, device=given.meta["val"].device), persistent=False)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        counter = gm.graph.get_attr(_COUNTER)
    insert = Inserter(gm.graph.output_node())
    insert(torch.ops.aten.add_.Tensor, counter, insert(torch.ops.aten.sym_size.int, given, dim))
    return counter


def _check(module: nn.Module, cached: CachedModule, inputs: tuple[Any, ...]) -> None:
    """Calls piece by piece must give what one call gives: nothing but attention may mix columns."""
    index, dim = cached._source
    count = pytree.tree_leaves(inputs)[index].shape[dim]
    with torch.no_grad():
        whole = pytree.tree_leaves(module(*inputs))
    start = 0
    for length in (count - 2, 1, 1):
        stop = start + length
        piece = pytree.tree_map(lambda leaf, start=start, stop=stop: _columns(leaf, count, start, stop), inputs)
        outputs = pytree.tree_leaves(cached(*piece))
        for expected, actual in zip(whole, outputs, strict=True):
            _check_output(expected, actual, count, start, stop)
        start = stop
    cached.reset()


def _columns(leaf: Any, count: int, start: int, stop: int) -> Any:
    dims = _column_dims(leaf, count)
    return leaf.narrow(dims[0], start, stop - start) if dims else leaf


def _check_output(expected: Any, actual: Any, count: int, start: int, stop: int) -> None:
    if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
        return
    dims = _column_dims(expected, count)
    if not dims and stop != count:
        return  # the last column alone, which is not there yet
    expected = expected.narrow(dims[0], start, stop - start) if dims else expected
    error = float((expected - actual).abs().max()) / max(float(expected.abs().max()), 1e-6)
    if not error < _CHECK_TOLERANCE:
        raise ValueError(
            "calls piece by piece must give what one call gives, but they differ by "
            f"{error:.1%}: something besides attention mixes columns"
        )

"""Keep the state of matched layers in buffers of the graph's module, at fixed addresses.

Before                                          After
    out = attention(q, k, v)                      key_pages = self.kitty_0_key_pages; ...   (non-persistent buffers)
                                                  out = kitty.attend(q, k, v, None, None, key_pages, ...)

For plain modules and for ``torch.export``. Every row owns its pages, so that nothing has to be dealt out: slot n of row r
is page r * max_pages + n for ever.

Where the model itself wrote new columns at ``positions`` (a static cache), the lengths are set to the first of them before
the layer attends, so that the caller's positions stay in command: starting over at 0, going back within the rollback
window and going on are allowed, anything else is an assertion on the device.
"""

from collections.abc import Callable

import torch
from torch import fx

from kitty_compile.kernels.layout import LayerTensors
from kitty_compile.kernels.ops import OpParameters
from kitty_compile.passes.insert_nodes import Inserter, fake_mode_of
from kitty_compile.passes.nodes import dtype, is_graph_input, is_static, sizes, value_of
from kitty_compile.passes.records import AttentionMatch, MaskKind
from kitty_compile.passes.rewrite_attention import LayerBinding, positions_of

_TABLE = "kitty_page_table"
_FIELDS = tuple(name for name in LayerTensors._fields if name != "page_table")
aten = torch.ops.aten


class BufferBinder:
    """Registers the buffers of each layer it is asked for, for ``max_length`` tokens a row.

    Args:
        gm: the module that gets them; its batch must be fixed.
        max_length: tokens that a row can come to hold.
        parameters_of: the operator's integers for a layer.

    Attributes:
        layers: the layers that were bound.
        follows_positions: the caller says where columns are written.
    """

    def __init__(
        self, gm: fx.GraphModule, max_length: int, parameters_of: Callable[[AttentionMatch], OpParameters]
    ) -> None:
        self.gm, self.max_length, self.parameters_of = gm, max_length, parameters_of
        self.layers: list[int] = []
        self.follows_positions = False

    def bind(self, match: AttentionMatch, mask: MaskKind) -> LayerBinding | str:
        if mask.kind == "sliding":
            return f"a sliding window of {mask.window} needs a ring of its own"
        if mask.padding is not None:
            return f"rows padded by {mask.padding} need a cache that knows which columns hold tokens"
        if not is_static(sizes(match.key)[0]):
            return "buffers need a fixed batch"
        if match.update.kind in ("cat", "kitty") and match.update.key_past is not None:
            return "the caller holds the past"
        parameters = self.parameters_of(match)
        tensors = allocate_pages(parameters, dtype(match.key), match.batch, self.max_length, value_of(match.key).device)
        nodes = [self._buffer(f"kitty_{match.layer}_{name}", tensors[name]) for name in _FIELDS]
        self.layers.append(match.layer)
        if match.update.is_static and not match.update.is_fresh:
            self.follows_positions = True
            self._follow_positions(match, dict(zip(_FIELDS, nodes, strict=True)), parameters.rollback_window)
        return LayerBinding((*nodes, self._page_table(match, parameters)), parameters)

    def _page_table(self, match: AttentionMatch, parameters: OpParameters) -> fx.Node:
        known: list[fx.Node] = self.gm.graph.find_nodes(op="get_attr", target=_TABLE)
        if known:
            return known[0]
        device = value_of(match.key).device
        return self._buffer(_TABLE, allocate_table(parameters, match.batch, self.max_length, device))

    def _buffer(self, name: str, tensor: torch.Tensor) -> fx.Node:
        self.gm.register_buffer(name, tensor, persistent=False)
        with self.gm.graph.inserting_before(next(iter(self.gm.graph.nodes))):
            node = self.gm.graph.get_attr(name)
        node.meta["val"] = fake_mode_of(self.gm.graph).from_tensor(tensor, static_shapes=True)
        return node

    def _follow_positions(self, match: AttentionMatch, state: dict[str, fx.Node], rollback: int) -> None:
        insert = Inserter(match.node)
        start = insert(aten.to.dtype, self._first_position(match, insert), torch.int32)
        lengths, high_water = state["lengths"], state["high_water"]
        restarts = insert(aten.eq.Scalar, start, 0)
        goes_back = insert(
            aten.ge.Tensor, start, insert(aten.sub.Tensor, insert(aten.amax.default, high_water), rollback)
        )
        goes_on = insert(aten.le.Tensor, start, insert(aten.amin.default, lengths))
        allowed = insert(aten.logical_or.default, restarts, insert(aten.logical_and.default, goes_back, goes_on))
        insert(
            aten._assert_async.msg, allowed, "new columns must follow the cached ones, start at 0 or go back a little"
        )
        kept = insert(aten.where.ScalarSelf, restarts, 0, high_water)
        insert(aten.copy_.default, high_water, insert(aten.to.dtype, kept, torch.int32))
        insert(aten.copy_.default, lengths, insert(aten.expand.default, start, [match.batch]))

    def _first_position(self, match: AttentionMatch, insert: Inserter) -> fx.Node:
        flat = insert(aten.reshape.default, positions_of(match, insert), [-1])
        return insert(aten.select.int, flat, 0, 0)


def allocate_pages(
    parameters: OpParameters, dtype: torch.dtype, rows: int, max_length: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """A layer's tensors by their names in ``LayerTensors``, but for the page table: ``rows`` empty rows."""
    layout, raw, heads = parameters.page_layout(dtype), parameters.raw_layout(), parameters.num_kv_heads
    pages = rows * raw.pages_for(max_length)
    raw_key = (rows, heads, raw.key_slots, parameters.key_dim)
    raw_value = (rows, heads, raw.value_slots, parameters.value_dim)
    return {
        "key_pages": torch.zeros(pages, layout.key_page_bytes, dtype=torch.uint8, device=device),
        "value_pages": torch.zeros(pages, layout.value_page_bytes, dtype=torch.uint8, device=device),
        "raw_key": torch.zeros(raw_key, dtype=dtype, device=device),
        "raw_value": torch.zeros(raw_value, dtype=dtype, device=device),
        "lengths": torch.zeros(rows, dtype=torch.int32, device=device),
        "high_water": torch.zeros(rows, dtype=torch.int32, device=device),
    }


def allocate_table(parameters: OpParameters, rows: int, max_length: int, device: torch.device) -> torch.Tensor:
    """The page table of rows that own their pages."""
    max_pages = parameters.raw_layout().pages_for(max_length)
    return torch.arange(rows * max_pages, dtype=torch.int32, device=device).view(rows, max_pages)


def owned_writes(match: AttentionMatch) -> tuple[fx.Node, ...]:
    """Writes to 16-bit buffers of the module that nobody reads any more once its attention is rewritten."""
    return tuple(write for write in match.update.writes if _writes_own_buffer(write))


def _writes_own_buffer(write: fx.Node) -> bool:
    root = write
    while not is_graph_input(root) and root.args and isinstance(root.args[0], fx.Node):
        root = root.args[0]
    return root.op == "get_attr"


def state_of(module: torch.nn.Module, layer: int) -> LayerTensors:
    """The buffers of a layer."""
    fields = {name: getattr(module, f"kitty_{layer}_{name}") for name in _FIELDS}
    return LayerTensors(**fields, page_table=getattr(module, _TABLE))

"""Keep the state of matched layers in buffers of the graph's module, at fixed addresses.

Before                                          After
    out = attention(q, k, v)                      key_pages = self.kitty_0_key_pages; ...   (non-persistent buffers)
                                                  out = kitty.attend(q, k, v, None, None, key_pages, ..., )

For plain modules and for ``torch.export``. Every row owns its pages, so that nothing has to be dealt out: slot n of row r
is page r * max_pages + n for ever.
"""

from collections.abc import Callable

import torch
from torch import fx

from kitty_compile.kernels.layout import LayerTensors
from kitty_compile.kernels.ops import OpParameters
from kitty_compile.passes.nodes import dtype, is_static, sizes, value_of
from kitty_compile.passes.records import AttentionMatch, MaskKind
from kitty_compile.passes.rewrite_attention import LayerBinding

_TABLE = "kitty_page_table"


class BufferBinder:
    """Registers the buffers of each layer it is asked for, for ``max_length`` tokens a row.

    Args:
        gm: the module that gets them; its batch must be fixed.
        max_length: tokens that a row can come to hold.
        parameters_of: the operator's integers for a layer.
    """

    def __init__(
        self, gm: fx.GraphModule, max_length: int, parameters_of: Callable[[AttentionMatch], OpParameters]
    ) -> None:
        self.gm, self.max_length, self.parameters_of = gm, max_length, parameters_of
        self.layers: list[int] = []

    def bind(self, match: AttentionMatch, mask: MaskKind) -> LayerBinding | str:
        if mask.kind == "sliding":
            return f"a sliding window of {mask.window} needs a ring of its own"
        if mask.padding is not None:
            return f"the padding {mask.padding} cannot be told from a cache in buffers"
        if not is_static(sizes(match.key)[0]):
            return "buffers need a fixed batch"
        parameters = self.parameters_of(match)
        tensors = self._allocate(match, parameters)
        nodes = [self._buffer(f"kitty_{match.layer}_{name}", tensor) for name, tensor in tensors.items()]
        self.layers.append(match.layer)
        return LayerBinding((*nodes, self._page_table(match, parameters)), parameters)

    def _allocate(self, match: AttentionMatch, parameters: OpParameters) -> dict[str, torch.Tensor]:
        kind, device = dtype(match.key), value_of(match.key).device
        layout, raw = parameters.page_layout(kind), parameters.raw_layout()
        pages, heads = match.batch * raw.pages_for(self.max_length), match.num_kv_heads
        return {
            "key_pages": torch.empty(pages, layout.key_page_bytes, dtype=torch.uint8, device=device),
            "value_pages": torch.empty(pages, layout.value_page_bytes, dtype=torch.uint8, device=device),
            "raw_key": torch.zeros(match.batch, heads, raw.key_slots, match.key_dim, dtype=kind, device=device),
            "raw_value": torch.zeros(match.batch, heads, raw.value_slots, match.value_dim, dtype=kind, device=device),
            "lengths": torch.zeros(match.batch, dtype=torch.int32, device=device),
            "high_water": torch.zeros(match.batch, dtype=torch.int32, device=device),
        }

    def _page_table(self, match: AttentionMatch, parameters: OpParameters) -> fx.Node:
        for node in self.gm.graph.find_nodes(op="get_attr", target=_TABLE):
            return node
        max_pages = parameters.raw_layout().pages_for(self.max_length)
        ids = torch.arange(match.batch * max_pages, dtype=torch.int32, device=value_of(match.key).device)
        return self._buffer(_TABLE, ids.view(match.batch, max_pages))

    def _buffer(self, name: str, tensor: torch.Tensor) -> fx.Node:
        self.gm.register_buffer(name, tensor, persistent=False)
        first = next(node for node in self.gm.graph.nodes if node.op != "placeholder")
        with self.gm.graph.inserting_before(first):
            node = self.gm.graph.get_attr(name)
        fake_mode = next(
            value.fake_mode
            for node in self.gm.graph.nodes
            if isinstance(value := value_of(node), torch._subclasses.FakeTensor)
        )
        node.meta["val"] = fake_mode.from_tensor(tensor, static_shapes=True)
        return node


def state_of(module: torch.nn.Module, layer: int) -> LayerTensors:
    """The buffers of a layer."""
    fields = [getattr(module, f"kitty_{layer}_{name}") for name in LayerTensors._fields if name != "page_table"]
    return LayerTensors(*fields, getattr(module, _TABLE))

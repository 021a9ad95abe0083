"""The device state of one attention layer: 2-bit pages with raw edges, or a kept raw ring for a sliding window.

What outlives a forward is allocated outside of inference mode, so that a cache filled inside of it can go on outside.
"""

import dataclasses
from typing import Literal, NamedTuple

import torch

from kitty_compile.columns import Call
from kitty_compile.config import KittyConfig
from kitty_compile.kernels import attend_window, ops
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout
from kitty_compile.pages import PageTable


class Geometry(NamedTuple):
    """What the keys and values of a layer have in common from forward to forward."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


def geometry(key: torch.Tensor, value: torch.Tensor) -> Geometry:
    """Of [B, Hkv, n, D] tensors."""
    return Geometry(key.shape[1], key.shape[3], value.shape[3], key.dtype, key.device)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What a model's attention layer asks of the cache: all past tokens ("full"), or a sliding ``window`` of columns."""

    kind: Literal["full", "sliding"] = "full"
    window: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("full", "sliding"):
            raise ValueError(f'kind must be "full" or "sliding", got {self.kind!r}')
        if (self.kind == "sliding") != (self.window is not None):
            raise ValueError(f"window must be given for sliding layers alone, got {self.window} for a {self.kind} one")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")


class _Layer:
    """What both kinds are: an index, columns that the host counts, tensors with ``raw_key``, ``raw_value`` [B, Hkv, n, D]."""

    def __init__(self, index: int, config: KittyConfig) -> None:
        self.index, self.config = index, config
        self.columns = 0
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def is_initialized(self) -> bool:
        return bool(self._tensors)

    @property
    def batch_size(self) -> int:
        return self._tensors["raw_key"].shape[0]

    @property
    def device(self) -> torch.device:
        return self._tensors["raw_key"].device

    @property
    def geometry(self) -> Geometry:
        return geometry(self._tensors["raw_key"], self._tensors["raw_value"])

    @property
    def elements_per_token(self) -> int:
        """K and V elements of one token in this layer."""
        if not self.is_initialized:
            return 0
        found = self.geometry
        return found.num_kv_heads * (found.key_dim + found.value_dim)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def release(self) -> None:
        """Drop all tensors; the next call allocates anew."""
        self.columns, self._tensors = 0, {}

    def _select(self, names: tuple[str, ...], index: torch.Tensor) -> None:
        """Rows by index, at the same addresses when the batch keeps its size."""
        for name in names:
            tensor = self._tensors[name]
            selected = tensor.index_select(0, index)
            self._tensors[name] = tensor.copy_(selected) if selected.shape == tensor.shape else selected


class PagedLayer(_Layer):
    """One full-attention layer. ``lengths`` are advanced by the layer's own operator."""

    is_sliding = False

    def __init__(self, index: int, config: KittyConfig, table: PageTable) -> None:
        super().__init__(index, config)
        self.table = table
        self.parameters: ops.OpParameters | None = None

    @classmethod
    def over(cls, state: LayerTensors, config: KittyConfig, parameters: ops.OpParameters) -> "PagedLayer":
        """The layer whose tensors are ``state``, which somebody else keeps."""
        layer = cls(parameters.layer, config, PageTable())
        layer._tensors = state._asdict()
        layer.table.table = layer._tensors.pop("page_table")
        layer.parameters = parameters
        return layer

    @property
    def state(self) -> LayerTensors:
        return LayerTensors(**self._tensors, page_table=self.table.table)

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens per row, i32 [B]."""
        return self._tensors["lengths"]

    @property
    def num_pages(self) -> int:
        return self._tensors["key_pages"].shape[0]

    @property
    def page_layout(self) -> PageLayout:
        assert self.parameters is not None
        return self.parameters.page_layout(self._tensors["raw_key"].dtype)

    @torch.inference_mode(False)
    def initialize(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Allocate for K and V of these batch sizes, heads, dims, dtype and device. Pages are left as they come."""
        batch, heads, _, key_dim = key.shape
        parameters = self.config.parameters(self.index, key_dim, value.shape[3], heads)
        layout, raw = parameters.page_layout(key.dtype), self.config.raw_layout
        pages = self.table.num_pages
        self._tensors = {
            "key_pages": torch.empty(pages, layout.key_page_bytes, dtype=torch.uint8, device=key.device),
            "value_pages": torch.empty(pages, layout.value_page_bytes, dtype=torch.uint8, device=key.device),
            "raw_key": key.new_zeros(batch, heads, raw.key_slots, key_dim),
            "raw_value": value.new_zeros(batch, heads, raw.value_slots, value.shape[3]),
            "lengths": torch.zeros(batch, dtype=torch.int32, device=key.device),
            "high_water": torch.zeros(batch, dtype=torch.int32, device=key.device),
        }
        self.parameters = parameters

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: Call,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.parameters is not None
        output = ops.attend(
            query,
            key,
            value,
            call.columns,
            call.counts,
            self.state,
            self.parameters,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            is_empty=call.start == 0,
        )
        self.columns += call.num_columns
        return output

    def store(
        self, key: torch.Tensor, value: torch.Tensor, call: Call, real: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The materialising form: K and V of every column, dequantised (the call's own raw); ``real`` bool [B, start]."""
        assert self.parameters is not None
        past_key, past_value = self.materialize(call.start, real) if call.start else (key[:, :, :0], value[:, :, :0])
        ops.update(key, value, call.columns, call.counts, self.state, self.parameters)
        self.columns += call.num_columns
        return torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)

    def materialize(self, columns: int, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at the first ``columns`` columns, [B, Hkv, columns, D], zero where ``real`` is False (None: never)."""
        batch = self.lengths.shape[0]
        if real is None:
            tokens = torch.arange(columns, device=self.lengths.device).expand(batch, -1)
        else:
            tokens = (real.cumsum(dim=1) - 1).clamp(min=0)
        dense = (self._read(tokens, is_key=True), self._read(tokens, is_key=False))
        if real is not None:
            dense = (dense[0].masked_fill(~real[:, None, :, None], 0), dense[1].masked_fill(~real[:, None, :, None], 0))
        return dense

    def _read(self, tokens: torch.Tensor, is_key: bool, packed: torch.Tensor | None = None) -> torch.Tensor:
        """K or V of ``tokens`` i64 [B, n], from pages where ``packed`` (default: the read rule) and raw elsewhere."""
        assert self.parameters is not None
        state, raw = self.state, self.config.raw_layout
        lengths = state.lengths.long()
        held, pool, ring, sealed = (
            (state.raw_key, state.key_pages, raw.key_ring, raw.key_pages(lengths))
            if is_key
            else (state.raw_value, state.value_pages, raw.value_ring, raw.value_pages(lengths))
        )
        offset = tokens - raw.sink_length
        if packed is None:
            packed = (offset >= 0) & (offset // PAGE_SIZE < sealed.unsqueeze(1))
        num_pages = int(torch.where(packed, offset // PAGE_SIZE + 1, 0).max()) if packed.numel() else 0
        dense = ops.dequantize(pool, state.page_table, num_pages, held, self.parameters, is_key)
        # One gather from [raw slots | pages]; an index outside its part is never chosen.
        slot = torch.where(packed, held.shape[2] + offset, raw.slots(tokens, ring))
        everything = torch.cat([held, dense], dim=2)
        return everything.gather(2, slot[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))

    def refill(self, lengths: torch.Tensor) -> None:
        """Before a crop to ``lengths`` [B]: where raw tokens of the new state are gone, take them from the pages.

        This happens to rows that go back by more than the rollback window since ``high_water``; what it restores carries
        the pages' quantisation error. Rows within the window keep their rings as they are.
        """
        state, raw = self.state, self.config.raw_layout
        high_water = state.high_water.long()
        deep = lengths < high_water - raw.rollback_window
        sealed_pages = raw.key_pages(state.lengths.long()), raw.value_pages(state.lengths.long())
        for is_key, held, ring, sealed in (
            (True, state.raw_key, raw.key_ring, sealed_pages[0]),
            (False, state.raw_value, raw.value_ring, sealed_pages[1]),
        ):
            tokens = lengths.unsqueeze(1) - 1 - torch.arange(ring, device=lengths.device)
            offset = tokens - raw.sink_length
            lost = deep.unsqueeze(1) & (offset >= 0) & (tokens < (high_water - ring).unsqueeze(1))
            lost &= offset // PAGE_SIZE < sealed.unsqueeze(1)
            restored = self._read(tokens.clamp(min=0), is_key, packed=lost)
            slots = raw.slots(tokens.clamp(min=0), ring)
            rows, index = torch.nonzero(lost, as_tuple=True)
            held[rows, :, slots[rows, index]] = restored[rows, :, index]
        state.high_water.copy_(torch.where(deep, lengths.to(torch.int32), state.high_water))

    def set_lengths(self, lengths: torch.Tensor, columns: int) -> None:
        self.lengths.copy_(lengths)
        self.columns = columns

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        """Take rows by index; the page table moves on its own."""
        self._select(("raw_key", "raw_value", "lengths", "high_water"), index)

    @torch.inference_mode(False)
    def grow(self, num_pages: int) -> None:
        """Make room for ``num_pages`` pages; those in use keep their ids."""
        for name in ("key_pages", "value_pages"):
            old = self._tensors[name]
            grown = torch.empty(num_pages, old.shape[1], dtype=old.dtype, device=old.device)
            grown[: old.shape[0]] = old
            self._tensors[name] = grown

    def free(self, rows: torch.Tensor) -> None:
        self.lengths[rows] = 0
        self._tensors["high_water"][rows] = 0

    def reset(self) -> None:
        self.columns = 0
        if self.is_initialized:
            self.lengths.zero_()
            self._tensors["high_water"].zero_()

    def release(self) -> None:
        super().release()
        self.parameters = None


class SlidingLayer(_Layer):
    """One sliding-window layer, kept raw: a ring of ``window + rollback_window`` columns."""

    is_sliding = True

    def __init__(self, index: int, config: KittyConfig, window: int) -> None:
        super().__init__(index, config)
        self.window, self.ring = window, window + config.rollback_window

    @torch.inference_mode(False)
    def initialize(self, key: torch.Tensor, value: torch.Tensor) -> None:
        batch, heads = key.shape[:2]
        self._tensors = {
            "raw_key": key.new_zeros(batch, heads, self.ring, key.shape[3]),
            "raw_value": value.new_zeros(batch, heads, self.ring, value.shape[3]),
            "real": torch.zeros(batch, self.ring, dtype=torch.bool, device=key.device),
            "position": torch.zeros(1, dtype=torch.int64, device=key.device),
        }

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: Call,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        output = attend_window.attend(
            query,
            key,
            value,
            call.real,
            *self._tensors.values(),
            window=self.window,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        self._append(key, value, call)
        return output

    def store(
        self, key: torch.Tensor, value: torch.Tensor, call: Call, real: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the newest ``window - 1`` columns before the call and of its own."""
        past = min(call.start, self.window - 1)
        slots = torch.arange(call.start - past, call.start, device=key.device) % self.ring
        keys = torch.cat([self._tensors["raw_key"].index_select(2, slots), key], dim=2)
        values = torch.cat([self._tensors["raw_value"].index_select(2, slots), value], dim=2)
        self._append(key, value, call)
        return keys, values

    def _append(self, key: torch.Tensor, value: torch.Tensor, call: Call) -> None:
        attend_window.append(key, value, call.real, *self._tensors.values())
        self.columns += call.num_columns

    def set_columns(self, columns: int) -> None:
        self._tensors["position"].fill_(columns)
        self.columns = columns

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        self._select(("raw_key", "raw_value", "real"), index)

    def free(self, rows: torch.Tensor) -> None:
        self._tensors["real"][rows] = False

    def reset(self) -> None:
        self.columns = 0
        if self.is_initialized:
            self._tensors["position"].zero_()

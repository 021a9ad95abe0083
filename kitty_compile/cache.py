"""The paged cache of a whole model: one state machine over all layers, free of any model library.

A forward is ``begin_call``, then ``attend`` (fused) or ``store`` (materialising) once per layer, then ``end_call``. Between
forwards rows can be cropped, reordered, repeated, selected and freed. Everything that can fail is checked before anything
changes. Lengths live on the device; the host knows columns, which bound them from above.
"""

from collections.abc import Sequence

import torch

from kitty_compile.checks import check_key_and_value, check_query
from kitty_compile.columns import Call, ColumnMap
from kitty_compile.config import KittyConfig
from kitty_compile.layers import LayerPlan, PagedLayer, SlidingLayer, geometry
from kitty_compile.pages import PageTable

# Without max_length the pools grow by a quarter, and by at least this many pages a row.
_MIN_GROWTH = 2


class PagedCache:
    """The KV cache of a model's attention layers on 2-bit pages.

    Args:
        plans: one per attention layer, in the model's order.
        config: bits, boost, sink and windows.
        max_length: columns that a row can come to hold. The pools are then allocated once, and a call that would exceed
            it is an error. None: the pools grow between calls.
    """

    def __init__(self, plans: Sequence[LayerPlan], config: KittyConfig, *, max_length: int | None = None) -> None:
        if not plans:
            raise ValueError("plans must name at least one attention layer, got none")
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length must be a positive int or None, got {max_length!r}")
        absent = [layer for layer in config.skip_layers if layer >= len(plans)]
        if absent:
            raise ValueError(f"skip_layers must name layers below {len(plans)}, got {absent}")
        self.plans, self.config, self.max_length = tuple(plans), config, max_length
        self._table = PageTable()
        self.layers: list[PagedLayer | SlidingLayer] = [
            PagedLayer(index, config, self._table) if plan.window is None else SlidingLayer(index, config, plan.window)
            for index, plan in enumerate(plans)
        ]
        self._map = ColumnMap()
        # Counts the times that tensors moved: a captured step is good for one epoch.
        self.epoch = 0
        self._call: Call | None = None
        self._served: set[int] = set()
        self._padding: torch.Tensor | None = None
        # Most columns held since the last reset: sliding rings have lost what lies too far before it.
        self._high_columns = 0
        # The same for paged rings, which a deep crop refills: a crop that goes back from it by no more than the rollback
        # window takes no row further back than that from its high_water, whatever pads came between.
        self._refill_columns = 0

    @property
    def _paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    # ---- one forward

    def begin_call(self, num_columns: int, attention_mask: torch.Tensor | None = None) -> Call:
        """Announce a forward of ``num_columns`` new columns.

        Args:
            attention_mask: [B, T] or [B, columns + T], nonzero where a column holds a token; None: everywhere.

        Raises:
            ValueError: the mask does not fit, ``max_length`` would be exceeded, or an earlier forward stopped half way.
        """
        start = self.layers[0].columns
        if any(layer.columns != start for layer in self.layers):
            raise ValueError("the cache must be whole, but a forward stopped half way: crop it to where it was")
        if self.max_length is not None and start + num_columns > self.max_length:
            raise ValueError(f"columns must not exceed max_length={self.max_length}, got {start} + {num_columns}")
        real = self._map.own_columns(attention_mask, start, num_columns)
        batch = self.batch_size
        if real is not None and batch > 0 and start > 0 and real.shape[0] != batch:
            raise ValueError(f"attention_mask must have {batch} rows, got {real.shape[0]}")
        self.abort_call()
        call = Call.of(num_columns, start, real)
        self._reserve(start + num_columns)
        if start == 0:
            self._map = ColumnMap()
        self._map.write(call)
        self._call = call
        return call

    def set_padding(self, attention_mask: torch.Tensor | None) -> None:
        """Say which columns of the next forward hold tokens, for the materialising form, which never sees the mask."""
        self._padding = attention_mask

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The fused form: attention of the call's columns, after which the layer holds their tokens.

        Args:
            query: [B, Hq, T, Dk], Hq a multiple of Hkv. key: [B, Hkv, T, Dk]. value: [B, Hkv, T, Dv].
            softcap: scores become softcap * tanh(score / softcap). sinks: [Hq], learned logits of the denominator.

        Returns:
            [B, Hq, T, Dv]. Columns that hold no token come out finite and meaningless.
        """
        call = self._serve(key, value, layer, query)
        return self.layers[layer].attend(query, key, value, call, scale, softcap or 0.0, sinks)

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The materialising form: takes the layer's new K and V [B, Hkv, T, D], returns those of all columns, dequantised.

        A forward begins by itself, with the mask of :meth:`set_padding`, and ends when every layer was served.
        """
        is_first = self._call is None or layer in self._served
        if is_first:
            self.begin_call(key.shape[2], self._padding)
        try:
            call = self._serve(key, value, layer)
        except (TypeError, ValueError):
            if is_first:
                self.abort_call()
            raise
        self._padding = None
        real = None if self._map.real is None else self._map.real[:, : call.start]
        stored = self.layers[layer].store(key, value, call, real)
        if len(self._served) == len(self.layers):
            self._close_call()
        return stored

    def end_call(self) -> None:
        """Close the forward.

        Raises:
            RuntimeError: a layer was not served; the cache is then torn, see :meth:`crop`.
        """
        call, served = self._call, self._served
        self._close_call()
        if call is not None and served and len(served) < len(self.layers):
            missing = [layer.index for layer in self.layers if layer.index not in served]
            raise RuntimeError(f"every layer must be served in a forward, but layers {missing} were not")

    def abort_call(self) -> None:
        """Forget the forward after an exception. Layers that were served keep its tokens until ``crop``."""
        self._close_call()

    def _close_call(self) -> None:
        self._call, self._served = None, set()

    # A captured step runs the layers' device part alone; the host's part is done here.

    def use_call(self, call: Call) -> None:
        """Take ``call`` for the one that ``begin_call`` returned: the same columns in tensors that will be overwritten."""
        self._call, self._served = call, set()

    def advance_host(self, call: Call) -> None:
        """Every layer's operator has run on the device: do what the host does after it."""
        for layer in self.layers:
            layer.columns = call.start + call.num_columns
        self._close_call()

    def rewind_host(self, call: Call) -> None:
        """The layers' operators were captured and have not run: the host is again where ``call`` began."""
        for layer in self.layers:
            layer.columns = call.start
        self.use_call(call)

    def _serve(self, key: torch.Tensor, value: torch.Tensor, index: int, query: torch.Tensor | None = None) -> Call:
        if not 0 <= index < len(self.layers):
            raise ValueError(f"layer must be below {len(self.layers)}, got {index}")
        call, layer = self._call, self.layers[index]
        if call is None or index in self._served:
            raise RuntimeError(f"layer {index} must be served once between begin_call and end_call")
        check_key_and_value(key, value, call)
        if query is not None:
            check_query(query, key)
        batch = key.shape[0]
        is_used = call.start > 0 or bool(self._served)
        if is_used and self.batch_size != batch:
            raise ValueError(f"batch must stay {self.batch_size} while the cache holds tokens, got {batch}")
        found = geometry(key, value)
        if is_used and layer.is_initialized and layer.geometry != found:
            raise ValueError(f"key and value must stay {layer.geometry} while the cache holds tokens, got {found}")
        if self.batch_size not in (-1, batch) or (layer.is_initialized and layer.geometry != found):
            self._release()
        if self._table.table.shape[0] != batch and self._paged:
            pages = self.config.raw_layout.pages_for(self.max_length or call.num_columns)
            spare = 0 if self.max_length is not None else _MIN_GROWTH
            self._table.allocate(batch, pages + spare, key.device)
        if not layer.is_initialized:
            layer.initialize(key, value)
            self.epoch += 1
        self._served.add(index)
        return call

    def _reserve(self, columns: int) -> None:
        """Grow the pools until every row has the pages that ``columns`` columns can come to need."""
        need, have = self.config.raw_layout.pages_for(columns), self._table.max_pages
        if need <= have or not self._table.table.shape[0]:
            return
        self._table.grow(max(need, have * 5 // 4, have + _MIN_GROWTH))
        self._grow_layers()
        self.epoch += 1

    def _grow_layers(self) -> None:
        for layer in self._paged:
            if layer.is_initialized:
                layer.grow(self._table.num_pages)

    # ---- between forwards

    def crop(self, columns: int) -> None:
        """Keep the first ``columns`` columns of every row; layers that a torn forward left ahead come back in line.

        Dropping up to ``rollback_window`` tokens since the row was longest loses nothing: what follows is bit-identical to
        a cache that never saw them. Going back further restores the raw edges from the pages, with their quantisation
        error; sliding layers cannot do that.

        Raises:
            ValueError: ``columns`` is negative or more than is cached, or a sliding layer cannot go back so far.
        """
        held = min(layer.columns for layer in self.layers)
        if not 0 <= columns <= held:
            raise ValueError(f"columns must be between 0 and the {held} cached ones, got {columns}")
        most = max(layer.columns for layer in self.layers)
        if most == columns:
            return
        self.abort_call()
        self._high_columns = max(self._high_columns, most)
        self._check_sliding(columns)
        high, window = max(self._refill_columns, most), self.config.rollback_window
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            if isinstance(layer, SlidingLayer):
                layer.set_columns(columns)
            else:
                lengths = self._tokens_in(columns, layer.lengths)
                if high - columns > window:
                    layer.refill(lengths)
                layer.set_lengths(lengths, columns)
        self._refill_columns = min(high, columns + window)
        self._high_columns = self._high_columns if columns else 0
        self._deal()

    def _check_sliding(self, columns: int) -> None:
        back, most = self._high_columns - columns, self.config.rollback_window
        for layer in self.layers:
            if isinstance(layer, SlidingLayer) and columns > 0 and back > most and self._high_columns > layer.ring:
                raise ValueError(
                    f"columns must go back by at most rollback_window={most} from the {self._high_columns} that were held on "
                    f"a model with sliding layers, which keep no more, got {columns}"
                )

    def _tokens_in(self, columns: int, like: torch.Tensor) -> torch.Tensor:
        """Tokens of each row in its first ``columns`` columns, i64 [B]."""
        if self._map.real is None:
            return torch.full_like(like, columns, dtype=torch.int64)
        return self._map.real[:, :columns].sum(dim=1)

    def reorder(self, index: torch.Tensor) -> None:
        """Row i becomes what row ``index[i]`` was; i64 [B'], B' may differ from B. Sealed pages are shared, not copied."""
        if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32) or index.numel() == 0:
            raise ValueError(
                f"index must be a 1-D integer tensor with at least one row, got {index.dtype} {list(index.shape)}"
            )
        if not any(layer.is_initialized for layer in self.layers):
            return
        self.epoch += index.numel() != self.batch_size
        index = index.to(self.device)
        for layer in self.layers:
            if layer.is_initialized:
                layer.select(index)
        self._map.select(index)
        if self._paged:
            self._table.select(index)
            if any(layer.is_initialized and self._table.num_pages > layer.num_pages for layer in self._paged):
                self._grow_layers()
            self._deal()

    def repeat(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after another."""
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        if self.batch_size > 0 and repeats > 1:
            self.reorder(torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats))

    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of ``index`` (integers, or a bool per row)."""
        if index.dtype == torch.bool and index.numel() != self.batch_size > 0:
            raise ValueError(f"index must have an entry per row, {self.batch_size}, got {index.numel()}")
        self.reorder(torch.nonzero(index).flatten() if index.dtype == torch.bool else index)

    def free(self, rows: Sequence[int] | torch.Tensor) -> None:
        """Empty these rows (integers, or a bool per row): their pages become free, their columns so far hold no token."""
        if self.batch_size < 1:
            return
        rows = torch.as_tensor(rows, device=self.device)
        rows = torch.nonzero(rows).flatten() if rows.dtype == torch.bool else rows.long()
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.batch_size:
            raise ValueError(f"rows must be between 0 and {self.batch_size - 1}, got {rows.tolist()}")
        for layer in self.layers:
            if layer.is_initialized:
                layer.free(rows)
        anchor = torch.empty(self.batch_size, device=self.device)
        self._map.drop_rows(rows, self.layers[0].columns, anchor)
        self._deal()

    def reset(self) -> None:
        """Empty every row; the memory stays for the next forward."""
        for layer in self.layers:
            layer.reset()
        self._close_call()
        self._map, self._padding = ColumnMap(), None
        self._refill_columns = self._high_columns = 0
        self._deal()

    def _release(self) -> None:
        for layer in self.layers:
            layer.release()
        self._table.release()

    def _deal(self) -> None:
        """Give unsealed slots private free pages. The longest layer decides, so that a torn forward loses nothing."""
        layers = [layer for layer in self._paged if layer.is_initialized]
        if layers and self._table.max_pages:
            longest = torch.stack([layer.lengths for layer in layers]).amax(dim=0)
            self._table.deal(self.config.raw_layout.key_pages(longest))

    # ---- what it holds

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return next((layer.batch_size for layer in self.layers if layer.is_initialized), -1)

    @property
    def columns(self) -> int:
        """Columns that every layer has seen (pads included)."""
        return min(layer.columns for layer in self.layers)

    @property
    def device(self) -> torch.device:
        return next((layer.device for layer in self.layers if layer.is_initialized), torch.device("cpu"))

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens per row, i32 [B]; empty before the first forward."""
        paged = next((layer for layer in self._paged if layer.is_initialized), None)
        if paged is not None:
            return paged.lengths
        if self.batch_size < 0:
            return torch.zeros(0, dtype=torch.int32)
        like = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
        return self._tokens_in(self.layers[0].columns, like).to(torch.int32)

    @property
    def pages_in_use(self) -> int:
        """Distinct sealed pages, each counted once however many rows and layers share its id. Asks the device."""
        layer = next((layer for layer in self._paged if layer.is_initialized), None)
        return 0 if layer is None else self._table.pages_in_use(self.config.raw_layout.key_pages(layer.lengths))

    @property
    def nbytes(self) -> int:
        """Bytes of everything the cache keeps alive: pools, raw tokens, table, lengths, column map."""
        return sum(layer.nbytes for layer in self.layers) + self._table.nbytes + self._map.nbytes

    def bits_per_element(self) -> float:
        """``nbytes`` in bits over the K and V elements of the tokens held; nan while it holds none. Asks the device."""
        elements = sum(layer.elements_per_token * int(self._held(layer).sum()) for layer in self.layers)
        return 8 * self.nbytes / elements if elements else float("nan")

    def _held(self, layer: PagedLayer | SlidingLayer) -> torch.Tensor:
        """Tokens per row that a layer of any cache would have to keep."""
        return self.lengths if isinstance(layer, PagedLayer) else self.lengths.clamp(max=layer.window)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that a layer has seen (pads included)."""
        return self.layers[layer_idx].columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns of K that a mask for ``query_length`` new columns spans, index of the first of them)."""
        layer = self.layers[layer_idx]
        if isinstance(layer, PagedLayer):
            return layer.columns + query_length, 0
        past = min(layer.columns, layer.window - 1)
        return past + query_length, layer.columns - past

"""The cache's rules once more in plain torch: a Python list of tokens per row and layer, pages packed when the read rule
says so, columns as lists of bools. It keeps what the real cache may read and poisons the rest."""

import dataclasses

import torch

from kitty_compile.config import KittyConfig
from kitty_compile.kernels import reference
from kitty_compile.kernels.layout import PAGE_SIZE, PageLayout
from kitty_compile.layers import LayerPlan


@dataclasses.dataclass
class Side:
    """K or V of one row in one layer."""

    raw: list  # per token [H, D]; NaN where the ring has forgotten it
    pages: list  # sealed records u8 [H, nbytes]
    dense: list  # the same pages dequantised, [H, 128, D] in the model's dtype
    forgotten: int = 0  # tokens from the sink to this one are poisoned

    def copy(self):
        return Side(list(self.raw), list(self.pages), list(self.dense), self.forgotten)


@dataclasses.dataclass
class PagedRow:
    key: Side
    value: Side
    high_water: int = 0

    @classmethod
    def empty(cls):
        return cls(Side([], [], []), Side([], [], []))

    @property
    def length(self):
        return len(self.key.raw)

    def copy(self):
        return PagedRow(self.key.copy(), self.value.copy(), self.high_water)


class PagedModel:
    """The rows of a full-attention layer."""

    def __init__(self, config, layout, batch):
        self.config, self.layout = config, layout
        self.rows = [PagedRow.empty() for _ in range(batch)]

    def _sides(self, row):
        """(side, ring, window, layout of its record) of K, then of V."""
        config = self.config
        ring = PAGE_SIZE + config.rollback_window
        yield row.key, ring, 0, reference.seal_keys, reference.unseal_keys
        yield row.value, ring + config.value_window, config.value_window, reference.seal_values, reference.unseal_values

    def append(self, index, key, value):
        """Tokens [H, n, D] of a row."""
        row = self.rows[index]
        row.key.raw += key.unbind(1)
        row.value.raw += value.unbind(1)
        row.high_water = max(row.high_water, row.length)
        for side, ring, window, seal, unseal in self._sides(row):
            while self._page_stop(len(side.pages)) + window <= row.length:
                stop = self._page_stop(len(side.pages))
                tokens = torch.stack(side.raw[stop - PAGE_SIZE : stop], dim=1)
                side.pages.append(seal(tokens.unsqueeze(0), self.layout)[0])
                side.dense.append(unseal(side.pages[-1], self.layout).to(self.layout.dtype))
            self._forget(side, row.high_water - ring)

    def crop(self, index, length):
        row = self.rows[index]
        deep = length < row.high_water - self.config.rollback_window
        for side, ring, window, _, _ in self._sides(row):
            if deep:
                for token in range(max(length - ring, self.config.sink_length), min(length, row.high_water - ring)):
                    page, offset = divmod(token - self.config.sink_length, PAGE_SIZE)
                    side.raw[token] = side.dense[page][:, offset]
                side.forgotten = min(side.forgotten, max(length - ring, 0))
            del side.raw[length:]
            while side.pages and self._page_stop(len(side.pages) - 1) + window > length:
                side.pages.pop()
                side.dense.pop()
        if deep:
            row.high_water = length

    def free(self, index):
        self.rows[index] = PagedRow.empty()

    def read(self, index):
        """K and V [H, length, D] of a row as the read rule has them."""
        row = self.rows[index]
        return tuple(self._read_side(side) for side in (row.key, row.value))

    def _read_side(self, side):
        sink, stop = self.config.sink_length, self._page_stop(len(side.pages) - 1) if side.pages else 0
        if not side.raw:
            return None
        raw = torch.stack(side.raw, dim=1)
        return torch.cat([raw[:, :sink], *side.dense, raw[:, stop:]], dim=1) if side.pages else raw

    def _page_stop(self, page):
        return self.config.sink_length + (page + 1) * PAGE_SIZE

    def _forget(self, side, stop):
        for token in range(max(self.config.sink_length, side.forgotten), stop):
            side.raw[token] = torch.full_like(side.raw[token], torch.nan)
        side.forgotten = max(side.forgotten, stop)


class SlidingModel:
    """The rows of a sliding layer: K, V and reality of every column, forgotten past the ring."""

    def __init__(self, config, window, batch):
        self.window, self.ring = window, window + config.rollback_window
        self.rows = [[] for _ in range(batch)]

    def append(self, index, key, value, real):
        self.rows[index] += list(zip(key.unbind(1), value.unbind(1), real, strict=True))

    def crop(self, columns):
        for row in self.rows:
            del row[columns:]

    def free(self, index):
        self.rows[index] = [(key, value, False) for key, value, _ in self.rows[index]]

    def read(self, index):
        """K and V [H, n, D] and reality of the newest window - 1 columns."""
        row = self.rows[index]
        newest = row[max(len(row) - self.window + 1, 0) :]
        if not newest:
            return None, None, []
        key, value, real = zip(*newest, strict=True)
        return torch.stack(key, dim=1), torch.stack(value, dim=1), list(real)


class CacheModel:
    """What ``PagedCache`` promises, for a cache of these plans.

    ``real`` holds the reality of every column of every row. ``peak`` is the greatest number of columns that sliding
    rings have held since they were last whole.
    """

    def __init__(self, plans, config, layout, batch):
        self.plans, self.config, self.layout = plans, config, layout
        self.start_over(batch)

    def start_over(self, batch):
        self.real = [[] for _ in range(batch)]
        self.peak = 0
        self.layers = [
            SlidingModel(self.config, plan.window, batch) if plan.window else PagedModel(self.config, layout, batch)
            for plan, layout in zip(self.plans, self._layouts(), strict=True)
        ]

    def _layouts(self):
        raw = dataclasses.replace(self.layout, key_bits=16, value_bits=16, num_boosted=0)
        return [raw if index in self.config.skip_layers else self.layout for index in range(len(self.plans))]

    @property
    def batch(self):
        return len(self.real)

    @property
    def columns(self):
        return len(self.real[0])

    @property
    def lengths(self):
        return [sum(row) for row in self.real]

    def serve(self, layer, key, value, real):
        """A layer takes the K and V [B, H, T, D] of new columns."""
        for index in range(self.batch):
            chosen = real[index].nonzero().flatten()
            if isinstance(self.layers[layer], SlidingModel):
                self.layers[layer].append(index, key[index], value[index], real[index].tolist())
            else:
                self.layers[layer].append(index, key[index][:, chosen], value[index][:, chosen])

    def finish(self, real):
        """All layers were served with columns of this reality [B, T]."""
        for row, own in zip(self.real, real.tolist(), strict=True):
            row += own
        self.peak = max(self.peak, self.columns)

    def can_crop(self, columns, ahead=0):
        """``ahead``: columns that a torn forward left in some layers."""
        rings = [layer.ring for layer in self.layers if isinstance(layer, SlidingModel)]
        peak = max(self.peak, self.columns + ahead)
        return columns == 0 or all(peak <= ring or peak - columns <= self.config.rollback_window for ring in rings)

    def crop(self, columns, ahead=0):
        peak = max(self.peak, self.columns + ahead)
        whole = columns == 0 or all(peak <= layer.ring for layer in self.layers if isinstance(layer, SlidingModel))
        self.peak = columns if whole else peak
        for row in self.real:
            del row[columns:]
        for layer in self.layers:
            if isinstance(layer, SlidingModel):
                layer.crop(columns)
                continue
            for index, length in enumerate(self.lengths):
                layer.crop(index, length)

    def select(self, index):
        self.real = [list(self.real[row]) for row in index]
        for layer in self.layers:
            layer.rows = [
                list(layer.rows[row]) if isinstance(layer, SlidingModel) else layer.rows[row].copy() for row in index
            ]

    def free(self, rows):
        for index in rows:
            self.real[index] = [False] * self.columns
            for layer in self.layers:
                layer.free(index)

    def materialized(self, layer):
        """K and V [B, H, columns, D] of a layer before a new call: at their columns, zero at pads; the newest
        window - 1 columns as they came when it is a sliding one. None while there are none."""
        if not self.columns:
            return None
        rows = [self._materialized_row(self.layers[layer], index) for index in range(self.batch)]
        return tuple(torch.stack(side) for side in zip(*rows, strict=True))

    def _materialized_row(self, layer, index):
        if isinstance(layer, SlidingModel):
            return layer.read(index)[:2]
        heads, layout = layer.layout.num_kv_heads, layer.layout
        read, at = layer.read(index), torch.tensor(self.real[index], dtype=torch.bool)
        row = []
        for side, head_dim in zip(read, (layout.key_dim, layout.value_dim), strict=True):
            columns = torch.zeros(heads, self.columns, head_dim, dtype=layout.dtype)
            if side is not None:
                columns[:, at] = side
            row.append(columns)
        return row

    def attended(self, layer, query, key, value, real, *, scale):
        """Attention of a call before ``serve``, in fp64: [B, Hq, T, Dv], zero where nothing is visible."""
        past, group = self.materialized(layer), query.shape[1] // key.shape[1]
        window = self.plans[layer].window
        past_real = torch.tensor(self.real, dtype=torch.bool).view(self.batch, -1)
        if past is not None:
            key, value = (torch.cat([old, new], dim=2) for old, new in zip(past, (key, value), strict=True))
            past_real = past_real[:, past_real.shape[1] - past[0].shape[2] :]
        all_real = torch.cat([past_real, real], dim=1)
        column = torch.arange(key.shape[2])
        distance = column[-query.shape[2] :, None] - column
        visible = (distance >= 0) & (distance < (window or key.shape[2] + 1)) & all_real[:, None, :]
        hidden = ~all_real[:, None, :, None]
        wide_key, wide_value = (
            side.double().masked_fill(hidden, 0.0).repeat_interleave(group, dim=1) for side in (key, value)
        )
        scores = (query.double() @ wide_key.mT * scale).masked_fill(~visible[:, None], -torch.inf)
        return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ wide_value


def small_layout(config: KittyConfig, *, heads=1, key_dim=16, value_dim=16, dtype=torch.float32) -> PageLayout:
    bits = config.key_bits, config.value_bits
    num_boosted = config.num_boosted(key_dim) if config.key_bits == 2 else 0
    return PageLayout(key_dim, value_dim, heads, *bits, num_boosted, dtype)


def plans_of(*windows: int | None) -> list[LayerPlan]:
    """A layer per entry: None for full attention, else its window."""
    return [LayerPlan() if window is None else LayerPlan("sliding", window) for window in windows]

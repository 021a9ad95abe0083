"""Rewrite a generated model, call it piece by piece, and compute what it must give."""

import copy
import dataclasses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kitty_compile.cache import PagedCache
from kitty_compile.columns import Call
from kitty_compile.config import KittyConfig
from kitty_compile.layers import LayerPlan, PagedLayer
from kitty_compile.pages import PageTable
from kitty_compile.passes.bind_buffers import BufferBinder
from kitty_compile.passes.clean_up import clean_up
from kitty_compile.passes.insert_nodes import fake_mode_of
from kitty_compile.passes.nodes import dtype, op_name, sizes
from kitty_compile.passes.pipeline import analyze
from kitty_compile.passes.rewrite_attention import LayerBinding, rewrite_attention
from tests.generated_graphs import ROOM, TOTAL, WIDTH
from tests.generated_models import cache_size

ATTENDS = ("softmax", "_softmax", "_safe_softmax", "scaled_dot_product_attention")
_PARAMETERS = 12  # where kitty::attend takes them


class StateBinder:
    """Binds what ``BufferBinder`` leaves: pasts that the caller holds, and padded rows."""

    def __init__(self, gm, config):
        self.gm, self.config = gm, config

    def bind(self, match, mask):
        if mask.kind == "sliding":
            return f"a sliding window of {mask.window}"
        heads = match.num_kv_heads
        layer = make_layer(
            match.layer, self.config, match.batch, heads, match.key_dim, match.value_dim, dtype(match.key)
        )
        fields = layer.state._asdict()
        nodes = tuple(self._attribute(name_of(match.layer, field), tensor) for field, tensor in fields.items())
        if mask.padding is None:
            return LayerBinding(nodes, layer.parameters)
        own = (match.batch, sizes(match.key)[match.update.columns_dim])
        columns, counts = self._filled("kitty_columns", own), self._filled("kitty_counts", own[:1])
        return LayerBinding(nodes, layer.parameters, columns, counts)

    def _filled(self, name, size):
        """A buffer that is filled before every call."""
        node = self._attribute(name, torch.zeros(1, dtype=torch.int32))
        with fake_mode_of(self.gm.graph):
            node.meta["val"] = torch.empty(size, dtype=torch.int32)
        return node

    def _attribute(self, name, tensor):
        known = self.gm.graph.find_nodes(op="get_attr", target=name)
        if known:
            return known[0]
        self.gm.register_buffer(name, tensor, persistent=False)
        with self.gm.graph.inserting_before(next(iter(self.gm.graph.nodes))):
            node = self.gm.graph.get_attr(name)
        node.meta["val"] = fake_mode_of(self.gm.graph).from_tensor(tensor, static_shapes=True)
        return node


def name_of(layer, field):
    return "kitty_page_table" if field == "page_table" else f"kitty_{layer}_{field}"


def make_layer(index, config, batch, heads, key_dim, value_dim, kind, table=None):
    """The state of a layer; the page table is shared with the other layers, if there are any."""
    if table is None:
        table = PageTable()
        table.allocate(batch, config.raw_layout.pages_for(ROOM), torch.device("cpu"))
    layer = PagedLayer(index, config, table)
    layer.initialize(*(torch.zeros(batch, heads, 1, dim, dtype=kind) for dim in (key_dim, value_dim)))
    return layer


class _Attends(TorchDispatchMode):
    """Copies what goes into and comes out of every ``kitty::attend``."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.kitty.attend.default:
            layer = args[_PARAMETERS][7]
            self.seen.append((layer, *(part.clone() for part in (*args[:3], out))))
        return out


class Rewritten:
    """A model whose graphs are analysed and rewritten as they are captured.

    Attributes:
        graphs, reports: of each capture.
        layers: the state of the rewritten layers, by index.
        seen: (layer, query, key, value, output) of every attention since ``use``.
    """

    def __init__(self, recipe, model):
        self.recipe, self.model = recipe, model
        self.graphs, self.reports, self.kept = [], [], []
        self.layers, self.seen = {}, []
        self.matches = {}
        self.config = KittyConfig.preset("lossless")
        if recipe.front_end == "export":
            self._call = self._rewrite(export(recipe, model))
        else:
            torch._dynamo.reset()
            self._call = torch.compile(model, backend=self._backend)

    def _backend(self, gm, example_inputs):
        return self._rewrite(gm, example_inputs)

    def _rewrite(self, gm, example_inputs=()):
        gm, report = analyze(gm, example_inputs)
        assert sum(op_name(node) in ATTENDS for node in gm.graph.nodes) == len(report.found)
        recipe = self.recipe
        is_plain = recipe.padding is None and recipe.cache != "cat" and recipe.front_end == "export"
        binder = BufferBinder(gm, ROOM, self._parameters) if is_plain else StateBinder(gm, self.config)
        rewrite = rewrite_attention(gm, report, binder)
        clean_up(gm, rewrite.replaced)
        gm.graph.lint()
        self.reports.append(report)
        self.kept += rewrite.kept.values()
        self.graphs.append(gm)
        self.matches |= {match.layer: match for match in report.matches if match.node not in rewrite.kept}
        self._install(gm)
        return lambda *args: self._run(gm, args)

    def _parameters(self, match):
        return self.config.parameters(match.layer, match.key_dim, match.value_dim, match.num_kv_heads)

    def use(self, config):
        """Start over with empty caches of another configuration."""
        self.config, self.layers, self.seen = config, {}, []
        for gm in self.graphs:
            self._install(gm)

    def _install(self, gm):
        """Have all graphs work on the same state."""
        recipe = self.recipe
        sizes_of = (recipe.batch, recipe.kv_heads, recipe.key_dim, recipe.value_dim, recipe.dtype)
        for index in sorted(set(self.matches) - set(self.layers)):
            table = next((layer.table for layer in self.layers.values()), None)
            self.layers[index] = make_layer(index, self.config, *sizes_of, table)
        for node in gm.graph.nodes:
            if op_name(node) == "kitty::attend":
                layer = self.layers[node.args[_PARAMETERS][7]]
                node.update_arg(_PARAMETERS, list(layer.parameters))
                for field, tensor in layer.state._asdict().items():
                    setattr(gm, name_of(layer.index, field), tensor)
        gm.recompile()

    def _run(self, gm, args):
        if self.own is not None and hasattr(gm, "kitty_columns"):
            call = Call.of(self.own.shape[1], 0, self.own)
            gm.kitty_columns, gm.kitty_counts = call.columns, call.counts
        with _Attends(self.seen):
            return gm(*args)

    def __call__(self, *args, own=None):
        """``own``: bool [batch, columns] of the call's columns that hold tokens."""
        self.own = own
        with torch.no_grad():
            return self._call(*args)


# ---- calls


def hidden(recipe, columns=TOTAL):
    x = torch.randn(recipe.batch, columns, WIDTH, generator=torch.Generator().manual_seed(recipe.seed + 7))
    return x.to(recipe.dtype)


def held_at_start(recipe, dtype, past=0):
    """What the caller holds before the first call: empty pasts, or zeroed buffers."""
    held = []
    for _ in recipe.windows:
        for dim in (recipe.key_dim, recipe.value_dim):
            size = list(cache_size(recipe, dim))
            if recipe.cache == "cat":
                size[2 if recipe.heads_first else 1] = past
            held.append(torch.zeros(size, dtype=dtype))
    return held if recipe.cache == "cat" or (recipe.is_static and recipe.owner == "caller") else None


def tokens(recipe, columns):
    """bool [batch, columns]: which hold tokens."""
    pads = torch.tensor(recipe.padding or [0] * recipe.batch)
    return torch.arange(columns) >= pads[:, None]


def arguments_of(recipe, x, start, held):
    """(x, held, where, mask) of a call whose first column is ``start``."""
    t = x.shape[1]
    where = None
    if recipe.is_static:
        where = start if recipe.cache == "slice" else torch.arange(start, start + t)
    mask = None
    if recipe.padding is not None:
        if recipe.cache == "none":
            mask = tokens(recipe, start + t)[:, start:].long()
        else:
            mask = tokens(recipe, ROOM if recipe.is_static else start + t).long()
    return x, held, where, mask


def run(recipe, model, lengths, dtype=None, start=0):
    """Outputs of calls of these lengths; a ``Rewritten`` is told which columns are tokens."""
    x = hidden(recipe) if dtype is None else hidden(recipe).to(dtype)
    held = held_at_start(recipe, x.dtype)
    outputs = []
    for length in lengths:
        piece = x[:, start : start + length]
        arguments = arguments_of(recipe, piece, start, held)
        if isinstance(model, Rewritten):
            if recipe.front_end == "dynamo":
                _mark(recipe, arguments, start)
            own = tokens(recipe, start + length)[:, start:] if recipe.padding is not None else None
            out, *rest = model(*arguments, own=own)
        else:
            with torch.no_grad():
                out, *rest = model(*arguments)
        held = list(rest) if recipe.cache == "cat" else held
        outputs.append(out)
        start += length
    return torch.cat(outputs, dim=1)


def _mark(recipe, arguments, start):
    """Sizes that change from call to call are symbols from the first graph on."""
    x, held, where, mask = arguments
    if x.shape[1] > 1:
        torch._dynamo.mark_dynamic(x, 1)
        if isinstance(where, torch.Tensor):
            torch._dynamo.mark_dynamic(where, 0)
    if mask is not None and not recipe.is_static and mask.shape[1] > 1:
        torch._dynamo.maybe_mark_dynamic(mask, 1)
    if recipe.cache == "cat" and start > 1:
        for tensor in held:
            torch._dynamo.mark_dynamic(tensor, 2 if recipe.heads_first else 1)


def export(recipe, model):
    dynamic = torch.export.Dim.DYNAMIC
    t, past = 19, 0 if recipe.cache == "none" else 23
    arguments = arguments_of(recipe, hidden(recipe, t), past, held_at_start(recipe, recipe.dtype, past))
    held = None
    if recipe.cache == "cat":
        held = [{2 if recipe.heads_first else 1: dynamic}] * len(arguments[1])
    elif arguments[1] is not None:
        held = [None] * len(arguments[1])
    where = {0: dynamic} if isinstance(arguments[2], torch.Tensor) else dynamic if recipe.cache == "slice" else None
    mask = {1: dynamic} if arguments[3] is not None and not recipe.is_static else None
    with torch.no_grad():
        program = torch.export.export(model, arguments, dynamic_shapes=({1: dynamic}, held, where, mask), strict=False)
    gm = program.module()
    for node in gm.graph.find_nodes(op="call_module"):
        gm.graph.erase_node(node)
    return gm


# ---- what must come out


@dataclasses.dataclass
class Truth:
    """In float64, with the error that the model itself makes in its own precision."""

    output: torch.Tensor
    error: float


def truth_of(recipe, model):
    exact = run(recipe, copy.deepcopy(model).double(), (TOTAL,), torch.float64)
    own = run(recipe, copy.deepcopy(model), (TOTAL,))
    real = tokens(recipe, TOTAL)
    return Truth(exact, float((own - exact)[real].abs().max()))


@dataclasses.dataclass
class Expected:
    """One attention over unpacked keys and values: in float64, in the model's precision, and what was computed."""

    exact: torch.Tensor
    own: torch.Tensor
    actual: torch.Tensor
    values: torch.Tensor
    real: torch.Tensor

    def errors(self):
        """(of what was computed, of the model's precision), where columns hold tokens."""
        real = self.real[:, None, :, None].expand_as(self.actual)
        return tuple(float(((out - self.exact) * real).abs().max()) for out in (self.actual, self.own))


def materialised(recipe, model, rewritten, config):
    """What every recorded attention should have been, over K and V of a cache that unpacks its pages."""
    caches = [PagedCache([LayerPlan()], config) for _ in recipe.windows]
    for layer, query, key, value, actual in rewritten.seen:
        start, t = caches[layer].get_seq_length(), key.shape[2]
        real = tokens(recipe, start + t)
        caches[layer].set_padding(real if recipe.padding is not None else None)
        keys, values = caches[layer].store(key, value, 0)
        visible = torch.ones(t, start + t, dtype=torch.bool).tril(start) & real[:, None, None]
        sinks = model.layers[layer].sinks if recipe.sinks else None
        rest = (visible, sinks, rewritten.matches[layer].scale)
        exact = plain(recipe, query.double(), keys.double(), values.double(), *rest)
        yield Expected(exact, plain(recipe, query, keys, values, *rest), actual, values, real[:, start:])


def plain(recipe, query, keys, values, visible, sinks, scale):
    keys, values = (part.repeat_interleave(recipe.group, dim=1) for part in (keys, values))
    scores = query @ keys.mT * scale
    if recipe.softcap is not None:
        scores = torch.tanh(scores / recipe.softcap) * recipe.softcap
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., : keys.shape[2]] @ values

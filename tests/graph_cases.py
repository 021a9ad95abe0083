"""Small attention graphs from both front ends, and what a match of them must compute."""

import dataclasses

import torch
from torch import fx, nn

from kitty_compile.passes.nodes import constant_of, shape
from kitty_compile.passes.normalize import normalize, normalize_program


@dataclasses.dataclass
class Graph:
    """A normalised graph and real values of its placeholders."""

    gm: fx.GraphModule
    inputs: list


def capture(front_end, module, *args, dynamic=False, dynamic_shapes=None, **kwargs):
    """The one graph that a call makes."""
    if front_end == "dynamo":
        (graph,) = capture_dynamo(module, *args, dynamic=dynamic, **kwargs)
        return graph
    return capture_export(module, *args, dynamic_shapes=dynamic_shapes, **kwargs)


def capture_dynamo(function, *args, dynamic=False, **kwargs):
    """All graphs of a call, in order."""
    torch._dynamo.reset()
    graphs = []

    def record(gm, example_inputs):
        values = [value.node.hint if isinstance(value, torch.SymInt) else value for value in example_inputs]
        graphs.append(Graph(normalize(gm, example_inputs), values))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=record, dynamic=dynamic)(*args, **kwargs)
    return graphs


def capture_export(module, *args, dynamic_shapes=None, **kwargs):
    if not isinstance(module, nn.Module):
        module = Function(module)
    with torch.no_grad():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    gm = normalize_program(program)
    given = iter(torch.utils._pytree.tree_leaves((args, kwargs)))
    return Graph(gm, [constant_of(node) if constant_of(node) is not None else next(given) for node in placeholders(gm)])


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def placeholders(gm):
    return gm.graph.find_nodes(op="placeholder")


class _Recorder(fx.Interpreter):
    def __init__(self, gm, wanted):
        super().__init__(gm, garbage_collect_values=False)
        self.wanted, self.seen = wanted, {}

    def run_node(self, n):
        value = super().run_node(n)
        if n in self.wanted:
            # Later in-place calls must not change what was read; a graph input is read after them.
            self.seen[n] = value.clone() if isinstance(value, torch.Tensor) and n.op != "placeholder" else value
        return value


def values_of(graph, nodes):
    """What the nodes are when the graph runs on its inputs."""
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in graph.inputs]
    recorder = _Recorder(graph.gm, set(nodes))
    with torch.no_grad():
        recorder.run(*copies)
    return recorder.seen


def replay(graph, match):
    """(what the matched node is, what its record says that it is), both [batch, heads, T, value_dim]."""
    update = match.update
    nodes = {match.node, match.query, match.key, match.value, update.key_full, update.value_full, match.sinks}
    nodes |= {term.node for term in match.masks}
    seen = values_of(graph, nodes - {None})
    query = seen[match.query].reshape(match.batch, match.num_heads, match.num_columns, match.key_dim).double()
    key, value = (_by_heads(seen[node], match) for node in (update.key_full, update.value_full))
    repeats = match.num_heads // match.num_kv_heads
    key, value = (tensor.repeat_interleave(repeats, dim=1).double() for tensor in (key, value))
    scores = match.scale * query @ key.mT
    if match.softcap is not None:
        scores = match.softcap * torch.tanh(scores / match.softcap)
    for term in match.masks:
        scores = _masked(scores, seen[term.node], term)
    if match.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    if match.sinks is not None:
        sinks = seen[match.sinks].double().view(1, -1, 1, 1).expand(match.batch, -1, match.num_columns, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    output = scores.softmax(dim=-1)[..., : match.num_keys] @ value
    return seen[match.node].reshape(output.shape).double(), output


def _by_heads(tensor, match):
    tensor = tensor if match.update.columns_dim == 2 else tensor.transpose(1, 2)
    return tensor[: match.batch, :, : match.num_keys]


def _masked(scores, mask, term):
    applied_to = (*shape(term.scores)[:-1], scores.shape[-1])
    mask = mask.expand(applied_to).reshape(scores.shape)
    if term.form == "additive":
        return scores + mask.double()
    return scores.masked_fill(mask.bool() if term.form == "hidden" else ~mask.bool(), -torch.inf)


class Attention(nn.Module):
    """Projections around ``attend(self, q, k, v, *extra)``, with q [b, heads, t, dim] and k, v [b, kv_heads, t, dim]."""

    def __init__(self, attend, heads=4, kv_heads=2, dim=16, width=32):
        super().__init__()
        self.attend, self.heads, self.kv_heads, self.dim = attend, heads, kv_heads, dim
        self.q_proj = nn.Linear(width, heads * dim)
        self.k_proj = nn.Linear(width, kv_heads * dim)
        self.v_proj = nn.Linear(width, kv_heads * dim)
        self.o_proj = nn.Linear(heads * dim, width)
        self.register_buffer("tril", torch.ones(64, 64).tril()[None, None], persistent=False)
        self.sinks = nn.Parameter(torch.randn(heads))

    def forward(self, x, *extra):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        out = self.attend(self, q, k, v, *extra)
        rest = ()
        if isinstance(out, tuple):
            out, *rest = out
        out = out.reshape(b, self.heads, t, self.dim).transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(out), *rest


class Stack(nn.Module):
    """Layers in a ModuleList, as models have them."""

    def __init__(self, attend, num_layers=1, **sizes):
        super().__init__()
        self.layers = nn.ModuleList(Attention(attend, **sizes) for _ in range(num_layers))

    def forward(self, x, *extra):
        rest = []
        for layer in self.layers:
            x, *more = layer(x, *extra)
            rest.extend(more)
        return x, *rest


def hidden(batch=2, columns=7, width=32, seed=0):
    return torch.randn(batch, columns, width, generator=torch.Generator().manual_seed(seed))


def past_of(batch=2, kv_heads=2, columns=11, dim=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, kv_heads, columns, dim, generator=generator) for _ in range(2))


def causal(queries, keys):
    """bool [queries, keys], the last queries of the keys."""
    return torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]


def repeat_kv(x, repeats):
    b, heads, columns, dim = x.shape
    return x[:, :, None].expand(b, heads, repeats, columns, dim).reshape(b, heads * repeats, columns, dim)

"""The models that recipes describe."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.generated_graphs import ROOM, WIDTH
from tests.graph_cases import repeat_kv


class Layer(nn.Module):
    def __init__(self, recipe, window):
        super().__init__()
        self.recipe, self.window = recipe, window
        self.q_proj = nn.Linear(WIDTH, recipe.heads * recipe.key_dim, bias=False)
        self.k_proj = nn.Linear(WIDTH, recipe.kv_heads * recipe.key_dim, bias=False)
        self.v_proj = nn.Linear(WIDTH, recipe.kv_heads * recipe.value_dim, bias=False)
        self.o_proj = nn.Linear(recipe.heads * recipe.value_dim, WIDTH, bias=False)
        if recipe.sinks:
            self.sinks = nn.Parameter(torch.empty(recipe.heads))
        if recipe.owner == "module":
            for name, dim in (("k_cache", recipe.key_dim), ("v_cache", recipe.value_dim)):
                self.register_buffer(name, torch.zeros(cache_size(recipe, dim)), persistent=False)

    def forward(self, x, held, where, visible, index, store=None):
        recipe = self.recipe
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, recipe.heads, recipe.key_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, recipe.kv_heads, recipe.key_dim)
        v = self.v_proj(x).view(b, t, recipe.kv_heads, recipe.value_dim)
        if recipe.norm:
            q, k = (part / part.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() for part in (q, k))
        if recipe.heads_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if recipe.owner == "module":
            held = (self.k_cache, self.v_cache)
        k, v = join(recipe, held, k, v, where)
        kept = (k, v) if recipe.cache == "cat" else ()
        if not recipe.heads_first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        out = attend(self, q, k, v, visible)
        extra = ()
        if isinstance(out, tuple):
            out, *extra = out
        return x + self.o_proj(out.transpose(1, 2).reshape(b, t, -1)), kept, extra


class Model(nn.Module):
    """``forward(x, held, where, mask)``: hidden states, what the caller holds, where the columns go, which are tokens."""

    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe
        self.layers = nn.ModuleList(Layer(recipe, window) for window in recipe.windows)
        self.register_buffer("tril", torch.ones(ROOM, ROOM, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x, held=None, where=None, mask=None):
        recipe, t = self.recipe, x.shape[1]
        past = held[0].shape[2 if recipe.heads_first else 1] if recipe.cache == "cat" else 0
        results = []
        for index, layer in enumerate(self.layers):
            visible = visible_columns(self, layer.window, t, past, where, mask)
            own = held[2 * index : 2 * index + 2] if held is not None else None
            x, kept, extra = layer(x, own, where, visible, index)
            results += [*kept, *extra]
        return x, *results


def cache_size(recipe, dim):
    leading = (recipe.kv_heads, ROOM) if recipe.heads_first else (ROOM, recipe.kv_heads)
    return (recipe.batch, *leading, dim)


def make_model(recipe):
    torch.manual_seed(recipe.seed)
    model = Model(recipe)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 1.3 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0)
    return model.to(recipe.dtype).train(recipe.twist == "dropout").requires_grad_(False)


def join(recipe, held, k, v, where):
    """Keys and values of all columns."""
    dim = 2 if recipe.heads_first else 1
    match recipe.cache:
        case "none":
            return k, v
        case "cat":
            return torch.cat([held[0], k], dim=dim), torch.cat([held[1], v], dim=dim)
        case "index_copy":
            for cache, new in zip(held, (k, v), strict=True):
                cache.index_copy_(dim, where, new)
        case "index_put":
            for cache, new in zip(held, (k, v), strict=True):
                cache[(slice(None),) * dim + (where,)] = new
        case "slice":
            stop = where + k.shape[dim]
            for cache, new in zip(held, (k, v), strict=True):
                cache[(slice(None),) * dim + (slice(where, stop),)] = new
            return tuple(cache[(slice(None),) * dim + (slice(stop),)] for cache in held)
    return tuple(held)


def visible_columns(model, window, t, past, where, mask):
    """bool [b or 1, 1, t, n]; None where the recipe does without a mask."""
    recipe = model.recipe
    n = past + t
    if recipe.cache == "slice":
        past, n = where, where + t
    elif recipe.is_static:
        n = ROOM
    # One column sees all that is read, unless a buffer is read to its end.
    is_plain = recipe.padding is None and window is None and n != ROOM
    if recipe.mask == "none" and is_plain and t == 1:
        return None
    if recipe.mask == "flag" and is_plain and (t == 1 or n == t):
        return None
    visible = _causal(model, window, t, n, past, where)
    match recipe.twist:
        case "bidirectional":
            visible = torch.ones_like(visible)
        case "prefix":
            visible = visible | (torch.arange(n) < 4)
        case "chunks":
            queries, keys = _positions(recipe, t, past, where)[:, None] // 8, torch.arange(n) // 8
            visible = visible & (queries == keys)
    visible = visible[None, None]
    return visible if recipe.padding is None else visible & mask[:, None, None, :n].bool()


def _positions(recipe, t, past, where):
    return where if recipe.cache in ("index_copy", "index_put") else torch.arange(t) + past


def _causal(model, window, t, n, past, where):
    recipe = model.recipe
    queries, keys = _positions(recipe, t, past, where)[:, None], torch.arange(n)
    match recipe.mask_from:
        case "buffer":
            visible = model.tril[queries[:, 0], :n]
        case "tril" if not recipe.is_static:
            visible = torch.ones(t, n, dtype=torch.bool).tril(n - t)
        case _:
            visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def additive(recipe, visible, dtype):
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, recipe.lowest)


def attend(layer, q, k, v, visible):
    recipe = layer.recipe
    if recipe.twist == "scaled values":
        v = v * 0.5
    return _sdpa(recipe, q, k, v, visible) if recipe.product == "sdpa" else _eager(layer, q, k, v, visible)


def _repeated(recipe, k, v):
    if recipe.twist == "tiled heads":
        return (part.repeat(1, recipe.group, 1, 1) for part in (k, v))
    if recipe.group == 1 or recipe.repeats == "operator":
        return k, v
    if recipe.repeats == "repeat_interleave":
        return (part.repeat_interleave(recipe.group, dim=1) for part in (k, v))
    return (repeat_kv(part, recipe.group) for part in (k, v))


def _sdpa(recipe, q, k, v, visible):
    k, v = _repeated(recipe, k, v)
    arguments = {"enable_gqa": True} if recipe.repeats == "operator" else {}
    q, k, remaining = _scaled_operands(recipe, q, k)
    if recipe.scale_at != "default":
        arguments["scale"] = remaining
    if recipe.twist == "dropout":
        arguments["dropout_p"] = 0.1
    if recipe.twist == "wrong causal flag" or (visible is None and q.shape[2] > 1):
        return sdpa(q, k, v, is_causal=True, **arguments)
    if visible is None:
        return sdpa(q, k, v, **arguments)
    mask = visible if recipe.mask != "additive" else additive(recipe, visible, q.dtype)
    return sdpa(q, k, v, attn_mask=mask, **arguments)


def _scaled_operands(recipe, q, k):
    """(q, k, the part of the scale that is left)."""
    match recipe.scale_at:
        case "query":
            return q * recipe.scale, k, 1.0
        case "key":
            return q, k * recipe.scale, 1.0
        case "both":
            return q * recipe.scale**0.5, k * recipe.scale**0.5, 1.0
    return q, k, recipe.total_scale


def _eager(layer, q, k, v, visible):
    recipe, (b, _, t, _) = layer.recipe, q.shape
    if recipe.product not in ("grouped", "packed"):
        k, v = _repeated(recipe, k, v)
    q, k, scale = _scaled_operands(recipe, q, k)
    if recipe.softmax == "cast":
        q, k = q.float(), k.float()
    visible, weigh = _layout_of(recipe, b, t, visible)
    scores = _product(recipe, q, k, scale)
    if recipe.twist == "bias":
        scores = scores + torch.arange(scores.shape[-1]).to(scores.dtype) * -0.1
    if recipe.softcap is not None:
        scores = torch.tanh(scores / recipe.softcap) * recipe.softcap
    scores = _masked(recipe, scores, visible)
    if recipe.twist == "masked before the scale":
        scores = scores * 0.5
    weights = _weights(layer, scores, b, t)
    if recipe.twist == "weights come second":
        return torch.einsum("bhkd,bhqk->bhqd", v, weights.to(v.dtype))
    out = weigh(weights.to(v.dtype), v).reshape(b, recipe.heads, t, recipe.value_dim)
    return (out, weights) if recipe.twist == "weights are returned" else out


def _layout_of(recipe, b, t, visible):
    """How this product lays the mask out, and how it multiplies weights and values."""
    if recipe.product == "grouped":
        return None if visible is None else visible[:, :, None], lambda weights, v: weights @ v[:, :, None]
    if recipe.product == "packed":
        return None if visible is None else visible.repeat(1, 1, recipe.group, 1), torch.matmul
    if recipe.product == "einsum":
        return visible, lambda weights, v: torch.einsum("bhqk,bhkd->bhqd", weights, v)
    if recipe.product in ("bmm", "baddbmm"):
        return visible, lambda weights, v: torch.bmm(weights.flatten(0, 1), v.flatten(0, 1))
    return visible, torch.matmul


def _product(recipe, q, k, scale):
    b, _, t, d = q.shape
    if recipe.twist == "columns before heads in einsum":
        return torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) * scale
    match recipe.product:
        case "grouped":
            scores = q.reshape(b, recipe.kv_heads, recipe.group, t, d) @ k[:, :, None].mT
        case "packed":
            scores = q.reshape(b, recipe.kv_heads, recipe.group * t, d) @ k.mT
        case "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        case "bmm":
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(b, recipe.heads, t, -1)
        case "baddbmm":
            empty = torch.empty(b * recipe.heads, t, k.shape[2], dtype=q.dtype)
            scores = torch.baddbmm(empty, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale)
            return scores.view(b, recipe.heads, t, -1)
        case _:
            scores = q @ k.transpose(-1, -2)
    match recipe.scale_at:
        case "query" | "key" | "both":
            return scores
        case "div":
            return scores / (1 / scale)
        case "tensor":
            return scores * torch.tensor(scale, dtype=scores.dtype)
        case "in place":
            scores *= scale
            return scores
    return scores * scale


def _masked(recipe, scores, visible):
    if visible is None:
        return scores
    match recipe.mask:
        case "fill":
            return scores.masked_fill(~visible, recipe.lowest)
        case "fill in place":
            return scores.masked_fill_(~visible, recipe.lowest)
        case "where":
            return torch.where(visible, scores, recipe.lowest)
        case "mask first":
            return additive(recipe, visible, scores.dtype) + scores
    return scores + additive(recipe, visible, scores.dtype)


def _weights(layer, scores, b, t):
    recipe = layer.recipe
    dtype = torch.float32 if recipe.softmax == "dtype" and scores.dtype != torch.float64 else None
    if recipe.sinks:
        sinks = layer.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1).to(scores.dtype)
        scores = torch.cat([scores, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = nn.functional.softmax(scores, dim=-1, dtype=dtype)
    if recipe.sinks:
        weights = weights[..., :-1]
    if recipe.dropout or recipe.twist == "dropout":
        weights = nn.functional.dropout(weights, 0.1, training=layer.training)
    if recipe.twist == "weights are renormalised":
        weights = weights / weights.sum(-1, keepdim=True)
    return weights

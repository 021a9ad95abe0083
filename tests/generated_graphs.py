"""Recipes of small attention models: one idiom, mask, cache and layout each, out of the many that people write."""

import dataclasses
import itertools
import math

import torch
from hypothesis import strategies as st

WIDTH = 32
TOTAL = 330
MOST_PADS = 20
# From here on every row reads a page of V packed: sink, page and window behind its pads.
PACKED = 32 + 128 + 128 + MOST_PADS
ROOM = 352  # columns of a static cache
STATIC = ("index_copy", "index_put", "slice")
WINDOW = 50

# Forms that the passes do not take, and what their reasons say.
TWISTS = {
    "tiled heads": "tiles heads",
    "masked before the scale": "before the scale",
    "bias": "hide nothing|before the scale",
    "bidirectional": "bidirectional|later columns",
    "prefix": "prefix|later columns|neither causal nor sliding",
    "chunks": "chunk|mask",
    "weights are returned": "also read by",
    "weights are renormalised": "pass through",
    "dropout": "dropout is active",
    "wrong causal flag": "counts from the first key",
    "scaled values": "values are scaled",
    "columns before heads in einsum": "einsum",
    "weights come second": "first factor",
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model attends.

    Attributes:
        product: "sdpa", or how the eager form multiplies.
        repeats: how KV heads meet their query heads.
        mask, mask_from: the form in which scores are masked, and what the mask is made from.
        scale_at: where the scale is applied.
        owner: who holds a static cache, the "module" or the "caller".
        heads_first: the cache is [batch, heads, columns, head_dim], not [batch, columns, heads, head_dim].
        windows: per layer.
        padding: pads at the left of each row.
    """

    product: str = "sdpa"
    repeats: str = "repeat_kv"
    mask: str = "bool"
    mask_from: str = "compare"
    scale_at: str = "default"
    scale: float = 0.25
    softcap: float | None = None
    softmax: str = "plain"
    sinks: bool = False
    dropout: bool = False
    cache: str = "none"
    owner: str = "caller"
    heads_first: bool = True
    windows: tuple = (None,)
    padding: tuple | None = None
    norm: bool = False
    batch: int = 2
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    front_end: str = "dynamo"
    twist: str | None = None
    seed: int = 0

    @property
    def heads(self):
        return self.kv_heads * self.group

    @property
    def is_static(self):
        return self.cache in STATIC

    @property
    def lowest(self):
        """What hides a score: rows of pads see nothing, which must stay finite."""
        if self.padding is None and self.mask in ("fill", "where"):
            return -math.inf
        return -3e4 if self.dtype == torch.float16 else torch.finfo(torch.float32).min / 2

    @property
    def total_scale(self):
        return self.scale if self.scale_at != "default" else self.key_dim**-0.5


# ---- what hypothesis draws


SCALES = ("mul", "div", "tensor", "in place", "query", "key", "both", "default")
EAGER = ("matmul", "einsum", "bmm", "baddbmm", "grouped", "packed")


@st.composite
def recipes(draw):
    """A recipe whose parts fit each other."""

    def choose(*options):
        return draw(st.sampled_from(options))

    product = choose("sdpa", *EAGER)
    cache = choose("none", "cat", *STATIC)
    batch, layers, key_dim = choose(1, 2, 3), choose(1, 2), choose(16, 32, 48, 64)
    common = {
        "product": product,
        "mask_from": choose("compare", "tril", "buffer"),
        "scale": choose(0.25, 0.11, 0.3),
        "cache": cache,
        "owner": choose("caller", "module") if cache in STATIC else "caller",
        "heads_first": choose(True, True, False),
        "windows": tuple(choose(None, None, None, WINDOW) for _ in range(layers)),
        "padding": draw(st.none() | st.none() | st.tuples(*[st.integers(0, MOST_PADS)] * batch)),
        "norm": choose(True, False),
        "batch": batch,
        "kv_heads": choose(1, 2, 3),
        "group": choose(1, 2, 3, 5),
        "key_dim": key_dim,
        "value_dim": choose(key_dim, 16, 64),
        "dtype": choose(torch.float32, torch.float32, torch.bfloat16, torch.float16),
        "front_end": choose("dynamo", "export"),
        "seed": draw(st.integers(0, 3)),
    }
    if product == "sdpa":
        return Recipe(
            repeats=choose("repeat_kv", "repeat_interleave", "operator"),
            mask=choose("flag", "none", "bool", "additive"),
            scale_at=choose("default", "argument", "query", "key", "both"),
            **common,
        )
    return Recipe(
        repeats=choose("repeat_kv", "repeat_interleave"),
        mask=choose("add", "mask first", "fill", "fill in place", "where"),
        scale_at=choose(*SCALES),
        softcap=choose(None, None, 3.0, 20.0),
        softmax=choose("plain", "dtype", "cast"),
        sinks=product not in ("grouped", "packed") and choose(True, False, False),
        dropout=choose(True, False),
        **common,
    )


@st.composite
def twisted_recipes(draw):
    """A recipe that the passes must refuse."""
    twist, recipe = draw(st.sampled_from(sorted(TWISTS))), draw(recipes())
    changes = {"twist": twist, "windows": (None,) * len(recipe.windows)}
    is_heads = twist in ("tiled heads", "columns before heads in einsum", "weights come second")
    if twist in ("wrong causal flag", "scaled values") and recipe.cache == "none":
        changes["cache"] = "cat"
    if twist == "wrong causal flag":
        changes |= _plain_sdpa(recipe) | {"padding": None}
    elif twist in ("bidirectional", "prefix", "chunks") and recipe.product == "sdpa":
        changes["mask"] = "bool"
    elif is_heads or (recipe.product == "sdpa" and twist not in ("dropout", "scaled values")):
        changes |= {"product": "matmul", "repeats": "repeat_kv", "mask": "add", "scale_at": "mul"}
    if twist == "columns before heads in einsum":
        changes["product"] = "einsum"
    if twist == "dropout":
        changes["front_end"] = "export"  # Dynamo breaks the graph there
    if is_heads:
        changes |= {"kv_heads": max(recipe.kv_heads, 2), "group": max(recipe.group, 2)}
    return dataclasses.replace(recipe, **changes)


def _plain_sdpa(recipe):
    return {
        "product": "sdpa",
        "mask": "bool",
        "scale_at": "default",
        "softcap": None,
        "softmax": "plain",
        "sinks": False,
        "dropout": False,
        "repeats": "repeat_kv",
    }


@st.composite
def pieces(draw):
    """Lengths of calls that add up to TOTAL: a prompt, some chunks, then calls that read packed pages of V."""
    first = draw(st.integers(16, 250))
    middle = draw(st.lists(st.integers(first + 1, PACKED - 1), max_size=2, unique=True))
    last = draw(st.lists(st.integers(PACKED + 1, TOTAL - 1), min_size=2, max_size=3, unique=True))
    stops = [0, *sorted({first, *middle, PACKED, *last}), TOTAL]
    return tuple(stop - start for start, stop in itertools.pairwise(stops))

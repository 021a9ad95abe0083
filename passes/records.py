"""What the matching passes find. Nodes are those of the graph that was matched, which stays as it is."""

import dataclasses
from typing import Literal

from torch import fx

MaskForm = Literal["additive", "visible", "hidden"]


@dataclasses.dataclass(frozen=True)
class KVUpdate:
    """How a call's new keys and values join those of earlier calls.

    Attributes:
        kind: "none" (attention over the call's own columns alone), "cat" ([past, new] along the columns), "index_copy",
            "index_put" or "slice" (new columns written into a buffer that holds all), "kitty" (a KittyCache unpacks all).
        key_past, value_past: the tensors of earlier columns as the graph gets them; None for "none", and for "cat" with an
            empty cache. The call of ``kitty::materialize`` for "kitty".
        key_full, value_full: what attention reads, before heads are repeated.
        positions: where new columns are written: a tensor node [T], or the first column as a number or size node.
            None when they come last.
        kept: columns that a sliding cache keeps of the result for the next call; None when it keeps all.
        is_fresh: the buffer of a static update is made in this call, so that there are no earlier columns.
        writes: the calls of a static update that write new columns.
        columns_dim: 2 when these tensors are [batch, heads, columns, head_dim], 1 when [batch, columns, heads, head_dim].
    """

    kind: Literal["none", "cat", "index_copy", "index_put", "slice", "kitty"]
    key_full: fx.Node
    value_full: fx.Node
    key_past: fx.Node | None = None
    value_past: fx.Node | None = None
    positions: fx.Node | int | None = None
    kept: int | None = None
    columns_dim: int = 2
    is_fresh: bool = False
    writes: tuple[fx.Node, ...] = ()

    @property
    def is_static(self) -> bool:
        """Does attention read a buffer of fixed length?"""
        return self.kind in ("index_copy", "index_put", "slice")


@dataclasses.dataclass(frozen=True)
class MaskTerm:
    """A tensor that masks scores of the sizes ``scores``: added to them, or true where they stay or where they go."""

    node: fx.Node
    form: MaskForm
    scores: fx.Node


@dataclasses.dataclass(frozen=True)
class AttentionMatch:
    """One attention: ``node`` = softmax(softcap(scale * query @ key^T) + mask) @ value, heads of K and V repeated.

    Attributes:
        node: the result, some view of [batch, query heads, T, value_dim] with the dimensions in this order.
        layer, module_path: where the model computes it; -1 and "" when the front end kept no modules.
        query: a view of [batch, query heads, T, key_dim] in this order.
        key, value: the call's own, before the update and before heads are repeated, laid out as ``update.columns_dim`` says.
        masks: all of them hold; ``is_causal`` is SDPA's flag beside them.
        sinks: one logit per query head that joins the softmax, [query heads].
        num_columns: T; num_keys: columns of K that attention reads (sizes of the traced call).
        stops_at_own: of a static cache, attention reads the columns up to the call's last one, in every call.
        numbers: nodes whose values were read as numbers: they must not change between calls.
    """

    node: fx.Node
    layer: int
    module_path: str
    query: fx.Node
    key: fx.Node
    value: fx.Node
    update: KVUpdate
    masks: tuple[MaskTerm, ...]
    is_causal: bool
    scale: float
    softcap: float | None
    sinks: fx.Node | None
    batch: int
    num_heads: int
    num_kv_heads: int
    num_columns: int
    num_keys: int
    key_dim: int
    value_dim: int
    numbers: tuple[fx.Node, ...] = ()
    idiom: str = ""
    stops_at_own: bool = False


@dataclasses.dataclass(frozen=True)
class MatchFailure:
    """An attention, or an update of a cache, that is not understood."""

    node: fx.Node
    reason: str
    module_path: str = ""


@dataclasses.dataclass(frozen=True)
class FusedAttention:
    """A ``kitty::attend`` or ``kitty::attention`` that is in the graph already."""

    node: fx.Node
    layer: int
    module_path: str = ""


@dataclasses.dataclass(frozen=True)
class MaskKind:
    """What the masks of an attention amount to, in columns.

    A query at column c sees columns j <= c (and j > c - window for "sliding") that hold a token. Which columns do is
    told by ``padding``, a 2-D integer or bool graph input [batch, columns]; None when all do.
    """

    kind: Literal["causal", "sliding"]
    window: int | None = None
    padding: fx.Node | None = None


@dataclasses.dataclass(frozen=True)
class MaskRefusal:
    """Masks that mean something else, or whose meaning cannot be found out."""

    reason: str


Match = AttentionMatch | MatchFailure | FusedAttention

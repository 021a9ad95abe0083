"""Find every attention of a graph. Reads it, changes nothing.

Before                                                                       Record
    aten.scaled_dot_product_attention(q, k, v, mask, scale=s)                  AttentionMatch, idiom "sdpa"
    aten.matmul(aten.softmax(aten.matmul(q, k.mT) * s + mask, -1), v)          AttentionMatch, idiom "eager"
    kitty.attend(q, k, v, ...)                                                 FusedAttention
    anything else that attends                                                 MatchFailure with the reason

``match_scores`` reads what stands between the two products, ``match_heads`` what stands before them, ``match_kv_update``
where keys and values come from. A softmax that no product of two activations feeds (a router, a sampler) is no attention.
"""

import dataclasses
import re
from typing import Any

import torch
from torch import fx

from kitty_compile.passes.evaluate import number_of
from kitty_compile.passes.match_heads import Operands, Order, match_keys, match_queries
from kitty_compile.passes.match_kv_update import match_kv_update
from kitty_compile.passes.match_scores import (
    PRODUCTS,
    Scores,
    check_value_equation,
    reaches_product,
    read_scores,
)
from kitty_compile.passes.nodes import (
    NoMatchError,
    arguments,
    dtype,
    is_pointwise,
    module_path,
    op_name,
    order_of,
    readers,
    same_size,
    shape,
    sizes,
    value_of,
    writers,
)
from kitty_compile.passes.records import (
    AttentionMatch,
    FusedAttention,
    KVUpdate,
    MaskForm,
    MaskTerm,
    Match,
    MatchFailure,
)
from kitty_compile.passes.trace_axes import is_inert_dropout, source_of

_SOFTMAXES = frozenset({"softmax", "_softmax", "_safe_softmax", "special_softmax"})
_WEIGHTS_PASS = frozenset(
    {
        "to",
        "_to_copy",
        "type_as",
        "contiguous",
        "clone",
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "dropout",
    }
)
# Operators that attend but hide how; models have a switch that avoids them.
_OPAQUE = re.compile(
    r"flash_att|flex_attention|efficient_attention|cudnn_attention|native_multi_head_attention|paged_att"
)


def match_attention(gm: fx.GraphModule) -> list[Match]:
    """All attentions of a graph in pre-dispatch ATen, in graph order, matched or with the reason why not."""
    order = order_of(gm.graph)
    found: list[Match] = []
    for node in gm.graph.nodes:
        match = _match_node(gm, node, order)
        if match is not None:
            found.append(match)
    return _with_distinct_layers(_without_shared_updates(found))


def _match_node(gm: fx.GraphModule, node: fx.Node, order: Order) -> Match | None:
    name = op_name(node)
    if name in ("kitty::attend", "kitty::attention"):
        given = arguments(node)
        layer = given["layer"] if name == "kitty::attention" else given["parameters"][7]
        return FusedAttention(node, int(layer), module_path(node))
    try:
        if name == "scaled_dot_product_attention":
            return _match_sdpa(node, order)
        if name in _SOFTMAXES:
            return _match_eager(node, order)
        _check_opaque(gm, node)
    except NoMatchError as failure:
        return MatchFailure(node, str(failure), module_path(node))
    return None


def _check_opaque(gm: fx.GraphModule, node: fx.Node) -> None:
    if node.op != "call_function":
        return
    if _OPAQUE.search(str(node.target)):
        raise NoMatchError(f"{node.target} does not show its mask: use the sdpa or eager attention of the model")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for operand in node.all_input_nodes:
            inner = getattr(gm, str(operand.target), None) if operand.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule) and any(match_attention(inner)):
                raise NoMatchError(f"an attention stands inside {node.target}")


def _match_sdpa(node: fx.Node, order: Order) -> AttentionMatch:
    named = arguments(node)
    operands = Operands(
        named["query"], named["key"], named["value"], key_is_transposed=False, repeats_heads=bool(named["enable_gqa"])
    )
    if named["dropout_p"] != 0:
        raise NoMatchError(f"attention dropout is active (p = {named['dropout_p']})")
    scale = number_of(named["scale"], order) if named["scale"] is not None else shape(operands.query)[-1] ** -0.5
    if scale is None:
        raise NoMatchError("the scale is not a number")
    masks: tuple[MaskTerm, ...] = ()
    if (mask := named["attn_mask"]) is not None:
        form: MaskForm = "visible" if dtype(mask) == torch.bool else "additive"
        # The scores of SDPA have the sizes of its result, columns of K instead of head_dim.
        masks = (MaskTerm(mask, form, node),)
    numbers = (named["scale"],) if isinstance(named["scale"], fx.Node) else ()
    scores = Scores(node, operands, scale, masks=masks, numbers=numbers)
    return _assemble(node, scores, bool(named["is_causal"]), "sdpa", order)


def _match_eager(softmax: fx.Node, order: Order) -> AttentionMatch | None:
    if not reaches_product(arguments(softmax)["self"]):
        return None
    if (product := _value_product(softmax)) is None:
        return None
    scores = read_scores(softmax, order)
    _check_weights(softmax, product, scores)
    value = _value_operand(product)
    scores = dataclasses.replace(scores, operands=dataclasses.replace(scores.operands, value=value))
    for operand in (scores.operands.query, scores.operands.key):
        _check_unwritten(operand, scores.product, product, order)
    return _assemble(product, scores, False, "eager", order)


def _value_product(softmax: fx.Node) -> fx.Node | None:
    """The product of the softmax's result and something else; None when there is none.

    Raises:
        NoMatchError: there is one, but of weights that were changed on the way.
    """
    # What changed the weights on the way, and whether other numbers came of it or only other places.
    queue: list[tuple[fx.Node, str, bool]] = [(softmax, "", False)]
    while queue:
        node, changed, is_computed = queue.pop()
        for user in node.users:
            name = op_name(user)
            is_first = name in PRODUCTS and _weights_operand(user) is node
            if is_first and not changed:
                return user
            if is_first or (name in PRODUCTS and not is_computed):
                reason = f"pass through {changed}" if changed else f"are not the first factor of {user}"
                raise NoMatchError(f"attention weights {reason}")
            if name in _WEIGHTS_PASS or name == "slice":
                queue.append((user, changed, is_computed))
            elif is_pointwise(user) or source_of(user) is not None:
                queue.append((user, changed or name, is_computed or is_pointwise(user)))
    return None


def _weights_operand(product: fx.Node) -> object:
    named = arguments(product)
    if op_name(product) == "einsum":
        return named["tensors"][0]
    return named["batch1"] if op_name(product) == "baddbmm" else product.args[0]


def _value_operand(product: fx.Node) -> fx.Node:
    if op_name(product) == "baddbmm":
        raise NoMatchError("something is added to the product of weights and values")
    if op_name(product) == "einsum":
        check_value_equation(arguments(product)["equation"])
        operand = arguments(product)["tensors"][1]
    else:
        operand = product.args[1]
    assert isinstance(operand, fx.Node)
    return operand


def _check_weights(softmax: fx.Node, product: fx.Node, scores: Scores) -> None:
    """Between softmax and ``product`` nothing may change the weights, and nobody else may read them."""
    node: fx.Node = _weights_operand(product)  # type: ignore[assignment]
    num_keys = shape(node)[-1]
    reader, cut = product, False
    while True:
        others = [user for user in readers(node) if user is not reader]
        if others:
            raise NoMatchError(f"attention weights are also read by {others[0]}")
        if node is softmax:
            break
        if op_name(node) == "dropout" and not is_inert_dropout(node):
            raise NoMatchError("attention dropout is active: call eval() on the model")
        if op_name(node) == "slice":
            named = arguments(node)
            rank = len(shape(node))
            cut = named["dim"] % rank == rank - 1 and not named["start"] and shape(named["self"])[-1] == num_keys + 1
            if not cut and shape(named["self"]) != shape(node):
                raise NoMatchError("a part of the attention weights is used")
        reader, node = node, node.args[0]  # type: ignore[assignment]
    if cut != (scores.sinks is not None):
        raise NoMatchError("a part of the attention weights is used, or sinks are attended to")


def _check_unwritten(operand: fx.Node, start: fx.Node, end: fx.Node, order: Order) -> None:
    if writes := writers(operand, order, before=end, after=start):
        raise NoMatchError(f"{writes[0]} changes what attention reads before it is done")


def _assemble(node: fx.Node, scores: Scores, is_causal: bool, idiom: str, order: Order) -> AttentionMatch:
    operands = scores.operands
    key = match_keys(operands.key, operands.key_is_transposed, order)
    value = match_keys(operands.value, False, order)
    if key.columns_dim != value.columns_dim:
        raise NoMatchError("keys and values are laid out differently")
    matched = match_kv_update(key.base, value.base, key.columns_dim, scores.product, order)
    own_columns = sizes(matched.key)[key.columns_dim]
    query = match_queries(operands, key, value, own_columns, order)
    if matched.update.kind == "none" and query.num_columns != key.num_columns:
        raise NoMatchError(f"{query.num_columns} columns attend to {key.num_columns} others (cross attention)")
    _check_readers(matched.update)
    return AttentionMatch(
        node=node,
        layer=-1,
        module_path=module_path(node),
        query=_uncast(operands.query, dtype(matched.key)),
        key=matched.key,
        value=matched.value,
        update=matched.update,
        masks=scores.masks,
        is_causal=is_causal,
        scale=scores.scale * key.factor,
        softcap=scores.softcap,
        sinks=scores.sinks,
        batch=key.batch,
        num_heads=query.num_heads,
        num_kv_heads=key.num_kv_heads,
        num_columns=query.num_columns,
        num_keys=key.num_columns,
        key_dim=key.head_dim,
        value_dim=value.head_dim,
        numbers=scores.numbers,
        idiom=idiom,
        stops_at_own=_stops_at_own(operands, matched.update, own_columns),
    )


def _stops_at_own(operands: Operands, update: KVUpdate, own_columns: Any) -> bool:
    """Does attention read ``cache[: start + t]`` where the call writes ``cache[start : start + t]``?"""
    start = value_of(update.positions) if isinstance(update.positions, fx.Node) else update.positions
    read = sizes(operands.key)[-1 if operands.key_is_transposed else -2]
    return update.kind == "slice" and isinstance(start, int | torch.SymInt) and same_size(read, start + own_columns)


def _uncast(query: fx.Node, wanted: torch.dtype) -> fx.Node:
    """The query before it is brought to a higher precision for the product, which attention does by itself."""
    if dtype(query) != wanted and op_name(query) in ("to", "_to_copy") and (source := source_of(query)) is not None:
        return source if dtype(source) == wanted else query
    return query


def _check_readers(update: KVUpdate) -> None:
    """Joined keys and values may go to the attention and to the next call, nowhere else."""
    if update.kind != "cat":
        return
    for full in (update.key_full, update.value_full):
        for user in readers(full):
            is_handed_on = user.op == "output" or op_name(user) == "slice" or source_of(user) is full
            if not is_handed_on and op_name(user) not in PRODUCTS | {"scaled_dot_product_attention", "mul", "div"}:
                raise NoMatchError(f"the cache is also read by {user}")


def _without_shared_updates(found: list[Match]) -> list[Match]:
    """Attentions that read the keys of another layer would store them twice."""
    first: dict[fx.Node, AttentionMatch] = {}
    checked: list[Match] = []
    for match in found:
        if isinstance(match, AttentionMatch):
            owner = first.setdefault(match.update.key_full, match)
            if owner is not match:
                reason = f"it shares the keys and values of {owner.module_path or owner.node}"
                checked.append(MatchFailure(match.node, reason, match.module_path))
                continue
        checked.append(match)
    return checked


def _with_distinct_layers(found: list[Match]) -> list[Match]:
    """Number the matches by the first index in their module paths that tells them apart."""
    matches = [match for match in found if isinstance(match, AttentionMatch)]
    indices = [[int(part) for part in match.module_path.split(".") if part.isdigit()] for match in matches]
    depth = min((len(numbers) for numbers in indices), default=0)
    for level in range(depth):
        layers = [numbers[level] for numbers in indices]
        if len(set(layers)) == len(layers):
            break
    else:
        layers = list(range(len(matches)))
    numbered = iter(dataclasses.replace(match, layer=layer) for match, layer in zip(matches, layers, strict=True))
    return [next(numbered) if isinstance(match, AttentionMatch) else match for match in found]

"""The attention function and the mask function that transformers calls for an applied model.

Both serve the ``ActiveCall`` that the decoder's hooks (``hooks.py``) have opened and otherwise are the model's own:

    mask function       transformers' mask function is classified, a ``CallMask`` stands in for the mask
    cache.update        stages the layer's key and value in the call
    attention function  checks the ``CallMask`` against the layer's plan, then attends over the cache and stores
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kitty_compile.kernels import serving

if TYPE_CHECKING:
    from kitty_compile.huggingface.cache import KittyCache

IMPLEMENTATION_PREFIX = "kitty|"
# What models hand to an attention function without a meaning for its result.
HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "deterministic",
        "ignore_index",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shift_labels",
        "token_type_ids",
        "use_cache",
    }
)


@dataclasses.dataclass(frozen=True)
class CallMask:
    """Stands where a mask would: causal, within ``window`` columns when it is a sliding layer's.

    ``refusal``: why no layer can attend with it. A model may make masks that it does not use.
    """

    window: int | None
    refusal: str | None = None


@dataclasses.dataclass
class ActiveCall:
    """The forward that is running on a KittyCache; at most one layer's keys and values wait in ``staged``."""

    cache: "KittyCache"
    config: PreTrainedConfig
    decoder: torch.nn.Module
    previous: "ActiveCall | None"
    num_served: int = 0
    staged: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def stage(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.staged is not None:
            raise RuntimeError(
                f"the attention of layer {self.staged[0]} must run before layer {layer}, got no call of it"
            )
        self.staged = (layer, key, value)

    def is_staged(self, key: torch.Tensor) -> bool:
        return self.staged is not None and self.staged[1] is key


_ACTIVE: contextvars.ContextVar[ActiveCall | None] = contextvars.ContextVar("kitty_compile_active_call", default=None)


def active_call() -> ActiveCall | None:
    return _ACTIVE.get()


def set_active_call(call: ActiveCall | None) -> None:
    _ACTIVE.set(call)


# What the device part of a step reads is global while it runs.
step_lock = threading.RLock()
# Read by Dynamo, which can guard on a global but not on what belongs to a thread.
_step_thread: int | None = None


def in_step() -> bool:
    """Is this the device part of a decode step, with the host's part done (``decode_step.py``)?

    There the cache hands keys and values on, masks are left out (every kind was checked when the prompt came in) and
    attention is ``kitty::attention``: nothing that Dynamo would have to guard on.
    """
    if torch.compiler.is_compiling():
        return _step_thread is not None
    return _step_thread == threading.get_ident()


def set_step(is_on: bool) -> None:
    global _step_thread  # noqa: PLW0603
    _step_thread = threading.get_ident() if is_on else None


@contextlib.contextmanager
def stepping() -> Iterator[None]:
    """Within this context a forward is the device part of a step, see :func:`in_step`."""
    with step_lock:
        set_step(True)
        try:
            yield
        finally:
            set_step(False)


def refuse_gradients(*tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a KittyCache must be used without gradients, got inputs that require them: "
            "run under torch.no_grad(), or pass use_cache=False to differentiate"
        )


def register(original: str | None) -> str:
    """Register the attention and mask functions that fall back on ``original``; returns their common name."""
    original = original or "eager"
    name = IMPLEMENTATION_PREFIX + original
    AttentionInterface.register(name, functools.partial(kitty_attention, original))
    AttentionMaskInterface.register(name, functools.partial(kitty_mask, original))
    return name


# ``original`` is bound by ``register``; the rest is transformers' signature of a mask function.
def kitty_mask(original: str, *args: Any, **kwargs: Any) -> Any:
    if in_step():
        return None
    call = _ACTIVE.get()
    if call is None or kwargs.get("config") is not call.config:
        if original not in ALL_MASK_ATTENTION_FUNCTIONS:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
    try:
        return CallMask(classify_mask(kwargs.get("mask_function", causal_mask_function)))
    except ValueError as error:
        return CallMask(None, refusal=str(error))


def classify_mask(function: Callable[..., Any]) -> int | None:
    """The window of transformers' own causal (None) and sliding mask functions; a ValueError for any other.

    Probing a mask at some positions cannot tell a causal mask from one with a hole elsewhere, so the function must be
    one of the two by construction.
    """
    if function is causal_mask_function:
        return None
    parts = _closure(function).get("mask_functions")
    if _is_local(function, "and_masks", "and_mask") and isinstance(parts, tuple) and len(parts) == 2:
        overlay, causal = parts
        window = _closure(overlay).get("sliding_window")
        is_sliding = causal is causal_mask_function and _is_local(overlay, "sliding_window_overlay", "inner_mask")
        # The edge is checked on plain integers: a query sees columns > its own - window.
        if is_sliding and isinstance(window, int) and not overlay(0, 0, window, 0) and overlay(0, 0, window, 1):
            return window
    raise ValueError(f"the mask must be causal or sliding for a KittyCache, got {_describe(function)}")


def kitty_attention(
    original: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CallMask | torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``original`` is bound by ``register``; the rest is transformers' signature of an attention function."""
    if in_step() and getattr(module, "layer_idx", None) is not None:
        return _attend_in_step(module, query, key, value, kwargs), None
    call = _ACTIVE.get()
    if call is None or not (call.is_staged(key) or getattr(module, "config", None) is call.config):
        result: tuple[torch.Tensor, torch.Tensor | None] = _original_attention(original, module)(
            module, query, key, value, attention_mask, **kwargs
        )
        return result
    layer = _take_staged(call, module, key, value)
    _check_mask(call, layer, attention_mask)
    scale, softcap, sinks = _attention_arguments(module, query, kwargs)
    refuse_gradients(query, key, value, *(() if sinks is None else (sinks,)))
    call.num_served += 1
    output = call.cache.attend(query, key, value, layer, scale=scale, softcap=softcap, sinks=sinks)
    return output.transpose(1, 2).contiguous(), None


def _attend_in_step(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
) -> torch.Tensor:
    scale, softcap, sinks = _attention_arguments(module, query, arguments)
    layer: int = module.layer_idx  # type: ignore[assignment]
    output = serving.attention(query, key, value, layer, scale=scale, softcap=softcap, sinks=sinks)
    return output.transpose(1, 2).contiguous()


def _take_staged(call: ActiveCall, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> int:
    staged, call.staged = call.staged, None
    layer = getattr(module, "layer_idx", None)
    if staged is None or staged[0] != layer or staged[1] is not key or staged[2] is not value:
        got = "none" if staged is None else f"those of layer {staged[0]}"
        raise RuntimeError(
            f"layer {layer} must attend to the keys and values it gave to the cache's update, got {got}: "
            f"{type(module).__name__} cannot be served"
        )
    return int(layer)


def _check_mask(call: ActiveCall, layer: int, mask: object) -> None:
    plan = call.cache.plans[layer]
    if not isinstance(mask, CallMask):
        got = "no mask" if mask is None else type(mask).__name__
        raise ValueError(f"layer {layer} must be masked by transformers' mask functions, got {got}")
    if mask.refusal is not None:
        raise ValueError(mask.refusal)
    if mask.window != plan.window:
        expected, got = (
            "causal" if window is None else f"sliding with window {window}" for window in (plan.window, mask.window)
        )
        raise ValueError(f"the mask of layer {layer} must be {expected} as its cache layer, got {got}")


def _attention_arguments(
    module: torch.nn.Module, query: torch.Tensor, arguments: dict[str, Any]
) -> tuple[float, float | None, torch.Tensor | None]:
    """Scale, softcap and sinks; any other argument that would change the result is refused."""
    rest = dict(arguments)
    # The window is the cache layer's, checked against the mask; the module's own is not always the layer's.
    rest.pop("sliding_window", None)
    scaling, softcap, sinks = (rest.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
    if dropout := rest.pop("dropout", 0.0):
        raise ValueError(f"attention dropout must be 0 with a KittyCache, got {dropout}: call model.eval()")
    if rest.pop("is_causal", None) is False:
        raise ValueError("is_causal must be True with a KittyCache, got False")
    for name, argument in rest.items():
        if name not in HARMLESS_ARGUMENTS and argument is not None and argument is not False:
            raise ValueError(f"{name} must not be given to {type(module).__name__} with a KittyCache, got a value")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return scale, None if softcap is None else float(softcap), sinks


def _original_attention(original: str, module: torch.nn.Module) -> Callable[..., Any]:
    if original in ALL_ATTENTION_FUNCTIONS:
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[original]
        return function
    # "eager" is not in the registry: every modeling file has its own, which its attention names as the default.
    namespaces = (
        getattr(inspect.unwrap(type(module).forward), "__globals__", {}),
        vars(sys.modules[type(module).__module__]),
    )
    for namespace in namespaces:
        if (eager := namespace.get("eager_attention_forward")) is not None:
            found: Callable[..., Any] = eager
            return found
    raise RuntimeError(f"{type(module).__name__} must come with an eager_attention_forward, got a file without one")


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    if not isinstance(function, types.FunctionType) or function.__closure__ is None:
        return {}
    return {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }


def _is_local(function: Callable[..., Any], outer: str, inner: str) -> bool:
    return (
        getattr(function, "__qualname__", "") == f"{outer}.<locals>.{inner}"
        and getattr(function, "__module__", "") == causal_mask_function.__module__
    )


def _describe(function: Callable[..., Any]) -> str:
    name = str(getattr(function, "__qualname__", type(function).__name__)).split(".<locals>")[0]
    parts = _closure(function).get("mask_functions", ())
    inner = ", ".join(_describe(part) for part in parts)
    return f"{name}({inner})" if inner else name

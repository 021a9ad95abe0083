"""The ``kitty`` backend of ``torch.compile``: attentions over a KV cache move onto 2-bit pages, inductor does the rest.

``torch.compile`` finds it by its name, through an entry point of the package.
"""

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import OptimizedModule

from kitty_compile.cached_call import STORE, CachedCall
from kitty_compile.config import KittyConfig, resolve_config
from kitty_compile.passes.bind_call import BoundCalls, SharedPastError, bind_call
from kitty_compile.passes.nodes import value_of
from kitty_compile.passes.normalize import is_normal, may_attend, obstacle
from kitty_compile.passes.pipeline import Report, analyze, dump, guard_numbers
from kitty_compile.static_call import StaticCall

logger = logging.getLogger(__name__)

_OWN_OPTIONS = ("config", "compiler", "static_cache")
COMPILERS = ("inductor", "aot_eager", "eager")


@dataclasses.dataclass(frozen=True)
class Options:
    """What was given to ``torch.compile`` beside the backend.

    Attributes:
        config: of the caches that stand behind a model's own; applied models bring theirs.
        compiler: what compiles the rewritten graph: "inductor", or "aot_eager" and "eager" to look for a fault.
        static_cache: move attention over caches of fixed length, too; their 16-bit buffers stay.
        inductor: inductor's own options, those of the mode among them.
    """

    config: KittyConfig
    compiler: str
    static_cache: bool
    inductor: dict[str, Any]

    @classmethod
    def of(cls, mode: str | None, options: Mapping[str, Any] | None) -> "Options":
        """Raises a ValueError for an option that neither this backend nor inductor has."""
        given = dict(options or {})
        config, compiler = resolve_config(given.pop("config", None)), given.pop("compiler", "inductor")
        if compiler not in COMPILERS:
            raise ValueError(f"compiler must be one of {', '.join(COMPILERS)}, got {compiler!r}")
        static_cache = given.pop("static_cache", False)
        if not isinstance(static_cache, bool):
            raise ValueError(f"static_cache must be a bool, got {static_cache!r}")
        known = torch._inductor.list_options()
        unknown = [name for name in given if name.replace("-", "_") not in known]
        if unknown:
            raise ValueError(f"options must be {', '.join(_OWN_OPTIONS)} or inductor's, got {', '.join(unknown)}")
        return cls(
            config, compiler, static_cache, {**(torch._inductor.list_mode_options(mode) if mode else {}), **given}
        )


_GENERATE = (
    "torch.compile(model).generate runs the model uncompiled, since transformers calls the model inside: "
    'use model.compile(backend="kitty"), or kitty_compile.apply(model)'
)


def _warn_about_generate() -> None:
    """Say so when ``generate`` is taken from a module compiled with this backend: it is the original's, and not compiled."""
    get_attribute = OptimizedModule.__getattr__

    @functools.wraps(get_attribute)
    def warn_and_get(module: OptimizedModule, name: str) -> Any:
        if name == "generate" and _is_own(module):
            _warn_once(_GENERATE)
        return get_attribute(module, name)

    OptimizedModule.__getattr__ = warn_and_get  # type: ignore[method-assign]


def _is_own(module: OptimizedModule) -> bool:
    function = getattr(module.dynamo_ctx, "callback", None)
    # Dynamo's wrappers each name what they wrap.
    while (inner := getattr(function, "_torchdynamo_orig_backend", None)) is not None:
        function = inner
    return getattr(function, "compiler_fn", function) is kitty


# torch imports this module for whoever names the backend, and has no other place to say it.
_warn_about_generate()


def kitty(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph from Dynamo; for ``torch.compile(model, backend="kitty")``, not to be called.

    Args:
        mode: one of inductor's.
        options: ``config`` (a ``KittyConfig`` or a preset's name), ``static_cache``, ``compiler``, and inductor's own.
    """
    settings = Options.of(mode, options)
    if any(str(node.target).startswith("kitty.attention") for node in gm.graph.nodes):
        # Traced from a model that was applied: every attention was accounted for then.
        return _compile(gm, example_inputs, settings, is_served=True)
    suspects = _possible_pasts(gm, example_inputs)
    reason, attends = obstacle(gm), may_attend(gm)
    if reason is not None or not attends:
        compiled = _compile(gm, example_inputs, settings, is_served=False)
        if attends:
            _warn_once(f"a graph stays as it is: {reason}")
        return _Guarded(compiled, suspects, [reason] if reason else []) if suspects else compiled
    normal, report, bound = _rewrite(gm, example_inputs, settings)
    dump(normal, "after_bind_call")
    _log(report, bound)
    compiled = _compile(normal, example_inputs, settings, is_served=bool(bound.layers or bound.num_fused))
    call: Callable[..., Any] = compiled
    if bound.is_static:
        call = StaticCall(compiled, bound, settings.config)
    elif bound.layers:
        call = CachedCall(compiled, bound, settings.config, gm.forward)
    taken = {index for layer in bound.layers for index in layer.inputs or ()}
    rest = [index for index in suspects if index not in taken]
    return _Guarded(call, rest, _reasons(report, bound)) if rest else call


def _rewrite(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options
) -> tuple[fx.GraphModule, Report, BoundCalls]:
    """The rewritten graph; ``gm`` stays as it is."""
    shared: frozenset[int] = frozenset()
    while True:
        normal, report = analyze(copy.deepcopy(gm) if is_normal(gm) else gm, example_inputs)
        guard_numbers(report)
        if _wants_gradients(example_inputs):
            reasons = {match.node: "gradients do not go through pages" for match in report.matches}
            return normal, report, BoundCalls((), None, 0, reasons)
        try:
            return normal, report, bind_call(normal, report, takes_static=settings.static_cache, shared=shared)
        except SharedPastError as error:
            shared |= error.layers


def _wants_gradients(example_inputs: Sequence[Any]) -> bool:
    tensors = (value for value in example_inputs if isinstance(value, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Guarded:
    """Keeps phantoms out of attentions that do not know them."""

    def __init__(self, call: Callable[..., Any], suspects: Sequence[int], reasons: Sequence[str]) -> None:
        self.call, self.suspects = call, suspects
        self.reasons = reasons or ["no attention reads it"]

    def __call__(self, *inputs: Any) -> Any:
        for index in self.suspects:
            if STORE.holds(inputs[index]):
                raise ValueError(
                    f"a cache on 2-bit pages must be read by what was rewritten, got: {'; '.join(self.reasons)}"
                )
        return self.call(*inputs)


def _possible_pasts(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """Inputs that could be keys or values of earlier calls."""
    found = []
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = value_of(node)
        is_owned = getattr(example_inputs[index], "_dynamo_static_input_type", None) is not None
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point() and not is_owned:
            found.append(index)
    return found


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Options, *, is_served: bool
) -> Callable[..., Any]:
    if settings.compiler == "eager":
        forward: Callable[..., Any] = gm.forward
        return forward
    if settings.compiler == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        traced: Callable[..., Any] = aot_eager(gm, list(example_inputs))
        return traced
    from torch._inductor.compile_fx import compile_fx

    patches = dict(settings.inductor)
    if is_served:
        # Its recordings cannot see the cache; decode steps of applied models are recorded as a whole instead.
        patches["triton.cudagraphs"] = False
    compiled = compile_fx(gm, example_inputs, config_patches=patches)
    assert callable(compiled)
    return compiled


_logged: set[str] = set()


def _reasons(report: Report, bound: BoundCalls) -> list[str]:
    return sorted({failure.reason for failure in report.failures} | set(bound.kept.values()))


def _log(report: Report, bound: BoundCalls) -> None:
    """Say once why attentions stay as they are, and that a static cache saves nothing."""
    messages = [f"an attention stays as it is: {reason}" for reason in _reasons(report, bound)]
    if bound.is_static:
        messages.append("the 16-bit buffers of the static cache stay: its pages come on top of their memory")
    for message in messages:
        _warn_once(message)


def _warn_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.warning("%s", message)

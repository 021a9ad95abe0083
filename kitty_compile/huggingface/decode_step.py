"""What stands before an applied model's ``forward``: decode steps run without the host in their way.

A decode step is a forward of one column on a KittyCache that holds a prompt. The host's part (capacity, padding, columns)
comes first. The device part is the model's own forward, which then reads nothing on the host that changes from step to step:

    torch.compile    Dynamo traces it: one graph without a break, with ``kitty::attention`` where a layer attends
    CUDA             it is captured as one CUDA graph, compiled or not (``decode_graph.py``)

All other calls on a KittyCache, a prompt above all, run eagerly.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch._dynamo.eval_frame import set_eval_frame  # type: ignore[attr-defined]
from transformers import PreTrainedModel

from kitty_compile.columns import Call
from kitty_compile.huggingface import hooks
from kitty_compile.huggingface.attention import set_step, step_lock
from kitty_compile.huggingface.cache import KittyCache
from kitty_compile.huggingface.decode_graph import DecodeGraph
from kitty_compile.huggingface.support import decoder_of
from kitty_compile.kernels.serving import serving

_CACHE_NAMES = ("cache", "past_key_values")
# What a step may be given beside ids, positions, mask and cache: constants of its graph.
_CONSTANTS = ("use_cache", "return_dict", "logits_to_keep", "output_hidden_states", "output_attentions")
# Given by generate in some versions, of no effect on a model whose positions are given.
_IGNORED = ("cache_position", "next_sequence_length")


@dataclasses.dataclass
class Step:
    """The arguments of a forward of one column on a KittyCache, and the call that was begun for it."""

    cache: KittyCache
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    constants: tuple[tuple[str, Any], ...]
    call: Call
    is_traced: bool
    context: contextlib.AbstractContextManager[None] = dataclasses.field(default_factory=contextlib.nullcontext)

    def key(self) -> tuple[Any, ...]:
        """What a recording of the step is good for."""
        return (self.cache.epoch, tuple(self.input_ids.shape), self.call.real is None, self.constants, self.is_traced)


class DecodeStep:
    """Replaces the ``forward`` of an applied model's instance."""

    def __init__(self, model: PreTrainedModel, attachment: hooks.Attachment, *, graphed: bool) -> None:
        self.model, self.attachment = model, attachment
        # Somebody else's ``forward`` on the instance stays in charge of what it wraps.
        self.previous = vars(model).get("forward")
        self.parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        # transformers reads the signature of ``model.forward``.
        self.__signature__ = inspect.signature(model.forward)
        self.graph = DecodeGraph() if graphed else None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model records its own.
        return {**self.__dict__, "graph": None if self.graph is None else DecodeGraph()}

    # Dynamo skips this frame, and takes up the model's forward where it is called from here. All else is kept from it.
    @_disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or self.model.training:
            return self.function(*args, **kwargs)
        # Would Dynamo take up the next frame? There is no public way to ask.
        callback = set_eval_frame(None)
        set_eval_frame(callback)
        step = self._begin(args, kwargs, is_traced=callable(callback))
        if step is None:
            return self._whole(args, kwargs)
        if self._is_due(step):
            inputs = self._start_recording(step)
            output = None
            try:
                output = self.function(**inputs)
            except RuntimeError as error:
                self._refuse_recording(error)
            finally:
                self._stop_recording(step, output)
        if self._is_recorded(step):
            return self._replay(step)
        inputs = self._open(step)
        try:
            output = self.function(**inputs)
        except BaseException:
            self._close(step, failed=True)
            raise
        self._close(step)
        return output

    @property
    def function(self) -> Callable[..., Any]:
        if self.previous is not None:
            previous: Callable[..., Any] = self.previous
            return previous
        return functools.partial(type(self.model).forward, self.model)

    @_disable_dynamo
    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.graph is not None:
            # A prompt may need the memory.
            self.graph.forget_orphan()
        return self.function(*args, **kwargs)

    @_disable_dynamo
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_traced: bool) -> Step | None:
        """The host's part of a step; None when the call is not one, or would gain nothing."""
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
        ids, mask, positions = (given.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids"))
        cache = next((given.pop(name) for name in _CACHE_NAMES if name in given), None)
        if not isinstance(cache, KittyCache) or not isinstance(ids, torch.Tensor) or set(given) - set(_CONSTANTS):
            return None
        if not (is_traced or (ids.is_cuda and self.graph is not None and self.graph.refusal is None)):
            return None
        if given.get("output_hidden_states") or given.get("output_attentions") or given.get("use_cache") is False:
            return None
        if ids.dim() != 2 or ids.shape[1] != 1 or cache.columns == 0 or cache.batch_size != ids.shape[0]:
            return None
        hooks.check_call(self.attachment, decoder_of(self.model), cache)
        call = hooks.begin_call(self.attachment, cache, mask, ids)
        positions = torch.full_like(ids, call.start) if positions is None else positions
        return Step(cache, ids, positions, tuple(sorted(given.items())), call, is_traced)

    @_disable_dynamo
    def _open(self, step: Step) -> dict[str, Any]:
        """Everything is made ready for the device part; returns its arguments."""
        step_lock.acquire()
        step.context = serving(step.cache.attend)
        step.context.__enter__()
        set_step(True)
        return {
            "input_ids": step.input_ids,
            "position_ids": step.position_ids,
            self.attachment.cache_argument: step.cache,
            **dict(step.constants),
        }

    @_disable_dynamo
    def _close(self, step: Step, *, failed: bool = False) -> None:
        self._leave(step)
        if failed:
            step.cache.abort_call()
        else:
            step.cache.end_call()

    @staticmethod
    def _leave(step: Step) -> None:
        set_step(False)
        step.context.__exit__(None, None, None)
        step_lock.release()

    @_disable_dynamo
    def _is_due(self, step: Step) -> bool:
        return self.graph is not None and step.input_ids.is_cuda and self.graph.is_due(step)

    @_disable_dynamo
    def _is_recorded(self, step: Step) -> bool:
        return self.graph is not None and self.graph.is_recorded(step)

    @_disable_dynamo
    def _start_recording(self, step: Step) -> dict[str, Any]:
        assert self.graph is not None
        inputs = self._open(step)
        return inputs | self.graph.start(step)

    @_disable_dynamo
    def _refuse_recording(self, error: RuntimeError) -> None:
        assert self.graph is not None
        self.graph.refuse(str(error).splitlines()[0])

    @_disable_dynamo
    def _stop_recording(self, step: Step, output: Any) -> None:
        assert self.graph is not None
        try:
            self.graph.stop(step, output)
        finally:
            self._leave(step)

    @_disable_dynamo
    def _replay(self, step: Step) -> Any:
        assert self.graph is not None
        return self.graph.replay(step)

"""One CUDA graph for the decode steps of an applied model: a forward of one column costs the host one replay.

The graph is captured from the model's own eager forward, which reads nothing on the host that changes from step to step:
lengths, positions and pages live on the device at fixed addresses. The host's part of a step (capacity, padding, columns)
runs before the replay. A cache whose tensors moved, another batch or other arguments are captured anew; what cannot be
captured runs as it did, and the log says why.
"""

import dataclasses
import inspect
import logging
import time
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from kitty_compile.columns import Call
from kitty_compile.huggingface import hooks
from kitty_compile.huggingface.attention import ActiveCall, active_call, set_active_call
from kitty_compile.huggingface.cache import KittyCache

logger = logging.getLogger(__name__)

_CACHE_NAMES = ("cache", "past_key_values")
# What a step may be given beside ids, positions, mask and cache: constants of the graph.
_CONSTANTS = ("use_cache", "return_dict", "logits_to_keep", "output_hidden_states", "output_attentions")
# Given by generate in some versions, of no effect on a model whose positions are given.
_IGNORED = ("cache_position", "next_sequence_length")


@dataclasses.dataclass
class _Step:
    """The arguments of a forward of one column on a KittyCache."""

    cache: KittyCache
    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    constants: tuple[tuple[str, Any], ...]

    def key(self, call: Call) -> tuple[Any, ...]:
        return (self.cache.epoch, tuple(self.input_ids.shape), call.real is None, self.constants)


@dataclasses.dataclass
class _Captured:
    """A graph, the tensors it reads, and what the forward returned when it was captured."""

    key: tuple[Any, ...]
    cache: weakref.ref[KittyCache]
    graph: torch.cuda.CUDAGraph
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    call: Call
    output: Any


class DecodeGraph:
    """Stands before a model's ``forward`` and serves decode steps by replay."""

    def __init__(self, model: PreTrainedModel, attachment: hooks.Attachment) -> None:
        self.model, self.attachment = model, attachment
        # Somebody else's ``forward`` on the instance stays in charge of what it wraps.
        self.previous = vars(model).get("forward")
        self.parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        # transformers reads the signature of ``model.forward``.
        self.__signature__ = inspect.signature(model.forward)
        self.captured: _Captured | None = None
        self.num_captures = 0
        self.refusal: str | None = None
        self._warm: tuple[Any, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model captures its own.
        return {**self.__dict__, "captured": None, "_warm": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step(args, kwargs)
        if step is None:
            return self._forward(*args, **kwargs)
        hooks.check_call(self.attachment, self.model.get_decoder(), step.cache)
        call = hooks.begin_call(self.attachment, step.cache, step.attention_mask, step.input_ids)
        key = step.key(call)
        if self.captured is None or self.captured.key != key or self.captured.cache() is not step.cache:
            self.captured = None
            # Kernels are compiled and libraries initialised by an eager step: a capture must not be the first to run.
            is_warm = self._warm == key[1:]
            self._warm = key[1:]
            if not is_warm or not self._capture(step, call, key):
                step.cache.abort_call()
                return self._forward(*args, **kwargs)
        return self._replay(step, call)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Step | None:
        """The call's arguments if it is a step that a graph can serve."""
        if self.refusal is not None or torch.is_grad_enabled() or self.model.training or torch.compiler.is_compiling():
            return None
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        given = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
        ids, mask, positions = (given.pop(name, None) for name in ("input_ids", "attention_mask", "position_ids"))
        cache = next((given.pop(name) for name in _CACHE_NAMES if name in given), None)
        if not isinstance(cache, KittyCache) or not isinstance(ids, torch.Tensor) or set(given) - set(_CONSTANTS):
            return None
        is_step = ids.dim() == 2 and ids.shape[1] == 1 and ids.is_cuda and cache.get_seq_length() > 0
        if not is_step or not cache.is_initialized or cache.batch_size != ids.shape[0]:
            return None
        if given.get("output_hidden_states") or given.get("output_attentions") or given.get("use_cache") is False:
            return None
        return _Step(cache, ids, positions, mask, tuple(sorted(given.items())))

    def _capture(self, step: _Step, call: Call, key: tuple[Any, ...]) -> bool:
        start = time.perf_counter()
        input_ids = step.input_ids.clone()
        position_ids = self._positions(step, call).clone()
        static = call if call.real is None else _static_call(call)
        graph = torch.cuda.CUDAGraph()
        decoder = self.model.get_decoder()
        step.cache.use_call(static)
        set_active_call(ActiveCall(step.cache, decoder.config, decoder, active_call(), is_prepared=True))
        try:
            # Streamers and data loaders may use the device from other threads meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = self._forward(
                    input_ids=input_ids,
                    position_ids=position_ids,
                    **{self.attachment.cache_argument: step.cache},
                    **dict(step.constants),
                )
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.refusal = str(error).splitlines()[0]
            logger.warning(
                "decode steps of %s run eagerly, capture failed: %s", type(self.model).__name__, self.refusal
            )
            return False
        finally:
            hooks.drop_call(decoder)
            step.cache.rewind_host(call)
        self.captured = _Captured(key, weakref.ref(step.cache), graph, input_ids, position_ids, static, output)
        self.num_captures += 1
        logger.info("decode step of %s captured in %.2f s", type(self.model).__name__, time.perf_counter() - start)
        return True

    @staticmethod
    def _positions(step: _Step, call: Call) -> torch.Tensor:
        if step.position_ids is not None:
            return step.position_ids
        return torch.full_like(step.input_ids, call.start)

    def _replay(self, step: _Step, call: Call) -> Any:
        captured = self.captured
        assert captured is not None
        captured.input_ids.copy_(step.input_ids)
        captured.position_ids.copy_(self._positions(step, call))
        for target, source in ((captured.call.real, call.real), (captured.call.counts, call.counts)):
            if target is not None and source is not None:
                target.copy_(source)
        captured.graph.replay()
        step.cache.advance_host(call)
        # The graph writes its output where the last step's lies.
        fresh = {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in captured.output.items()
        }
        return type(captured.output)(**fresh)


def _static_call(call: Call) -> Call:
    """The call with tensors of its own that later steps overwrite."""
    assert call.real is not None
    assert call.columns is not None
    assert call.counts is not None
    return dataclasses.replace(
        call, real=call.real.clone(), columns=torch.zeros_like(call.columns), counts=call.counts.clone()
    )

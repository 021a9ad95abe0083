"""One CUDA graph for all decode steps on a cache: a forward of one column costs the host one replay.

Lengths, positions and pages live on the device at fixed addresses, so that a recorded step serves every later one. A cache
whose tensors moved, another batch or other arguments are recorded anew; what cannot be recorded runs as it did, and the log
says why.

A recording knows the weights, hooks and adapters that the model had when it was made, and nothing of what becomes of them. So
every ``generate`` makes its own, which takes little more time than an eager step does, and no recording keeps its cache.
"""

import dataclasses
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from kitty_compile.columns import Call
from kitty_compile.huggingface.cache import KittyCache

if TYPE_CHECKING:
    from kitty_compile.huggingface.decode_step import Step

logger = logging.getLogger(__name__)


# Stands in a recorded output for the cache, which would otherwise live as long as the recording.
_CACHE = object()


@dataclasses.dataclass
class _Recorded:
    """A graph, the tensors it reads, and what the forward returned when it was recorded."""

    key: tuple[Any, ...]
    cache: weakref.ref[KittyCache]
    graph: torch.cuda.CUDAGraph
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    call: Call
    output_type: Any = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


class DecodeGraph:
    """Records a step between ``start`` and ``stop``, in which its caller runs the device part, and replays it."""

    def __init__(self) -> None:
        self.recorded: _Recorded | None = None
        self.num_captures = 0
        self.seconds = 0.0  # that the last recording took
        self.refusal: str | None = None
        self._warm: tuple[Any, ...] | None = None
        self._recording: _Recorded | None = None
        self._context: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._started, self._length_reads = 0.0, 0

    def forget(self) -> None:
        """Drop the recording with the memory of its own."""
        self.recorded = None

    def forget_orphan(self) -> None:
        """Drop the recording if its cache is gone."""
        if self.recorded is not None and self.recorded.cache() is None:
            self.forget()

    def is_recorded(self, step: "Step") -> bool:
        recorded = self.recorded
        return recorded is not None and recorded.key == step.key() and recorded.cache() is step.cache

    def is_due(self, step: "Step") -> bool:
        """Shall this step be recorded? Not the first of its kind: that one compiles kernels and initialises libraries."""
        if self.refusal is not None or self.is_recorded(step):
            return False
        self.recorded = None
        key = step.key()[1:]
        is_warm, self._warm = self._warm == key, key
        return is_warm

    def start(self, step: "Step") -> dict[str, Any]:
        """Begin to record; returns the inputs to run the device part with."""
        self._started, self._length_reads = time.perf_counter(), step.cache.num_length_reads
        static = step.call if step.call.real is None else _static_call(step.call)
        self._recording = _Recorded(
            step.key(),
            weakref.ref(step.cache),
            torch.cuda.CUDAGraph(),
            step.input_ids.clone(),
            step.position_ids.clone(),
            static,
        )
        step.cache.use_call(static)
        self._stream = torch.cuda.current_stream()
        # Streamers and data loaders may use the device from other threads meanwhile.
        self._context = torch.cuda.graph(self._recording.graph, capture_error_mode="thread_local")
        self._context.__enter__()
        return {"input_ids": self._recording.input_ids, "position_ids": self._recording.position_ids}

    def stop(self, step: "Step", output: Any) -> None:
        """End the recording of ``output``, None when the device part has failed. Nothing has run: the host is rewound."""
        recording, context = self._recording, self._context
        self._recording = self._context = None
        assert recording is not None
        try:
            context.__exit__(None, None, None)
        except RuntimeError as error:
            self.refuse(str(error).splitlines()[0])
            # A recording that was broken off leaves its stream behind.
            torch.cuda.set_stream(self._stream)  # type: ignore[arg-type]
        step.cache.rewind_host(step.call)
        if self.refusal is None and step.cache.num_length_reads != self._length_reads:
            self.refuse("the forward asks the cache for its length, which is not the same in the next step")
        if self.refusal is not None:
            torch.cuda.synchronize()
            return
        recording.output_type = type(output)
        recording.fields = {name: _CACHE if value is step.cache else value for name, value in output.items()}
        self.recorded = recording
        self.num_captures += 1
        self.seconds = time.perf_counter() - self._started
        logger.info("a decode step was recorded in %.2f s", self.seconds)

    def refuse(self, reason: str) -> None:
        if self.refusal is None:
            self.refusal = reason
            logger.warning("decode steps run without a CUDA graph, recording one failed: %s", reason)

    def replay(self, step: "Step") -> Any:
        recorded = self.recorded
        assert recorded is not None
        recorded.input_ids.copy_(step.input_ids)
        recorded.position_ids.copy_(step.position_ids)
        for target, source in ((recorded.call.real, step.call.real), (recorded.call.counts, step.call.counts)):
            if target is not None and source is not None:
                target.copy_(source)
        recorded.graph.replay()
        step.cache.advance_host(step.call)
        return recorded.output_type(**{name: _fresh(value, step.cache) for name, value in recorded.fields.items()})


def _fresh(value: Any, cache: KittyCache) -> Any:
    if value is _CACHE:
        return cache
    # The graph writes its output where the last step's lies.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _static_call(call: Call) -> Call:
    """The call with tensors of its own that later steps overwrite."""
    assert call.real is not None
    assert call.columns is not None
    assert call.counts is not None
    return dataclasses.replace(
        call, real=call.real.clone(), columns=torch.zeros_like(call.columns), counts=call.counts.clone()
    )

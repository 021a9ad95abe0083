"""Kernels beside each other in a CUDA graph."""

import contextlib
import functools
from collections.abc import Iterator

import torch


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def fork(device: torch.device) -> Iterator[contextlib.AbstractContextManager[object]]:
    """Gives a context whose launches run beside the other launches of the block, if a graph is being captured.

    Outside of a capture, where two streams would cost the host more than the device gains, all go one after another. What is
    allocated before the block and freed after it may be used in both.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield contextlib.nullcontext()
        return
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    yield torch.cuda.stream(side)
    main.wait_stream(side)

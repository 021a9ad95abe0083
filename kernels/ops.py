"""The operators, ``torch.ops.kitty``: one call per layer and forward, state mutated in place and declared so.

    kitty::attend         attention of a call over the cache and its own tokens, then what ``update`` does (the fused form)
    kitty::attend_window  the same for a sliding window over a kept raw ring
    kitty::update         seal complete pages, append to the raw tokens, advance the lengths
    kitty::dequantize     the pages of every row, dense (the materialising form needs it)

A state may have more rows than a call of ``attend`` or ``attend_window`` brings: the call takes the first ones, in place.

CPU tensors go to the torch kernels, CUDA tensors to the Triton ones, which are imported on first use.
"""

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo

from kitty_compile.kernels import attend_window
from kitty_compile.kernels.layout import PAGE_SIZE, LayerTensors, PageLayout, RawLayout

_CALL = "Tensor key, Tensor value, Tensor? columns, Tensor? counts"
_STATE = (
    "Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor(c!) raw_key, Tensor(d!) raw_value, "
    "Tensor(e!) lengths, Tensor(f!) high_water, Tensor page_table"
)

_library = torch.library.Library("kitty", "DEF")
_library.define(
    f"attend(Tensor query, {_CALL}, {_STATE}, int[] parameters, float scale, float softcap, Tensor? sinks, bool is_empty)"
    " -> Tensor"
)
_library.define(
    "attend_window(Tensor query, Tensor key, Tensor value, Tensor? real, Tensor(a!) ring_key, Tensor(b!) ring_value, "
    "Tensor(c!) ring_real, Tensor(d!) position, int window, float scale, float softcap, Tensor? sinks) -> Tensor"
)
_library.define(f"update({_CALL}, {_STATE}, int[] parameters) -> ()")
_library.define(
    "dequantize(Tensor pages, Tensor page_table, int num_pages, Tensor like, int[] parameters, bool is_key) -> Tensor"
)


class OpParameters(NamedTuple):
    """The integers an operator takes beside its tensors, in the order of its ``parameters`` argument."""

    key_bits: int
    value_bits: int
    num_boosted: int
    sink_length: int
    value_window: int
    rollback_window: int
    seed: int  # -1: boost by magnitude; otherwise by a hash of it
    layer: int
    key_dim: int
    value_dim: int
    num_kv_heads: int

    def page_layout(self, dtype: torch.dtype) -> PageLayout:
        return _page_layout(self, dtype)

    def raw_layout(self) -> RawLayout:
        return RawLayout(self.sink_length, self.value_window, self.rollback_window)


@functools.lru_cache(maxsize=1024)
def _page_layout(parameters: OpParameters, dtype: torch.dtype) -> PageLayout:
    key_bits, value_bits, num_boosted = parameters[:3]
    key_dim, value_dim, num_kv_heads = parameters[-3:]
    return PageLayout(key_dim, value_dim, num_kv_heads, key_bits, value_bits, num_boosted, dtype)


@functools.cache
def _backend(device_type: str) -> Any:
    """The module that implements ``attend_and_update``, ``update`` and ``dequantize_pages`` for a device type."""
    name = {"cpu": "torch_backend", "cuda": "triton_backend"}[device_type]
    return importlib.import_module(f"kitty_compile.kernels.{name}")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    *arguments: Any,
) -> torch.Tensor:
    *tensors, parameters, scale, softcap, sinks, is_empty = arguments
    state, numbers = _first_rows(LayerTensors(*tensors), query.shape[0]), OpParameters(*parameters)
    layouts = numbers.page_layout(state.raw_key.dtype), numbers.raw_layout()
    backend = _backend(query.device.type)
    output: torch.Tensor = backend.attend_and_update(
        query,
        key,
        value,
        columns,
        counts,
        state,
        *layouts,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        is_empty=is_empty,
        seed=numbers.seed,
        layer=numbers.layer,
    )
    return output


def _first_rows(state: LayerTensors, rows: int) -> LayerTensors:
    _check_present(state.raw_key)
    if state.lengths.shape[0] == rows:
        return state
    pools, by_row = state[:2], state[2:]
    return LayerTensors(*pools, *(tensor[:rows] for tensor in by_row))


def _check_present(raw: torch.Tensor) -> None:
    """A saved program that something else than this package has loaded comes without its state."""
    if not raw.numel():
        raise ValueError("the state must have memory, got none: read saved programs with kitty_compile.load")


def _attend_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor | None,
    ring_key: torch.Tensor,
    ring_value: torch.Tensor,
    ring_real: torch.Tensor,
    position: torch.Tensor,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    _check_present(ring_key)
    ring = (*(tensor[: query.shape[0]] for tensor in (ring_key, ring_value, ring_real)), position)
    output = attend_window.attend(
        query, key, value, real, *ring, window=window, scale=scale, softcap=softcap, sinks=sinks
    )
    attend_window.append(key, value, real, *ring)
    return output.contiguous()


def _update(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    *arguments: Any,
) -> None:
    *tensors, parameters = arguments
    state, numbers = LayerTensors(*tensors), OpParameters(*parameters)
    layouts = numbers.page_layout(state.raw_key.dtype), numbers.raw_layout()
    _backend(key.device.type).update(
        key, value, columns, counts, state, *layouts, seed=numbers.seed, layer=numbers.layer
    )


def _dequantize(
    pages: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: int,
    like: torch.Tensor,
    parameters: list[int],
    is_key: bool,
) -> torch.Tensor:
    layout = OpParameters(*parameters).page_layout(like.dtype)
    dense: torch.Tensor = _backend(pages.device.type).dequantize_pages(
        pages, page_table, num_pages, layout, is_key=is_key
    )
    return dense


# Within a compiled call Dynamo would look into them.
for _name, _function in (
    ("attend", _attend),
    ("attend_window", _attend_window),
    ("update", _update),
    ("dequantize", _dequantize),
):
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _disable_dynamo(_function), _device)


@torch.library.register_fake("kitty::attend", lib=_library)
def _attend_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


@torch.library.register_fake("kitty::attend_window", lib=_library)
def _attend_window_fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


@torch.library.register_fake("kitty::update", lib=_library)
def _update_fake(*_: Any) -> None:
    return None


@torch.library.register_fake("kitty::dequantize", lib=_library)
def _dequantize_fake(
    pages: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: int,
    like: torch.Tensor,
    parameters: list[int],
    is_key: bool,
) -> torch.Tensor:
    numbers = OpParameters(*parameters)
    head_dim = numbers.key_dim if is_key else numbers.value_dim
    return like.new_empty((page_table.shape[0], numbers.num_kv_heads, num_pages * PAGE_SIZE, head_dim))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    parameters: OpParameters,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    is_empty: bool = False,
) -> torch.Tensor:
    """``kitty::attend``; arguments as in ``attend_torch.attend``. Returns [B, Hq, T, Dv]."""
    output: torch.Tensor = torch.ops.kitty.attend(
        query, key, value, columns, counts, *state, list(parameters), scale, softcap, sinks, is_empty
    )
    return output


def update(
    key: torch.Tensor,
    value: torch.Tensor,
    columns: torch.Tensor | None,
    counts: torch.Tensor | None,
    state: LayerTensors,
    parameters: OpParameters,
) -> None:
    """``kitty::update``; arguments as in ``update_torch.update``."""
    torch.ops.kitty.update(key, value, columns, counts, *state, list(parameters))


def dequantize(
    pages: torch.Tensor,
    page_table: torch.Tensor,
    num_pages: int,
    like: torch.Tensor,
    parameters: OpParameters,
    is_key: bool,
) -> torch.Tensor:
    """``kitty::dequantize``: [B, Hkv, num_pages * 128, D] in the dtype of ``like`` (a raw tensor of the layer)."""
    dense: torch.Tensor = torch.ops.kitty.dequantize(pages, page_table, num_pages, like, list(parameters), is_key)
    return dense

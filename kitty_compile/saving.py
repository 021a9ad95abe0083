"""Caches as files: a prefix that was packed once goes on in another process.

A file is safetensors, so nothing in it can be executed. Its header names the format, the versions and, as JSON, the
configuration and what the host counts (:class:`Header`). Its tensors:

    page_table       i32 [rows, slots], which of the file's pages a slot names; -1 where nothing is sealed
    real             bool [rows, columns], the columns that hold a token; absent when all do
    layers.N.NAME    the tensors of layer N, of its pools only the pages in use

A file is compared with the page layout before a cache is made of it, and takes its name only when it is complete.
"""

import dataclasses
import json
import os
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kitty_compile.cache import PagedCache
from kitty_compile.config import KittyConfig
from kitty_compile.kernels.layout import LAYOUT_VERSION, SUPPORTED_DTYPES
from kitty_compile.layers import LayerPlan, PagedLayer, SlidingLayer

CacheType = TypeVar("CacheType", bound=PagedCache)
Path = str | os.PathLike[str]

FORMAT = "kitty_compile.cache"
# Of the header and the names of the tensors; what is in a page has LAYOUT_VERSION.
FORMAT_VERSION = 1

# Lengths and page ids are i32.
_MOST = 2**31 - 1
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SUPPORTED_DTYPES}
_STORED_AS = {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What the keys and values of a layer have in common."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_dim", "value_dim"):
            _check_count(name, getattr(self, name), least=1)
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")

    @classmethod
    def of(cls, layer: PagedLayer | SlidingLayer) -> "LayerShape | None":
        """None of a layer that was never served."""
        if not layer.is_initialized:
            return None
        heads, key_dim, value_dim, dtype, _ = layer.geometry
        return cls(heads, key_dim, value_dim, str(dtype).removeprefix("torch."))

    def empty(self, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of no columns, as ``initialize`` wants them."""
        dtype = _DTYPES[self.dtype]
        key = torch.empty(rows, self.num_kv_heads, 0, self.key_dim, dtype=dtype, device=device)
        return key, key.new_empty(rows, self.num_kv_heads, 0, self.value_dim)


@dataclasses.dataclass(frozen=True)
class Header:
    """All of a cache that is no tensor, and what the tensors' sizes follow from. ``rows`` is 0 before the first forward."""

    config: KittyConfig
    plans: tuple[LayerPlan, ...]
    shapes: tuple[LayerShape | None, ...]
    max_length: int | None
    rows: int
    columns: int
    high_columns: int
    refill_columns: int
    num_pages: int
    has_pads: bool

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "high_columns", "refill_columns", "num_pages"):
            _check_count(name, getattr(self, name))
        if len(self.shapes) != len(self.plans):
            raise ValueError(f"shapes must be those of {len(self.plans)} layers, got {len(self.shapes)}")
        if self.columns and None in self.shapes:
            raise ValueError("every layer must have a shape, got a layer without one")
        if bool(self.rows) != any(self.shapes):
            raise ValueError(f"rows must be 0 without tensors alone, got {self.rows}")
        if not isinstance(self.has_pads, bool):
            raise ValueError(f"has_pads must be a bool, got {self.has_pads!r}")
        if self.num_pages > self.rows * self.num_slots:
            raise ValueError(f"num_pages must be at most {self.rows * self.num_slots}, got {self.num_pages}")
        if self.max_length is not None:
            _check_count("max_length", self.max_length, least=max(self.columns, 1))

    @property
    def num_slots(self) -> int:
        """Pages that a row of these columns can have sealed."""
        return self.config.raw_layout.pages_for(self.columns)

    @property
    def has_table(self) -> bool:
        return self.rows > 0 and any(plan.window is None for plan in self.plans)

    @classmethod
    def of(cls, cache: PagedCache, num_pages: int, *, is_bounded: bool) -> "Header":
        return cls(
            cache.config,
            cache.plans,
            tuple(LayerShape.of(layer) for layer in cache.layers),
            cache.max_length if is_bounded else None,
            max(cache.batch_size, 0),
            cache.columns,
            cache._high_columns,
            cache._refill_columns,
            num_pages,
            cache._map.real is not None and cache.columns > 0,
        )

    def to_json(self) -> str:
        versions = {"format": FORMAT, "format_version": FORMAT_VERSION, "layout_version": LAYOUT_VERSION}
        return json.dumps(versions | {"cache": dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Header":
        config = KittyConfig(**fields["config"])
        plans = tuple(LayerPlan(**plan) for plan in fields["plans"])
        shapes = tuple(None if shape is None else LayerShape(**shape) for shape in fields["shapes"])
        return cls(**{**fields, "config": config, "plans": plans, "shapes": shapes})


def _check_count(name: str, value: object, least: int = 0) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(f"{name} must be an int from {least} to {_MOST}, got {value!r}")


def save(cache: PagedCache, path: Path, *, is_bounded: bool = True) -> None:
    """Write all that ``cache`` holds to ``path``; a file that is there is replaced.

    Args:
        is_bounded: keep ``max_length``; otherwise what is loaded grows.

    Raises:
        ValueError: a forward stopped half way, ``set_padding`` has spoken of a forward that is yet to come, or the folder
            of ``path`` does not exist.
    """
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path must lie in a folder that exists, got {path}")
    if len({layer.columns for layer in cache.layers}) > 1:
        raise ValueError("the cache must be whole, but a forward stopped half way: crop it to where it was")
    if cache._padding is not None:
        raise ValueError("set_padding must come after save and load, got a mask of the next forward")
    pages, table, has_value = _pages_in_use(cache)
    header = Header.of(cache, pages.numel(), is_bounded=is_bounded)
    tensors = {} if not header.has_table else {"page_table": table}
    if header.has_pads:
        assert cache._map.real is not None
        tensors["real"] = cache._map.real[:, : header.columns]
    for name, tensor in _layer_tensors(cache).items():
        if name.endswith("_pages"):
            tensor = tensor[pages]
        if name.endswith("value_pages"):
            tensor[~has_value] = 0
        tensors[name] = tensor
    _write(path, {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, header.to_json())


def _layer_tensors(cache: PagedCache) -> dict[str, torch.Tensor]:
    return {f"layers.{layer.index}.{name}": tensor for layer in cache.layers for name, tensor in layer._tensors.items()}


def _pages_in_use(cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids of the sealed pages, the table that numbers them from 0, which of them have their V sealed as well)."""
    raw, lengths = cache.config.raw_layout, cache.lengths.long().unsqueeze(1)
    table = cache._table.table[:, : raw.pages_for(cache.columns)]
    slot = torch.arange(table.shape[1], device=table.device)
    is_sealed = slot < raw.key_pages(lengths) if table.numel() else torch.zeros_like(table, dtype=torch.bool)
    pages, numbers = table[is_sealed].long().unique(return_inverse=True)
    numbered = torch.full_like(table, -1)
    numbered[is_sealed] = numbers.to(table.dtype)
    has_value = torch.zeros_like(pages, dtype=torch.bool)
    if table.numel():
        # Memory that V has not been written to may hold anything, also what is nobody's business.
        has_value[numbered[slot < raw.value_pages(lengths)].long()] = True
    return pages, numbered, has_value


def _write(path: pathlib.Path, tensors: dict[str, torch.Tensor], header: str) -> None:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        # One entry: the writer brings several into a random order, and equal caches shall make equal files.
        save_file(tensors, part, metadata={FORMAT: header})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@torch.inference_mode(False)
def load(
    path: Path,
    make: Callable[..., CacheType] = PagedCache,  # type: ignore[assignment]
    *,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
) -> CacheType:
    """The cache that :func:`save` wrote to ``path``: what follows is bit-identical to what follows in the one that was saved.

    Args:
        make: called with plans, configuration and ``max_length=`` for an empty cache.
        device: where it shall live, whatever device it was saved from.
        max_length: columns it can come to hold; None: as it was when it was saved.

    Raises:
        ValueError: ``path`` is no whole file of this format and layout version, or ``max_length`` is less than it holds.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path must be a file that was saved, got {path}")
    try:
        opened = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"path must be a whole file of a saved cache, got {path}: {error}") from error
    with opened as file:
        header = _read_header(path, file.metadata())
        if max_length is not None:
            _check_count("max_length", max_length, least=max(header.columns, 1))
        try:
            _check_tensors(header, file)
            _check_values(header, file)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            # torch adds its stack to what it says.
            reason = str(error).partition("\n")[0]
            raise ValueError(f"path must be a file as it was saved, got {path}: {reason}") from error
        cache = make(header.plans, header.config, max_length=max_length or header.max_length)
        _fill(cache, header, file, torch.device(device))
    return cache


def _read_header(path: pathlib.Path, metadata: dict[str, str] | None) -> Header:
    try:
        fields = json.loads((metadata or {})[FORMAT])
        versions = {"format_version": FORMAT_VERSION, "layout_version": LAYOUT_VERSION}
        found = {name: fields[name] for name in versions}
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"path must be a file of the format {FORMAT}, got {path} of another") from None
    for name, version in versions.items():
        if found[name] != version:
            raise ValueError(f"{name} must be {version}, got {found[name]!r} in {path}: save the cache anew")
    try:
        return Header.from_fields(fields["cache"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"path must have the header that was saved, got {path}: {error}") from error


def _allocate(cache: PagedCache, header: Header, device: torch.device) -> None:
    for layer, shape in zip(cache.layers, header.shapes, strict=True):
        if shape is not None:
            layer.initialize(*shape.empty(header.rows, device))


def _check_tensors(header: Header, file: Any) -> None:
    """Raise a ValueError unless the file has the tensors that the layout asks for, and no other."""
    meta = torch.device("meta")
    cache = PagedCache(header.plans, header.config)
    cache._table.num_pages = header.num_pages
    _allocate(cache, header, meta)
    expected = _layer_tensors(cache)
    if header.has_table:
        expected["page_table"] = torch.empty(header.rows, header.num_slots, dtype=torch.int32, device=meta)
    if header.has_pads:
        expected["real"] = torch.empty(header.rows, header.columns, dtype=torch.bool, device=meta)
    strays = sorted(expected.keys() ^ set(file.keys()))
    if strays:
        raise ValueError(f"its tensors must be those of its header, got {', '.join(strays)} on one side alone")
    for name, tensor in expected.items():
        stored, wanted = file.get_slice(name), (_STORED_AS[tensor.dtype], list(tensor.shape))
        found = (stored.get_dtype(), list(stored.get_shape()))
        if found != wanted:
            raise ValueError(f"{name} must be {wanted[0]} {wanted[1]}, got {found[0]} {found[1]}")


def _check_values(header: Header, file: Any) -> None:
    """Raise a ValueError unless counters, lengths and page table agree, so that no kernel reads where there is nothing."""
    tokens = torch.full((header.rows,), header.columns, device="cpu")
    if header.has_pads:
        tokens = file.get_tensor("real").sum(dim=1)
    for index, (plan, shape) in enumerate(zip(header.plans, header.shapes, strict=True)):
        if shape is None:
            continue
        if plan.window is not None:
            if file.get_tensor(f"layers.{index}.position").tolist() != [header.columns]:
                raise ValueError(f"the position of layer {index} must be {header.columns}, got another")
            continue
        lengths, high_water = (file.get_tensor(f"layers.{index}.{name}") for name in ("lengths", "high_water"))
        if not torch.equal(lengths.long(), tokens) or bool((high_water < lengths).any()):
            raise ValueError(f"the lengths of layer {index} must be {tokens.tolist()}, got {lengths.tolist()}")
    if header.has_table:
        table = file.get_tensor("page_table")
        slot = torch.arange(header.num_slots, device="cpu")
        sealed = table[slot < header.config.raw_layout.key_pages(tokens).unsqueeze(1)]
        if sealed.unique().tolist() != list(range(header.num_pages)):
            raise ValueError(f"page_table must name each of {header.num_pages} pages, got other ids or too few")


def _fill(cache: PagedCache, header: Header, file: Any, device: torch.device) -> None:
    """Give an empty cache what the file holds. Pages keep the file's ids; the slots behind them are dealt."""
    if header.has_table:
        max_pages = header.config.raw_layout.pages_for(cache.max_length or header.columns)
        cache._table.allocate(header.rows, max_pages, device)
        cache._table.table[:, : header.num_slots] = file.get_tensor("page_table").to(device)
    _allocate(cache, header, device)
    for name, tensor in _layer_tensors(cache).items():
        saved = file.get_tensor(name)
        tensor[: saved.shape[0]].copy_(saved)
    for layer in cache.layers:
        layer.columns = header.columns
    if header.has_pads:
        cache._map.real = file.get_tensor("real").to(device, copy=True)
    cache._high_columns, cache._refill_columns = header.high_columns, header.refill_columns
    cache._deal()

"""Phantoms: tensors of stride 0 that stand in a caller's cache where 16-bit keys and values would be.

A phantom has the shape, dtype and device of K or V [B, Hkv, columns, D] and one element of memory. The columns themselves
are in a ``PagedCache`` that lives as long as a phantom of it does (on a CUDA device until the next call after that). All
phantoms of one call share a storage, and the storage is their identity (never an address: a weak reference keeps it from
being given out again). So

    a slice of a phantom        a crop
    an older phantom            going back; a fork when the newer ones are still held
    a deep copy of phantoms     a fork
    a gathered, dense phantom   an error that says so: NaN of a bit pattern that no arithmetic gives

Elements are NaN, so that attention which does not know phantoms cannot go unnoticed.
"""

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kitty_compile.cache import PagedCache

_SERIAL_BYTES = 8


@dataclasses.dataclass
class _Pages:
    """A cache, and how many columns it held after which calls (by serial) that it has not gone back behind since."""

    cache: PagedCache
    columns: dict[int, int] = dataclasses.field(default_factory=dict)

    def go_back(self, columns: int) -> None:
        self.cache.crop(columns)
        self.columns = {serial: held for serial, held in self.columns.items() if held <= columns}


@dataclasses.dataclass
class _Entry:
    """The phantoms of one call."""

    storage: StorageWeakRef
    pages: _Pages
    serial: int


class PhantomStore:
    """Makes phantoms and finds the caches behind them."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._serials = itertools.count(1)

    def __len__(self) -> int:
        """How many calls have phantoms that are still held."""
        self.sweep()
        return len(self._entries)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is it a phantom of this store, or a slice of one?"""
        entry = self._entries.get(_key(tensor))
        return entry is not None and not entry.storage.expired()

    @property
    def caches(self) -> list[PagedCache]:
        """The caches that phantoms keep alive."""
        self.sweep()
        return [pages.cache for pages in self._held()]

    def sweep(self) -> None:
        """Let go of caches whose phantoms are gone."""
        for key in [key for key, entry in self._entries.items() if entry.storage.expired()]:
            del self._entries[key]

    def make(
        self, cache: PagedCache, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """One phantom per shape: K and V of layer 0, of layer 1 and so on."""
        self.sweep()
        serial = next(self._serials)
        size = len(shapes) * dtype.itemsize
        base = torch.full((-(-size // _SERIAL_BYTES) * _SERIAL_BYTES + _SERIAL_BYTES,), 255, dtype=torch.uint8)
        base[-_SERIAL_BYTES:].view(torch.int64).fill_(serial)
        base, owner = _owned(base.to(device))
        elements = base[:size].view(dtype)
        pages = next((pages for pages in self._held() if pages.cache is cache), None) or _Pages(cache)
        pages.columns[serial] = cache.columns
        self._entries[_key(base)] = _Entry(StorageWeakRef(base.untyped_storage()), pages, serial)
        if owner is not None:
            weakref.finalize(owner, self._entries.pop, _key(base), None)
        return [elements[index].expand(tuple(shape)) for index, shape in enumerate(shapes)]

    def resolve(self, phantoms: Sequence[torch.Tensor], columns: int | None) -> PagedCache:
        """The cache behind the phantoms of all layers, gone back to ``columns`` (None: as many as it held then).

        Raises:
            ValueError: they are not the phantoms of one call in their order, or what they stood for is gone.
        """
        self.sweep()
        entry = self._entry(phantoms)
        pages, most = entry.pages, entry.pages.columns.get(entry.serial)
        columns = most if columns is None else columns
        if most is None or columns is None or columns > most:
            raise ValueError(
                "phantoms must be the newest of their cache, got some from before it was cropped and went on"
            )
        if any(other.pages is pages and other.serial > entry.serial for other in self._entries.values()):
            # Somebody holds what came later.
            pages = entry.pages = _Pages(copy.deepcopy(pages.cache), {entry.serial: most})
        if columns < pages.cache.columns:
            pages.go_back(columns)
            if columns < most:
                pages.columns[entry.serial] = columns
        return pages.cache

    def _entry(self, phantoms: Sequence[torch.Tensor]) -> _Entry:
        first = phantoms[0]
        for index, phantom in enumerate(phantoms):
            is_in_place = _key(phantom) == _key(first) and phantom.storage_offset() == index
            if not is_in_place:
                raise ValueError("phantoms must be those of one call, a layer behind the other, got a mixture")
        entry = self._entries.get(_key(first))
        return self._fork(first) if entry is None else entry

    def _fork(self, copied: torch.Tensor) -> _Entry:
        """An entry for phantoms that were copied with their storage; they carry the serial of the original."""
        storage = copied.untyped_storage()
        held = torch.empty(0, dtype=torch.uint8, device=copied.device).set_(storage)
        serial = int(held[-_SERIAL_BYTES:].view(torch.int64)) if len(held) > _SERIAL_BYTES else 0
        original = next((pages for pages in self._held() if serial in pages.columns), None)
        if original is None:
            raise ValueError("phantoms must be copied while their cache is held, got a copy whose original is gone")
        fork = _Pages(copy.deepcopy(original.cache))
        entry = _Entry(StorageWeakRef(storage), fork, next(self._serials))
        fork.columns[entry.serial] = original.columns[serial]
        self._entries[_key(copied)] = entry
        return entry

    def _held(self) -> list[_Pages]:
        return list({id(entry.pages): entry.pages for entry in self._entries.values()}.values())


def _owned(held: torch.Tensor) -> tuple[torch.Tensor, object | None]:
    """The same bytes in a storage whose end can be observed: an object that lives just as long; None on a CUDA device."""
    if held.device.type != "cpu":
        return held, None
    array = held.numpy()
    return torch.from_numpy(array), array


def is_dense_phantom(tensor: torch.Tensor) -> bool:
    """Was this tensor gathered, joined or cloned from a phantom? Reads the device."""
    if not tensor.numel() or not any(tensor.stride()):
        return False
    first = tensor[(0,) * tensor.dim()].reshape(1)
    return bool((first.view(torch.uint8) == 255).all())


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key

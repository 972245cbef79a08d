"""Accesses to the memory of one rank: races, memory that is freed too early, bytes in use.

Two accesses to overlapping bytes race if one of them writes and neither is ordered before the
other. Memory of the device is freed too early if a stream may still use it when the caching
allocator could hand it out again: to the next operation of the stream on which it was allocated.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from torch import Tensor

from tests.support.virtual_device.timelines import Clock, Timeline, merge

ROOT = Path(__file__).parents[3]
_PRODUCT = tuple(f"{ROOT}/{folder}/" for folder in ("engine", "workers", "rayzero"))
_PLACES = 4  # frames of the product that name a place
_BLOCK_BYTES = 512  # the caching allocator's granularity


class Home(Enum):
    """Where a storage is."""

    DEVICE = "device"
    PINNED = "pinned"  # host memory of torch's allocator, which keeps it while a copy needs it
    REGISTERED = "registered"  # host memory that others own, pinned
    PAGEABLE = "pageable"  # other host memory: threads that use it hold references to it

    @property
    def on_host(self) -> bool:
        return self is not Home.DEVICE


Place = tuple[tuple[CodeType, int], ...]  # frames, innermost first
_from_product: dict[CodeType, bool] = {}


def current_place() -> Place:
    """The innermost frames of the product's code."""
    frame = sys._getframe(1)
    places: list[tuple[CodeType, int]] = []
    while frame is not None and len(places) < _PLACES:
        code = frame.f_code
        known = _from_product.get(code)
        if known is None:
            known = _from_product[code] = code.co_filename.startswith(_PRODUCT)
        if known:
            places.append((code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(places)


def describe(place: Place) -> str:
    """A place as text: file:line function, innermost first."""
    parts = []
    for code, line in place:
        path = Path(code.co_filename)
        parts.append(f"{'/'.join(path.parts[-2:])}:{line} {code.co_name}")
    return " < ".join(parts) or "the script"


class Access(NamedTuple):
    """Bytes that an operation read or wrote."""

    start: int
    stop: int
    writes: bool
    timeline: str
    number: int
    operator: str
    place: Place

    def __str__(self) -> str:
        kind = "writes" if self.writes else "reads"
        return f"{self.operator} {kind} on {self.timeline} at {describe(self.place)}"


@dataclass
class _Storage:
    """`allocated_on` is the clock of the stream that gets the memory when it is freed; `address`
    that of host memory. `used_on` are streams whose work until then it is kept for, too."""

    home: Home
    nbytes: int
    allocated_on: Timeline
    address: int = 0
    accesses: list[Access] = field(default_factory=list)
    used_on: list[Timeline] = field(default_factory=list)


class Memory:
    """The storages that one rank uses.

    Attributes:
        races: pairs of unordered accesses, as text, and how often.
        early_frees: accesses that may still run when their memory is reused.
        device_bytes, peak_bytes: of the device, in blocks of the caching allocator.
    """

    def __init__(self) -> None:
        self.races: Counter[str] = Counter()
        self.early_frees: Counter[str] = Counter()
        self.device_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, _Storage] = {}
        self._aliases: dict[int, tuple[int, int]] = {}  # (storage, first byte in it), by storage

    def home(self, tensor: Tensor) -> Home | None:
        """None of a storage that was never seen."""
        storage = self._storages.get(self._key(tensor)[0])
        return None if storage is None else storage.home

    def _key(self, tensor: Tensor) -> tuple[int, int]:
        """The storage that a tensor's accesses are booked at, and where its own begins there."""
        key = tensor.untyped_storage()._cdata
        return self._aliases.get(key) or (key, 0)

    def alias(self, tensor: Tensor) -> None:
        """A storage that was made for a buffer of Python: books its accesses at the storage that
        owns the memory, if that is known."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        for key, known in self._storages.items():
            if known.address <= address < known.address + known.nbytes:
                self._aliases[storage._cdata] = key, address - known.address
                weakref.finalize(storage, self._aliases.pop, storage._cdata, None).atexit = False
                return

    def place(self, tensor: Tensor, home: Home, timeline: Timeline, host: Timeline) -> Home:
        """Says where a storage is, unless that is known; returns where it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata if storage._cdata not in self._aliases else self._key(tensor)[0]
        known = self._storages.get(key)
        if known is None:
            address = storage.data_ptr() if home.on_host else 0
            known = self._storages[key] = _Storage(home, storage.nbytes(), timeline, address)
            if home is Home.DEVICE:
                self.device_bytes += _blocks(known.nbytes)
                self.peak_bytes = max(self.peak_bytes, self.device_bytes)
            weakref.finalize(storage, self._free, key, host).atexit = False
        return known.home

    def move(self, tensor: Tensor, home: Home) -> None:
        """Host memory is pinned, or no longer."""
        self._storages[self._key(tensor)[0]].home = home

    def record_use(self, tensor: Tensor, timeline: Timeline) -> None:
        """`Tensor.record_stream`."""
        self._storages[self._key(tensor)[0]].used_on.append(timeline)

    def access(
        self,
        tensor: Tensor,
        timeline: Timeline,
        number: int,
        what: tuple[str, Place],
        *,
        writes: bool,
    ) -> None:
        """Books operation `number` of a timeline, and reports what it races with."""
        extent = _extent(tensor)
        if extent is None:
            return
        name, clock = timeline.name, timeline.clock
        key, first = self._key(tensor)
        start, stop = extent[0] + first, extent[1] + first
        storage = self._storages[key]
        kept = []
        new = Access(start, stop, writes, name, number, *what)
        for old in storage.accesses:
            if old.stop <= start or stop <= old.start:
                kept.append(old)
                continue
            covered = start <= old.start and old.stop <= stop
            if old.timeline == name:
                if not (covered and (writes or not old.writes)):
                    kept.append(old)
                continue
            if old.writes or writes:
                if old.number > clock.get(old.timeline, 0):
                    self.races[f"{old}\n    {new}"] += 1
                elif writes and covered:
                    continue  # what is ordered after `new` is ordered after it, too
            kept.append(old)
        kept.append(new)
        storage.accesses = kept

    def unfinished(self, tensor: Tensor, clock: Clock) -> Iterator[Access]:
        """Accesses to a tensor's storage that are not ordered before `clock`."""
        storage = self._storages.get(self._key(tensor)[0])
        for access in storage.accesses if storage is not None else ():
            if access.number > clock.get(access.timeline, 0):
                yield access

    def _free(self, key: int, host: Timeline) -> None:
        storage = self._storages.pop(key, None)
        if storage is None or storage.home in (Home.PINNED, Home.PAGEABLE):
            return
        clock: Clock = {}
        merge(clock, host.clock)
        if storage.home is Home.DEVICE:
            self.device_bytes -= _blocks(storage.nbytes)
            for timeline in (storage.allocated_on, *storage.used_on):
                merge(clock, timeline.clock)
        for access in storage.accesses:
            if access.number > clock.get(access.timeline, 0):
                self.early_frees[f"{storage.nbytes} bytes of {storage.home.value}: {access}"] += 1


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _extent(tensor: Tensor) -> tuple[int, int] | None:
    """The first and last byte of a tensor in its storage; None if it has no elements."""
    numel = tensor.numel()
    if not numel:
        return None
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return start, start + numel * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size

"""All buffers of one vault: who writes which, how long a version lives, what comes after it.

A version goes when its generation is over and nothing pins it. A buffer whose version went is
spare: the next reservation takes it, grown if need be, so that a repair touches few pages for the
first time. When a generation is over its spares go too, which bounds the memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from rayzero.workers.vault.buffers import BufferPool, SharedBuffer
from rayzero.workers.vault.images import describe_slot, require_complete
from rayzero.workers.vault.records import SlotGoneError, SlotInfo, SlotRef
from rayzero.workers.vault.slots import (
    SlotGeometry,
    SlotHeader,
    SlotStatus,
    read_header,
    read_pin,
    write_header,
    write_pin,
)


@dataclass
class _Entry:
    """A buffer in use. `owner` is the number of the peer that writes it; None for a replica."""

    buffer: SharedBuffer
    generation: int
    rank: int
    owner: int | None
    readers: int = 0
    dropped: bool = False


class SlotRegistry:
    """Owns the buffers in use, until `close`. Safe to use from any thread.

    The headers say what is whole: workers write them without telling the vault.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._entries: list[_Entry] = []
        self._current_generation = 0  # generations before this one are over
        self._lock = Lock()  # places; held for moments

    def reserve(
        self,
        owner: int,
        generation: int,
        rank: int,
        world_size: int,
        geometry: SlotGeometry,
        count: int,
    ) -> list[int]:
        """New descriptors of so many empty buffers, for the caller to close. Takes a while.

        Raises:
            VaultMemoryError: there is not enough memory.
        """
        self.discard_unfinished(owner)  # it is not writing now, and will write into the new ones
        buffers = self._pool.acquire(geometry.nbytes, count)
        for one in buffers:
            write_pin(one.fd, False)
            write_header(one.fd, SlotHeader(generation, rank, world_size, geometry))
        with self._lock:
            self._entries += [_Entry(one, generation, rank, owner) for one in buffers]
            return [os.dup(one.fd) for one in buffers]

    def open_version(self, ref: SlotRef) -> int:
        """A new descriptor of that version's buffer, for the caller to close.

        Raises:
            SlotGoneError: it is not here.
        """
        with self._lock:
            return os.dup(self._find_entry(ref).buffer.fd)

    @contextmanager
    def open_pinned(self, ref: SlotRef) -> Iterator[int]:
        """The descriptor of a version that stays as it is meanwhile.

        Raises:
            SlotGoneError: it is not here, or (at the end) it was not pinned and was overwritten.
        """
        with self._lock:
            place = self._find_entry(ref)
            place.readers += 1
        try:
            yield place.buffer.fd
            require_complete(read_header(place.buffer.fd), ref)
        finally:
            with self._lock:
                place.readers -= 1
                if place.dropped and not place.readers:
                    self._pool.release([place.buffer])

    @contextmanager
    def receive_replica(self, header: SlotHeader) -> Iterator[int]:
        """A buffer to fill with a replica of that version, except for its header.

        When the `with` ends well the replica is whole, and pinned like the version it is of. One
        older replica of the same rank stays until then, and longer if it is pinned.

        Raises:
            VaultMemoryError: there is not enough memory.
        """
        self._drop_older_replicas(header.generation, header.rank)
        [buffer] = self._pool.acquire(header.geometry.nbytes, 1)
        try:
            write_header(buffer.fd, SlotHeader(header.generation, header.rank, 0, header.geometry))
            yield buffer.fd
            write_pin(buffer.fd, True)
            write_header(buffer.fd, header)
        except BaseException:
            self._pool.release([buffer])
            raise
        with self._lock:
            self._entries.append(_Entry(buffer, header.generation, header.rank, None))

    def has_version(self, ref: SlotRef) -> bool:
        with self._lock:
            return any(_matches(version, ref) for _, version in self._complete_versions())

    def inventory(self) -> list[SlotInfo]:
        """Every whole version."""
        with self._lock:
            return [
                SlotInfo(
                    version.generation,
                    version.rank,
                    version.world_size,
                    version.step,
                    version.geometry.data_bytes,
                    read_pin(place.buffer.fd),
                    place.owner is None,
                )
                for place, version in self._complete_versions()
            ]

    def usage(self) -> dict[str, int]:
        """Bytes of shared memory: `slots`, `replicas`, `spare`."""
        with self._lock:
            held = {"slots": 0, "replicas": 0}
            for place in self._entries:
                held["replicas" if place.owner is None else "slots"] += place.buffer.capacity_bytes
        return held | {"spare": self._pool.nbytes}

    def discard_unfinished(self, owner: int) -> None:
        """That owner does not go on with what it left unfinished: it is spare."""
        with self._lock:
            self._drop_entries(
                p for p in self._entries if p.owner == owner and _complete_version(p) is None
            )

    def generation_complete(self, generation: int) -> None:
        """All ranks of a generation have a whole version of it: older generations are over."""
        with self._lock:
            if generation > self._current_generation:
                self._evict_before(generation)
                self._pool.trim()

    def unpin(self, generation: int, step: int) -> None:
        """Frees what was pinned at that step or before, up to that generation.

        The newest replica of a rank stays all the same, until its generation is over.
        """
        with self._lock:
            for place in self._entries:
                # The pin is read before the header: it is set before, and stays until here. The
                # other way round a version that is pinned in between would be taken for the old.
                pinned, version = read_pin(place.buffer.fd), _complete_version(place)
                if pinned and version and place.generation <= generation and version.step <= step:
                    write_pin(place.buffer.fd, False)
            self._evict_before(max(generation, self._current_generation))

    def close(self) -> None:
        """Gives all memory back; what is mapped elsewhere stays with those who mapped it."""
        with self._lock:
            self._drop_entries(self._entries)
        self._pool.trim()

    # What follows is called with the lock held.

    def _complete_versions(self) -> list[tuple[_Entry, SlotHeader]]:
        return [
            (place, version) for place in self._entries if (version := _complete_version(place))
        ]

    def _find_entry(self, ref: SlotRef) -> _Entry:
        # The latest first: a version may be written again after all others, to save it.
        for place, version in reversed(self._complete_versions()):
            if _matches(version, ref):
                return place
        raise SlotGoneError(
            f"{describe_slot(ref)} is gone: dropped, overwritten, or never finished"
        )

    def _drop_entries(self, places: Iterable[_Entry]) -> None:
        gone = list(places)
        for place in gone:
            place.dropped = True
        self._entries = [place for place in self._entries if not place.dropped]
        # The last reader gives back what is still being read.
        self._pool.release([place.buffer for place in gone if not place.readers])

    def _evict_before(self, generation: int) -> None:
        """Drops what no pin holds: of generations before that one, and replicas with a newer."""
        self._current_generation = generation
        newest = self._newest_replicas()
        self._drop_entries(
            place
            for place in self._entries
            if not (read_pin(place.buffer.fd) and _complete_version(place))
            and (place.generation < generation or _is_outdated(place, newest))
        )

    def _newest_replicas(self) -> dict[tuple[int, int], int]:
        """The newest step of which there is a replica, by generation and rank."""
        newest: dict[tuple[int, int], int] = {}
        for place, version in self._complete_versions():
            if place.owner is None:
                key = (version.generation, version.rank)
                newest[key] = max(version.step, newest.get(key, -1))
        return newest

    def _drop_older_replicas(self, generation: int, rank: int) -> None:
        with self._lock:
            newest = self._newest_replicas().get((generation, rank), -1)
            self._drop_entries(
                place
                for place, version in self._complete_versions()
                if place.owner is None
                and (version.generation, version.rank) == (generation, rank)
                and version.step < newest
            )


def _complete_version(place: _Entry) -> SlotHeader | None:
    """The whole version in a buffer, if there is one."""
    header = read_header(place.buffer.fd)
    ours = header is not None and (header.generation, header.rank) == (place.generation, place.rank)
    return header if header and ours and header.status is SlotStatus.COMPLETE else None


def _matches(version: SlotHeader, ref: SlotRef) -> bool:
    return (version.generation, version.rank, version.step) == (ref.generation, ref.rank, ref.step)


def _is_outdated(place: _Entry, newest: dict[tuple[int, int], int]) -> bool:
    version = _complete_version(place)
    key = (place.generation, place.rank)
    return place.owner is None and version is not None and version.step < newest.get(key, -1)

"""The registry of a vault's buffers: their writers, and the lifetimes of versions.

A version is dropped when its generation is over and it is not pinned. The buffer of a dropped
version becomes spare: the next reservation reuses it, grown if necessary, so that a recovery
touches few new pages. The spares are freed when a generation ends, which bounds the memory.
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
    """A buffer in use. `owner` is the number of the peer that writes it; None: a replica."""

    buffer: SharedBuffer
    generation: int
    rank: int
    owner: int | None
    readers: int = 0
    dropped: bool = False


class SlotRegistry:
    """Owns the buffers in use until `close`. Safe to use from any thread.

    Whether a version is complete is read from its header: workers write headers without notifying
    the vault.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._entries: list[_Entry] = []
        self._current_generation = 0  # older generations are over
        self._lock = Lock()  # guards the entries; held briefly

    def reserve(
        self,
        owner: int,
        generation: int,
        rank: int,
        world_size: int,
        geometry: SlotGeometry,
        count: int,
    ) -> list[int]:
        """New descriptors of `count` empty buffers; the caller closes them. Allocation is slow.

        Raises:
            VaultMemoryError: there is not enough memory.
        """
        self.discard_unfinished(owner)  # the owner waits for this call: it is not writing
        buffers = self._pool.acquire(geometry.nbytes, count)
        for buffer in buffers:
            write_pin(buffer.fd, False)
            write_header(buffer.fd, SlotHeader(generation, rank, world_size, geometry))
        with self._lock:
            self._entries += [_Entry(buffer, generation, rank, owner) for buffer in buffers]
            return [os.dup(buffer.fd) for buffer in buffers]

    def open_version(self, ref: SlotRef) -> int:
        """A new descriptor of the version's buffer; the caller closes it.

        Raises:
            SlotGoneError: this vault does not hold the version.
        """
        with self._lock:
            return os.dup(self._find_entry(ref).buffer.fd)

    @contextmanager
    def open_pinned(self, ref: SlotRef) -> Iterator[int]:
        """The descriptor of a version whose buffer is not reused during the `with`.

        Raises:
            SlotGoneError: this vault does not hold the version; or, at the end of the `with`, it
                was not pinned and its writer has overwritten it.
        """
        with self._lock:
            entry = self._find_entry(ref)
            entry.readers += 1
        try:
            yield entry.buffer.fd
            require_complete(read_header(entry.buffer.fd), ref)
        finally:
            with self._lock:
                entry.readers -= 1
                if entry.dropped and not entry.readers:
                    self._pool.release([entry.buffer])

    @contextmanager
    def receive_replica(self, header: SlotHeader) -> Iterator[int]:
        """A buffer to fill with a replica of that version, all but the header page.

        When the `with` succeeds the replica is complete, and pinned like its original. The newest
        older replica of the rank stays until then, and longer if it is pinned.

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
        """All complete versions."""
        with self._lock:
            return [
                SlotInfo(
                    version.generation,
                    version.rank,
                    version.world_size,
                    version.step,
                    version.geometry.data_bytes,
                    read_pin(entry.buffer.fd),
                    entry.owner is None,
                )
                for entry, version in self._complete_versions()
            ]

    def usage(self) -> dict[str, int]:
        """Bytes of shared memory: `slots`, `replicas`, `spare`."""
        with self._lock:
            held = {"slots": 0, "replicas": 0}
            for entry in self._entries:
                held["replicas" if entry.owner is None else "slots"] += entry.buffer.capacity_bytes
        return held | {"spare": self._pool.nbytes}

    def discard_unfinished(self, owner: int) -> None:
        """Makes the owner's buffers without a complete version spare: it no longer writes them."""
        with self._lock:
            self._drop_entries(
                e for e in self._entries if e.owner == owner and _complete_version(e) is None
            )

    def generation_complete(self, generation: int) -> None:
        """All ranks have a complete version of this generation: older generations are over."""
        with self._lock:
            if generation > self._current_generation:
                self._evict_before(generation)
                self._pool.trim()

    def unpin(self, generation: int, step: int) -> None:
        """Unpins the versions of `step` and earlier, of `generation` and earlier.

        The newest replica of a rank stays until its generation is over.
        """
        with self._lock:
            for entry in self._entries:
                # Read the pin before the header: the writer sets it before, and only this method
                # clears it. In the other order, a pin set in between would be attributed to the
                # version before.
                pinned, version = read_pin(entry.buffer.fd), _complete_version(entry)
                if pinned and version and entry.generation <= generation and version.step <= step:
                    write_pin(entry.buffer.fd, False)
            self._evict_before(max(generation, self._current_generation))

    def close(self) -> None:
        """Releases all memory; pages that a worker still has mapped stay until it unmaps them."""
        with self._lock:
            self._drop_entries(self._entries)
        self._pool.trim()

    # The methods below are called with the lock held.

    def _complete_versions(self) -> list[tuple[_Entry, SlotHeader]]:
        return [
            (entry, version) for entry in self._entries if (version := _complete_version(entry))
        ]

    def _find_entry(self, ref: SlotRef) -> _Entry:
        # Latest entry first: salvage may write a version again after all others.
        for entry, version in reversed(self._complete_versions()):
            if _matches(version, ref):
                return entry
        raise SlotGoneError(
            f"{describe_slot(ref)} is gone: dropped, overwritten, or never finished"
        )

    def _drop_entries(self, entries: Iterable[_Entry]) -> None:
        dropped = list(entries)
        for entry in dropped:
            entry.dropped = True
        self._entries = [entry for entry in self._entries if not entry.dropped]
        # A buffer that is being read is released by its last reader.
        self._pool.release([entry.buffer for entry in dropped if not entry.readers])

    def _evict_before(self, generation: int) -> None:
        """Drops unpinned versions of older generations, and unpinned outdated replicas."""
        self._current_generation = generation
        newest = self._newest_replicas()
        self._drop_entries(
            entry
            for entry in self._entries
            if not (read_pin(entry.buffer.fd) and _complete_version(entry))
            and (entry.generation < generation or _is_outdated(entry, newest))
        )

    def _newest_replicas(self) -> dict[tuple[int, int], int]:
        """The newest step with a replica, by (generation, rank)."""
        newest: dict[tuple[int, int], int] = {}
        for entry, version in self._complete_versions():
            if entry.owner is None:
                key = (version.generation, version.rank)
                newest[key] = max(version.step, newest.get(key, -1))
        return newest

    def _drop_older_replicas(self, generation: int, rank: int) -> None:
        with self._lock:
            newest = self._newest_replicas().get((generation, rank), -1)
            self._drop_entries(
                entry
                for entry, version in self._complete_versions()
                if entry.owner is None
                and (version.generation, version.rank) == (generation, rank)
                and version.step < newest
            )


def _complete_version(entry: _Entry) -> SlotHeader | None:
    """The header of a buffer's complete version, if it holds one."""
    header = read_header(entry.buffer.fd)
    if header is None or header.status is not SlotStatus.COMPLETE:
        return None
    return header if (header.generation, header.rank) == (entry.generation, entry.rank) else None


def _matches(version: SlotHeader, ref: SlotRef) -> bool:
    return (version.generation, version.rank, version.step) == (ref.generation, ref.rank, ref.step)


def _is_outdated(entry: _Entry, newest: dict[tuple[int, int], int]) -> bool:
    version = _complete_version(entry)
    key = (entry.generation, entry.rank)
    return entry.owner is None and version is not None and version.step < newest.get(key, -1)

"""The registry of a vault's buffers: their writers, and the lifetimes of versions.

A version is dropped when its generation is over and it is not pinned. The buffer of a dropped
version becomes spare: the next reservation reuses it, preferably a reservation of the same worker,
which may have it mapped. A new generation therefore touches no new pages. When all ranks have
loaded a step, the buffers of older steps become spare, and each rank reserves its first buffer.
When all ranks have mirrored a step, the buffer of the loaded step becomes spare, and each rank
reserves its second buffer. Then the remaining spares are freed. The unfinished buffer of a dead
worker is freed, not reused, because its device may write to the buffer until the process has ended.

Rule of ordering: `old-versions` (docs/engine.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import PROT_READ, mmap
from threading import Lock

from rayzero.workers.vault.buffers import BufferPool, SharedBuffer
from rayzero.workers.vault.images import copy_bytes, require_version
from rayzero.workers.vault.records import SlotGoneError, SlotInfo, SlotRef, VaultGoneError
from rayzero.workers.vault.slots import (
    SlotHeader,
    checksum_of,
    clear_pin,
    is_kept,
    is_to_copy,
    read_header,
    read_pin,
    write_copied,
    write_header,
    write_kept,
)


@dataclass(eq=False)
class _Entry:
    """A buffer in use. `owner` is the connection of its writer; None for a replica."""

    buffer: SharedBuffer
    generation: int
    rank: int
    owner: object | None
    readers: int = 0
    dropped: bool = False
    reusable: bool = True

    @property
    def pinned(self) -> bool:
        return read_pin(self.buffer.fd) or is_kept(self.buffer.fd)

    @property
    def version(self) -> SlotHeader | None:
        """The header of the buffer's complete version, if it holds one."""
        header = read_header(self.buffer.fd)
        if header is None or header.step < 0:
            return None
        is_own = (header.generation, header.rank) == (self.generation, self.rank)
        return header if is_own else None


class SlotRegistry:
    """Owns the buffers in use until `close`. Safe to use from any thread.

    The registry reads from a version's header whether the version is complete, because workers
    write headers without notifying the vault.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._entries: list[_Entry] = []
        self._is_closed = False
        self._current_generation = 0  # older generations are over
        self._lock = Lock()  # guards the entries; held briefly

    def reserve(self, owner: object, header: SlotHeader) -> int:
        """Returns a new descriptor of an empty buffer with this header; the caller closes it. The
        owner's buffers without a complete version become spare. Allocation is slow. Raises
        VaultMemoryError if there is not enough memory."""
        self.discard_unfinished(owner)  # the owner waits for this call: it is not writing
        buffer = self._pool.acquire(header.nbytes, owner)
        clear_pin(buffer.fd)
        write_kept(buffer.fd, False)
        write_header(buffer.fd, header)
        with self._lock:
            self._add(_Entry(buffer, header.generation, header.rank, owner))
            return os.dup(buffer.fd)

    def open_version(self, ref: SlotRef) -> int:
        """Returns a new descriptor of the version's buffer; the caller closes it. Raises
        SlotGoneError if this vault does not hold the version."""
        with self._lock:
            return os.dup(self._find_entry(ref).buffer.fd)

    @contextmanager
    def open_pinned(self, ref: SlotRef) -> Iterator[int]:
        """Yields the descriptor of a version whose buffer is not reused during the `with`. Raises
        SlotGoneError if this vault does not hold the version; also at the end of the `with`, if the
        version was not pinned and its writer has overwritten it."""
        with self._lock:
            entry = self._find_entry(ref)
            entry.readers += 1
        with self._reading(entry):
            yield entry.buffer.fd
            require_version(read_header(entry.buffer.fd), ref)

    @contextmanager
    def receive_replica(self, header: SlotHeader) -> Iterator[int]:
        """Yields a buffer to fill with a replica of that version, except for the header page.

        When the `with` succeeds, the replica is complete, and pinned as its original is. The rank's
        newest replica of an older step stays until then, and longer if it is pinned. Raises
        SlotGoneError if the generation is over; VaultMemoryError if there is not enough memory.
        """
        with self._lock:
            if header.generation < self._current_generation:
                raise SlotGoneError(
                    f"generation {header.generation} is over: nobody needs its slots"
                )
            self._drop_entries(
                entry
                for entry in self._outdated_replicas()
                if (entry.generation, entry.rank) == (header.generation, header.rank)
            )
        buffer = self._pool.acquire(header.nbytes)
        try:
            write_header(buffer.fd, header._replace(step=-1))
            yield buffer.fd
            clear_pin(buffer.fd)
            write_kept(buffer.fd, True)
            write_header(buffer.fd, header)
        except BaseException:
            self._pool.release([buffer])
            raise
        with self._lock:
            self._add(_Entry(buffer, header.generation, header.rank, None))

    def copy_constants(self, header: SlotHeader, into: memoryview) -> bool:
        """Fills `into` with the constants of that version, copied from another replica that has the
        same constants. Returns False if there is no such replica, or it is damaged."""
        if not into or header.checksums is None:
            return False
        with self._lock:
            wanted = header.constant_bytes, header.constants_checksum
            sources = [
                (entry, version)
                for entry, version in self._complete_versions()
                if (version.constant_bytes, version.constants_checksum) == wanted
                and version.checksums is not None
                and entry.owner is None
            ]
            if not sources:
                return False
            entry, version = sources[-1]
            entry.readers += 1
        with self._reading(entry), mmap(entry.buffer.fd, version.nbytes, prot=PROT_READ) as memory:
            start = version.data_offset
            with memoryview(memory) as image, image[start : start + len(into)] as constants:
                copy_bytes(into, constants)
        return checksum_of(into) == header.constants_checksum

    def has_version(self, ref: SlotRef) -> bool:
        with self._lock:
            return any(version.holds(ref) for _, version in self._complete_versions())

    def inventory(self) -> list[SlotInfo]:
        """Returns all complete versions."""
        with self._lock:
            return [
                SlotInfo(
                    version.generation,
                    version.rank,
                    version.world_size,
                    version.step,
                    version.data_bytes,
                    read_pin(entry.buffer.fd),
                    entry.owner is None,
                )
                for entry, version in self._complete_versions()
            ]

    def usage(self) -> dict[str, int]:
        """Returns the bytes of shared memory: `slots`, `replicas`, `spare`."""
        with self._lock:
            held = {"slots": 0, "replicas": 0}
            for entry in self._entries:
                held["replicas" if entry.owner is None else "slots"] += entry.buffer.capacity_bytes
        return held | {"spare": self._pool.nbytes}

    def discard_unfinished(self, owner: object, *, dead: bool = False) -> None:
        """Makes the owner's buffers without a complete version spare, which the owner no longer
        writes. If the owner is `dead`, frees them."""
        with self._lock:
            owned = [entry for entry in self._entries if entry.owner == owner]
            unfinished = [entry for entry in owned if entry.version is None]
            for entry in unfinished:
                entry.reusable = not dead
            self._drop_entries(unfinished)

    def generation_loaded(self, generation: int, step: int) -> None:
        """Drops unpinned versions of older generations and steps before `step`. All ranks of this
        generation have loaded `step`, so that no rank goes back further."""
        with self._lock:
            self._drop_entries(
                entry
                for entry, version in self._complete_versions()
                if entry.generation < generation
                and entry.owner is not None
                and version.step < step
                and not entry.pinned
            )

    def generation_complete(self, generation: int) -> None:
        """Ends older generations: all ranks have a complete version of this one."""
        with self._lock:
            if generation > self._current_generation:
                self._evict_before(generation)

    def trim(self) -> None:
        """Frees the spare buffers. Called when all ranks have reserved the buffers they need."""
        self._pool.trim()

    def unpin(self, generation: int, step: int) -> None:
        """Unpins the versions of `step` and earlier, of `generation` and earlier, which a
        checkpoint needed."""
        with self._lock:
            for entry in self._entries:
                # Read the pin before the header: the writer sets the pin first, and only the vault
                # clears it. In the other order, a pin set in between would be attributed to the
                # previous version.
                pinned, version = read_pin(entry.buffer.fd), entry.version
                if pinned and version and entry.generation <= generation and version.step <= step:
                    clear_pin(entry.buffer.fd)
            self._evict_before(max(generation, self._current_generation))

    def give_up_checkpoints(self) -> None:
        """Unpins versions that wait for a checkpoint, because there is no controller to write one.
        Skips versions that are being read, and those without a newer version on other nodes. The
        rank needs the buffers for the steps after that newer version."""
        with self._lock:
            pinned = [
                entry for entry in self._entries if read_pin(entry.buffer.fd) and not entry.readers
            ]
            complete = self._complete_versions()  # after the pins: see `unpin`
            newest: dict[tuple[int, int], int] = {}  # step on other nodes, by generation and rank
            for entry, version in complete:
                if is_kept(entry.buffer.fd) and not is_to_copy(entry.buffer.fd):
                    writer = version.generation, version.rank
                    newest[writer] = max(version.step, newest.get(writer, 0))
            for entry, version in complete:
                is_older = version.step < newest.get((version.generation, version.rank), 0)
                if entry in pinned and is_older:
                    clear_pin(entry.buffer.fd)

    def bytes_to_copy(self, ref: SlotRef) -> int:
        """Returns the size of that version's image; 0 if this vault does not hold the version, or
        all nodes that are to have it do."""
        with self._lock:
            return sum(version.nbytes for _, version in self._versions_to_copy(ref))

    def copied(self, ref: SlotRef, nbytes: int) -> None:
        """Notes that all nodes that are to have a version have it, after `nbytes` were copied."""
        with self._lock:
            for entry, _ in self._versions_to_copy(ref):
                write_copied(entry.buffer.fd, nbytes)

    def let_go(self, generation: int, step: int) -> None:
        """Unpins what was kept for other nodes: replicas of older steps, and all versions of older
        generations. Called when all ranks' versions of `step` in `generation` are on other nodes.
        Writers unpin this generation's originals. The newest replica stays with its generation."""
        with self._lock:
            for entry, version in self._complete_versions():
                is_older = version.step < step and entry.owner is None
                if entry.generation < generation or (entry.generation == generation and is_older):
                    write_kept(entry.buffer.fd, False)
            self._evict_before(max(generation, self._current_generation))

    def close(self) -> None:
        """Releases all memory. Pages that a worker has mapped stay until it unmaps them."""
        with self._lock:
            self._is_closed = True
            self._drop_entries(self._entries)
        self._pool.trim()

    @contextmanager
    def _reading(self, entry: _Entry) -> Iterator[None]:
        """Ends a read of the entry's buffer at the end of the `with`. The caller has counted the
        read in `readers`."""
        try:
            yield
        finally:
            with self._lock:
                entry.readers -= 1
                if entry.dropped:
                    self._release([entry])

    # The methods below are called with the lock held.

    def _add(self, entry: _Entry) -> None:
        """Adds a buffer. Frees it and raises VaultGoneError if the vault was closed meanwhile."""
        if self._is_closed:
            self._pool.free([entry.buffer])
            raise VaultGoneError("the vault is closed")
        self._entries.append(entry)

    def _complete_versions(self) -> list[tuple[_Entry, SlotHeader]]:
        versions = [(entry, entry.version) for entry in self._entries]
        return [(entry, version) for entry, version in versions if version is not None]

    def _versions_to_copy(self, ref: SlotRef) -> list[tuple[_Entry, SlotHeader]]:
        return [
            (entry, version)
            for entry, version in self._complete_versions()
            if version.holds(ref) and entry.owner is not None and is_to_copy(entry.buffer.fd)
        ]

    def _find_entry(self, ref: SlotRef) -> _Entry:
        # Latest entry first: salvage may write a version again after all others.
        for entry, version in reversed(self._complete_versions()):
            if version.holds(ref):
                return entry
        raise SlotGoneError.of(ref)

    def _drop_entries(self, entries: Iterable[_Entry]) -> None:
        dropped = list(entries)
        for entry in dropped:
            entry.dropped = True
        self._entries = [entry for entry in self._entries if not entry.dropped]
        self._release(dropped)

    def _release(self, dropped: list[_Entry]) -> None:
        """Releases the buffers of dropped entries, or leaves that to the last reader of a
        buffer."""
        unread = [entry for entry in dropped if not entry.readers]
        self._pool.release([entry.buffer for entry in unread if entry.reusable])
        self._pool.free([entry.buffer for entry in unread if not entry.reusable])

    def _evict_before(self, generation: int) -> None:
        """Drops unpinned versions of older generations, and unpinned outdated replicas."""
        self._current_generation = generation
        outdated = self._outdated_replicas()
        self._drop_entries(
            entry
            for entry in self._entries
            if not (entry.pinned and entry.version)
            and (entry.generation < generation or entry in outdated)
        )

    def _outdated_replicas(self) -> list[_Entry]:
        """Returns the replicas of which this vault has a newer one."""
        held = [pair for pair in self._complete_versions() if pair[0].owner is None]
        held.sort(key=lambda pair: pair[1].step)
        newest = {(entry.generation, entry.rank): entry for entry, _ in held}
        return [entry for entry, _ in held if newest[entry.generation, entry.rank] is not entry]

"""The weights of versions on other nodes, for readers on this one: the beginnings of their images.

A version is copied once, when a reader first asks for it. There are at most two buffers for a rank,
which are written in turns, and as by the rank itself: the header names the version last, and none
before a byte changes. So a reader of an old version finds that it is gone. They are freed when
another generation is asked for, and when the last reader has gone.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock

from rayzero.workers.vault import images
from rayzero.workers.vault.buffers import BufferPool, SharedBuffer
from rayzero.workers.vault.images import FetchRemote, MappedSlotReader, copy_bytes, require_version
from rayzero.workers.vault.records import SlotGoneError, SlotRef, VaultGoneError
from rayzero.workers.vault.slots import HEADER_BYTES, PAGE_BYTES, SlotHeader, write_header

FETCHES = 2
"""Chunks in flight. The other vault answers with its command threads, of which few are left."""
_BUFFERS = 2
_NO_HEADER = bytes(HEADER_BYTES)


@dataclass(eq=False)
class _Replica:
    """A rank's buffer. `ref` is None while there is no complete version in it."""

    buffer: SharedBuffer
    ref: SlotRef | None = None
    header: SlotHeader | None = None

    @property
    def step(self) -> int:
        return -1 if self.ref is None else self.ref.step

    def has_constants_of(self, header: SlotHeader) -> bool:
        """Whether the constants in the buffer are those of that version, in the same place."""
        own = self.header
        return (
            own is not None
            and header.checksums is not None
            and _constants_key(own) == _constants_key(header)
        )


def _constants_key(header: SlotHeader) -> tuple[int, int, int]:
    return header.data_offset, header.constant_bytes, header.constants_checksum


class WeightReplicas:
    """Owns the replicas, and two kinds of threads, which are idle unless a copy is in flight, until
    `close`. Safe to use from any thread.

    Args:
        pool: of these replicas only.
        fetch: must return within a bounded time.
    """

    def __init__(self, pool: BufferPool, fetch: FetchRemote) -> None:
        self._pool = pool
        self._fetch = fetch
        self._replicas: defaultdict[int, list[_Replica]] = defaultdict(list)  # by rank
        self._copies: dict[SlotRef, Future[None]] = {}
        self._readers = set[object]()
        self._generation = 0
        self._is_closed = False
        self._lock = Lock()  # guards the above; held briefly
        # One copy at a time. `_chunks` are its fetches.
        self._copier = ThreadPoolExecutor(1, "rayzero-weights")
        self._chunks = ThreadPoolExecutor(FETCHES, "rayzero-weights-fetch")

    @property
    def nbytes(self) -> int:
        with self._lock:
            replicas = [it for held in self._replicas.values() for it in held]
            return sum(it.buffer.capacity_bytes for it in replicas)

    def open(self, reader: object, ref: SlotRef) -> int | None:
        """A new descriptor of the version's replica; the caller closes it. None while it is copied.
        Raises what has ended the copy: SlotGoneError, SlotDamagedError, VaultGoneError,
        VaultMemoryError."""
        with self._lock:
            if self._is_closed:
                raise VaultGoneError("the vault is closing")
            self._begin_generation(ref)
            self._readers.add(reader)
            for replica in self._replicas[ref.rank]:
                if replica.ref == ref:
                    return os.dup(replica.buffer.fd)
            if ref not in self._copies:
                self._drop_ended()
                self._copies[ref] = self._copier.submit(self._copy, ref)
            elif self._copies[ref].done():
                self._copies.pop(ref).result()
                raise SlotGoneError.of(ref)  # it was overwritten by a newer one
        return None

    def forget(self, reader: object) -> None:
        """The reader's connection has ended."""
        with self._lock:
            self._readers.discard(reader)
            if not self._readers:
                self._free_all()

    def close(self) -> None:
        """Ends a copy at its next chunk, and frees the memory. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._free_all()
        self._copier.shutdown(wait=False, cancel_futures=True)
        self._chunks.shutdown(wait=False, cancel_futures=True)

    # The methods below are called with the lock held.

    def _begin_generation(self, ref: SlotRef) -> None:
        """One generation's at a time, which may be an older one: a repair may have to go back."""
        if ref.generation != self._generation:
            self._generation = ref.generation
            self._free_all()

    def _free_all(self) -> None:
        buffers = [it.buffer for held in self._replicas.values() for it in held]
        self._replicas.clear()
        for copy in self._copies.values():
            copy.cancel()
        self._drop_ended()
        if buffers and not self._is_closed:  # which takes a while: not the server's thread
            self._copier.submit(self._pool.free, buffers)
        else:
            self._pool.free(buffers)

    def _drop_ended(self) -> None:
        self._copies = {ref: copy for ref, copy in self._copies.items() if not copy.done()}

    def _is_wanted(self, ref: SlotRef) -> bool:
        return not self._is_closed and bool(self._readers) and ref.generation == self._generation

    # The methods below run in the threads.

    def _copy(self, ref: SlotRef) -> None:
        fetched = bytes(self._fetch(ref, 0, HEADER_BYTES))
        header = require_version(SlotHeader.decode(fetched), ref)
        replica = self._take_buffer(ref, header.prefix_bytes)
        try:
            self._fill(replica, ref, header)
        except BaseException:
            self._pool.free([replica.buffer])
            raise
        with self._lock:
            if is_wanted := self._is_wanted(ref):
                replica.ref, replica.header = ref, header
                self._replicas[ref.rank].append(replica)
                self._copies.pop(ref, None)
        if not is_wanted:
            self._pool.free([replica.buffer])

    def _take_buffer(self, ref: SlotRef, nbytes: int) -> _Replica:
        """The rank's oldest buffer, or a new one; without a version, and in nobody's list."""
        replica = None
        with self._lock:
            held = self._replicas[ref.rank]
            if len(held) >= _BUFFERS:
                replica = min(held, key=lambda it: it.step)
                held.remove(replica)
        if replica is not None and replica.buffer.capacity_bytes < nbytes:
            self._pool.free([replica.buffer])
            replica = None
        replica = replica or _Replica(self._pool.acquire(nbytes))
        replica.ref = None
        os.pwrite(replica.buffer.fd, _NO_HEADER, 0)  # before a byte of it changes
        return replica

    def _fill(self, replica: _Replica, ref: SlotRef, header: SlotHeader) -> None:
        """Copies all but what the buffer, or the rank's other one, has; the header last."""
        start, middle = header.data_offset, header.data_offset + header.constant_bytes
        has_constants = replica.has_constants_of(header)
        replica.header = None  # of what is in the buffer nothing is known until the end
        fd = replica.buffer.fd
        with mmap.mmap(fd, header.prefix_bytes) as memory, memoryview(memory) as image:
            if not has_constants:
                has_constants = self._copy_constants(ref.rank, header, image)
            index_end = PAGE_BYTES + header.index_bytes
            spans = [(PAGE_BYTES, index_end)]
            spans += [(header.metadata_offset, header.metadata_offset + header.metadata_bytes)]
            spans += [] if has_constants else [(start, middle)]
            self._fetch_spans(ref, [*spans, (middle, header.prefix_bytes)], image)
        with closing(MappedSlotReader(ref, fd, header, prefix=True)) as reader:
            reader.index()
            reader.metadata()
            reader.verify()
        write_header(fd, header)

    def _copy_constants(self, rank: int, header: SlotHeader, image: memoryview) -> bool:
        """Whether another buffer had the constants. Nobody writes to it: one copy at a time."""
        with self._lock:
            same = [it for it in self._replicas[rank] if it.has_constants_of(header)]
            if not same:
                return False
            fd = os.dup(same[0].buffer.fd)
        start, stop = header.data_offset, header.data_offset + header.constant_bytes
        try:
            with (
                mmap.mmap(fd, stop, prot=mmap.PROT_READ) as other,
                memoryview(other) as held,
                held[start:stop] as source,
                image[start:stop] as target,
            ):
                copy_bytes(target, source)
        finally:
            os.close(fd)
        return True

    def _fetch_spans(
        self, ref: SlotRef, spans: Sequence[tuple[int, int]], image: memoryview
    ) -> None:
        """Several chunks in flight. Raises the first error, once no other fetch writes."""

        def fetch(start: int, stop: int) -> None:
            while start < stop:
                with self._lock:
                    if not self._is_wanted(ref):
                        raise SlotGoneError.of(ref)
                data = self._fetch(ref, start, stop - start)
                if not data:
                    raise SlotGoneError(f"{ref.describe()} ends at byte {start}")
                copy_bytes(image[start : start + len(data)], data)
                start += len(data)

        size = images.FETCH_CHUNK_BYTES
        edges = [[*range(start, stop, size), stop] for start, stop in spans]
        fetches = [self._chunks.submit(fetch, *chunk) for edge in edges for chunk in pairwise(edge)]
        try:
            for done in fetches:
                done.result()
        finally:
            for other in fetches:
                other.cancel()
            wait(fetches)

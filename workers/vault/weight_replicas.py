"""Replicas of other nodes' weights for the readers on this node. A replica is the beginning of an
image, up to the end of the weights and buffers.

A version is copied once, when a reader first asks for it. Each rank has at most two buffers, which
are written in turns. They are written in the same order as by the rank itself: the header is
cleared before a byte changes, and written last. A reader of an old version therefore sees that the
version is gone. Buffers are freed when a reader asks for another generation, and when the last
reader has disconnected.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from threading import Lock

from rayzero.workers.vault import images
from rayzero.workers.vault.buffers import BufferPool, SharedBuffer
from rayzero.workers.vault.images import FetchRemote, MappedSlotReader, copy_bytes, require_version
from rayzero.workers.vault.records import SlotGoneError, SlotRef, VaultGoneError
from rayzero.workers.vault.slots import HEADER_BYTES, PAGE_BYTES, SlotHeader, write_header

FETCHES = 2
"""How many chunks are in flight at once. The other vault serves them with its call threads, of
which it has few."""
_BUFFERS = 2
_NO_HEADER = bytes(HEADER_BYTES)


@dataclass(eq=False)
class _Replica:
    """A buffer for one rank's weights. `ref` is None while it holds no complete version."""

    buffer: SharedBuffer
    ref: SlotRef | None = None
    header: SlotHeader | None = None

    @property
    def step(self) -> int:
        return -1 if self.ref is None else self.ref.step

    def has_constants_of(self, header: SlotHeader) -> bool:
        """Returns whether the buffer holds the constants of that version, at the same offset."""
        own = self.header
        return (
            own is not None
            and header.checksums is not None
            and _constants_key(own) == _constants_key(header)
        )


def _constants_key(header: SlotHeader) -> tuple[int, int, int]:
    return header.data_offset, header.constant_bytes, header.constants_checksum


class WeightReplicas:
    """Owns the replicas and two thread pools until `close`. The threads are idle unless a copy is
    in flight. Safe to use from any thread.

    Args:
        pool: the pool of the replicas' buffers, which nothing else uses.
        fetch: reads from other nodes' vaults; must return within a bounded time.
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
        # One copy at a time; `_chunks` runs the fetches of that copy.
        self._copier = ThreadPoolExecutor(1, "rayzero-weights")
        self._chunks = ThreadPoolExecutor(FETCHES, "rayzero-weights-fetch")

    @property
    def nbytes(self) -> int:
        with self._lock:
            buffers = [replica.buffer for held in self._replicas.values() for replica in held]
            return sum(buffer.capacity_bytes for buffer in buffers)

    def open(self, reader: object, ref: SlotRef) -> int | None:
        """Returns a new descriptor of the version's replica, which the caller closes; None while
        the version is being copied. Raises the error that ended the copy: SlotGoneError,
        SlotDamagedError, VaultGoneError or VaultMemoryError."""
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
                raise SlotGoneError.of(ref)  # copied, and overwritten by a newer version
        return None

    def forget(self, reader: object) -> None:
        """Forgets a reader whose connection has ended. After the last one, frees the replicas."""
        with self._lock:
            self._readers.discard(reader)
            if not self._readers:
                self._free_all()

    def close(self) -> None:
        """Aborts a copy at its next chunk, and frees the memory. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._free_all()
        self._copier.shutdown(wait=False, cancel_futures=True)
        self._chunks.shutdown(wait=False, cancel_futures=True)

    # The methods below are called with the lock held.

    def _begin_generation(self, ref: SlotRef) -> None:
        """Frees the replicas of another generation than the version's. That may also be a newer
        one, because a repair may go back to an older generation."""
        if ref.generation != self._generation:
            self._generation = ref.generation
            self._free_all()

    def _free_all(self) -> None:
        buffers = [replica.buffer for held in self._replicas.values() for replica in held]
        self._replicas.clear()
        for copy in self._copies.values():
            copy.cancel()
        self._drop_ended()
        if buffers and not self._is_closed:  # freeing takes a while: not on the server's thread
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
        """Returns the rank's oldest buffer if the rank has all its buffers, else a new one. The
        buffer is in no list and holds no version."""
        replica = None
        with self._lock:
            held = self._replicas[ref.rank]
            if len(held) >= _BUFFERS:
                replica = min(held, key=lambda replica: replica.step)
                held.remove(replica)
        if replica is not None and replica.buffer.capacity_bytes < nbytes:
            self._pool.free([replica.buffer])
            replica = None
        if replica is None:
            replica = _Replica(self._pool.acquire(nbytes))
        replica.ref = None
        os.pwrite(replica.buffer.fd, _NO_HEADER, 0)  # before a byte of it changes
        return replica

    def _fill(self, replica: _Replica, ref: SlotRef, header: SlotHeader) -> None:
        """Fetches the version, and writes its header last. Constants that this buffer or the rank's
        other one holds are not fetched."""
        start, middle = header.data_offset, header.data_offset + header.constant_bytes
        has_constants = replica.has_constants_of(header)
        replica.header = None  # until the end, the contents of the buffer are undefined
        fd = replica.buffer.fd
        with mmap.mmap(fd, header.prefix_bytes) as memory, memoryview(memory) as image:
            if not has_constants:
                has_constants = self._copy_constants(ref.rank, header, image)
            spans = [
                (PAGE_BYTES, PAGE_BYTES + header.index_bytes),
                (header.metadata_offset, header.metadata_offset + header.metadata_bytes),
                (middle if has_constants else start, header.prefix_bytes),
            ]
            self._fetch_spans(ref, spans, image)
        with closing(MappedSlotReader(ref, fd, header, prefix=True)) as reader:
            reader.index()
            reader.metadata()
            reader.verify()
        write_header(fd, header)

    def _copy_constants(self, rank: int, header: SlotHeader, image: memoryview) -> bool:
        """Copies the constants from the rank's other buffer. Returns whether that buffer has them.
        Nothing writes to it meanwhile, because there is one copy at a time."""
        with self._lock:
            sources = [held for held in self._replicas[rank] if held.has_constants_of(header)]
            if not sources:
                return False
            fd = os.dup(sources[0].buffer.fd)
        start, stop = header.data_offset, header.data_offset + header.constant_bytes
        try:
            with (
                mmap.mmap(fd, stop, prot=mmap.PROT_READ) as memory,
                memoryview(memory) as source_image,
                source_image[start:stop] as source,
                image[start:stop] as target,
            ):
                copy_bytes(target, source)
        finally:
            os.close(fd)
        return True

    def _fetch_spans(
        self, ref: SlotRef, spans: Sequence[tuple[int, int]], image: memoryview
    ) -> None:
        """Fetches the spans in chunks, of which several are in flight. Raises the first error, once
        no fetch writes to the image any more."""

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
        fetches = [
            self._chunks.submit(fetch, begin, min(begin + size, stop))
            for start, stop in spans
            for begin in range(start, stop, size)
        ]
        try:
            for running in fetches:
                running.result()
        finally:
            for running in fetches:
                running.cancel()
            wait(fetches)

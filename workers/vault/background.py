"""A vault's background work: replicas of other vaults' versions, and checkpoint files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from threading import BoundedSemaphore, Event, Lock
from typing import Any, TypeAlias

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.writer import write_rank_file
from rayzero.workers.chaos.inject import FaultRecord, FaultSchedule, StoreFaultInjector
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from rayzero.workers.vault.images import (
    FETCH_CHUNK_BYTES,
    FetchRemote,
    MappedSlotReader,
    describe_slot,
    read_metadata,
    read_table,
    require_complete,
)
from rayzero.workers.vault.records import RankFile, SlotGoneError, SlotRef, VaultGoneError
from rayzero.workers.vault.registry import SlotRegistry
from rayzero.workers.vault.slots import HEADER_BYTES, PAGE_BYTES, SlotHeader, write_fully

MAX_CALLERS = 3
"""Calls of `replicate` at once, of which all but one wait; fewer than the vault's threads."""


class Replicator:
    """Copies images from other nodes in chunks, one in flight at a time. Safe from any thread.

    Args:
        fetch: reads from vaults of other nodes; must return within a bounded time.
    """

    def __init__(self, registry: SlotRegistry, fetch: FetchRemote) -> None:
        self._registry = registry
        self._fetch_remote = fetch
        self._pull_lock = Lock()  # one set of slots at a time
        self._caller_limit = BoundedSemaphore(MAX_CALLERS)
        self._stopped = Event()

    def replicate(self, refs: Iterable[SlotRef]) -> int:
        """Copies the versions that this vault does not have; returns the bytes copied.

        Raises:
            SlotGoneError: a version no longer exists; those before it were copied.
            SlotDamagedError: the received bytes do not match their checksums.
            VaultMemoryError: there is too little memory.
            VaultGoneError: another vault does not answer, this vault is closing, or too many
                earlier calls have not returned.
        """
        # A caller that timed out may call again: retries must not use up the vault's threads.
        if not self._caller_limit.acquire(blocking=False):
            raise VaultGoneError("earlier requests for replicas are still in flight")
        try:
            with self._pull_lock:
                return sum(self._pull(ref) for ref in refs if not self._registry.has_version(ref))
        finally:
            self._caller_limit.release()

    def stop(self) -> None:
        """Aborts copies in flight at their next chunk, and all later ones."""
        self._stopped.set()

    def _pull(self, ref: SlotRef) -> int:
        header = require_complete(
            SlotHeader.decode(bytes(self._fetch_remote(ref, 0, HEADER_BYTES))), ref
        )
        nbytes = header.geometry.nbytes
        with self._registry.receive_replica(header) as fd:
            done = PAGE_BYTES  # `receive_replica` writes the header last, on success
            while done < nbytes:
                if self._stopped.is_set():
                    raise VaultGoneError("the vault is closing")
                chunk = self._fetch_remote(ref, done, min(FETCH_CHUNK_BYTES, nbytes - done))
                if not chunk:
                    raise SlotGoneError(f"{describe_slot(ref)} ends at byte {done}")
                write_fully(fd, chunk, done)
                done += len(chunk)
            _verify_slot(MappedSlotReader(ref, fd, header))
        return nbytes


def _verify_slot(image: MappedSlotReader) -> None:
    try:
        read_table(image)
        read_metadata(image)
        image.verify()
    finally:
        image.close()


STORE_WAIT_S = 5.0
"""The time to wait for an earlier write; shorter than the timeout of a vault's poll."""

WriteRankFile: TypeAlias = Callable[..., RankFile]
"""The signature of `rayzero.engine.checkpoint.writer.write_rank_file`."""


class CheckpointFileWriter:
    """Writes versions as checkpoint files in the calling thread, one at a time."""

    def __init__(self, registry: SlotRegistry, write_file: WriteRankFile) -> None:
        self._registry = registry
        self._write_file = write_file
        self._write_lock = Lock()

    def write(self, folder: str, refs: Iterable[SlotRef]) -> list[RankFile]:
        """Writes a durable file for each version.

        Raises:
            StoreError: writing failed, or an earlier write has not finished.
            DataError: a version is gone or damaged.
        """
        # The store may hang for ever: retries must not use up the vault's threads.
        if not self._write_lock.acquire(timeout=STORE_WAIT_S):
            raise StoreError("slow", folder, "earlier files are still being written")
        try:
            return [self._write(folder, ref) for ref in refs]
        finally:
            self._write_lock.release()

    def _write(self, folder: str, ref: SlotRef) -> RankFile:
        with self._registry.open_pinned(ref) as fd:
            image = MappedSlotReader(ref, fd)
            try:
                image.verify()
                return self._write_file(
                    folder,
                    ref.rank,
                    read_table(image),
                    read_metadata(image),
                    image.data,
                    generation=ref.generation,
                    world_size=image.header.world_size,
                )
            finally:
                image.close()


class FaultInjectingStore:
    """Writes checkpoint files with the job's store faults injected.

    `write` is called by one thread at a time, the other methods by any.

    Args:
        faults: all faults of the job, as text; only those of the store are injected.
        output_dir: the folder of the record of injected faults.
    """

    def __init__(self, faults: Iterable[str], output_dir: str) -> None:
        self._fired: deque[FaultFired] = deque()
        self._schedule = FaultSchedule((), FaultRecord(output_dir), self._fired.append)
        self._injector = StoreFaultInjector(self._schedule)
        self.set_faults(faults)

    def set_faults(self, faults: Iterable[str]) -> None:
        """Replaces the list of the job's faults."""
        self._schedule.set_faults(parse_fault(text) for text in faults)

    def close(self) -> None:
        """Ends the wait of a slow write."""
        self._injector.close()

    def pop_fired(self) -> list[FaultFired]:
        """The faults injected since the last call."""
        return [self._fired.popleft() for _ in range(len(self._fired))]

    def write(
        self,
        folder: str,
        rank: int,
        table: Any,
        metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> RankFile:
        try:
            self._injector.before_write(int(metadata["step"]), rank)
        except OSError as error:  # reported like a real one
            path = os.path.join(folder, f"rank-{rank:05d}")
            raise StoreError("full", path, error.strerror or "") from error
        return write_rank_file(folder, rank, table, metadata, *args, **kwargs)

"""Replicas from other vaults, checkpoint files.

Copying versions from vaults of other nodes into this one.

Writing versions as files of a checkpoint, behind training.

Writing checkpoint files where the store may be made to fail.
"""

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
"""One set is copied while others wait: less than the threads that a vault's process has."""


class Replicator:
    """Pulls images chunk by chunk, so that one chunk at most is in passing. For any thread.

    Args:
        fetch: reads from vaults of other nodes; must come back in limited time.
    """

    def __init__(self, shelf: SlotRegistry, fetch: FetchRemote) -> None:
        self._registry = shelf
        self._fetch_remote = fetch
        self._pull_lock = Lock()  # one set after another
        self._caller_limit = BoundedSemaphore(MAX_CALLERS)
        self._stopped = Event()

    def replicate(self, refs: Iterable[SlotRef]) -> int:
        """Makes sure that there is a replica of each version; the bytes copied.

        Raises:
            SlotGoneError: a version is not there any more; the replicas before it are made.
            SlotDamagedError: what came does not match its checksums.
            VaultMemoryError: there is too little memory.
            VaultGoneError: another vault does not answer, or this one is closing, or too many ask.
        """
        # Who asks may have given up before and ask again: it must not hold a thread more each time.
        if not self._caller_limit.acquire(blocking=False):
            raise VaultGoneError("copies that were asked for before are still under way")
        try:
            with self._pull_lock:
                return sum(self._pull(ref) for ref in refs if not self._registry.has_version(ref))
        finally:
            self._caller_limit.release()

    def stop(self) -> None:
        """Ends what is under way before its next chunk, and what comes later."""
        self._stopped.set()

    def _pull(self, ref: SlotRef) -> int:
        header = require_complete(
            SlotHeader.decode(bytes(self._fetch_remote(ref, 0, HEADER_BYTES))), ref
        )
        nbytes = header.geometry.nbytes
        with self._registry.receive_replica(header) as fd:
            done = PAGE_BYTES  # the header comes last, when all is well
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
"""How long to wait for the files before: less than a poll of the vault may be late."""

WriteRankFile: TypeAlias = Callable[..., RankFile]
"""As `rayzero.engine.checkpoint.writer.write_rank_file`."""


class CheckpointFileWriter:
    """One file after another, in the calling thread: two would share the same disk."""

    def __init__(self, shelf: SlotRegistry, write_file: WriteRankFile) -> None:
        self._registry = shelf
        self._write_file = write_file
        self._write_lock = Lock()

    def write(self, folder: str, refs: Iterable[SlotRef]) -> list[RankFile]:
        """A durable file for each version, which stays as it is until then.

        Raises:
            StoreError: the store cannot take them, or has not yet taken those before.
            DataError: a version is gone or damaged.
        """
        # A store may hang for ever: whoever asks again must not hold one thread more each time.
        if not self._write_lock.acquire(timeout=STORE_WAIT_S):
            raise StoreError("slow", folder, "the vault waits for the store with earlier files")
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
    """Writes one file at a time, as `WriteRankFile`; the rest may be called by any thread.

    Args:
        faults: of the job, as text; those of other places are left to them.
        output_dir: where the record is kept of those that happened.
    """

    def __init__(self, faults: Iterable[str], output_dir: str) -> None:
        self._fired: deque[FaultFired] = deque()
        self._schedule = FaultSchedule((), FaultRecord(output_dir), self._fired.append)
        self._injector = StoreFaultInjector(self._schedule)
        self.set_faults(faults)

    def set_faults(self, faults: Iterable[str]) -> None:
        """All the job's faults from now on."""
        self._schedule.set_faults(parse_fault(text) for text in faults)

    def pop_fired(self) -> list[FaultFired]:
        """Those that happened since this was last asked."""
        return [self._fired.popleft() for _ in range(len(self._fired))]

    def close(self) -> None:
        """Ends every wait of a slow store, now and later."""
        self._injector.close()

    def write(
        self, folder: str, rank: int, table: Any, small: dict[str, Any], *more: Any, **named: Any
    ) -> RankFile:
        try:
            self._injector.before_write(int(small["step"]), rank)
        except OSError as error:  # told as a real one is
            path = os.path.join(folder, f"rank-{rank:05d}")
            raise StoreError("full", path, error.strerror or "") from error
        return write_rank_file(folder, rank, table, small, *more, **named)

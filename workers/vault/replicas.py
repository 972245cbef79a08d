"""Copying versions from vaults of other nodes into this one."""

from __future__ import annotations

from collections.abc import Iterable
from threading import BoundedSemaphore, Event, Lock

from rayzero.workers.messages import SlotRef
from rayzero.workers.vault.errors import SlotGoneError, VaultGoneError
from rayzero.workers.vault.header import HEADER_BYTES, PAGE_BYTES, Header
from rayzero.workers.vault.images import (
    CHUNK_BYTES,
    Fetch,
    MappedImage,
    name_of,
    read_small,
    read_table,
    whole,
)
from rayzero.workers.vault.shelf import Shelf
from rayzero.workers.vault.slots import write_all

MOST_ASKING = 3
"""One set is copied while others wait: less than the threads that a vault's process has."""


class Replicator:
    """Pulls images chunk by chunk, so that one chunk at most is in passing. For any thread.

    Args:
        fetch: reads from vaults of other nodes; must come back in limited time.
    """

    def __init__(self, shelf: Shelf, fetch: Fetch) -> None:
        self._shelf = shelf
        self._fetch = fetch
        self._pulling = Lock()  # one set after another
        self._asking = BoundedSemaphore(MOST_ASKING)
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
        if not self._asking.acquire(blocking=False):
            raise VaultGoneError("copies that were asked for before are still under way")
        try:
            with self._pulling:
                return sum(self._pull(ref) for ref in refs if not self._shelf.holds(ref))
        finally:
            self._asking.release()

    def stop(self) -> None:
        """Ends what is under way before its next chunk, and what comes later."""
        self._stopped.set()

    def _pull(self, ref: SlotRef) -> int:
        header = whole(Header.decode(bytes(self._fetch(ref, 0, HEADER_BYTES))), ref)
        nbytes = header.geometry.nbytes
        with self._shelf.incoming(header) as fd:
            done = PAGE_BYTES  # the header comes last, when all is well
            while done < nbytes:
                if self._stopped.is_set():
                    raise VaultGoneError("the vault is closing")
                chunk = self._fetch(ref, done, min(CHUNK_BYTES, nbytes - done))
                if not chunk:
                    raise SlotGoneError(f"{name_of(ref)} ends at byte {done}")
                write_all(fd, chunk, done)
                done += len(chunk)
            _verify(MappedImage(ref, fd, header))
        return nbytes


def _verify(image: MappedImage) -> None:
    try:
        read_table(image)
        read_small(image)
        image.verify()
    finally:
        image.close()

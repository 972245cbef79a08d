"""Reading a checkpoint: only the bytes that are wanted, rounded out to blocks and verified."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rayzero.engine.checkpoint.block_file import BlockFile
from rayzero.engine.checkpoint.errors import CheckpointDamagedError, StoreError
from rayzero.engine.checkpoint.format import MANIFEST
from rayzero.engine.checkpoint.manifest import FileEntry, Manifest
from rayzero.engine.checkpoint.storage import Store
from rayzero.engine.checkpoint.store import join, open_store
from rayzero.engine.errors import DataError
from rayzero.engine.state.table import Table


def read_manifest(folder: str) -> Manifest:
    """The manifest of the checkpoint in `folder`, a path or a URL.

    Raises:
        DataError: there is no checkpoint.
        CheckpointDamagedError, CheckpointVersionError: as `Manifest.from_bytes`.
        StoreError: the store cannot be read.
    """
    return manifest_in(open_store(folder))


def manifest_in(store: Store, folder: str = "") -> Manifest:
    """The same for a folder of a store."""
    name = f"{folder}/{MANIFEST}" if folder else MANIFEST
    where = join(store.url, name)
    try:
        raw = store.read(name)
    except StoreError as error:
        if error.kind != "gone":
            raise
        raise DataError(
            f"there is no checkpoint at {join(store.url, folder) if folder else store.url}",
            allowed=f"a folder step-<n> with a {MANIFEST}",
            fix="the path, or which checkpoint is used (checkpoint.resume)",
        ) from None
    return Manifest.from_bytes(raw, where)


class CheckpointSource:
    """A checkpoint as a `StateSource`; each rank's file is a block. Used by one thread at a time.

    Attributes:
        manifest: what the checkpoint says of itself.
    """

    def __init__(self, folder: str, verify: bool = True) -> None:
        """
        Args:
            folder: a path or a URL, `.../step-<n>`.
            verify: compare every block with its checksum; without, no more is read than is wanted.

        Raises:
            As `read_manifest`.
        """
        self._store = open_store(folder)
        self.manifest = manifest_in(self._store)
        self._verify = verify
        self._files: dict[int, BlockFile] = {}
        self._stack = ExitStack()

    @property
    def step(self) -> int:
        """Finished steps in the state."""
        return self.manifest.step

    @property
    def tables(self) -> Sequence[Table]:
        """What each rank's file holds."""
        return [one.table for one in self.manifest.files]

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that were read so far."""
        return sum(one.bytes_read for one in self._files.values())

    def small(self, rank: int) -> dict[str, Any]:
        """The state's JSON part as that rank had it; another rank's when there was no such rank."""
        return self.manifest.files[rank % self.manifest.world_size].small

    def read(self, block: int, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of a rank's data.

        Raises:
            CheckpointDamagedError: those bytes are damaged or gone. It names file and block.
            StoreError: the store cannot be read.
        """
        file = self._files.get(block)
        if file is None:
            file = self._files[block] = self._open(self.manifest.files[block])
        file.read(offset, into)

    def close(self) -> None:
        """Closes the files. Safe to repeat."""
        self._stack.close()

    def _open(self, entry: FileEntry) -> BlockFile:
        where = join(self._store.url, entry.name)
        try:
            file = self._store.open(entry.name)
        except StoreError as error:
            if error.kind != "gone":
                raise
            raise CheckpointDamagedError(f"{where} is missing") from None
        self._stack.callback(file.close)
        return BlockFile(file, entry, where, verify=self._verify)

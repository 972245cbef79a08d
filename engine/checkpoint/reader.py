"""Verified reads.

Reading a checkpoint: only the bytes that are wanted, rounded out to blocks and verified.

Any bytes out of a rank's file, each block of them compared with its checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from xxhash import xxh3_64_intdigest

from rayzero.engine.checkpoint.errors import CheckpointDamagedError, StoreError
from rayzero.engine.checkpoint.format import BLOCK_BYTES, MANIFEST_NAME, block_count
from rayzero.engine.checkpoint.manifest import FileEntry, Manifest
from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.store import ReadStream, Store, join_url
from rayzero.engine.errors import DataError, EngineError
from rayzero.engine.layout.state_index import BlockIndex


class BlockFile:
    """An open file of a checkpoint.

    Whole blocks are read straight into the caller's memory. A block that is wanted in part is kept,
    because the next read usually goes on where this one ended and needs the rest of it.

    Attributes:
        bytes_read: from the file, so far.
    """

    def __init__(self, file: ReadStream, entry: FileEntry, where: str, *, verify: bool) -> None:
        """
        Args:
            file: stays the caller's to close.
            where: what the file is called in errors.
            verify: without, exactly what is wanted is read, and compared with nothing.
        """
        self.bytes_read = 0
        self._file = file
        self._entry = entry
        self._where = where
        self._verify = verify
        self._cached_block = -1  # the number of the block in `_memory`
        self._cache = memoryview(b"")

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of the data.

        Raises:
            CheckpointDamagedError: a block is not what was written. It names file and block.
        """
        if not 0 <= offset <= offset + len(into) <= self._nbytes:
            span = f"bytes {offset} to {offset + len(into)}"
            raise EngineError(f"{span} of {self._where} were wanted, which has {self._nbytes}")
        if not self._verify:
            self._read_file(offset, [into])
            return
        done = 0
        while done < len(into):
            done += self._from_cached_block(offset + done, into[done:])
            if done < len(into):
                done += self._read_blocks(offset + done, into[done:])

    @property
    def _nbytes(self) -> int:
        return self._entry.block_index.nbytes

    def _from_cached_block(self, offset: int, into: memoryview) -> int:
        """What the kept block has of it; the number of bytes."""
        block, inside = divmod(offset, BLOCK_BYTES)
        if block != self._cached_block:
            return 0
        found = self._cache[inside : inside + len(into)]
        into[: len(found)] = found
        return len(found)

    def _read_blocks(self, offset: int, into: memoryview) -> int:
        """Fills the whole blocks at the beginning of `into`, and keeps the next block if some of it
        is wanted too, both in one request; the number of bytes filled."""
        block, inside = divmod(offset, BLOCK_BYTES)
        to_the_end = offset + len(into) == self._nbytes
        whole = len(into) if to_the_end else len(into) - len(into) % BLOCK_BYTES
        direct = into[: 0 if inside else whole]
        after = block + block_count(len(direct))
        kept = memoryview(b"")
        if len(direct) < len(into):
            self._cached_block = -1
            kept = self._cache_buffer(after)
        self._read_file(block * BLOCK_BYTES, [part for part in (direct, kept) if part])
        self._verify_blocks(block, direct)
        if kept:
            self._verify_blocks(after, kept)
            self._cache, self._cached_block = kept, after
        return len(direct)

    def _cache_buffer(self, block: int) -> memoryview:
        """Memory for one block, the same again and again."""
        size = min(BLOCK_BYTES, self._nbytes - block * BLOCK_BYTES)
        if len(self._cache) < size:
            self._cache = memoryview(bytearray(BLOCK_BYTES))
        return self._cache[:size]

    def _read_file(self, offset: int, parts: list[memoryview]) -> None:
        wanted = sum(len(part) for part in parts)
        found = self._file.read(self._entry.data_offset + offset, parts)
        self.bytes_read += found
        if found != wanted:
            block = (offset + found) // BLOCK_BYTES
            raise CheckpointDamagedError(f"{self._where} ends in block {block} of its data")

    def _verify_blocks(self, block: int, data: memoryview) -> None:
        """Compares whole blocks with their checksums."""
        for number, at in enumerate(range(0, len(data), BLOCK_BYTES), start=block):
            if xxh3_64_intdigest(data[at : at + BLOCK_BYTES]) != self._entry.blocks[number]:
                raise CheckpointDamagedError(
                    f"{self._where} is damaged: block {number} of its data has another checksum"
                )


def read_manifest(folder: str) -> Manifest:
    """The manifest of the checkpoint in `folder`, a path or a URL.

    Raises:
        DataError: there is no checkpoint.
        CheckpointDamagedError, CheckpointVersionError: as `Manifest.from_bytes`.
        StoreError: the store cannot be read.
    """
    return read_manifest_from(open_store(folder))


def read_manifest_from(store: Store, folder: str = "") -> Manifest:
    """The same for a folder of a store."""
    name = f"{folder}/{MANIFEST_NAME}" if folder else MANIFEST_NAME
    where = join_url(store.url, name)
    try:
        raw = store.read(name)
    except StoreError as error:
        if error.kind != "gone":
            raise
        raise DataError(
            f"there is no checkpoint at {join_url(store.url, folder) if folder else store.url}",
            allowed=f"a folder step-<n> with a {MANIFEST_NAME}",
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
        self.manifest = read_manifest_from(self._store)
        self._verify = verify
        self._files: dict[int, BlockFile] = {}
        self._stack = ExitStack()

    @property
    def step(self) -> int:
        """Finished steps in the state."""
        return self.manifest.step

    @property
    def block_indexes(self) -> Sequence[BlockIndex]:
        """What each rank's file holds."""
        return [one.block_index for one in self.manifest.files]

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that were read so far."""
        return sum(one.bytes_read for one in self._files.values())

    def metadata(self, rank: int) -> dict[str, Any]:
        """The state's JSON part as that rank had it; another rank's when there was no such rank."""
        return self.manifest.files[rank % self.manifest.world_size].metadata

    def read(self, block: int, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of a rank's data.

        Raises:
            CheckpointDamagedError: those bytes are damaged or gone. It names file and block.
            StoreError: the store cannot be read.
        """
        file = self._files.get(block)
        if file is None:
            file = self._files[block] = self._open_file(self.manifest.files[block])
        file.read(offset, into)

    def close(self) -> None:
        """Closes the files. Safe to repeat."""
        self._stack.close()

    def _open_file(self, entry: FileEntry) -> BlockFile:
        where = join_url(self._store.url, entry.name)
        try:
            file = self._store.open(entry.name)
        except StoreError as error:
            if error.kind != "gone":
                raise
            raise CheckpointDamagedError(f"{where} is missing") from None
        self._stack.callback(file.close)
        return BlockFile(file, entry, where, verify=self._verify)

"""Reads a checkpoint: only the requested bytes, rounded out to blocks, and verified."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rayzero.engine.checkpoint.base import file_sizes, store_of
from rayzero.engine.checkpoint.errors import CheckpointDamagedError, StoreError
from rayzero.engine.checkpoint.format import (
    BASE_FOLDER,
    BLOCK_BYTES,
    MANIFEST_NAME,
    block_count,
)
from rayzero.engine.checkpoint.manifest import DataFile, Manifest
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.checkpoint.store_local import ReadStream, Store
from rayzero.engine.errors import DataError, EngineError
from rayzero.engine.layout.state_index import StateSource

MAX_MANIFEST_BYTES = 2**30  # it has 64 bytes for each MiB of data: this is one of about 16 TB


class BlockReader:
    """Reads one open file; compares each block with its checksum.

    Whole blocks are read directly into the caller's memory. A partly requested block is cached,
    because the next read usually continues there.

    Args:
        file: closed by the caller.
        where: path or URL for error messages.
    """

    def __init__(self, file: ReadStream, entry: DataFile, where: str) -> None:
        self._file = file
        self._entry = entry
        self._where = where
        self._nbytes = entry.data_bytes
        self._cached_block = -1  # the number of the block in `_cache`
        self._cache = memoryview(b"")

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` (bytes, writable) from byte `offset` of the data. Raises
        CheckpointDamagedError, which names file and block, if bytes are damaged or missing;
        StoreError if the store cannot be read."""
        if not 0 <= offset <= offset + len(into) <= self._nbytes:
            span = f"bytes {offset} to {offset + len(into)}"
            raise EngineError(f"{span} of {self._where} were requested, which has {self._nbytes}")
        while into:
            block, inside = divmod(offset, BLOCK_BYTES)
            if block == self._cached_block:
                data = self._cache[inside : inside + len(into)]
                into[: len(data)] = data
                count = len(data)
            else:
                count = self._read_blocks(block, inside, into)
            offset, into = offset + count, into[count:]

    def _read_blocks(self, block: int, inside: int, into: memoryview) -> int:
        """Fill the whole blocks at the beginning of `into` and cache the next block if it is partly
        requested, in one request. Returns the number of bytes filled. `into` begins at byte
        `inside` of the block of number `block`."""
        to_the_end = block * BLOCK_BYTES + inside + len(into) == self._nbytes
        whole = len(into) if to_the_end else len(into) - len(into) % BLOCK_BYTES
        direct = into[: 0 if inside else whole]
        after = block + block_count(len(direct))
        cache = memoryview(b"")
        if len(direct) < len(into):
            self._cached_block = -1
            cache = self._cache_buffer(after)
        self._read_file(block * BLOCK_BYTES, [part for part in (direct, cache) if part])
        self._verify_blocks(block, direct)
        if cache:
            self._verify_blocks(after, cache)
            self._cache, self._cached_block = cache, after
        return len(direct)

    def _cache_buffer(self, block: int) -> memoryview:
        """Memory for one block, reused."""
        size = min(BLOCK_BYTES, self._nbytes - block * BLOCK_BYTES)
        if len(self._cache) < size:
            self._cache = memoryview(bytearray(BLOCK_BYTES))
        return self._cache[:size]

    def _read_file(self, offset: int, parts: list[memoryview]) -> None:
        count = self._file.read(self._entry.data_offset + offset, parts)
        if count != sum(len(part) for part in parts):
            block = (offset + count) // BLOCK_BYTES
            raise CheckpointDamagedError(f"{self._where} ends in block {block} of its data")

    def _verify_blocks(self, first: int, data: memoryview) -> None:
        for number, start in enumerate(range(0, len(data), BLOCK_BYTES), start=first):
            if not self._entry.block_matches(number, data[start : start + BLOCK_BYTES]):
                raise CheckpointDamagedError(
                    f"{self._where} is damaged: block {number} of its data does not match its "
                    "checksum"
                )


def read_manifest(store: Store, folder: str = "") -> Manifest:
    """The manifest of the checkpoint in a folder of a store.

    Raises:
        DataError: there is no checkpoint.
        CheckpointDamagedError, CheckpointVersionError: as `Manifest.from_bytes`.
        StoreError: the store cannot be read.
    """
    name = f"{folder}/{MANIFEST_NAME}" if folder else MANIFEST_NAME
    where = join_url(store.url, name)
    try:
        raw = store.read(name, MAX_MANIFEST_BYTES)
    except StoreError as error:
        if error.kind == "unreadable":
            raise CheckpointDamagedError(f"{where} {error.damage}") from None
        if error.kind != "gone":
            raise
        raise DataError(
            f"there is no checkpoint at {join_url(store.url, folder) if folder else store.url}",
            allowed=f"a folder step-<n> with a {MANIFEST_NAME}",
            fix="the path, or the checkpoint to resume from (checkpoint.resume)",
        ) from None
    return Manifest.from_bytes(raw, where)


class CheckpointSource(StateSource):
    """The checkpoint in a folder (a path or a URL, `.../step-<n>`) as a state source; each rank's
    file is a block. Not thread-safe. Raises as `read_manifest`."""

    def __init__(self, folder: str) -> None:
        self._store = open_store(folder)
        self.manifest = read_manifest(self._store)
        self.step = self.manifest.step
        self.block_indexes = [file.block_index for file in self.manifest.files]
        self._readers: dict[str, BlockReader] = {}  # by the name of the file
        self._stack = ExitStack()

    def metadata(self, rank: int) -> dict[str, Any]:
        return self.manifest.files[rank % self.manifest.world_size].metadata

    def read(self, block: int, offset: int, into: memoryview) -> None:
        """Reads as `BlockReader.read` does, from a rank's data."""
        entry = self.manifest.files[block]
        base_bytes = entry.base.data_bytes if entry.base else 0
        if entry.base and offset < base_bytes:
            count = min(len(into), base_bytes - offset)
            self._reader(entry.base).read(offset, into[:count])
            offset, into = offset + count, into[count:]
            if not into:
                return
        self._reader(entry.own).read(offset - base_bytes, into)

    def check_sizes(self) -> None:
        """Raises CheckpointDamagedError if a file has not the size that the manifest states."""
        sizes = file_sizes(self._store, self.manifest)
        for name, text in self.manifest.wrong_sizes(sizes).items():
            raise _damaged(store_of(self._store, name), name, text)

    def close(self) -> None:
        self._stack.close()

    def _reader(self, entry: DataFile) -> BlockReader:
        if entry.name not in self._readers:
            self._readers[entry.name] = self._open_file(entry)
        return self._readers[entry.name]

    def _open_file(self, entry: DataFile) -> BlockReader:
        store = store_of(self._store, entry.name)
        try:
            file = store.open(entry.name)
        except StoreError as error:
            if not error.damage:
                raise
            raise _damaged(store, entry.name, error.damage) from None
        self._stack.callback(file.close)
        return BlockReader(file, entry, join_url(store.url, entry.name))


def _damaged(store: Store, name: str, text: str) -> CheckpointDamagedError:
    fix = f"copy {BASE_FOLDER}/, which checkpoints share, together with their folders"
    is_base = name.startswith(f"{BASE_FOLDER}/")
    return CheckpointDamagedError(f"{join_url(store.url, name)} {text}", fix=fix if is_base else "")

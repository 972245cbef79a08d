"""Reads a checkpoint: only the requested bytes, rounded out to blocks, and verified."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from rayzero.engine.checkpoint.errors import CheckpointDamagedError, StoreError
from rayzero.engine.checkpoint.format import BASE_FOLDER, BLOCK_BYTES, MANIFEST_NAME, block_count
from rayzero.engine.checkpoint.manifest import DataFile, Manifest
from rayzero.engine.checkpoint.store import join_url, open_store, split_url
from rayzero.engine.checkpoint.store_local import ReadStream, Store
from rayzero.engine.errors import DataError, EngineError
from rayzero.engine.layout.state_index import StateSource

MAX_MANIFEST_BYTES = 2**30  # for about 16 TB of data: a manifest has 64 bytes for each MiB


class BlockReader:
    """Reads one open file, and compares each block with its checksum.

    Whole blocks are read directly into the caller's memory. A partly requested block is kept,
    because the next read usually continues there.

    Args:
        file: closed by the caller.
        where: path or URL for error messages.
    """

    def __init__(self, file: ReadStream, entry: DataFile, where: str) -> None:
        self._file = file
        self._entry = entry
        self._where = where
        self._memory = memoryview(b"")  # for one block
        self._kept = memoryview(b"")
        self._kept_block = -1  # the number of the block in `_kept`

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` (bytes, writable) from byte `offset` of the data. Raises
        CheckpointDamagedError, which names file and block, if bytes are damaged or missing;
        StoreError if the store cannot be read."""
        end, nbytes = offset + len(into), self._entry.data_bytes
        if not 0 <= offset <= end <= nbytes:
            span = f"bytes {offset} to {end}"
            raise EngineError(f"{span} of {self._where} were requested, which has {nbytes}")
        while into:
            block, inside = divmod(offset, BLOCK_BYTES)
            if block == self._kept_block:
                part = self._kept[inside : inside + len(into)]
                into[: len(part)] = part
            else:
                whole = len(into) if end == nbytes else len(into) - len(into) % BLOCK_BYTES
                part = into[: 0 if inside else whole]
                self._read_blocks(block, part, keeps_next=len(part) < len(into))
            offset, into = offset + len(part), into[len(part) :]

    def _read_blocks(self, block: int, into: memoryview, *, keeps_next: bool) -> None:
        """Fills `into` with whole blocks from number `block` on. With `keeps_next`, reads one more
        block into `_kept`, in the same request, because a remote store takes long for each."""
        after = block + block_count(len(into))
        kept = self._memory[:0]
        if keeps_next:
            self._memory = self._memory or memoryview(bytearray(BLOCK_BYTES))
            self._kept_block = -1
            kept = self._memory[: min(BLOCK_BYTES, self._entry.data_bytes - after * BLOCK_BYTES)]
        parts = [part for part in (into, kept) if part]
        count = self._file.read(self._entry.data_offset + block * BLOCK_BYTES, parts)
        if count != sum(map(len, parts)):
            torn = block + count // BLOCK_BYTES
            raise CheckpointDamagedError(f"{self._where} ends in block {torn} of its data")
        for first, data in ((block, into), (after, kept)):
            for number, start in enumerate(range(0, len(data), BLOCK_BYTES), start=first):
                if not self._entry.block_matches(number, data[start : start + BLOCK_BYTES]):
                    raise CheckpointDamagedError(
                        f"{self._where} is damaged: block {number} of its data does not match its "
                        "checksum"
                    )
        if keeps_next:
            self._kept, self._kept_block = kept, after


def file_sizes(store: Store, manifest: Manifest) -> dict[str, int]:
    """Returns file sizes by the names that a manifest uses: of the files in the checkpoint's
    folder, which is the store's folder, and of base files if the checkpoint has some."""
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    if manifest.base_names:
        entries = job_store(store).list_folder(BASE_FOLDER)
        sizes |= {f"{BASE_FOLDER}/{entry.name}": entry.nbytes for entry in entries}
    return sizes


def job_store(store: Store) -> Store:
    """Returns the store of the job's folder, which contains the folder of this checkpoint."""
    return open_store(split_url(store.url)[0])


def store_of(store: Store, name: str) -> Store:
    """Returns the store that has the file of a checkpoint: base files are in the job's folder."""
    return job_store(store) if name.startswith(f"{BASE_FOLDER}/") else store


def read_manifest(store: Store, folder: str = "") -> Manifest:
    """Reads the manifest of the checkpoint in a folder of a store.

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
            fix="check the path, or the checkpoint to resume from (checkpoint.resume)",
        ) from None
    return Manifest.from_bytes(raw, where)


class CheckpointSource(StateSource):
    """The checkpoint in a folder (a path or a URL, `.../step-<n>`) as a state source. Block r is
    the data of rank r. Not thread-safe. The constructor raises as `read_manifest`."""

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
        """Reads and raises as `BlockReader.read`; `block` is the rank."""
        entry = self.manifest.files[block]
        base_bytes = entry.base.data_bytes if entry.base else 0
        if entry.base and offset < base_bytes:
            count = min(len(into), base_bytes - offset)
            self._reader(entry.base).read(offset, into[:count])
            offset, into = offset + count, into[count:]
            if not into:
                return
        self._reader(entry).read(offset - base_bytes, into)

    def check_sizes(self) -> None:
        """Raises CheckpointDamagedError if the size of a file differs from the manifest's."""
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

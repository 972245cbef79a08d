"""Writes a checkpoint: one file for each rank, then the manifest, which makes it exist."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from xxhash import xxh3_64

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import BLOCK_BYTES, MANIFEST_NAME, file_header, new_file_name
from rayzero.engine.checkpoint.manifest import Manifest, RankFile
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex

_CHUNK_BYTES = 32 * BLOCK_BYTES  # per write: efficient for disks, fits in CPU caches


def write_rank_file(
    folder: str,
    rank: int,
    table: BlockIndex,
    metadata: dict[str, Any],
    data: memoryview,
    *,
    generation: int,
    world_size: int,
) -> RankFile:
    """Write one rank's file of the checkpoint in `folder`; returns when it is durable. Raises
    StoreError if the store failed (full, gone, forbidden, slow), EngineError if the size of the
    data is not the index's.

    Args:
        folder: path or URL `.../step-<n>`; created if it does not exist.
        table: index of `data`.
        metadata: the rank's JSON part.
        data: `table.nbytes` bytes, which must not change during the call.
        generation, world_size: of the process group of `rank`.
    """
    data = data.cast("B") if data.nbytes else memoryview(b"")
    if len(data) != table.nbytes:
        raise EngineError(f"an index of {table.nbytes} bytes was given for {len(data)} bytes")
    about = {"rank": rank, "world_size": world_size, "generation": generation}
    if "step" in metadata:
        about = {"step": metadata["step"]} | about
    header = file_header(table, about)
    name = new_file_name(rank)
    checksums = _Checksums()
    with closing(checksums.chunks(header, data)) as chunks:
        open_store(folder).create(name, chunks)
    checksum, blocks = checksums.whole.hexdigest(), "".join(checksums.blocks)
    return RankFile(name, rank, len(header) + len(data), checksum, blocks, table, metadata)


def commit_checkpoint(
    folder: str, manifest: Manifest, check: Callable[[], object] = lambda: None
) -> None:
    """Make the checkpoint in `folder` exist durably, replacing an existing one. Raises StoreError,
    of kind `gone` if a file is not visible from this node; and as `check`, which `Store.replace`
    calls."""
    store = open_store(folder)
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    if missing := manifest.wrong_sizes(sizes):
        raise StoreError(
            "gone",
            store.url,
            f"{len(missing)} of {len(manifest.files)} files, such as {min(missing)}, were written "
            "by other nodes and are not visible from this one: all nodes must share this folder",
        )
    store.replace(MANIFEST_NAME, manifest.to_bytes(), check)


class _Checksums:
    """Checksums of a file and of its blocks, computed while it is written."""

    def __init__(self) -> None:
        self.whole = xxh3_64()
        self.blocks: list[str] = []

    def chunks(self, header: bytes, data: memoryview) -> Generator[memoryview]:
        """The file's chunks; another thread hashes one while the caller writes it. The thread ends
        with the iterator. Hashing and writing both release the GIL."""
        with ThreadPoolExecutor(1, "rayzero-checksum") as executor:
            self.whole.update(header)
            yield memoryview(header)
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                future = executor.submit(self._hash_chunk, chunk)
                yield chunk
                future.result()

    def _hash_chunk(self, chunk: memoryview) -> None:
        self.whole.update(chunk)
        self.blocks += [
            xxh3_64(chunk[start : start + BLOCK_BYTES]).hexdigest()
            for start in range(0, len(chunk), BLOCK_BYTES)
        ]

"""Writes a checkpoint: one file for each rank, then the manifest, which makes it exist."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xxhash import xxh3_64

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    file_header,
    new_file_name,
)
from rayzero.engine.checkpoint.manifest import Manifest, RankFile
from rayzero.engine.checkpoint.store import WriteStream, open_store
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
    """Write one rank's file of the checkpoint in `folder`; returns when it is durable.

    Args:
        folder: path or URL `.../step-<n>`; created if it does not exist.
        table: index of `data`.
        metadata: the rank's JSON part.
        data: `table.nbytes` bytes, which must not change during the call.
        generation, world_size: of the process group of `rank`.

    Raises:
        StoreError: the store failed: full, gone, forbidden, slow.
        EngineError: the size of the data is not the index's.
    """
    data = data.cast("B") if data.nbytes else memoryview(b"")
    if len(data) != table.nbytes:
        raise EngineError(f"an index of {table.nbytes} bytes was given for {len(data)} bytes")
    about = {"rank": rank, "world_size": world_size, "generation": generation}
    if "step" in metadata:
        about = {"step": metadata["step"]} | about
    header = file_header(table, about)
    name = new_file_name(rank)
    with open_store(folder).create(name) as sink:
        checksum, blocks = _write_with_checksums(sink, header, data)
    return RankFile(name, rank, len(header) + len(data), checksum, blocks, table, metadata)


def commit_checkpoint(folder: str, manifest: Manifest) -> None:
    """Make the checkpoint in `folder` exist durably, replacing an existing one.

    Raises:
        StoreError: of kind `gone` if a file is not visible from this node; else the store's error.
    """
    store = open_store(folder)
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    if missing := manifest.wrong_sizes(sizes):
        raise StoreError(
            "gone",
            store.url,
            f"{len(missing)} of {len(manifest.files)} files, such as {min(missing)}, were written "
            "by other nodes and are not visible from this one: all nodes must share this folder",
        )
    store.replace(MANIFEST_NAME, manifest.to_bytes())


def _write_with_checksums(sink: WriteStream, header: bytes, data: memoryview) -> tuple[str, str]:
    """Write; returns the checksums of the file and of its blocks, computed during the writes."""
    whole = xxh3_64(header)
    blocks: list[str] = []

    def hash_chunk(chunk: memoryview) -> None:
        whole.update(chunk)
        blocks.extend(
            xxh3_64(chunk[start : start + BLOCK_BYTES]).hexdigest()
            for start in range(0, len(chunk), BLOCK_BYTES)
        )

    # Hashing and writing both release the GIL. The thread ends with this block.
    with ThreadPoolExecutor(1, "rayzero-checksum") as executor:
        sink.write(memoryview(header))
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            future = executor.submit(hash_chunk, chunk)
            sink.write(chunk)
            future.result()
    return whole.hexdigest(), "".join(blocks)

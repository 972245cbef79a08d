"""Writes a checkpoint: one file for each rank, then the manifest, which makes it exist."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

from xxhash import xxh3_64

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    WrittenFile,
    file_header,
    new_file_name,
)
from rayzero.engine.checkpoint.manifest import Manifest
from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.store import WriteStream
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex

_CHUNK_BYTES = 32 * BLOCK_BYTES  # per write: efficient for disks, fits in CPU caches


def write_rank_file(
    folder: str,
    rank: int,
    table: BlockIndex,
    small: dict[str, Any],
    data: memoryview,
    *,
    generation: int,
    world_size: int,
) -> WrittenFile:
    """Write one rank's file of the checkpoint in `folder`; returns when it is durable.

    Args:
        folder: path or URL `.../step-<n>`; created if it does not exist.
        table: index of `data`.
        small: the rank's JSON part.
        data: `table.nbytes` bytes, which must not change during the call.
        generation, world_size: of the process group of `rank`.

    Raises:
        StoreError: the store failed: full, gone, forbidden, slow.
        EngineError: the size of the data is not the index's.
    """
    began_s = monotonic()
    data = data.cast("B") if data.nbytes else memoryview(b"")
    if len(data) != table.nbytes:
        raise EngineError(f"an index of {table.nbytes} bytes was given for {len(data)} bytes")
    about = {"rank": rank, "world_size": world_size, "generation": generation}
    header = file_header(table, {"step": small["step"]} | about if "step" in small else about)
    name = new_file_name(rank)
    with open_store(folder).create(name) as sink:
        checksum, blocks = _write_with_checksums(sink, header, data)
    return WrittenFile(
        name=name,
        rank=rank,
        nbytes=len(header) + len(data),
        checksum=checksum,
        blocks=tuple(blocks),
        table=table.to_json(),
        small=small,
        seconds=monotonic() - began_s,
    )


def commit_checkpoint(folder: str, manifest: Manifest) -> None:
    """Make the checkpoint in `folder` exist durably, replacing an existing one.

    Raises:
        StoreError: of kind `gone` if a file is not visible from this node; else the store's error.
    """
    store = open_store(folder)
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    missing = [file.name for file in manifest.files if sizes.get(file.name) != file.nbytes]
    if missing:
        raise StoreError(
            "gone",
            store.url,
            f"{len(missing)} of {len(manifest.files)} files, such as {missing[0]}, were written by "
            "other nodes and are not visible from this one: all nodes must share this folder",
        )
    store.replace(MANIFEST_NAME, manifest.to_bytes())


def _write_with_checksums(
    sink: WriteStream, header: bytes, data: memoryview
) -> tuple[int, list[int]]:
    """Write; returns the checksums of the file and of each block, computed during the writes."""
    whole = xxh3_64(header)
    blocks: list[int] = []

    def hash_chunk(chunk: memoryview) -> None:
        whole.update(chunk)
        blocks.extend(
            xxh3_64(chunk[at : at + BLOCK_BYTES]).intdigest()
            for at in range(0, len(chunk), BLOCK_BYTES)
        )

    # Hashing and writing both release the GIL. The thread ends with this block.
    with ThreadPoolExecutor(1, "rayzero-checksum") as executor:
        sink.write(memoryview(header))
        for at in range(0, len(data), _CHUNK_BYTES):
            chunk = data[at : at + _CHUNK_BYTES]
            future = executor.submit(hash_chunk, chunk)
            sink.write(chunk)
            future.result()
    return whole.intdigest(), blocks

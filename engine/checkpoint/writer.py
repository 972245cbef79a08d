"""Writing a checkpoint: a file for each rank, then the manifest, which makes it exist."""

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

_CHUNK_BYTES = 32 * BLOCK_BYTES  # written at once: long enough for a disk, short enough for caches


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
    """Writes one rank's state as a file of the checkpoint in `folder`; returns when it is durable.

    Args:
        folder: a path or a URL, `.../step-<n>`; made when it is not there.
        table: what `data` holds.
        small: the rank's JSON part.
        data: `table.nbytes` bytes, which must not change meanwhile.
        generation, world_size: of the process group that `rank` is in.

    Raises:
        StoreError: the store cannot take it: full, gone, forbidden, slow.
        EngineError: the data is not what the table says.
    """
    began_s = monotonic()
    data = data.cast("B") if data.nbytes else memoryview(b"")
    if len(data) != table.nbytes:
        raise EngineError(f"a table of {table.nbytes} bytes was given for {len(data)} bytes")
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
    """Makes the checkpoint in `folder` exist, durably, in place of the one that is there.

    Raises:
        StoreError: of kind `gone`, if a file is not to be seen from here; else the store's trouble.
    """
    store = open_store(folder)
    there = {one.name: one.nbytes for one in store.list_folder()}
    lost = [one.name for one in manifest.files if there.get(one.name) != one.nbytes]
    if lost:
        raise StoreError(
            "gone",
            store.url,
            f"{len(lost)} of {len(manifest.files)} files, {lost[0]} among them, were written by "
            "other nodes and cannot be seen from this one: all nodes must share the place",
        )
    store.replace(MANIFEST_NAME, manifest.to_bytes())


def _write_with_checksums(
    sink: WriteStream, header: bytes, data: memoryview
) -> tuple[int, list[int]]:
    """The checksums of the whole and of each block, taken of every chunk while it is written."""
    whole = xxh3_64(header)
    blocks: list[int] = []

    def take(chunk: memoryview) -> None:
        whole.update(chunk)
        blocks.extend(
            xxh3_64(chunk[at : at + BLOCK_BYTES]).intdigest()
            for at in range(0, len(chunk), BLOCK_BYTES)
        )

    # Both let go of the interpreter's lock. The thread ends with this block, at once.
    with ThreadPoolExecutor(1, "rayzero-checksum") as helper:
        sink.write(memoryview(header))
        for at in range(0, len(data), _CHUNK_BYTES):
            chunk = data[at : at + _CHUNK_BYTES]
            taking = helper.submit(take, chunk)
            sink.write(chunk)
            taking.result()
    return whole.intdigest(), blocks

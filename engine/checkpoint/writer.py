"""Writes a checkpoint: one file for each rank, then the manifest, which makes it exist.

Frozen weights, which training never changes, are the first `constant_bytes` of a rank's block. They
may be in a separate base file, which the checkpoints of a job share. A base file is named by its
content. So there is a new one when a weight was changed, frozen or made trainable, or the world
size differs; and a job that continues finds the base files of its earlier runs. The content is
hashed by the process that writes it, concurrently with training. A base file that exists already is
read once by each process before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Any

from xxhash import xxh3_64, xxh3_128_hexdigest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import (
    BASE_FOLDER,
    BLOCK_BYTES,
    MANIFEST_NAME,
    base_file_name,
    base_file_step,
    file_header,
    new_file_name,
)
from rayzero.engine.checkpoint.manifest import DataFile, Manifest, RankFile
from rayzero.engine.checkpoint.reader import file_sizes, job_store
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.checkpoint.verify import find_damage
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex

MIN_BASE_BYTES = BLOCK_BYTES
"""Fewer frozen bytes stay in the rank's file: a base file would cost more than it saves."""
_CHUNK_BYTES = 32 * BLOCK_BYTES  # per write: efficient for disks, fits in CPU caches


class Checksums:
    """Checksums of a file and of its blocks, computed while the file is written."""

    def __init__(self) -> None:
        self.whole = xxh3_64()
        self.blocks: list[str] = []

    def chunks(self, header: bytes, data: memoryview) -> Generator[memoryview]:
        """Yields the file's chunks. Another thread hashes a chunk while the caller writes it; that
        thread ends with the iterator. Hashing and writing both release the GIL."""
        with ThreadPoolExecutor(1, "rayzero-checksum") as executor:
            self.whole.update(header)
            yield memoryview(header)
            for start in range(0, len(data), _CHUNK_BYTES):
                chunk = data[start : start + _CHUNK_BYTES]
                future = executor.submit(self._hash_chunk, chunk)
                yield chunk
                future.result()

    def to_file(self, name: str, header: bytes, data: memoryview) -> DataFile:
        """Describes the file, once all of its chunks were written."""
        nbytes = len(header) + len(data)
        checksum, blocks = self.whole.hexdigest(), "".join(self.blocks)
        return DataFile(name, nbytes, checksum, blocks, len(data))

    def _hash_chunk(self, chunk: memoryview) -> None:
        self.whole.update(chunk)
        self.blocks += [
            xxh3_64(chunk[start : start + BLOCK_BYTES]).hexdigest()
            for start in range(0, len(chunk), BLOCK_BYTES)
        ]


def split_block(table: BlockIndex) -> tuple[BlockIndex, BlockIndex]:
    """Returns two indexes: of the constant bytes of a block, and of the bytes behind them."""
    size = table.constant_bytes
    constant = [part for part in table.ranges if part.offset < size]
    other = [
        replace(part, offset=part.offset - size) for part in table.ranges if part.offset >= size
    ]
    return (
        BlockIndex(table.tensors, tuple(constant), size, size),
        BlockIndex(table.tensors, tuple(other), table.nbytes - size),
    )


def write_base(folder: str, rank: int, table: BlockIndex, block: memoryview, step: int) -> DataFile:
    """Returns the durable base file with the first `table.nbytes` bytes of a rank's `block`, for
    the checkpoint in `folder`. Writes it only if no intact one exists. Raises StoreError."""
    data = block[: table.nbytes]
    header = file_header(table, {"rank": rank})
    checksums = Checksums()
    for _ in checksums.chunks(header, data):
        pass
    digest = xxh3_128_hexdigest(header + "".join(checksums.blocks).encode())
    store = job_store(open_store(folder))
    for entry in store.list_folder(BASE_FOLDER):
        first = base_file_step(entry.name)
        same = first is not None and entry.name.startswith(f"step-{first}-rank-{rank:05d}-{digest}")
        file = checksums.to_file(f"{BASE_FOLDER}/{entry.name}", header, data)
        if same and entry.nbytes == file.nbytes and _is_intact(store.url, file, entry.modified_s):
            return file
    name = f"{BASE_FOLDER}/{base_file_name(step, rank, digest)}"
    store.create(name, Checksums().chunks(header, data))
    return checksums.to_file(name, header, data)


@lru_cache(maxsize=64)
def _is_intact(url: str, file: DataFile, _modified_s: float) -> bool:
    """Returns whether a file's bytes match its checksums. The file is read again after its
    modification time changed."""
    try:
        blocks, elsewhere = find_damage(open_store(url), file, lambda _: None)
    except StoreError as error:
        if not error.damage:
            raise
        return False
    return not blocks and not elsewhere


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
    """Writes one rank's file of the checkpoint in `folder`; returns when it is durable.

    Frozen weights go into a base file next to the folder, which the checkpoints of other steps
    share as long as these weights are the same. Raises StoreError if the store failed (full, gone,
    forbidden, slow), EngineError if `data` has not the size that the index states.

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
    base, own = None, table
    if table.constant_bytes >= MIN_BASE_BYTES:
        constant, own = split_block(table)
        base = write_base(folder, rank, constant, data, metadata.get("step", 0))
        data = data[constant.nbytes :]
    header = file_header(own, about)
    name = new_file_name(rank)
    checksums = Checksums()
    with closing(checksums.chunks(header, data)) as chunks:
        open_store(folder).create(name, chunks)
    file = checksums.to_file(name, header, data)
    return RankFile(**vars(file), rank=rank, block_index=table, metadata=metadata, base=base)


def commit_checkpoint(
    folder: str, manifest: Manifest, check: Callable[[], object] = lambda: None
) -> None:
    """Makes the checkpoint in `folder` exist durably, replacing an existing one. Raises StoreError,
    of kind `gone` if a file is not visible from this node; and what `check` raises, which is called
    by `Store.replace`."""
    store = open_store(folder)
    if missing := manifest.wrong_sizes(file_sizes(store, manifest)):
        raise StoreError(
            "gone",
            store.url,
            f"{len(missing)} of {len(manifest.files)} files, such as {min(missing)}, were written "
            "by other nodes and are not visible from this one: all nodes must share this folder",
        )
    store.replace(MANIFEST_NAME, manifest.to_bytes(), check)

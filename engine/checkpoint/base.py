"""Frozen weights in files of their own, which the checkpoints of a job share.

Training never changes the first `constant_bytes` of a rank's block. Their file is named by its
content, so a weight that was changed, frozen or made trainable, or another world size, gives
another file, and a job that continues finds those of its earlier runs. It is hashed where it is
written, beside training; one that exists is read once by each process before it is used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from xxhash import xxh3_128_hexdigest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import (
    BASE_FOLDER,
    BLOCK_BYTES,
    base_file_name,
    base_file_step,
    file_header,
)
from rayzero.engine.checkpoint.hashing import Checksums, find_damage
from rayzero.engine.checkpoint.manifest import DataFile, Manifest
from rayzero.engine.checkpoint.store import open_store, split_url
from rayzero.engine.checkpoint.store_local import Store
from rayzero.engine.layout.state_index import BlockIndex

MIN_BASE_BYTES = BLOCK_BYTES
"""Less than this stays in the rank's file: another file would cost more than it saves."""


def split_block(table: BlockIndex) -> tuple[BlockIndex, BlockIndex]:
    """The indexes of the constant bytes of a block, and of those behind them."""
    size = table.constant_bytes
    constant = [part for part in table.ranges if part.offset < size]
    other = [replace(it, offset=it.offset - size) for it in table.ranges if it.offset >= size]
    return (
        BlockIndex(table.tensors, tuple(constant), size, size),
        BlockIndex(table.tensors, tuple(other), table.nbytes - size),
    )


def write_base(folder: str, rank: int, table: BlockIndex, block: memoryview, step: int) -> DataFile:
    """The durable file with the first `table.nbytes` bytes of a rank's `block`, for the checkpoint
    in `folder`; written only if there is none, or only damaged ones. Raises StoreError."""
    data = block[: table.nbytes]
    header = file_header(table, {"rank": rank})
    checksums = Checksums()
    for _ in checksums.chunks(header, data):
        pass
    checksum, blocks = checksums.whole.hexdigest(), "".join(checksums.blocks)
    digest = xxh3_128_hexdigest(header + blocks.encode())
    store, nbytes = job_store(open_store(folder)), len(header) + len(data)
    for entry in store.list_folder(BASE_FOLDER):
        first = base_file_step(entry.name)
        same = first is not None and entry.name.startswith(f"step-{first}-rank-{rank:05d}-{digest}")
        file = DataFile(f"{BASE_FOLDER}/{entry.name}", nbytes, checksum, blocks, len(data))
        if same and entry.nbytes == nbytes and _is_intact(store.url, file, entry.modified_s):
            return file
    name = f"{BASE_FOLDER}/{base_file_name(step, rank, digest)}"
    store.create(name, Checksums().chunks(header, data))
    return DataFile(name, nbytes, checksum, blocks, len(data))


@lru_cache(maxsize=64)
def _is_intact(url: str, file: DataFile, _modified_s: float) -> bool:
    """Whether a file holds what it should; read again once it has another time of change."""
    try:
        blocks, elsewhere = find_damage(open_store(url), file, lambda _: None)
    except StoreError as error:
        if not error.damage:
            raise
        return False
    return not blocks and not elsewhere


def file_sizes(store: Store, manifest: Manifest) -> dict[str, int]:
    """The sizes of the files in the checkpoint's folder, which is the store's, and of the shared
    ones if the checkpoint has some, by the names that the manifest has for them."""
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    if manifest.base_names:
        entries = job_store(store).list_folder(BASE_FOLDER)
        sizes |= {f"{BASE_FOLDER}/{entry.name}": entry.nbytes for entry in entries}
    return sizes


def job_store(store: Store) -> Store:
    """The store of the folder that contains a checkpoint's."""
    return open_store(split_url(store.url)[0])


def store_of(store: Store, name: str) -> Store:
    return job_store(store) if name.startswith(f"{BASE_FOLDER}/") else store

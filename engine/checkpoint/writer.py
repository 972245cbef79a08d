"""Writes a checkpoint: one file for each rank, then the manifest, which makes it exist."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from rayzero.engine.checkpoint.base import MIN_BASE_BYTES, file_sizes, split_block, write_base
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import MANIFEST_NAME, file_header, new_file_name
from rayzero.engine.checkpoint.hashing import Checksums
from rayzero.engine.checkpoint.manifest import Manifest, RankFile
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.errors import EngineError
from rayzero.engine.layout.state_index import BlockIndex


def write_rank_file(
    folder: str,
    rank: int,
    table: BlockIndex,
    metadata: dict[str, Any],
    data: memoryview,
    *,
    generation: int,
    world_size: int,
    share_base: bool = False,
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
        share_base: put what training never changes into a file next to the folder, which the
            checkpoints of other steps use as long as it is the same.
    """
    data = data.cast("B") if data.nbytes else memoryview(b"")
    if len(data) != table.nbytes:
        raise EngineError(f"an index of {table.nbytes} bytes was given for {len(data)} bytes")
    about = {"rank": rank, "world_size": world_size, "generation": generation}
    if "step" in metadata:
        about = {"step": metadata["step"]} | about
    base, own = None, table
    if share_base and table.constant_bytes >= MIN_BASE_BYTES:
        constant, own = split_block(table)
        base = write_base(folder, rank, constant, data, metadata.get("step", 0))
        data = data[constant.nbytes :]
    header = file_header(own, about)
    name = new_file_name(rank)
    checksums = Checksums()
    with closing(checksums.chunks(header, data)) as chunks:
        open_store(folder).create(name, chunks)
    checksum, blocks = checksums.whole.hexdigest(), "".join(checksums.blocks)
    return RankFile(name, rank, len(header) + len(data), checksum, blocks, table, metadata, base)


def commit_checkpoint(
    folder: str, manifest: Manifest, check: Callable[[], object] = lambda: None
) -> None:
    """Make the checkpoint in `folder` exist durably, replacing an existing one. Raises StoreError,
    of kind `gone` if a file is not visible from this node; and as `check`, which `Store.replace`
    calls."""
    store = open_store(folder)
    if missing := manifest.wrong_sizes(file_sizes(store, manifest)):
        raise StoreError(
            "gone",
            store.url,
            f"{len(missing)} of {len(manifest.files)} files, such as {min(missing)}, were written "
            "by other nodes and are not visible from this one: all nodes must share this folder",
        )
    store.replace(MANIFEST_NAME, manifest.to_bytes(), check)

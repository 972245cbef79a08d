"""Verifies a checkpoint by reading every byte of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from xxhash import xxh3_64, xxh3_64_intdigest

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    is_checkpoint_file,
)
from rayzero.engine.checkpoint.manifest import FileEntry
from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.reader import read_manifest_from
from rayzero.engine.checkpoint.store import Store
from rayzero.engine.errors import DataError

_CHUNK_BYTES = 16 * BLOCK_BYTES

ProgressCallback: TypeAlias = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


@dataclass(frozen=True)
class FileProblem:
    """A problem with a file in a checkpoint's folder.

    Attributes:
        file: name in the folder.
        kind: flipped: bytes differ; cut: the size differs; foreign: not part of the checkpoint,
            harmless.
        text: the problem.
    """

    file: str
    kind: Literal["flipped", "cut", "missing", "foreign"]
    text: str

    @property
    def makes_unusable(self) -> bool:
        """Whether the checkpoint cannot be used because of it."""
        return self.kind != "foreign"

    def __str__(self) -> str:
        return f"{self.file} {self.text}"


def verify_checkpoint(
    folder: str, progress: ProgressCallback = lambda _: None
) -> list[FileProblem]:
    """Read every byte of the checkpoint in `folder`, a path or a URL.

    Raises:
        CheckpointVersionError: the format is newer.
        StoreError: the store cannot be read.
    """
    store = open_store(folder)
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    if MANIFEST_NAME not in sizes:
        return [FileProblem(MANIFEST_NAME, "missing", "is missing, so there is no checkpoint")]
    try:
        manifest = read_manifest_from(store)
    except DataError as error:
        return [FileProblem(MANIFEST_NAME, "flipped", error.seen.partition(f"{MANIFEST_NAME} ")[2])]
    problems = [
        problem for file in manifest.files for problem in _verify_file(store, file, sizes, progress)
    ]
    expected = {MANIFEST_NAME, *(file.name for file in manifest.files)}
    for name in sorted(sizes.keys() - expected):
        leftover = is_checkpoint_file(name) or name.endswith(PARTIAL_SUFFIX)
        text = "is left from an interrupted save" if leftover else "is not part of the checkpoint"
        problems.append(FileProblem(name, "foreign", text))
    return problems


def _verify_file(
    store: Store, file: FileEntry, sizes: dict[str, int], progress: ProgressCallback
) -> Iterator[FileProblem]:
    size = sizes.get(file.name)
    if size is None:
        yield FileProblem(file.name, "missing", "is missing")
        return
    if size != file.nbytes:
        yield FileProblem(file.name, "cut", f"has {size} bytes instead of {file.nbytes}")
        return
    try:
        blocks, checksum = _damaged_blocks(store, file, progress)
    except StoreError as error:
        if error.kind != "gone":
            raise
        yield FileProblem(file.name, "missing", "is missing")
        return
    for number in blocks:
        begin = file.data_offset + number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, file.nbytes)
        yield FileProblem(file.name, "flipped", f"is damaged between bytes {begin} and {end}")
    if checksum != file.checksum and not blocks:
        yield FileProblem(file.name, "flipped", "is damaged in its header")


def _damaged_blocks(
    store: Store, file: FileEntry, progress: ProgressCallback
) -> tuple[list[int], int]:
    """Blocks whose checksums differ, and the checksum of the whole file."""
    memory = memoryview(bytearray(max(_CHUNK_BYTES, file.data_offset)))
    flipped = []
    opened = store.open(file.name)
    try:
        header = memory[: file.data_offset]
        opened.read(0, [header])
        whole = xxh3_64(header)
        for at in range(0, file.block_index.nbytes, _CHUNK_BYTES):
            chunk = memory[: min(_CHUNK_BYTES, file.block_index.nbytes - at)]
            opened.read(file.data_offset + at, [chunk])
            whole.update(chunk)
            for inside in range(0, len(chunk), BLOCK_BYTES):
                number = (at + inside) // BLOCK_BYTES
                if xxh3_64_intdigest(chunk[inside : inside + BLOCK_BYTES]) != file.blocks[number]:
                    flipped.append(number)
            progress(len(chunk))
    finally:
        opened.close()
    return flipped, whole.intdigest()

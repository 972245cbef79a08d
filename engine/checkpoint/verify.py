"""Verifies a checkpoint by reading every byte of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from xxhash import xxh3_64

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    is_checkpoint_file,
)
from rayzero.engine.checkpoint.manifest import RankFile
from rayzero.engine.checkpoint.reader import read_manifest
from rayzero.engine.checkpoint.store import Store, open_store
from rayzero.engine.errors import DataError

_CHUNK_BYTES = 16 * BLOCK_BYTES


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
    folder: str, progress: Callable[[int], None] = lambda _: None
) -> list[FileProblem]:
    """Read every byte of the checkpoint in `folder`, a path or a URL.

    Args:
        progress: called with the number of bytes read since the last call.

    Raises:
        CheckpointVersionError: the format is newer.
        StoreError: the store cannot be read.
    """
    store = open_store(folder)
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    if MANIFEST_NAME not in sizes:
        return [FileProblem(MANIFEST_NAME, "missing", "is missing, so there is no checkpoint")]
    try:
        manifest = read_manifest(store)
    except DataError as error:
        return [FileProblem(MANIFEST_NAME, "flipped", error.seen.partition(f"{MANIFEST_NAME} ")[2])]
    wrong = manifest.wrong_sizes(sizes)
    problems = [
        FileProblem(name, "cut" if name in sizes else "missing", text)
        for name, text in wrong.items()
    ]
    for file in manifest.files:
        if file.name not in wrong:
            problems += _verify_file(store, file, progress)
    expected = {MANIFEST_NAME, *(file.name for file in manifest.files)}
    for name in sorted(sizes.keys() - expected):
        leftover = is_checkpoint_file(name) or name.endswith(PARTIAL_SUFFIX)
        text = "is left from an interrupted save" if leftover else "is not part of the checkpoint"
        problems.append(FileProblem(name, "foreign", text))
    return problems


def _verify_file(
    store: Store, file: RankFile, progress: Callable[[int], None]
) -> Iterator[FileProblem]:
    try:
        damaged, header_damaged = _read_all(store, file, progress)
    except StoreError as error:
        if error.kind != "gone":
            raise
        yield FileProblem(file.name, "missing", "is missing")
        return
    for number in damaged:
        begin = file.data_offset + number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, file.nbytes)
        yield FileProblem(file.name, "flipped", f"is damaged between bytes {begin} and {end}")
    if header_damaged:
        yield FileProblem(file.name, "flipped", "is damaged in its header")


def _read_all(
    store: Store, file: RankFile, progress: Callable[[int], None]
) -> tuple[list[int], bool]:
    """The damaged blocks, and whether the file is damaged elsewhere."""
    memory = memoryview(bytearray(max(_CHUNK_BYTES, file.data_offset)))
    damaged = []
    with closing(store.open(file.name)) as opened:
        header = memory[: file.data_offset]
        opened.read(0, [header])
        whole = xxh3_64(header)
        for start in range(0, file.block_index.nbytes, _CHUNK_BYTES):
            chunk = memory[: min(_CHUNK_BYTES, file.block_index.nbytes - start)]
            opened.read(file.data_offset + start, [chunk])
            whole.update(chunk)
            for inside in range(0, len(chunk), BLOCK_BYTES):
                number = (start + inside) // BLOCK_BYTES
                if not file.block_matches(number, chunk[inside : inside + BLOCK_BYTES]):
                    damaged.append(number)
            progress(len(chunk))
    return damaged, not damaged and whole.hexdigest() != file.checksum

"""Reads every byte of a checkpoint, and marks a damaged one.

Listing a folder compares only sizes, so it would miss the flipped bytes that a load has found.
Therefore `damaged.json` in the checkpoint's folder names the damaged file. This mark is valid as
long as the manifest lists that file. File names are not reused, so the mark does not apply to a
checkpoint that is written there later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from xxhash import xxh3_64

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import (
    BASE_FOLDER,
    BLOCK_BYTES,
    DAMAGE_NAME,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    is_checkpoint_file,
)
from rayzero.engine.checkpoint.manifest import DataFile, Manifest
from rayzero.engine.checkpoint.reader import file_sizes, read_manifest, store_of
from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.checkpoint.store_local import Store
from rayzero.engine.errors import DataError

_READ_BYTES = 16 * BLOCK_BYTES


@dataclass(frozen=True)
class FileProblem:
    """A problem with a file in a checkpoint's folder.

    Attributes:
        file: name as in the manifest.
        kind: flipped: bytes differ; cut: the size differs; missing: the file does not exist;
            foreign: not part of the checkpoint, harmless.
        text: the problem, to be read after the file's name.
    """

    file: str
    kind: Literal["flipped", "cut", "missing", "foreign"]
    text: str

    @property
    def makes_unusable(self) -> bool:
        """Whether this problem makes the checkpoint unusable."""
        return self.kind != "foreign"

    def __str__(self) -> str:
        return f"{self.file} {self.text}"


def verify_checkpoint(
    folder: str, progress: Callable[[int], None] = lambda _: None
) -> list[FileProblem]:
    """Reads every byte of the checkpoint in `folder`, a path or a URL, and returns its problems.
    `progress` is called with the number of bytes read since the last call. Raises
    CheckpointVersionError if the format is newer, StoreError if the store cannot be read."""
    return list(find_problems(folder, progress))


def find_problems(
    folder: str, progress: Callable[[int], None], likely: str = ""
) -> Iterator[FileProblem]:
    """Yields the problems that `verify_checkpoint` returns. Files whose names occur in the text
    `likely` are read first."""
    store = open_store(folder)
    sizes = {entry.name: entry.nbytes for entry in store.list_folder()}
    if MANIFEST_NAME not in sizes:
        yield FileProblem(MANIFEST_NAME, "missing", "is missing, so there is no checkpoint")
        return
    try:
        manifest = read_manifest(store)
    except DataError as error:
        yield FileProblem(MANIFEST_NAME, "flipped", error.seen.partition(f"{MANIFEST_NAME} ")[2])
        return
    sizes = file_sizes(store, manifest)
    wrong = manifest.wrong_sizes(sizes)
    for name, text in wrong.items():
        yield FileProblem(name, "cut" if name in sizes else "missing", text)
    intact = not wrong
    for file in sorted(manifest.data_files, key=lambda file: file.name not in likely):
        if file.name not in wrong:
            for problem in _verify_file(store_of(store, file.name), file, progress):
                intact = False
                yield problem
    yield from _find_foreign(manifest, sizes, intact=intact)


def _find_foreign(
    manifest: Manifest, sizes: Mapping[str, int], *, intact: bool
) -> Iterator[FileProblem]:
    expected = {MANIFEST_NAME, *(file.name for file in manifest.data_files)}
    for name in sorted(sizes.keys() - expected):
        if name.startswith(f"{BASE_FOLDER}/"):
            continue  # another checkpoint may use it
        if name == DAMAGE_NAME:
            if intact:
                text = "says that the checkpoint is damaged, but it is intact: remove this file"
                yield FileProblem(name, "foreign", text)
            continue
        leftover = is_checkpoint_file(name) or name.endswith(PARTIAL_SUFFIX)
        text = "is left from an interrupted save" if leftover else "is not part of the checkpoint"
        yield FileProblem(name, "foreign", text)


def find_damage(
    store: Store, file: DataFile, progress: Callable[[int], None]
) -> tuple[list[int], bool]:
    """Reads every byte of a file. Returns the numbers of its damaged blocks, and whether it is
    damaged elsewhere, in the header. `progress` is called with the number of bytes of data read
    since the last call."""
    memory = memoryview(bytearray(min(_READ_BYTES, file.nbytes)))
    damaged, whole = [], xxh3_64()
    with closing(store.open(file.name)) as opened:
        for start in range(0, file.data_offset, _READ_BYTES):
            chunk = memory[: min(_READ_BYTES, file.data_offset - start)]
            opened.read(start, [chunk])
            whole.update(chunk)
        for start in range(0, file.data_bytes, _READ_BYTES):
            chunk = memory[: min(_READ_BYTES, file.data_bytes - start)]
            opened.read(file.data_offset + start, [chunk])
            whole.update(chunk)
            for inside in range(0, len(chunk), BLOCK_BYTES):
                number = (start + inside) // BLOCK_BYTES
                if not file.block_matches(number, chunk[inside : inside + BLOCK_BYTES]):
                    damaged.append(number)
            progress(len(chunk))
    return damaged, not damaged and whole.hexdigest() != file.checksum


def _verify_file(
    store: Store, file: DataFile, progress: Callable[[int], None]
) -> Iterator[FileProblem]:
    try:
        damaged, header_damaged = find_damage(store, file, progress)
    except StoreError as error:
        if not error.damage:
            raise
        yield FileProblem(file.name, "missing", error.damage)
        return
    for number in damaged:
        begin = file.data_offset + number * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, file.nbytes)
        yield FileProblem(file.name, "flipped", f"is damaged between bytes {begin} and {end}")
    if header_damaged:
        yield FileProblem(file.name, "flipped", "is damaged in its header")


def mark_damaged(
    folder: str,
    likely: str,
    check: Callable[[], object],
    progress: Callable[[int], None] = lambda _: None,
) -> str:
    """Reads the checkpoint in `folder` until a damaged file is found, and marks it. Returns the
    problem; empty if the checkpoint is intact. Raises StoreError if the store cannot be read or
    written.

    Args:
        likely: a text that may name the damaged file.
        check: called before the mark is written; raises if the folder has another owner.
        progress: called with the number of bytes read since the last call; may raise to stop.
    """
    problems = find_problems(folder, progress, likely)
    problem = next((found for found in problems if found.makes_unusable), None)
    if problem is None:
        return ""
    if problem.kind == "flipped" and problem.file != MANIFEST_NAME:  # listings find other problems
        mark = json.dumps({"file": problem.file, "problem": str(problem)})
        check()
        open_store(folder).replace(DAMAGE_NAME, mark.encode(), check)
    return str(problem)


def marked_damage(store: Store, folder: str, manifest: Manifest) -> str:
    """Returns the problem that the mark in a folder states; empty if there is no valid mark."""
    try:
        mark = json.loads(store.read(f"{folder}/{DAMAGE_NAME}"))
        file, problem = str(mark["file"]), str(mark["problem"])
    except (StoreError, ValueError, TypeError, KeyError):
        return ""
    return problem if any(listed.name == file for listed in manifest.data_files) else ""

"""Which checkpoints there are in a job's folder, and which of them can be used."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rayzero.engine.checkpoint.errors import CheckpointVersionError
from rayzero.engine.checkpoint.format import MANIFEST_NAME, parse_step
from rayzero.engine.checkpoint.manifest import Manifest
from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.reader import read_manifest_from
from rayzero.engine.checkpoint.store import Store, StoreEntry, join_url, split_url
from rayzero.engine.errors import DataError

CheckpointStatus: TypeAlias = Literal["whole", "unfinished", "damaged", "newer"]
"""unfinished: without a manifest, so it does not exist. newer: of a format not known here."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A step's folder.

    Attributes:
        folder: its path or URL.
        problem: what is wrong, when it is not whole.
        manifest: when that could be read.
        entries: what is in the folder.
    """

    step: int
    folder: str
    status: CheckpointStatus
    problem: str
    manifest: Manifest | None
    entries: tuple[StoreEntry, ...]

    @property
    def is_complete(self) -> bool:
        return self.status == "whole"


def list_checkpoints(path: str) -> list[CheckpointInfo]:
    """What lies in a job's folder, or the one checkpoint whose folder it is, by step. Nothing but
    manifests and sizes is read.

    Raises:
        StoreError: the store cannot be read.
        ConfigError: it is no path or URL of a store.
    """
    parent, name = split_url(path)
    if parse_step(name) is not None:
        found = _inspect_folder(open_store(parent), name)
        return [found] if found.entries else []
    return sorted(_iter_checkpoints(open_store(path)), key=lambda one: one.step)


def newest_complete(path: str, excluding: Collection[int] = ()) -> CheckpointInfo | None:
    """The newest checkpoint in a job's folder that looks whole, but for some steps: its manifest is
    what was written, and every file is there in its size. Older ones are not looked at.

    Raises:
        As `list_checkpoints`.
    """
    store = open_store(path)
    for step, name in sorted(_step_folders(store), reverse=True):
        if step not in excluding and (found := _inspect_folder(store, name)).is_complete:
            return found
    return None


def _iter_checkpoints(store: Store) -> Iterator[CheckpointInfo]:
    for _, name in _step_folders(store):
        yield _inspect_folder(store, name)


def _step_folders(store: Store) -> list[tuple[int, str]]:
    return [
        (step, one.name)
        for one in store.list_folder()
        if one.is_folder and (step := parse_step(one.name)) is not None
    ]


def _inspect_folder(store: Store, name: str) -> CheckpointInfo:
    step = parse_step(name) or 0
    entries = tuple(store.list_folder(name))
    condition, problem, manifest = _check_status(store, name, step, entries)
    return CheckpointInfo(step, join_url(store.url, name), condition, problem, manifest, entries)


def _check_status(
    store: Store, name: str, step: int, entries: tuple[StoreEntry, ...]
) -> tuple[CheckpointStatus, str, Manifest | None]:
    sizes = {one.name: one.nbytes for one in entries}
    if MANIFEST_NAME not in sizes:
        return "unfinished", f"it has no {MANIFEST_NAME}: its save did not end", None
    try:
        manifest = read_manifest_from(store, name)
    except CheckpointVersionError as error:
        return "newer", error.seen, None
    except DataError as error:
        return "damaged", error.seen, None
    if manifest.step != step:
        return "damaged", f"its manifest is that of step {manifest.step}", manifest
    for file in manifest.files:
        if file.name not in sizes:
            return "damaged", f"{file.name} is missing", manifest
        if sizes[file.name] != file.nbytes:
            told = f"{file.name} has {sizes[file.name]} bytes, and had {file.nbytes}"
            return "damaged", told, manifest
    return "whole", "", manifest

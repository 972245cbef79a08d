"""Which checkpoints there are in a job's folder, and which of them can be used."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rayzero.engine.checkpoint.errors import CheckpointVersionError
from rayzero.engine.checkpoint.format import MANIFEST, step_of
from rayzero.engine.checkpoint.manifest import Manifest
from rayzero.engine.checkpoint.reader import manifest_in
from rayzero.engine.checkpoint.storage import Entry, Store
from rayzero.engine.checkpoint.store import join, open_store, split
from rayzero.engine.errors import DataError

Condition: TypeAlias = Literal["whole", "unfinished", "damaged", "newer"]
"""unfinished: without a manifest, so it does not exist. newer: of a format not known here."""


@dataclass(frozen=True)
class Found:
    """A step's folder.

    Attributes:
        folder: its path or URL.
        problem: what is wrong, when it is not whole.
        manifest: when that could be read.
        entries: what is in the folder.
    """

    step: int
    folder: str
    condition: Condition
    problem: str
    manifest: Manifest | None
    entries: tuple[Entry, ...]

    @property
    def is_whole(self) -> bool:
        return self.condition == "whole"


def list_checkpoints(path: str) -> list[Found]:
    """What lies in a job's folder, or the one checkpoint whose folder it is, by step. Nothing but
    manifests and sizes is read.

    Raises:
        StoreError: the store cannot be read.
        ConfigError: it is no path or URL of a store.
    """
    parent, name = split(path)
    if step_of(name) is not None:
        found = _look(open_store(parent), name)
        return [found] if found.entries else []
    return sorted(_all(open_store(path)), key=lambda one: one.step)


def newest_whole(path: str, excluding: Collection[int] = ()) -> Found | None:
    """The newest checkpoint in a job's folder that looks whole, but for some steps: its manifest is
    what was written, and every file is there in its size. Older ones are not looked at.

    Raises:
        As `list_checkpoints`.
    """
    store = open_store(path)
    for step, name in sorted(_steps(store), reverse=True):
        if step not in excluding and (found := _look(store, name)).is_whole:
            return found
    return None


def _all(store: Store) -> Iterator[Found]:
    for _, name in _steps(store):
        yield _look(store, name)


def _steps(store: Store) -> list[tuple[int, str]]:
    return [
        (step, one.name)
        for one in store.entries()
        if one.is_folder and (step := step_of(one.name)) is not None
    ]


def _look(store: Store, name: str) -> Found:
    step = step_of(name) or 0
    entries = tuple(store.entries(name))
    condition, problem, manifest = _condition(store, name, step, entries)
    return Found(step, join(store.url, name), condition, problem, manifest, entries)


def _condition(
    store: Store, name: str, step: int, entries: tuple[Entry, ...]
) -> tuple[Condition, str, Manifest | None]:
    sizes = {one.name: one.nbytes for one in entries}
    if MANIFEST not in sizes:
        return "unfinished", f"it has no {MANIFEST}: its save did not end", None
    try:
        manifest = manifest_in(store, name)
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

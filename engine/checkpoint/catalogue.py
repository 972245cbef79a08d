"""Checkpoints of a job's folder: list them, find the newest usable one, remove old ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rayzero.engine.checkpoint.errors import CheckpointVersionError
from rayzero.engine.checkpoint.format import (
    MANIFEST_NAME,
    is_checkpoint_file,
    parse_step,
    step_folder_name,
)
from rayzero.engine.checkpoint.manifest import Manifest
from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.reader import read_manifest_from
from rayzero.engine.checkpoint.store import Store, StoreEntry, join_url, split_url
from rayzero.engine.errors import ConfigError, DataError

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


def steps_to_keep(whole: Iterable[int], keep: int, keep_every: int | None = None) -> frozenset[int]:
    """The steps to keep of those whose checkpoints are whole.

    Args:
        keep: so many of the newest; at least 1.
        keep_every: besides, every step that this divides.
    """
    steps = sorted(set(whole), reverse=True)
    newest = steps[: max(1, keep)]
    return frozenset(newest) | {one for one in steps if keep_every and one % keep_every == 0}


@dataclass(frozen=True)
class PruneResult:
    """What went, or would go.

    Attributes:
        kept: steps of whole checkpoints that stay.
        removed: steps of checkpoints.
        swept: steps of folders with leftovers of saves.
        nbytes: of all files that went.
    """

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    swept: tuple[int, ...]
    nbytes: int


def prune_checkpoints(
    path: str, keep: int, keep_every: int | None = None, *, dry_run: bool = False
) -> PruneResult:
    """Removes from a job's folder what `kept_steps` does not keep.

    Only whole checkpoints count. One that is damaged goes when it is older than the `keep` newest
    whole ones; one of a newer format stays. Leftovers of saves go when they are older than the
    newest whole checkpoint, by step and by the clock: a save under way is neither.

    Raises:
        ConfigError: the path is not a job's folder.
        StoreError: the store cannot be read, or something in it not be removed.
    """
    if parse_step(split_url(path)[1]) is not None:
        raise ConfigError(
            f"{path} is one checkpoint", allowed="a job's folder, with checkpoints step-<n> in it"
        )
    found = list_checkpoints(path)
    whole = [one for one in found if one.is_complete]
    if not whole:
        return PruneResult((), (), (), 0)
    kept = steps_to_keep((one.step for one in whole), keep, keep_every)
    oldest = min(steps_to_keep((one.step for one in whole), keep))
    going, swept = [], []
    for one in found:
        outdated = one.step not in kept if one.is_complete else one.step < oldest
        if one.status in ("whole", "damaged") and outdated:
            going.append(_FolderRemoval(one.step, _checkpoint_files(one)))
        elif left := _leftover_files(one, whole[-1]):
            swept.append(_FolderRemoval(one.step, left))
    if not dry_run:
        _remove_files(open_store(path), [*going, *swept])
    return PruneResult(
        kept=tuple(sorted(kept)),
        removed=tuple(one.step for one in going),
        swept=tuple(one.step for one in swept),
        nbytes=sum(entry.nbytes for one in (*going, *swept) for entry in one.entries),
    )


@dataclass(frozen=True)
class _FolderRemoval:
    """Files of one step's folder."""

    step: int
    entries: list[StoreEntry]


def _checkpoint_files(one: CheckpointInfo) -> list[StoreEntry]:
    return [entry for entry in one.entries if is_checkpoint_file(entry.name)]


def _leftover_files(one: CheckpointInfo, newest: CheckpointInfo) -> list[StoreEntry]:
    """What no manifest lists and nobody is writing any more."""
    if one.step > newest.step or one.status not in ("whole", "unfinished"):
        return []
    made_s = next(entry.modified_s for entry in newest.entries if entry.name == MANIFEST_NAME)
    listed = {MANIFEST_NAME} | {file.name for file in (one.manifest.files if one.manifest else ())}
    return [
        entry
        for entry in _checkpoint_files(one)
        if entry.name not in listed and entry.modified_s < made_s
    ]


def _remove_files(store: Store, going: list[_FolderRemoval]) -> None:
    """Manifests first: a checkpoint of which only a part is gone does not exist."""
    for one in going:
        folder = step_folder_name(one.step)
        for entry in sorted(one.entries, key=lambda entry: entry.name != MANIFEST_NAME):
            store.remove(f"{folder}/{entry.name}")
        store.remove_folder(folder)

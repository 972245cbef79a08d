"""Lists the checkpoints in a job's folder, finds the newest usable one, removes old ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from rayzero.engine.checkpoint.errors import CheckpointVersionError
from rayzero.engine.checkpoint.format import (
    BASE_FOLDER,
    DAMAGE_NAME,
    MANIFEST_NAME,
    base_file_step,
    is_checkpoint_file,
    parse_step,
    step_folder_name,
)
from rayzero.engine.checkpoint.manifest import Manifest
from rayzero.engine.checkpoint.reader import file_sizes, read_manifest
from rayzero.engine.checkpoint.store import join_url, open_store, split_url
from rayzero.engine.checkpoint.store_local import Store, StoreEntry
from rayzero.engine.checkpoint.verify import marked_damage
from rayzero.engine.errors import ConfigError, DataError

Status: TypeAlias = Literal["whole", "unfinished", "damaged", "newer"]
"""State of a step's folder. unfinished: it has no manifest, so there is no checkpoint. newer: its
format version is not supported."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A step's folder.

    Attributes:
        folder: path or URL of the folder.
        problem: why the checkpoint is not whole; empty if it is.
        manifest: None if there is none, or it could not be read.
        entries: the folder's content.
    """

    step: int
    folder: str
    status: Status
    problem: str
    manifest: Manifest | None
    entries: tuple[StoreEntry, ...]

    @property
    def is_complete(self) -> bool:
        return self.status == "whole"

    @property
    def own_files(self) -> list[StoreEntry]:
        """The files in the folder that rayzero writes for a checkpoint."""
        return [entry for entry in self.entries if is_checkpoint_file(entry.name)]


def list_checkpoints(path: str) -> list[CheckpointInfo]:
    """Returns the checkpoints in a job's folder, in the order of steps; or only one, if `path` is
    the folder of one checkpoint.

    Reads manifests and file sizes only. Raises StoreError if the store cannot be read; ConfigError
    if `path` is not the path or URL of a store.
    """
    parent, name = split_url(path)
    if parse_step(name) is not None:
        checkpoint = _inspect_folder(open_store(parent), name)
        return [checkpoint] if checkpoint.entries else []
    store = open_store(path)
    return [_inspect_folder(store, name) for _, name in sorted(_step_folders(store))]


def newest_complete(path: str, excluding: Collection[int] = ()) -> CheckpointInfo | None:
    """Returns the newest complete checkpoint in a job's folder, ignoring the steps in `excluding`;
    None if there is none.

    A checkpoint is complete if the manifest's checksum matches, every file has its size, and none
    is marked as damaged. Older checkpoints are not inspected. Raises as `list_checkpoints`.
    """
    store = open_store(path)
    for step, name in sorted(_step_folders(store), reverse=True):
        if step not in excluding and (info := _inspect_folder(store, name)).is_complete:
            return info
    return None


def _step_folders(store: Store, *, with_links: bool = True) -> list[tuple[int, str]]:
    return [
        (step, entry.name)
        for entry in store.list_folder()
        if entry.is_folder
        and (with_links or not entry.is_link)
        and (step := parse_step(entry.name)) is not None
    ]


def _inspect_folder(store: Store, name: str) -> CheckpointInfo:
    entries, step = tuple(store.list_folder(name)), parse_step(name) or 0
    manifest: Manifest | None = None
    status: Status = "damaged"
    try:
        if all(entry.name != MANIFEST_NAME for entry in entries):
            status, problem = "unfinished", f"it has no {MANIFEST_NAME}: its save did not end"
        else:
            manifest = read_manifest(store, name)
            sizes = file_sizes(open_store(join_url(store.url, name)), manifest)
            wrong = (f"{file} {text}" for file, text in manifest.wrong_sizes(sizes).items())
            problem = next(wrong, "")
            if manifest.step != step:
                problem = f"its manifest is that of step {manifest.step}"
            if not problem and any(entry.name == DAMAGE_NAME for entry in entries):
                problem = marked_damage(store, name, manifest)
            status = "damaged" if problem else "whole"
    except CheckpointVersionError as error:
        status, problem = "newer", error.seen
    except DataError as error:
        problem = error.seen
    return CheckpointInfo(step, join_url(store.url, name), status, problem, manifest, entries)


def steps_to_keep(whole: Iterable[int], keep: int, keep_every: int | None = None) -> frozenset[int]:
    """Returns which of the steps with complete checkpoints (`whole`) to keep.

    Args:
        keep: number of newest checkpoints; at least 1.
        keep_every: also keep every step divisible by this.
    """
    steps = sorted(set(whole), reverse=True)
    newest = steps[: max(1, keep)]
    return frozenset(newest) | {step for step in steps if keep_every and step % keep_every == 0}


@dataclass(frozen=True)
class PruneResult:
    """The result of `prune_checkpoints`; with `dry_run`, what would be removed.

    Attributes:
        kept: steps of complete checkpoints that remain.
        removed: steps of removed checkpoints.
        swept: steps of folders from which files of interrupted saves were removed.
        nbytes: total size of the removed files.
    """

    kept: tuple[int, ...]
    removed: tuple[int, ...]
    swept: tuple[int, ...]
    nbytes: int


def prune_checkpoints(
    path: str, keep: int, keep_every: int | None = None, *, dry_run: bool = False
) -> PruneResult:
    """Removes the checkpoints that `steps_to_keep` does not keep from a job's folder.

    Only complete checkpoints count as kept. Damaged ones are removed if they are older than the
    `keep` newest complete ones; checkpoints of a newer format remain. Files of interrupted saves
    are removed if they are older than the newest complete checkpoint, both by step and by clock,
    which the files of a running save are not. Folders that are symbolic links are neither counted
    nor changed: they point to another place. Raises ConfigError if the path is not a job's folder;
    StoreError if the store cannot be read, or a file cannot be removed.
    """
    if parse_step(split_url(path)[1]) is not None:
        raise ConfigError(
            f"{path} is one checkpoint", allowed="a job's folder, with checkpoints step-<n> in it"
        )
    store = open_store(path)
    folders = sorted(_step_folders(store, with_links=False))
    checkpoints = [_inspect_folder(store, name) for _, name in folders]
    complete = [info for info in checkpoints if info.is_complete]
    if not complete:
        return PruneResult((), (), (), 0)
    kept = steps_to_keep((info.step for info in complete), keep, keep_every)
    oldest = min(steps_to_keep((info.step for info in complete), keep))
    removed: dict[int, list[StoreEntry]] = {}
    swept: dict[int, list[StoreEntry]] = {}
    for info in checkpoints:
        outdated = info.step not in kept if info.is_complete else info.step < oldest
        if info.status in ("whole", "damaged") and outdated:
            removed[info.step] = info.own_files
        elif leftovers := _leftover_files(info, complete[-1]):
            swept[info.step] = leftovers
    bases = unused_bases(store, (), [step_folder_name(step) for step in removed])
    if not dry_run:
        _remove_files(store, removed | swept)
        for base in bases:  # after the manifests that refer to them
            store.remove(base.name)
    files = [entry for entries in (removed | swept).values() for entry in entries]
    nbytes = sum(entry.nbytes for entry in files + bases)
    return PruneResult(tuple(sorted(kept)), tuple(removed), tuple(swept), nbytes)


def _leftover_files(info: CheckpointInfo, newest: CheckpointInfo) -> list[StoreEntry]:
    """Returns the files in an older step's folder that no manifest lists and that are older than
    the newest manifest. Such files in the newest step's folder remain: a process that lost the
    job's lease may still be about to commit them."""
    if info.step >= newest.step or info.status not in ("whole", "unfinished"):
        return []
    newest_s = next(entry.modified_s for entry in newest.entries if entry.name == MANIFEST_NAME)
    listed = {MANIFEST_NAME} | {
        file.name for file in (info.manifest.files if info.manifest else ())
    }
    return [
        entry
        for entry in info.own_files
        if entry.name not in listed and entry.modified_s < newest_s
    ]


def unused_bases(
    store: Store, used: Collection[str], removed: Collection[str] = ()
) -> list[StoreEntry]:
    """Returns the base files (frozen weights) of a job's folder that no checkpoint refers to.

    Only those that are older than the newest manifest, by step and by clock: a running save may
    refer to newer ones. Empty if a manifest cannot be read, since it may refer to any file.

    Args:
        used: names of base files, relative to the store, that count as referred to.
        removed: names of step folders whose manifests do not count.
    """
    listed = [
        replace(entry, name=f"{BASE_FOLDER}/{entry.name}")
        for entry in store.list_folder(BASE_FOLDER)
        if base_file_step(entry.name) is not None
    ]
    unused = [entry for entry in listed if entry.name not in used]
    if not unused:
        return []
    newest_step, newest_s = -1, 0.0
    for folder in [entry for entry in store.list_folder() if entry.is_folder]:
        files = {entry.name: entry for entry in store.list_folder(folder.name)}
        if MANIFEST_NAME not in files or folder.name in removed:
            continue
        try:
            manifest = read_manifest(store, folder.name)
        except (DataError, CheckpointVersionError):
            return []
        newest_step = max(newest_step, manifest.step)
        newest_s = max(newest_s, files[MANIFEST_NAME].modified_s)
        unused = [entry for entry in unused if entry.name not in manifest.base_names]
    return [
        entry
        for entry in unused
        if (base_file_step(split_url(entry.name)[1]) or 0) < newest_step
        and entry.modified_s < newest_s
    ]


def _remove_files(store: Store, files_by_step: Mapping[int, list[StoreEntry]]) -> None:
    """Removes manifests first, so that an interrupted removal leaves no partial checkpoint."""
    for step, entries in files_by_step.items():
        folder = step_folder_name(step)
        for entry in sorted(entries, key=lambda entry: entry.name != MANIFEST_NAME):
            store.remove(f"{folder}/{entry.name}")
        store.remove_folder(folder)

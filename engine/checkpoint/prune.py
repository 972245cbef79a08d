"""Removing checkpoints that are no longer kept, and what is left of saves that did not end."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.engine.checkpoint.catalogue import Found, list_checkpoints
from rayzero.engine.checkpoint.format import MANIFEST, is_ours, step_folder, step_of
from rayzero.engine.checkpoint.retention import kept_steps
from rayzero.engine.checkpoint.storage import Entry, Store
from rayzero.engine.checkpoint.store import open_store, split
from rayzero.engine.errors import ConfigError


@dataclass(frozen=True)
class Pruned:
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


def prune(path: str, keep: int, keep_every: int | None = None, *, dry_run: bool = False) -> Pruned:
    """Removes from a job's folder what `kept_steps` does not keep.

    Only whole checkpoints count. One that is damaged goes when it is older than the `keep` newest
    whole ones; one of a newer format stays. Leftovers of saves go when they are older than the
    newest whole checkpoint, by step and by the clock: a save under way is neither.

    Raises:
        ConfigError: the path is not a job's folder.
        StoreError: the store cannot be read, or something in it not be removed.
    """
    if step_of(split(path)[1]) is not None:
        raise ConfigError(
            f"{path} is one checkpoint", allowed="a job's folder, with checkpoints step-<n> in it"
        )
    found = list_checkpoints(path)
    whole = [one for one in found if one.is_whole]
    if not whole:
        return Pruned((), (), (), 0)
    kept = kept_steps((one.step for one in whole), keep, keep_every)
    oldest = min(kept_steps((one.step for one in whole), keep))
    going, swept = [], []
    for one in found:
        outdated = one.step not in kept if one.is_whole else one.step < oldest
        if one.condition in ("whole", "damaged") and outdated:
            going.append(_Going(one.step, _ours(one)))
        elif left := _left(one, whole[-1]):
            swept.append(_Going(one.step, left))
    if not dry_run:
        _remove(open_store(path), [*going, *swept])
    return Pruned(
        kept=tuple(sorted(kept)),
        removed=tuple(one.step for one in going),
        swept=tuple(one.step for one in swept),
        nbytes=sum(entry.nbytes for one in (*going, *swept) for entry in one.entries),
    )


@dataclass(frozen=True)
class _Going:
    """Files of one step's folder."""

    step: int
    entries: list[Entry]


def _ours(one: Found) -> list[Entry]:
    return [entry for entry in one.entries if is_ours(entry.name)]


def _left(one: Found, newest: Found) -> list[Entry]:
    """What no manifest lists and nobody is writing any more."""
    if one.step > newest.step or one.condition not in ("whole", "unfinished"):
        return []
    made_s = next(entry.modified_s for entry in newest.entries if entry.name == MANIFEST)
    listed = {MANIFEST} | {file.name for file in (one.manifest.files if one.manifest else ())}
    return [entry for entry in _ours(one) if entry.name not in listed and entry.modified_s < made_s]


def _remove(store: Store, going: list[_Going]) -> None:
    """Manifests first: a checkpoint of which only a part is gone does not exist."""
    for one in going:
        folder = step_folder(one.step)
        for entry in sorted(one.entries, key=lambda entry: entry.name != MANIFEST):
            store.remove(f"{folder}/{entry.name}")
        store.remove_folder(folder)

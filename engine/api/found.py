"""Which checkpoint a script means by a folder and a tag."""

from __future__ import annotations

from rayzero.engine.checkpoint.catalogue import newest_whole
from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.format import MANIFEST
from rayzero.engine.checkpoint.imports.foreign import open_foreign
from rayzero.engine.checkpoint.names import stays_below
from rayzero.engine.checkpoint.reader import CheckpointSource
from rayzero.engine.checkpoint.store import join, open_store
from rayzero.engine.errors import DataError
from rayzero.engine.state.save import LATEST
from rayzero.engine.state.source import StateSource


def find_checkpoint(folder: str, tag: str | int | None) -> str | None:
    """The path or URL of one checkpoint; None if no tag was given, and there is none.

    Raises:
        DataError: there is none of that tag, or of the one that `latest` names.
        StoreError: the store cannot be read.
    """
    name = _latest(folder) if tag is None else str(tag)
    if name is None:
        newest = newest_whole(folder)
        return newest.folder if newest is not None else None
    found = join(folder, name)
    if not stays_below(name) or not open_store(found).entries():
        raise DataError(
            f"there is no checkpoint {name!r} in {folder}",
            allowed="a tag that was saved there",
            fix="load_checkpoint(tag=...)" if tag is not None else f"the file {LATEST} there",
        )
    return found


def open_found(place: str) -> StateSource:
    """The state in it, ours or DeepSpeed's.

    Raises:
        DataError: neither, or damaged.
    """
    if any(entry.name == MANIFEST for entry in open_store(place).entries()):
        return CheckpointSource(place)
    foreign = open_foreign(place)
    if foreign is None:
        raise DataError(
            f"{place} is no checkpoint: it has neither a {MANIFEST} nor DeepSpeed's files",
            fix="load_checkpoint(load_dir, tag)",
        )
    return foreign


def _latest(folder: str) -> str | None:
    try:
        return open_store(folder).read(LATEST).decode(errors="replace").strip() or None
    except StoreError as error:
        if error.kind != "gone":
            raise
        return None

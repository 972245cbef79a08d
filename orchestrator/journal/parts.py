"""A list that only grows, in numbered parts: object stores cannot append.

The newest part is written again while it grows; a full one never changes. The parts that a process
writes have an id of its own in their names: no two processes write the same object.
"""

from __future__ import annotations

import re
import secrets

from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.checkpoint.store_local import Store, StoreEntry

_PART_NAME = re.compile(r"(\d{6,12})-[0-9a-f]{8}\.[a-z.]+")


def part_number(name: str) -> int:
    """Returns the number in the name of a part; 0 if it is not the name of a part."""
    match = _PART_NAME.fullmatch(name)
    return 0 if match is None else int(match[1])


def list_parts(store: Store) -> list[StoreEntry]:
    """Returns the parts in a store's folder, in order. May raise StoreError."""
    entries = [entry for entry in store.list_folder() if part_number(entry.name)]
    return sorted(entries, key=lambda entry: (part_number(entry.name), entry.name))


class PartWriter:
    """Appends to the parts in a folder, after those of earlier processes. Used from one thread.

    Args:
        suffix: suffix of the parts' names.
        part_bytes: a part of this size is full. The writer keeps the newest part in memory.
    """

    def __init__(self, url: str, suffix: str, part_bytes: int) -> None:
        self._url = url
        self._suffix = suffix
        self._part_bytes = part_bytes
        self._writer_id = secrets.token_hex(4)
        self._number = 0
        self._newest = b""
        self._sizes: dict[str, int] = {}  # of all parts in the folder, by name, the oldest first

    def append(self, content: bytes) -> None:
        """Appends content to one part. It is durable when this returns. Raises StoreError; a second
        call with the same content then does not write it twice."""
        store = open_store(self._url)
        if not self._number:
            self._sizes = {entry.name: entry.nbytes for entry in list_parts(store)}
            self._number = max(map(part_number, self._sizes), default=0) + 1
        if len(self._newest) >= self._part_bytes:
            self._number, self._newest = self._number + 1, b""
        name = f"{self._number:06d}-{self._writer_id}{self._suffix}"
        grown = self._newest + content
        store.replace(name, grown)
        self._newest = grown
        self._sizes[name] = len(grown)

    def prune(self, max_bytes: int) -> None:
        """Removes the oldest parts, until the rest has at most `max_bytes`, or is one part. Raises
        StoreError."""
        while sum(self._sizes.values()) > max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            open_store(self._url).remove(oldest)
            del self._sizes[oldest]

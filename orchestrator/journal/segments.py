"""The journal's files: small, numbered, each rewritten as a whole while it grows.

So it is the same on a disk and in an object store, which cannot append.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence

from rayzero.engine.checkpoint.store import is_remote, join, open_store
from rayzero.orchestrator.journal.past import Past, begins_run, is_step, parse

FOLDER = "journal"
FULL_BYTES = 64 * 1024
"""A file that has grown so big is left alone, and the next one begun."""
_NAME = re.compile(r"(\d{6})-[0-9a-f]{8}\.jsonl")


def folder(archive: str) -> str:
    """Where the journal of a job with these checkpoints lies."""
    return join(archive, FOLDER)


def every_s(archive: str) -> float:
    """How long lines are gathered: a store is asked less often than a disk."""
    return 5.0 if is_remote(archive) else 0.5


def read(archive: str) -> Past | None:
    """What the journal tells of the last run; None when there is no journal.

    Raises:
        StoreError: the store cannot be read.
        ConfigError: it is no path or URL of a store.
    """
    store = open_store(folder(archive))
    lines: list[str] = []
    for name in reversed(_names(archive)):
        part = store.read(name).decode("utf-8", "replace").splitlines()
        lines = part + lines
        if any(begins_run(line) for line in part):
            break
    return parse(lines)


def step_every_s(archive: str) -> float:
    """How often it is told how far the run is; each time a file is written anew."""
    return 30.0 if is_remote(archive) else 5.0


class Segments:
    """Writes the journal of one process. Two of them never write the same file.

    A line of kind `step` goes when another follows it, so a journal grows by what happens and not
    with time.
    """

    def __init__(self, archive: str) -> None:
        self._archive = archive
        self._mark = secrets.token_hex(4)
        self._number: int | None = None
        self._lines: list[str] = []

    def write(self, lines: Sequence[str]) -> None:
        """Durable when it returns. Raises StoreError, and then nothing was written."""
        if self._number is None:
            self._number = self._next()
        for part in _cut(lines):
            if sum(map(len, self._lines)) > FULL_BYTES:
                self._number, self._lines = self._number + 1, []
            now = _thinned([*self._lines, *part])
            content = "".join(f"{line}\n" for line in now).encode()
            name = f"{self._number:06d}-{self._mark}.jsonl"
            open_store(folder(self._archive)).replace(name, content)
            self._lines = now

    def _next(self) -> int:
        names = _names(self._archive)
        return int(names[-1][:6]) + 1 if names else 1


def _names(archive: str) -> list[str]:
    found = open_store(folder(archive)).entries()
    return sorted(one.name for one in found if _NAME.fullmatch(one.name))


def _thinned(lines: Sequence[str]) -> list[str]:
    """Without steps that are directly followed by another."""
    following = [*lines[1:], ""]
    return [
        line
        for line, then in zip(lines, following, strict=True)
        if not (is_step(line) and is_step(then))
    ]


def _cut(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(lines), 200):
        yield lines[at : at + 200]

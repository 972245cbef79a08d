"""Reads a job's log from the parts in its store, without the job's cluster."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import join_url, open_store
from rayzero.engine.checkpoint.store_local import StoreEntry
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.job.log_upload import CHUNK_BYTES, LOG_FOLDER
from rayzero.orchestrator.job.lookup import job_folder, load_run_history
from rayzero.orchestrator.journal.files import read_journal
from rayzero.orchestrator.journal.parts import list_parts, part_number

FOLLOW_POLL_S = 2.0
_POLLS_AFTER_END = 2  # polls that find nothing: the journal's end is written before the log's


class StoredLog:
    """The log of a job, as parts in the job's folder in a store.

    Args:
        path: the `checkpoint.path` of the job file, which holds the folders of jobs.
        note: called with a text when a part of the log is missing.

    Raises:
        ConfigError: the folder has no such job, or no log of the job.
        StoreError: the store cannot be read.
    """

    def __init__(self, path: str, name: str, note: Callable[[str], object]) -> None:
        self._folder = job_folder(path, name)
        self._note = note
        self._store = open_store(join_url(self._folder, LOG_FOLDER))
        self._read_bytes: dict[str, int] = {}  # how much of each part was read, by its name
        self._last = ""  # the part that was read last
        self._ends_line = True
        self._damaged: list[str] = []
        if not list_parts(self._store):
            load_run_history(path, name)
            raise ConfigError(
                f"{redact_url(self._store.url)} has no log of job {name!r}",
                allowed="a job of this version whose checkpoint.path is a URL: the log of any "
                "other is a file on the head node's disk, or in the folder that is its path",
                fix="run the command there; read the events in the folder `journal`",
            )

    def parts(self, follow: bool = False) -> Iterator[bytes]:
        """Yields the log from its oldest part on. With `follow`, waits for new parts until the
        job's end, and yields an empty part each time there is no more yet. Raises StoreError;
        DataError at the end, if a part is damaged."""
        quiet_polls = 0
        while quiet_polls < _POLLS_AFTER_END:
            has_ended = not follow or self._has_ended()  # before the parts are listed
            found = False
            for part in list_parts(self._store):
                if part.nbytes > self._read_bytes.get(part.name, 0):
                    yield from self._read(part)
                    found = True
            if not follow:
                break
            yield b""
            quiet_polls = quiet_polls + 1 if has_ended and not found else 0
            time.sleep(FOLLOW_POLL_S)
        if self._damaged:
            raise DataError(
                f"parts of the log are damaged: {', '.join(self._damaged)}",
                allowed="the files as the job wrote them",
                fix="restore copies of them, if the store keeps versions",
            )

    def _has_ended(self) -> bool:
        facts = read_journal(self._folder)
        return facts is not None and bool(facts.end_state)

    def _read(self, part: StoreEntry) -> Iterator[bytes]:
        """Yields what was added to a part since it was read last."""
        begin = self._read_bytes.get(part.name, 0)
        try:
            content = self._store.read(part.name)
        except StoreError as error:
            if error.kind != "gone":  # removed since it was listed
                raise
            return
        if part.name != self._last:
            self._note_missing(part_number(self._last), part_number(part.name))
            # If another process wrote the previous part, it may have been killed within a line.
            is_same_process = part.name.split("-")[1:] == self._last.split("-")[1:]
            if not self._ends_line and not is_same_process:
                yield b"\n"
            self._last = part.name
        self._read_bytes[part.name] = len(content)
        try:
            for lines in _decompress(content[begin:]):
                self._ends_line = lines.endswith(b"\n")
                yield lines
        except zlib.error as error:
            url = redact_url(join_url(self._store.url, part.name))
            self._damaged.append(url)
            self._note(f"{url} is damaged: {error}; the rest of its lines is missing here")

    def _note_missing(self, before: int, number: int) -> None:
        if number > before + 1:
            why = "" if before else ": the oldest are removed (records.max_bytes)"
            self._note(f"parts {before + 1} to {number - 1} of the log are not there{why}")


def _decompress(content: bytes) -> Iterator[bytes]:
    """Decompresses the chunks of a part one by one. Raises zlib.error at the first damaged one."""
    while content:
        chunk = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # with gzip's header and checksum
        lines = chunk.decompress(content, 2 * CHUNK_BYTES)
        if not chunk.eof:
            raise zlib.error("it is truncated")
        content = chunk.unused_data
        yield lines

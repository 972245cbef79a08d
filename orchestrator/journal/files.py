"""The files of a journal: one state file, replaced atomically, and one append-only list of events.

The state file alone is what adoption, `status` and `resume` read. On an object store, which cannot
append, the events are numbered segments, each rewritten as it grows.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rayzero.engine.checkpoint.errors import StoreError
from rayzero.engine.checkpoint.store import is_remote, join_url, open_store
from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.facts import EventBus, JobFacts
from rayzero.orchestrator.job_events import RunEnded
from rayzero.orchestrator.journal.entries import (
    JournalUpdate,
    JournalWriter,
    facts_json,
    fold_entries,
    parse_facts,
)

STATE_FILE = "job.json"
EVENTS_FILE = "events.jsonl"
MAX_EVENTS_BYTES = 16 * 2**20
"""A list of events of this size becomes `events.jsonl.1`, and a new one is started."""
SEGMENTS_FOLDER = "journal"
"""Events on an object store; also the whole journal of runs before there was a state file."""
MAX_SEGMENT_BYTES = 64 * 1024
"""A segment of this size is complete, and the next one is started."""

_SEGMENT_NAME = re.compile(r"(\d{6})-[0-9a-f]{8}\.jsonl")


def state_url(job_folder: str) -> str:
    """Path or URL of a job's state file."""
    return join_url(job_folder, STATE_FILE)


def has_journal(job_folder: str) -> bool:
    """May raise StoreError."""
    names = {entry.name for entry in open_store(job_folder).list_folder()}
    return not names.isdisjoint((STATE_FILE, SEGMENTS_FOLDER))


def read_journal(job_folder: str) -> JobFacts | None:
    """The state of the last run; None when there is no journal.

    Raises:
        StoreError: the store cannot be read.
        ConfigError: `job_folder` is neither a path nor the URL of a store.
    """
    try:
        content = open_store(job_folder).read(STATE_FILE)
    except StoreError as error:
        if error.kind != "gone":
            raise
        return _read_segments(job_folder)
    return parse_facts(content)


def read_sound_journal(job_folder: str) -> JobFacts | None:
    """Reads as `read_journal` does. Raises ConfigError also if there is a journal, and it is
    damaged."""
    facts = read_journal(job_folder)
    if facts is None and has_journal(job_folder):
        raise ConfigError(
            f"the journal {redact_url(state_url(job_folder))} is damaged: it is not the state of a "
            "run",
            allowed="the file as a job wrote it",
            fix="restore a copy of the file, or remove it: the job's checkpoints do not depend on "
            "it; or run the job with --restart, which sets its files aside, or with "
            "checkpoint.resume: PATH of a checkpoint",
        )
    return facts


class JournalFiles:
    """Writes one process's journal. `fence` is called before each write, and raises when another
    process owns the folder."""

    def __init__(
        self,
        job_folder: str,
        fence: Callable[[], None] = lambda: None,
        max_events_bytes: int = MAX_EVENTS_BYTES,
    ) -> None:
        self._job_folder = job_folder
        self._fence = fence
        self._max_events_bytes = max_events_bytes
        remote = is_remote(job_folder)
        self._segments = _Segments(job_folder) if remote else None
        # Requests to a store cost more than writes to a disk.
        self.flush_interval_s = 5.0 if remote else 0.5
        """How long updates are to be collected."""
        self.step_interval_s = 30.0 if remote else 5.0
        """How often the number of finished steps is to be written."""

    def write(self, updates: Sequence[JournalUpdate]) -> None:
        """The state is durable when this returns.

        Raises:
            StoreError, OSError: the state is the one before or the one after, never half of it.
        """
        self._fence()
        state = facts_json(updates[-1].facts)
        open_store(self._job_folder).replace(STATE_FILE, state)
        lines = [update.line for update in updates if update.line]
        if lines and self._segments is not None:
            self._segments.write(lines)
        elif lines:
            path = Path(self._job_folder.removeprefix("file://")) / EVENTS_FILE
            _append_events(path, lines, self._max_events_bytes)


def write_end(job_folder: str, facts: JobFacts, state: str, error: str) -> None:
    """Ends a lost run in its journal. May block; the caller holds the folder's lease.

    Raises:
        StoreError, OSError: nothing was changed.
    """
    updates: list[JournalUpdate] = []
    events = EventBus(facts)
    JournalWriter(updates.append, events)
    events.emit(RunEnded(state, error))
    JournalFiles(job_folder).write(updates)


def _append_events(path: Path, lines: Sequence[str], max_bytes: int) -> None:
    if path.exists() and path.stat().st_size > max_bytes:
        os.replace(path, path.with_suffix(".jsonl.1"))
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


class _Segments:
    """Events in an object store. Two processes never write the same object."""

    def __init__(self, job_folder: str) -> None:
        self._store_url = join_url(job_folder, SEGMENTS_FOLDER)
        self._writer_id = secrets.token_hex(4)
        self._number: int | None = None
        self._lines: list[str] = []

    def write(self, lines: Sequence[str]) -> None:
        """Durable when it returns. Raises StoreError, and then a part of the lines is missing."""
        store = open_store(self._store_url)
        if self._number is None:
            names = _segment_names(self._store_url)
            self._number = int(names[-1][:6]) + 1 if names else 1
        for start in range(0, len(lines), 200):
            if sum(map(len, self._lines)) > MAX_SEGMENT_BYTES:
                self._number, self._lines = self._number + 1, []
            content = [*self._lines, *lines[start : start + 200]]
            name = f"{self._number:06d}-{self._writer_id}.jsonl"
            store.replace(name, "".join(f"{line}\n" for line in content).encode())
            self._lines = content


def _segment_names(url: str) -> list[str]:
    entries = open_store(url).list_folder()
    return sorted(entry.name for entry in entries if _SEGMENT_NAME.fullmatch(entry.name))


def _read_segments(job_folder: str) -> JobFacts | None:
    """The journal of a run from before there was a state file: all of it is in the segments."""
    url = join_url(job_folder, SEGMENTS_FOLDER)
    store = open_store(url)
    entries: list[dict[str, Any]] = []
    for name in reversed(_segment_names(url)):
        segment = list(_parse_lines(store.read(name)))
        entries = segment + entries
        if any(entry["kind"] == "begun" and not entry.get("adopted") for entry in segment):
            break
    return fold_entries(entries)


def _parse_lines(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.decode("utf-8", "replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn
        if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
            yield entry

"""The files of a journal: one state file, replaced atomically, and one append-only list of events.

Adoption, `status` and `resume` read only the state file. On an object store, which cannot append,
the events are numbered parts.
"""

from __future__ import annotations

import json
import os
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
from rayzero.orchestrator.journal.parts import PartWriter, list_parts

STATE_FILE = "job.json"
EVENTS_FILE = "events.jsonl"
MAX_EVENTS_BYTES = 16 * 2**20
"""A list of events of this size becomes `events.jsonl.1`, and a new one is started."""
SEGMENTS_FOLDER = "journal"
"""Folder of the events on an object store; before there was a state file, of the whole journal."""
MAX_SEGMENT_BYTES = 64 * 1024
"""A part of the events of this size is full, and the next one is started."""


def state_url(job_folder: str) -> str:
    """Returns the path or URL of a job's state file."""
    return join_url(job_folder, STATE_FILE)


def has_journal(job_folder: str) -> bool:
    """Returns whether a folder has a journal. May raise StoreError."""
    names = {entry.name for entry in open_store(job_folder).list_folder()}
    return not names.isdisjoint((STATE_FILE, SEGMENTS_FOLDER))


def read_journal(job_folder: str) -> JobFacts | None:
    """Returns the facts of the last run; None if there is no journal, or it is damaged.

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
        events_url = join_url(job_folder, SEGMENTS_FOLDER)
        self._parts = PartWriter(events_url, ".jsonl", MAX_SEGMENT_BYTES) if remote else None
        # Requests to a store cost more than writes to a disk.
        self.flush_interval_s = 5.0 if remote else 0.5
        """How long the caller should collect updates."""
        self.step_interval_s = 30.0 if remote else 5.0
        """How often the caller should write the number of finished steps."""

    def write(self, updates: Sequence[JournalUpdate]) -> None:
        """Writes the newest state, and the events of the updates. The state is durable when this
        returns.

        Raises:
            StoreError, OSError: the stored state is the one before or the one after, never half of
                it.
        """
        self._fence()
        state = facts_json(updates[-1].facts)
        open_store(self._job_folder).replace(STATE_FILE, state)
        lines = [update.line for update in updates if update.line]
        if lines and self._parts is not None:
            self._parts.append("".join(f"{line}\n" for line in lines).encode())
        elif lines:
            path = Path(self._job_folder.removeprefix("file://")) / EVENTS_FILE
            _append_events(path, lines, self._max_events_bytes)


def write_end(job_folder: str, facts: JobFacts, error: str) -> None:
    """Ends a lost run in its journal, as `stopped`. May block; the caller holds the folder's lease.

    Raises:
        StoreError, OSError: nothing was changed.
    """
    updates: list[JournalUpdate] = []
    events = EventBus(facts)
    JournalWriter(updates.append, events)
    events.emit(RunEnded("stopped", error))
    JournalFiles(job_folder).write(updates)


def _append_events(path: Path, lines: Sequence[str], max_bytes: int) -> None:
    if path.exists() and path.stat().st_size > max_bytes:
        os.replace(path, path.with_suffix(".jsonl.1"))
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def _read_segments(job_folder: str) -> JobFacts | None:
    """Returns the facts of a run of a release without a state file: its whole journal is in the
    segments."""
    url = join_url(job_folder, SEGMENTS_FOLDER)
    store = open_store(url)
    entries: list[dict[str, Any]] = []
    for part in reversed(list_parts(store)):
        segment = list(_parse_lines(store.read(part.name)))
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

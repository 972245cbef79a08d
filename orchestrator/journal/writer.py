"""Journal entries and segments.

From what happens to a job to the lines of its journal.

The journal's files: small, numbered, each rewritten as a whole while it grows.

So it is the same on a disk and in an object store, which cannot append.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rayzero.engine.checkpoint.open_store import open_store
from rayzero.engine.checkpoint.store import is_remote, join_url
from rayzero.engine.redact import redact_document
from rayzero.orchestrator.job_events import (
    Checkpointed,
    CheckpointFailed,
    FaultRecorded,
    JobEvent,
    LimitsChanged,
    Repaired,
    Resized,
    Rewound,
    StateEntered,
)
from rayzero.orchestrator.journal.run_history import (
    RunHistory,
    begins_run,
    fold_journal,
    is_step_line,
)
from rayzero.orchestrator.policies.failure import Fault
from rayzero.orchestrator.progress import StepRecord

DEFAULT_STEP_INTERVAL_S = 5.0
"""Steps are too many to be told each: one now and then says how far the run is at least."""


JOURNAL_EVENTS: tuple[type[JobEvent], ...] = (
    StateEntered,
    StepRecord,
    FaultRecorded,
    Rewound,
    LimitsChanged,
    Repaired,
    Resized,
    Checkpointed,
    CheckpointFailed,
)


_KINDS_WITH_COUNTERS = ("moved", "step")
"""Lines that say what was counted by then."""


class JournalWriter:
    """An Observer, and the controller's `Note`. Used from one event loop.

    Args:
        put: takes a line.
        now_s: Unix time.
        step_every_s: between two steps that are told.
    """

    def __init__(
        self,
        put: Callable[[str], None],
        now_s: Callable[[], float] = time.time,
        step_every_s: float = DEFAULT_STEP_INTERVAL_S,
    ) -> None:
        self._write_line = put
        self._now_s = now_s
        self._step_interval_s = step_every_s
        self._next_step_s = 0.0
        self.counter_source: Callable[[], Mapping[str, Any]] = dict
        """What the job's metrics have counted; a run that adopts this one goes on from there."""

    def append(self, kind: str, **fields: Any) -> None:
        """One line; secrets in it are taken out."""
        if kind in _KINDS_WITH_COUNTERS and (counted := self.counter_source()):
            fields["counted"] = counted
        line = {"at_s": round(self._now_s(), 3), "kind": kind, **redact_document(fields)}
        self._write_line(json.dumps(line, default=str))

    def on_event(self, notice: JobEvent) -> None:
        match notice:
            case StateEntered():
                self.append(
                    "moved",
                    state=notice.state,
                    event=notice.trigger,
                    generation=notice.generation,
                    world_size=notice.world_size,
                    step=notice.step,
                )
            case FaultRecorded(fault, is_fatal=False):
                self.append("fault", **_fault_fields(fault))
            case Rewound():
                self.append("picked", **asdict(notice))
            case LimitsChanged():
                self.append("scaled", least=notice.min_workers, most=notice.max_workers)
            case StepRecord(step=step):
                if self._now_s() >= self._next_step_s:
                    self._next_step_s = self._now_s() + self._step_interval_s
                    self.append("step", step=step)
            case Repaired() | Resized():
                self.append(_entry_kind(notice), **asdict(notice), total_s=notice.total_s)
            case CheckpointFailed():
                self.append(_entry_kind(notice), **asdict(notice))
            case Checkpointed():
                self.append("checkpoint", **asdict(notice))


def _fault_fields(fault: Fault) -> dict[str, Any]:
    return {
        "cause": str(fault.cause),
        "worker": asdict(fault.worker),
        "rank": fault.rank,
        "step": fault.step,
        "generation": fault.generation,
        "detail": (fault.detail.splitlines() or [""])[0],
    }


def _entry_kind(notice: JobEvent) -> str:
    return type(notice).__name__.lower()


JOURNAL_FOLDER = "journal"


MAX_SEGMENT_BYTES = 64 * 1024
"""A file that has grown so big is left alone, and the next one begun."""


_SEGMENT_NAME = re.compile(r"(\d{6})-[0-9a-f]{8}\.jsonl")


def journal_folder(archive: str) -> str:
    """Where the journal of a job with these checkpoints lies."""
    return join_url(archive, JOURNAL_FOLDER)


def flush_interval_s(archive: str) -> float:
    """How long lines are gathered: a store is asked less often than a disk."""
    return 5.0 if is_remote(archive) else 0.5


def read_journal(archive: str) -> RunHistory | None:
    """What the journal tells of the last run; None when there is no journal.

    Raises:
        StoreError: the store cannot be read.
        ConfigError: it is no path or URL of a store.
    """
    store = open_store(journal_folder(archive))
    lines: list[str] = []
    for name in reversed(_segment_names(archive)):
        part = store.read(name).decode("utf-8", "replace").splitlines()
        lines = part + lines
        if any(begins_run(line) for line in part):
            break
    return fold_journal(lines)


def step_interval_s(archive: str) -> float:
    """How often it is told how far the run is; each time a file is written anew."""
    return 30.0 if is_remote(archive) else 5.0


class JournalSegments:
    """Writes the journal of one process. Two of them never write the same file.

    A line of kind `step` goes when another follows it, so a journal grows by what happens and not
    with time.
    """

    def __init__(self, archive: str) -> None:
        self._archive = archive
        self._writer_id = secrets.token_hex(4)
        self._number: int | None = None
        self._lines: list[str] = []

    def write(self, lines: Sequence[str]) -> None:
        """Durable when it returns. Raises StoreError, and then nothing was written."""
        if self._number is None:
            self._number = self._next_number()
        for part in _split_batches(lines):
            if sum(map(len, self._lines)) > MAX_SEGMENT_BYTES:
                self._number, self._lines = self._number + 1, []
            now = _drop_superseded_steps([*self._lines, *part])
            content = "".join(f"{line}\n" for line in now).encode()
            name = f"{self._number:06d}-{self._writer_id}.jsonl"
            open_store(journal_folder(self._archive)).replace(name, content)
            self._lines = now

    def _next_number(self) -> int:
        names = _segment_names(self._archive)
        return int(names[-1][:6]) + 1 if names else 1


def _segment_names(archive: str) -> list[str]:
    found = open_store(journal_folder(archive)).list_folder()
    return sorted(one.name for one in found if _SEGMENT_NAME.fullmatch(one.name))


def _drop_superseded_steps(lines: Sequence[str]) -> list[str]:
    """Without steps that are directly followed by another."""
    following = [*lines[1:], ""]
    return [
        line
        for line, then in zip(lines, following, strict=True)
        if not (is_step_line(line) and is_step_line(then))
    ]


def _split_batches(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(lines), 200):
        yield lines[at : at + 200]

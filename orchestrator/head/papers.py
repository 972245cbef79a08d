"""What a job's process writes down behind the controller: the journal, and a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from rayzero.engine.masking import masked
from rayzero.orchestrator.cli.plain import PlainLines
from rayzero.orchestrator.head.feed import Feed
from rayzero.orchestrator.head.log import append_log, log_path
from rayzero.orchestrator.journal.behind import Behind
from rayzero.orchestrator.journal.chronicle import Chronicle
from rayzero.orchestrator.journal.segments import Segments, every_s, step_every_s
from rayzero.orchestrator.notices import Notice
from rayzero.orchestrator.plan import JobPlan

_LOG_EVERY_S = 0.2


def without_credentials(notice: Notice) -> Notice:
    """The same, for everybody's eyes: URLs in it without their credentials."""
    texts = {
        one.name: masked(text)
        for one in fields(notice)
        if isinstance(text := getattr(notice, one.name), str) and "://" in text
    }
    return replace(notice, **texts) if texts else notice  # type: ignore[arg-type]


class Papers:
    """An Observer that shows everything to the feed, and writes it down. Owns two threads.

    Args:
        tell: shows a warning; called in other threads.
    """

    def __init__(self, plan: JobPlan, feed: Feed, tell: Callable[[str], None]) -> None:
        self._feed = feed
        write = partial(append_log, log_path(plan.output_dir))
        self._log = Behind("the job's log", write, _LOG_EVERY_S, tell)
        segments = Segments(plan.archive)
        self._journal = Behind("the journal", segments.write, every_s(plan.archive), tell)
        every_step_s = step_every_s(plan.archive)
        self._chronicle = Chronicle(self._journal.put, step_every_s=every_step_s)
        self._lines = PlainLines(self._log.put)
        self._journaled = True

    def count(self, counted: Callable[[], Mapping[str, Any]]) -> None:
        """Where the journal finds what the job's metrics have counted."""
        self._chronicle.counted = counted

    def note(self, kind: str, **fields: Any) -> None:
        """Writes a line into the journal."""
        if self._journaled:
            self._chronicle.note(kind, **fields)

    def leave_journal(self) -> None:
        """Writes no more lines into it: it is somebody else's."""
        self._journaled = False

    def see(self, notice: Notice) -> None:
        notice = without_credentials(notice)
        self._feed.see(notice)
        if self._journaled:
            self._chronicle.see(notice)
        self._lines.see(notice)

    def close(self, limit_s: float) -> bool:
        """Whether all was written in time. May block for so long."""
        written = self._journal.close(limit_s)
        self._log.close(1.0)
        return written

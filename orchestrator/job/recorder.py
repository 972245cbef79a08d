"""Event buffer (long poll), journal and log writer threads.

What a job's process writes down behind the controller: the journal, and a log.

A thread that writes lines behind whoever makes them, who never waits for a disk or a store.

A job's notices, numbered and kept for a while: who follows it fetches them at its own pace.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from threading import Condition, Thread
from typing import Any

from rayzero.engine.errors import first_line
from rayzero.engine.redact import redact_url
from rayzero.orchestrator.aio import ChangeNotifier
from rayzero.orchestrator.console import PlainConsole
from rayzero.orchestrator.job.log import append_log, log_path
from rayzero.orchestrator.job_events import EventBus, JobEvent, StateEntered
from rayzero.orchestrator.journal.writer import (
    JOURNAL_EVENTS,
    JournalSegments,
    JournalWriter,
    flush_interval_s,
    step_interval_s,
)
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import EventPage, JobEnd

MAX_QUEUED_LINES = 10_000
"""Lines that wait to be written; beyond that the oldest are dropped, and it is told."""


RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""How long to wait after each failure; the last from then on."""


class BackgroundLineWriter:
    """Owns a daemon thread, from the first line to `close`.

    Args:
        what: what is written, in the words of a warning.
        write: writes lines, or raises; then it is given them again.
        every_s: how long lines are gathered before they are written.
        tell: shows a warning; called in the thread.
    """

    def __init__(
        self,
        what: str,
        write: Callable[[Sequence[str]], None],
        every_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._subject = what
        self._write = write
        self._flush_interval_s = every_s
        self._warn = tell
        self._lines: deque[str] = deque(maxlen=MAX_QUEUED_LINES)
        self._dropped = 0
        self._failures = 0
        self._changed = Condition()
        self._close_deadline_s: float | None = None
        self._thread = Thread(target=self._run, name=f"rayzero-{what.split()[-1]}", daemon=True)

    def enqueue(self, line: str) -> None:
        """Takes one line; returns at once."""
        with self._changed:
            self._dropped += len(self._lines) == MAX_QUEUED_LINES
            self._lines.append(line)
            if not self._thread.is_alive() and self._close_deadline_s is None:
                self._thread.start()
            self._changed.notify()

    def close(self, limit_s: float) -> bool:
        """Writes what is left; whether all of it was written in time."""
        with self._changed:
            self._close_deadline_s = time.monotonic() + limit_s
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(limit_s)
        return not self._lines

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines) or self._is_closing)
                if not self._lines:
                    return
            self._sleep(self._flush_interval_s)
            with self._changed:
                lines, dropped = list(self._lines), self._dropped
            try:
                self._write(lines)
            except Exception as error:  # noqa: BLE001  # a thread that ended could not be told of it
                if not self._on_write_error(error):
                    return
                continue
            self._failures = 0
            with self._changed:
                # What was dropped meanwhile was at the front, and is among what was written.
                for _ in range(len(lines) - (self._dropped - dropped)):
                    self._lines.popleft()

    def _on_write_error(self, error: Exception) -> bool:
        """Told once for each time that it begins to fail; whether to try again."""
        if self._failures == 0:
            what = first_line(error)
            self._warn(f"{self._subject} cannot be written, and is tried again: {what}")
        until_s = self._close_deadline_s
        if until_s is not None and time.monotonic() > until_s:
            return False
        self._sleep(RETRY_DELAYS_S[min(self._failures, len(RETRY_DELAYS_S) - 1)], at_least_s=0.2)
        self._failures += 1
        return True

    def _sleep(self, seconds: float, at_least_s: float = 0.0) -> None:
        """Shorter when it is being closed."""
        time.sleep(at_least_s)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, max(0.0, seconds - at_least_s))

    @property
    def _is_closing(self) -> bool:
        return self._close_deadline_s is not None


MAX_BUFFERED_EVENTS = 10_000
"""Notices that are kept; a follower that is further behind than that misses some, and is told."""


MAX_PAGE_EVENTS = 500
"""Notices in one answer."""


BATCH_DELAY_S = 0.02
"""How long an answer waits for what comes at about the same time."""


LATEST = -1
"""Asks for what comes, behind the newest state and step."""


class EventBuffer:
    """An Observer that nobody can slow down. Used from one event loop."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.ended: JobEnd | None = None
        self._events: deque[JobEvent] = deque(maxlen=MAX_BUFFERED_EVENTS)
        self._count = 0
        self._latest_by_type: dict[type[JobEvent], JobEvent] = {}
        self._changed = ChangeNotifier()

    def on_event(self, notice: JobEvent) -> None:
        self._events.append(notice)
        self._count += 1
        if isinstance(notice, StateEntered | StepRecord):
            self._latest_by_type[type(notice)] = notice
        self._changed.notify()

    def finish(self, ended: JobEnd) -> None:
        """Nothing comes after this."""
        self.ended = ended
        self._changed.notify()

    async def fetch_since(self, run: str, since: int, timeout_s: float) -> EventPage:
        """What came after the notice of that number; waits so long for something to come.

        Args:
            run: whose numbers they are; those of another process mean nothing here.
            since: 0 for all that is kept, or FROM_NOW.
        """
        if since == LATEST:
            return EventPage(
                self.run, tuple(self._latest_by_type.values()), self._count, ended=self.ended
            )
        since = since if run in ("", self.run) else 0
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_until(
                    lambda: self._count > since or self.ended is not None
                )
        except TimeoutError:
            pass
        else:
            if self.ended is None:
                await asyncio.sleep(BATCH_DELAY_S)
        return self._page_since(since)

    def _page_since(self, since: int) -> EventPage:
        first = self._count - len(self._events)
        begin = max(since, first)
        page = tuple(self._events)[begin - first : begin - first + MAX_PAGE_EVENTS]
        upto = begin + len(page)
        ended = self.ended if upto == self._count else None
        return EventPage(self.run, page, upto, begin - since, ended)


_LOG_FLUSH_INTERVAL_S = 0.2


def redact_event(notice: JobEvent) -> JobEvent:
    """The same, for everybody's eyes: URLs in it without their credentials."""
    texts = {
        one.name: redact_url(text)
        for one in fields(notice)
        if isinstance(text := getattr(notice, one.name), str) and "://" in text
    }
    return replace(notice, **texts) if texts else notice  # type: ignore[arg-type]


class JobRecorder:
    """An Observer that shows everything to the feed, and writes it down. Owns two threads.

    Args:
        tell: shows a warning; called in other threads.
    """

    def __init__(self, plan: JobPlan, feed: EventBuffer, tell: Callable[[str], None]) -> None:
        self._events = feed
        write = partial(append_log, log_path(plan.output_dir))
        self._log_lines = BackgroundLineWriter("the job's log", write, _LOG_FLUSH_INTERVAL_S, tell)
        segments = JournalSegments(plan.job_folder)
        self._journal_lines = BackgroundLineWriter(
            "the journal", segments.write, flush_interval_s(plan.job_folder), tell
        )
        every_step_s = step_interval_s(plan.job_folder)
        self._journal_writer = JournalWriter(self._journal_lines.enqueue, step_every_s=every_step_s)
        self._plain_console = PlainConsole(self._log_lines.enqueue)
        self._journal_active = True

    def set_counter_source(self, counted: Callable[[], Mapping[str, Any]]) -> None:
        """Where the journal finds what the job's metrics have counted."""
        self._journal_writer.counter_source = counted

    def append_journal(self, kind: str, **fields: Any) -> None:
        """Writes a line into the journal."""
        if self._journal_active:
            self._journal_writer.append(kind, **fields)

    def stop_journal(self) -> None:
        """Writes no more lines into it: it is somebody else's."""
        self._journal_active = False

    def subscribe_to(self, events: EventBus) -> None:
        """Records these events from now on."""
        events.subscribe(self._show)
        events.subscribe(self._journal, JOURNAL_EVENTS)

    def _show(self, event: JobEvent) -> None:
        event = redact_event(event)
        self._events.on_event(event)
        self._plain_console.on_event(event)

    def _journal(self, event: JobEvent) -> None:
        if self._journal_active:
            self._journal_writer.on_event(event)

    def close(self, limit_s: float) -> bool:
        """Whether all was written in time. May block for so long."""
        written = self._journal_lines.close(limit_s)
        self._log_lines.close(1.0)
        return written

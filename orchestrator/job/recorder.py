"""Records the events of a job in its process: in a buffer that clients poll, in the log and in the
journal. If checkpoints are in a store, copies the log and the results there, too."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import islice

from rayzero.engine.checkpoint.store import open_store
from rayzero.engine.errors import RayzeroError
from rayzero.engine.redact import redact_document, redact_url
from rayzero.orchestrator.aio import ChangeNotifier
from rayzero.orchestrator.background_writer import BackgroundWriter
from rayzero.orchestrator.console import PlainConsole
from rayzero.orchestrator.event_text import summary_lines
from rayzero.orchestrator.facts import EventBus
from rayzero.orchestrator.job.log import append_log
from rayzero.orchestrator.job.log_upload import LogUpload
from rayzero.orchestrator.job_events import (
    FolderRemoved,
    JobEvent,
    RunBegun,
    RunEnded,
    StateEntered,
)
from rayzero.orchestrator.job_file import to_document
from rayzero.orchestrator.journal.entries import JournalUpdate, JournalWriter
from rayzero.orchestrator.journal.files import JournalFiles
from rayzero.orchestrator.plan import JobPlan
from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.results import EndedJob, EventPage, JobResult, final_state
from rayzero.orchestrator.top.format import format_time
from rayzero.workers.bounded_queue import MAX_ITEMS, BoundedQueue

MAX_PAGE_EVENTS = 500  # events in one reply
MAX_PAGE_BYTES = 2**20  # limit for one reply, beyond its first event
BATCH_DELAY_S = 0.02  # how long a reply is held back, to include events that follow at once
LATEST = -1  # requests the newest state and step, and then all later events
_LOG_FLUSH_INTERVAL_S = 0.2


class EventBuffer:
    """An observer that keeps the newest events for clients to poll. If events that a client has not
    read were dropped, the reply states their number. Used from one event loop."""

    def __init__(self, max_events: int = MAX_ITEMS, max_page_events: int = MAX_PAGE_EVENTS) -> None:
        self.run = secrets.token_hex(8)
        self.ended: EndedJob | None = None
        self._events: BoundedQueue[JobEvent] = BoundedQueue(max_items=max_events)
        self._max_page_events = max_page_events
        self._latest_by_type: dict[type[JobEvent], JobEvent] = {}
        self._changed = ChangeNotifier()

    def on_event(self, event: JobEvent) -> None:
        self._events.append(event)
        if isinstance(event, StateEntered | StepRecord):
            self._latest_by_type[type(event)] = event
        self._changed.notify()

    def finish(self, ended: EndedJob) -> None:
        """Records the job's end. No events may follow."""
        self.ended = ended
        self._changed.notify()

    async def fetch_since(self, run: str, since: int, timeout_s: float) -> EventPage:
        """Returns the events after the first `since` ones. Waits up to `timeout_s` for one.

        Args:
            run: id of the buffer to which `since` refers. If that was another process's buffer,
                returns all events that are kept.
            since: number of events to skip; 0 for all that are kept, or `LATEST`.
        """
        if since == LATEST:
            return EventPage(
                self.run, tuple(self._latest_by_type.values()), self._events.end, ended=self.ended
            )
        since = since if run in ("", self.run) else 0
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_until(
                    lambda: self._events.end > since or self.ended is not None
                )
        if self._events.end > since and self.ended is None:
            await asyncio.sleep(BATCH_DELAY_S)
        begin = max(since, self._events.end - len(self._events))
        page = tuple(islice(self._events.since(begin, MAX_PAGE_BYTES), self._max_page_events))
        next_index = begin + len(page)
        ended = self.ended if next_index == self._events.end else None
        return EventPage(self.run, page, next_index, begin - since, ended)


def redact_event(event: JobEvent) -> JobEvent:
    """Returns the event without credentials in URLs."""
    texts = {
        item.name: redact_url(text)
        for item in fields(event)
        if isinstance(text := getattr(event, item.name), str) and "://" in text
    }
    return replace(event, **texts) if texts else event  # type: ignore[arg-type]


class JobRecorder:
    """Keeps a job's events in the buffer, the log and the journal. Opens no file itself.

    Args:
        seconds: returns the wall time by cause, for the journal.
        fence: raises when another process owns the job's folder; called in the writers' threads.
        warn: emits a warning; thread-safe.

    Attributes:
        store_writer: writes everything into a store except the journal, which must not wait for
            the rest.
    """

    def __init__(
        self,
        plan: JobPlan,
        buffer: EventBuffer,
        writer: BackgroundWriter,
        events: EventBus,
        seconds: Callable[[], Mapping[str, float]] = dict,
        fence: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._events = events
        self.store_writer = BackgroundWriter(warn)
        # If the job's folder is removed, only the holder of its lease may make it again.
        append_lines = partial(append_log, plan.log_path, parents=plan.spec.checkpoint.is_url)
        self._store_summary: Callable[[JobResult], None] = lambda _: None
        write_log: Callable[[Sequence[str]], object] = append_lines
        if plan.spec.checkpoint.is_url:
            write_log = self._open_store_queues(append_lines, fence)
        log = writer.add_queue("the job's log", write_log, _LOG_FLUSH_INTERVAL_S)
        self._log = log
        self._plain_console = PlainConsole(log.put, shows_end=False)
        files = JournalFiles(plan.job_folder, fence)
        self._newest_facts = events.facts

        def write_lines(lines: Sequence[str]) -> None:
            files.write([JournalUpdate(self._newest_facts, line) for line in lines])

        # The queue has only lines. With the facts of each it would be full after some 100 events.
        self._journal_queue = writer.add_queue("the journal", write_lines, files.flush_interval_s)
        JournalWriter(self._put_update, events, seconds, files.step_interval_s)
        self._owns_journal = True

    def begin(self, *, adopted: bool) -> None:
        """Writes this process's first entry into the journal, and begins to keep events."""
        worker_spec = self._plan.worker_spec
        self._events.emit(
            RunBegun(
                worker_spec.run,
                redact_document(to_document(self._plan.spec)),
                worker_spec.working_dir,
                isinstance(worker_spec.entrypoint, bytes),
                adopted,
                self._plan.source,
            )
        )
        adopted_text = ", continuing a run whose controller was lost" * adopted
        self._log.put(
            f"--- job {self._plan.spec.name} began at {format_time(time.time())}{adopted_text} ---"
        )
        self._events.subscribe(self._show)

    def end(self, outcome: JobResult | RayzeroError) -> None:
        """Writes how the job ended, as the journal's last entry and the log's last lines."""
        error = outcome.seen if isinstance(outcome, RayzeroError) else ""
        if isinstance(outcome, JobResult):
            lines = list(summary_lines(outcome))
        else:
            lines = str(outcome).splitlines()
        for line in lines:
            self._log.put(line)
        if isinstance(outcome, JobResult):
            self._store_summary(outcome)
        self._log.put(f"--- {final_state(outcome)} at {format_time(time.time())} ---")
        self._events.emit(RunEnded(str(final_state(outcome)), error))

    def stop_journal(self) -> None:
        """Stops writing into the job's folder, because another process owns it."""
        self._owns_journal = False
        self._journal_queue.discard()
        self.store_writer.close(0.0)

    def write_again(self) -> None:
        """Writes the journal's state and an event, after the files in the job's folder were
        removed."""
        self._events.emit(FolderRemoved())

    @property
    def is_journal_written(self) -> bool:
        return self._journal_queue.is_empty

    def flush_journal(self, limit_s: float) -> bool:
        """Blocks until all events so far are durable. Returns False if that takes too long."""
        return self._journal_queue.flush(limit_s)

    def close_store(self, limit_s: float) -> None:
        """Writes the rest of the log and the results into the store. Called after the last line of
        the log file. Blocks for up to `limit_s`."""
        if not self._owns_journal:
            return  # `stop_journal` has closed the writer; another limit would let it try again
        if not self.store_writer.close(limit_s):
            self.store_writer.warn(
                "the store has not taken the end of the job's log, or its results: they are in "
                f"{self._plan.output_dir}"
            )

    def _open_store_queues(
        self, append_lines: Callable[[Sequence[str]], int], fence: Callable[[], None]
    ) -> Callable[[Sequence[str]], None]:
        """Opens the queues that copy the log, and the results at the end, into the job's store.
        Returns a function that writes lines of the log, to be called instead of `append_lines`."""
        upload = LogUpload(self._plan, self.store_writer.warn, fence)
        interval_s = self._plan.spec.records.interval_s
        log = self.store_writer.add_queue("the log in the store", upload.write, interval_s)

        def write_summary(results: Sequence[JobResult]) -> None:
            fence()
            store = open_store(self._plan.job_folder)
            store.replace(self._plan.summary_path.name, results[-1].summary())

        summary = self.store_writer.add_queue("the results in the store", write_summary, 0.0)
        self._store_summary = summary.put

        def write_log(lines: Sequence[str]) -> None:
            upload.logged_bytes += append_lines(lines)
            log.wake()

        return write_log

    def _put_update(self, update: JournalUpdate) -> None:
        self._newest_facts = update.facts  # first, so that the state is never older than a line
        if self._owns_journal:
            self._journal_queue.put(update.line)

    def _show(self, event: JobEvent) -> None:
        event = redact_event(event)
        self._buffer.on_event(event)
        self._plain_console.on_event(event)

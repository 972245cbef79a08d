"""A client's thread that polls one job for its events until the job ends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Condition, Event, Thread
from typing import TypeVar

from rayzero.engine.errors import RayzeroError, first_line
from rayzero.orchestrator.errors import JobFailedError, internal_error
from rayzero.orchestrator.job.actor import JobActor
from rayzero.orchestrator.job.client import JobProcess, JobProcessLostError, JobUnavailableError
from rayzero.orchestrator.job.ended_jobs import load_ended
from rayzero.orchestrator.job_events import JobEvent, JobObserver, JobWarning, NullObserver
from rayzero.orchestrator.results import EndedJob, EventPage, JobStatus
from rayzero.workers.bounded_queue import BoundedQueue

T = TypeVar("T")

LONG_POLL_S = 1.0  # how long a poll waits in the job's process for an event
ANSWER_MARGIN_S = 30.0  # how much longer the reply may take
UNAVAILABLE_LIMIT_S = 60.0
"""How long a process that does not answer is polled again: Ray may be restarting it."""
_RETRY_PAUSE_S = 0.2
_ACKNOWLEDGE_TIMEOUT_S = 5.0


class EventSubscriber:
    """Owns the thread `rayzero-follower`, which ends with the job, or at `close`.

    Args:
        since: as for `EventBuffer.fetch_since`.
        observer: gets every event, in the thread.
        on_end: called at the end of the thread, in it.
        ended: the end of the job, if it has ended before; then there is nothing to poll.
    """

    def __init__(
        self,
        process: JobProcess,
        since: int,
        observer: JobObserver,
        on_end: Callable[[], None],
        ended: EndedJob | None = None,
    ) -> None:
        self.ended = ended
        """Set before the thread ends, unless it was closed."""
        self._process = process
        self._since = since
        self._observer = observer
        self._on_end = on_end
        self._events: BoundedQueue[JobEvent] = BoundedQueue()
        self._changed = Condition()
        self._closed = Event()
        self._thread = Thread(target=self._run, name="rayzero-follower", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for the end. Returns False when `timeout_s` passed before it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread. The job continues."""
        self._closed.set()

    def newest(self, kind: type[T]) -> T | None:
        """The newest event of that kind, among those that are kept."""
        with self._changed:
            events = list(self._events.since(0))
        return next((event for event in reversed(events) if isinstance(event, kind)), None)

    def iter_events(self) -> Iterator[JobEvent]:
        """Yields events from the oldest one that is kept to the last one; waits for new ones."""
        index = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda index=index: self._events.end > index or not self.is_alive,  # type: ignore[misc]
                    LONG_POLL_S,
                )
                page, index = list(self._events.since(index)), self._events.end
            yield from page
            if not page and not self.is_alive:
                return

    def _run(self) -> None:
        try:
            if self.ended is None:
                self._follow()
        except Exception as error:  # noqa: BLE001  # `JobHandle.result` must raise it
            outcome = error if isinstance(error, RayzeroError) else internal_error(error)
            status = JobStatus(self._process.name, None, error=first_line(outcome))
            self.ended = EndedJob(status, outcome)
        finally:
            self._on_end()

    def _follow(self) -> None:
        page = EventPage(next_index=self._since)
        while not self._closed.is_set():
            page = self._fetch_page(page.run, page.next_index)
            if page.dropped:
                text = f"{page.dropped} events were dropped: this client is slower than the job"
                self._deliver(JobWarning(text))
            for event in page.events:
                self._deliver(event)
            if page.ended is not None:
                self.ended = page.ended
                with suppress(RayzeroError):  # another client did, and the process has ended
                    self._process.call(JobActor.acknowledge_end, timeout_s=_ACKNOWLEDGE_TIMEOUT_S)
                return

    def _fetch_page(self, run: str, since: int) -> EventPage:
        """The next events; retries for `UNAVAILABLE_LIMIT_S`. No events after `close`. Raises
        JobFailedError if the process does not answer, or has ended without a record of its end."""
        deadline_s = time.monotonic() + UNAVAILABLE_LIMIT_S
        while True:
            try:
                return self._process.call(
                    JobActor.fetch_events,
                    run,
                    since,
                    LONG_POLL_S,
                    timeout_s=LONG_POLL_S + ANSWER_MARGIN_S,
                )
            except JobUnavailableError as unavailable:
                if time.monotonic() > deadline_s:
                    raise JobFailedError(unavailable.seen) from None
            except JobProcessLostError as lost:
                # Another client may have acknowledged the end, and the process has ended itself.
                if (ended := load_ended(self._process.name)) is None:
                    raise JobFailedError(lost.seen) from None
                return EventPage(run, (), since, ended=ended)
            if self._closed.wait(_RETRY_PAUSE_S):
                return EventPage(run, (), since)

    def _deliver(self, event: JobEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
        if self._closed.is_set():
            return  # whose observer it was does other things
        try:
            self._observer.on_event(event)
        except Exception:  # noqa: BLE001  # user code must not end this thread
            traceback.print_exc()
            self._observer = NullObserver()

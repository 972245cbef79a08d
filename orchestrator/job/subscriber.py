"""A client's thread that polls one job for its events until the job ends."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Event, Thread
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job import client
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord
from rayzero.orchestrator.job.recorder import MAX_BUFFERED_EVENTS
from rayzero.orchestrator.job_events import JobEvent, JobObserver, JobWarning, NullObserver
from rayzero.orchestrator.results import EventPage, JobEnd, JobStatus

LONG_POLL_S = 1.0
"""How long a poll waits in the job's process for an event."""


ANSWER_MARGIN_S = 30.0
"""How much longer the reply may take."""


UNAVAILABLE_LIMIT_S = 60.0
"""How long a process that does not answer is polled again: Ray may be restarting it."""


_RETRY_PAUSE_S = 0.2


_END_CALL_TIMEOUT_S = 5.0
"""Limit for the last calls, after the job's end."""


class EventSubscriber:
    """Owns the thread `rayzero-follower`, which ends with the job, or at `close`.

    Args:
        actor: the job's process; None when the job has ended before.
        since: as for `EventBuffer.fetch_since`.
        observer: gets every event, in the thread.
        on_end: called at the end of the thread, in it.
        lookup_ended: the cluster's record of the job's end, if there is one; called when the
            process has ended.
    """

    def __init__(
        self,
        actor: Any,
        since: int,
        observer: JobObserver,
        on_end: Callable[[], None],
        lookup_ended: Callable[[], EndedJobRecord | None] = lambda: None,
    ) -> None:
        self.ended: JobEnd | None = None
        self.status: JobStatus | None = None
        """The final status."""
        self._actor = actor
        self._since = since
        self._observer = observer
        self._on_end = on_end
        self._lookup_ended = lookup_ended
        self._events: deque[JobEvent] = deque(maxlen=MAX_BUFFERED_EVENTS)
        self._count = 0
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

    def buffered_events(self) -> list[JobEvent]:
        """The events that are kept now."""
        with self._changed:
            return list(self._events)

    def iter_events(self) -> Iterator[JobEvent]:
        """From the oldest event that is kept to the last one; waits for events to come."""
        index = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda index=index: self._count > index or not self.is_alive,  # type: ignore[misc]
                    LONG_POLL_S,
                )
                oldest = self._count - len(self._events)
                page, index = list(self._events)[max(0, index - oldest) :], self._count
            yield from page
            if not page and not self.is_alive:
                return

    def _run(self) -> None:
        try:
            self.ended = self._poll_events()
        except RayzeroError as error:
            self.ended = JobEnd(error=error)
        except Exception as error:  # noqa: BLE001  # `result` must raise it
            text = f"internal error in rayzero: {type(error).__name__}: {error}"
            self.ended = JobEnd(error=JobFailedError(text, fix="please report this"))
        finally:
            self._on_end()

    def _poll_events(self) -> JobEnd | None:
        run, since = "", self._since
        if self._actor is None:
            return self._load_recorded_end()
        while not self._closed.is_set():
            page = self._fetch_page(run, since)
            if page.dropped:
                text = f"{page.dropped} events were dropped: this client is slower than the job"
                self._deliver(JobWarning(text))
            for event in page.events:
                self._deliver(event)
            run, since = page.run, page.next_index
            if page.ended is not None:
                self._acknowledge_end()
                return page.ended
        return None

    def _fetch_page(self, run: str, since: int) -> EventPage:
        """The next events; retries for `UNAVAILABLE_LIMIT_S`.

        Raises:
            JobFailedError: the process does not answer, or has ended without a record of its end.
        """
        deadline_s = time.monotonic() + UNAVAILABLE_LIMIT_S
        while True:
            try:
                wait_s = LONG_POLL_S + ANSWER_MARGIN_S
                page: EventPage = client.call(
                    self._actor, "fetch_events", run, since, LONG_POLL_S, timeout_s=wait_s
                )
                return page
            except client.JobUnavailableError as away:
                if time.monotonic() > deadline_s:
                    raise JobFailedError(away.seen) from None
            except client.JobProcessLostError as gone:
                # Another client may have acknowledged the end, and the process has ended itself.
                if (ended := self._load_recorded_end()) is None:
                    raise JobFailedError(gone.seen) from None
                return EventPage(run, (), since, ended=ended)
            if self._closed.wait(_RETRY_PAUSE_S):
                return EventPage(run, (), since, ended=JobEnd())

    def _load_recorded_end(self) -> JobEnd | None:
        if (record := self._lookup_ended()) is None:
            return None
        self.status = record.status
        return record.ended

    def _acknowledge_end(self) -> None:
        try:
            if self.status is None:
                self.status = client.call(self._actor, "status", timeout_s=_END_CALL_TIMEOUT_S)
            client.call(self._actor, "acknowledge_end", timeout_s=_END_CALL_TIMEOUT_S)
        except RayzeroError:
            pass  # another client has acknowledged the end, and the process has ended

    def _deliver(self, event: JobEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._count += 1
            self._changed.notify_all()
        try:
            self._observer.on_event(event)
        except Exception:  # noqa: BLE001  # user code must not end this thread
            traceback.print_exc()
            self._observer = NullObserver()

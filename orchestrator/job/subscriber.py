"""A client's thread that follows one job: fetches its notices, shows and keeps them, to the end."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Event, Thread
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job import client as reach
from rayzero.orchestrator.job.ended_jobs import EndedJobRecord
from rayzero.orchestrator.job.recorder import MAX_BUFFERED_EVENTS
from rayzero.orchestrator.job_events import JobEvent, JobObserver, JobWarning, NullObserver
from rayzero.orchestrator.results import EventPage, JobEnd, JobStatus

LONG_POLL_S = 1.0
"""How long a question for news waits at the job's process."""


ANSWER_MARGIN_S = 30.0
"""How long a process may take to answer beyond that."""


UNAVAILABLE_LIMIT_S = 60.0
"""How long a process that does not answer is asked again: Ray may be starting it anew."""


_RETRY_PAUSE_S = 0.2


_END_CALL_TIMEOUT_S = 5.0
"""How long the last questions may take, when the job has ended."""


class EventSubscriber:
    """Owns the thread `rayzero-follower`, which ends with the job, or at `close`.

    Args:
        actor: the job's process; None when the job has ended before.
        since: as for `EventBuffer.news`.
        observer: is shown every notice, in the thread.
        then: called at the thread's end, in it.
        recall: how the job ended, if the cluster kept that; asked when the process is gone.
    """

    def __init__(
        self,
        actor: Any,
        since: int,
        observer: JobObserver,
        then: Callable[[], None],
        recall: Callable[[], EndedJobRecord | None] = lambda: None,
    ) -> None:
        self.ended: JobEnd | None = None
        self.status: JobStatus | None = None
        """How the job stood at its end."""
        self._actor = actor
        self._since = since
        self._observer = observer
        self._on_end = then
        self._lookup_ended = recall
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
        """Waits for the end; whether it came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Follows no longer. The job goes on."""
        self._closed.set()

    def buffered_events(self) -> list[JobEvent]:
        """Those that are kept now."""
        with self._changed:
            return list(self._events)

    def iter_events(self) -> Iterator[JobEvent]:
        """From the first that is kept to the last of all; waits for those to come."""
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda at=at: self._count > at or not self.is_alive,  # type: ignore[misc]
                    LONG_POLL_S,
                )
                first = self._count - len(self._events)
                page, at = list(self._events)[max(0, at - first) :], self._count
            yield from page
            if not page and not self.is_alive:
                return

    def _run(self) -> None:
        try:
            self.ended = self._poll_events()
        except RayzeroError as error:
            self.ended = JobEnd(error=error)
        except Exception as error:  # noqa: BLE001  # the thread's end: nothing may be lost
            text = f"rayzero itself failed: {type(error).__name__}: {error}"
            self.ended = JobEnd(error=JobFailedError(text, fix="please report this"))
        finally:
            self._on_end()

    def _poll_events(self) -> JobEnd | None:
        run, since = "", self._since
        if self._actor is None:
            return self._load_recorded_end()
        while not self._closed.is_set():
            news = self._fetch_page(run, since)
            if news.dropped:
                self._deliver(
                    JobWarning(f"{news.dropped} messages of the job were dropped: it is faster")
                )
            for notice in news.events:
                self._deliver(notice)
            run, since = news.run, news.next_index
            if news.ended is not None:
                self._acknowledge_end()
                return news.ended
        return None

    def _fetch_page(self, run: str, since: int) -> EventPage:
        """Asks again for a while when nobody answers.

        Raises:
            JobFailedError: nobody does.
        """
        until_s = time.monotonic() + UNAVAILABLE_LIMIT_S
        while True:
            try:
                wait_s = LONG_POLL_S + ANSWER_MARGIN_S
                page: EventPage = reach.call(
                    self._actor, "fetch_events", run, since, LONG_POLL_S, timeout_s=wait_s
                )
                return page
            except reach.JobUnavailableError as away:
                if time.monotonic() > until_s:
                    raise JobFailedError(away.seen) from None
            except reach.JobProcessLostError as gone:
                # Perhaps another follower was faster, and the process has ended itself.
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
                self.status = reach.call(self._actor, "status", timeout_s=_END_CALL_TIMEOUT_S)
            reach.call(self._actor, "acknowledge_end", timeout_s=_END_CALL_TIMEOUT_S)
        except RayzeroError:
            pass  # another follower was faster, and the process is gone

    def _deliver(self, notice: JobEvent) -> None:
        with self._changed:
            self._events.append(notice)
            self._count += 1
            self._changed.notify_all()
        try:
            self._observer.on_event(notice)
        except Exception:  # noqa: BLE001  # the user's own: it must not end the follower
            traceback.print_exc()
            self._observer = NullObserver()

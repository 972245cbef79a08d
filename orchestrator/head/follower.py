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
from rayzero.orchestrator.head import reach
from rayzero.orchestrator.head.feed import KEPT
from rayzero.orchestrator.head.outcome import Ended, JobStatus, News
from rayzero.orchestrator.head.records import Record
from rayzero.orchestrator.notices import Notice, Observer, Unwatched, Warned

POLL_S = 1.0
"""How long a question for news waits at the job's process."""
ANSWER_S = 30.0
"""How long a process may take to answer beyond that."""
AWAY_S = 60.0
"""How long a process that does not answer is asked again: Ray may be starting it anew."""
_PAUSE_S = 0.2
_LAST_S = 5.0
"""How long the last questions may take, when the job has ended."""


class Follower:
    """Owns the thread `rayzero-follower`, which ends with the job, or at `close`.

    Args:
        actor: the job's process; None when the job has ended before.
        since: as for `Feed.news`.
        observer: is shown every notice, in the thread.
        then: called at the thread's end, in it.
        recall: how the job ended, if the cluster kept that; asked when the process is gone.
    """

    def __init__(
        self,
        actor: Any,
        since: int,
        observer: Observer,
        then: Callable[[], None],
        recall: Callable[[], Record | None] = lambda: None,
    ) -> None:
        self.ended: Ended | None = None
        self.status: JobStatus | None = None
        """How the job stood at its end."""
        self._actor = actor
        self._since = since
        self._observer = observer
        self._then = then
        self._recall = recall
        self._told: deque[Notice] = deque(maxlen=KEPT)
        self._count = 0
        self._news = Condition()
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

    def known(self) -> list[Notice]:
        """Those that are kept now."""
        with self._news:
            return list(self._told)

    def notices(self) -> Iterator[Notice]:
        """From the first that is kept to the last of all; waits for those to come."""
        at = 0
        while True:
            with self._news:
                self._news.wait_for(lambda at=at: self._count > at or not self.is_alive, POLL_S)  # type: ignore[misc]
                first = self._count - len(self._told)
                page, at = list(self._told)[max(0, at - first) :], self._count
            yield from page
            if not page and not self.is_alive:
                return

    def _run(self) -> None:
        try:
            self.ended = self._follow()
        except RayzeroError as error:
            self.ended = Ended(error=error)
        except Exception as error:  # noqa: BLE001  # the thread's end: nothing may be lost
            text = f"rayzero itself failed: {type(error).__name__}: {error}"
            self.ended = Ended(error=JobFailedError(text, fix="please report this"))
        finally:
            self._then()

    def _follow(self) -> Ended | None:
        run, since = "", self._since
        if self._actor is None:
            return self._recalled()
        while not self._closed.is_set():
            news = self._ask(run, since)
            if news.missed:
                self._show(Warned(f"{news.missed} messages of the job were dropped: it is faster"))
            for notice in news.notices:
                self._show(notice)
            run, since = news.run, news.upto
            if news.ended is not None:
                self._say_goodbye()
                return news.ended
        return None

    def _ask(self, run: str, since: int) -> News:
        """Asks again for a while when nobody answers.

        Raises:
            JobFailedError: nobody does.
        """
        until_s = time.monotonic() + AWAY_S
        while True:
            try:
                wait_s = POLL_S + ANSWER_S
                return reach.call(self._actor, "news", run, since, POLL_S, timeout_s=wait_s)  # type: ignore[no-any-return]
            except reach.AwayError as away:
                if time.monotonic() > until_s:
                    raise JobFailedError(away.seen) from None
            except reach.GoneError as gone:
                # Perhaps another follower was faster, and the process has ended itself.
                if (ended := self._recalled()) is None:
                    raise JobFailedError(gone.seen) from None
                return News(run, (), since, ended=ended)
            if self._closed.wait(_PAUSE_S):
                return News(run, (), since, ended=Ended())

    def _recalled(self) -> Ended | None:
        if (record := self._recall()) is None:
            return None
        self.status = record.status
        return record.ended

    def _say_goodbye(self) -> None:
        try:
            if self.status is None:
                self.status = reach.call(self._actor, "status", timeout_s=_LAST_S)
            reach.call(self._actor, "fetched", timeout_s=_LAST_S)
        except RayzeroError:
            pass  # another follower was faster, and the process is gone

    def _show(self, notice: Notice) -> None:
        with self._news:
            self._told.append(notice)
            self._count += 1
            self._news.notify_all()
        try:
            self._observer.see(notice)
        except Exception:  # noqa: BLE001  # the user's own: it must not end the follower
            traceback.print_exc()
            self._observer = Unwatched()

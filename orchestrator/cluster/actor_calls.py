"""Batched polls and broadcasts.

What a job's Ray actors say and answer: a poll under way at each of them, commands to many.

Many calls of Ray actors at once: their answers come to the event loop in batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from threading import Lock
from typing import Any

from rayzero.orchestrator.aio import ChangeNotifier, PendingReplies
from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause
from rayzero.orchestrator.interfaces import WORKER_POLL_S, WorkerLostError, WorkerReports
from rayzero.workers.messages import WorkerMessage

ReplyHandler = Callable[["Future[Any]"], None]
"""Told of an answer, or of an error, in the event loop."""

_MAX_BATCH_DELAY_S = 0.01


_DELAY_PER_WORKER_S = 1e-5


_BATCH_FROM_WORKERS = 100


def batch_delay_s(workers: int) -> float:
    """How long to gather what so many workers say. To wake the event loop costs as much as to hear
    ten of them, and a thousand that each speak once a second would wake it a thousand times."""
    return (
        min(_MAX_BATCH_DELAY_S, _DELAY_PER_WORKER_S * workers)
        if workers >= _BATCH_FROM_WORKERS
        else 0.0
    )


class _Wakeup(Enum):
    """When the event loop looks again at what arrived."""

    SCHEDULED = auto()
    """At once; it was told to."""
    DELAYED = auto()
    """Behind a while of gathering."""
    NONE = auto()
    """When it is told to."""


class FutureBatcher:
    """From Ray's threads, where answers arrive, to one event loop. It costs no task and no timer a
    call, and one wake-up a batch. After `close` answers are dropped.

    Args:
        on_batch: called behind every batch.
    """

    def __init__(self, on_batch: Callable[[], None]) -> None:
        self.batch_delay_s = 0.0
        """How long answers are gathered behind a batch. Errors never wait."""
        self._on_batch = on_batch
        self._done: deque[tuple[ReplyHandler, Future[Any]]] = deque()
        self._lock = Lock()
        self._wakeup = _Wakeup.NONE
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def add_call(self, reference: Any, answered: ReplyHandler) -> None:
        """Waits for a call's answer; from the event loop."""
        loop = asyncio.get_running_loop()
        reference.future().add_done_callback(partial(self._on_done, loop, answered))

    def close(self) -> None:
        """From the event loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_done(
        self, loop: asyncio.AbstractEventLoop, answered: ReplyHandler, answer: Future[Any]
    ) -> None:
        self._done.append((answered, answer))
        with self._lock:
            waits = self._wakeup is _Wakeup.DELAYED and answer.exception() is None
            if waits or self._wakeup is _Wakeup.SCHEDULED:
                return
            self._wakeup = _Wakeup.SCHEDULED
        with suppress(RuntimeError):  # the loop is over, and nobody waits any more
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            # What arrives from now on finds a wake-up or a timer to come, or wakes the loop itself.
            self._wakeup = _Wakeup.DELAYED if self._done and self.batch_delay_s else _Wakeup.NONE
            gathers = self._wakeup is _Wakeup.DELAYED and not self._closed
        if gathers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.batch_delay_s, self._deliver)
        while self._done:
            answered, answer = self._done.popleft()
            if not self._closed:
                answered(answer)
        self._on_batch()


ActorCall = Callable[[int], Any]
"""Calls a worker's actor; the reference to the answer. It may raise WorkerLostError."""


class ActorPoller:
    """Used from one event loop, until `close`: after that nobody is listened to any more.

    A worker that is found gone, by a poll or by a command, is told once, behind all that it said,
    and no longer listened to.

    Args:
        poll: has a worker wait up to so many seconds for something to say.
    """

    def __init__(self, poll: Callable[[int, float], Any]) -> None:
        self._call_poll = poll
        self._changed = ChangeNotifier()
        self._batcher = FutureBatcher(self._changed.notify)
        self._subscribed: set[int] = set()
        self._messages: list[tuple[int, list[WorkerMessage]]] = []
        self._lost: dict[int, str] = {}
        self._error: Exception | None = None

    def close(self) -> None:
        self._batcher.close()

    def subscribe(self, workers: Iterable[int]) -> None:
        """Has these polled from now on."""
        for worker in workers:
            self._subscribed.add(worker)
            self._start_poll(worker)
        self._batcher.batch_delay_s = batch_delay_s(len(self._subscribed))
        self._changed.notify()

    async def receive(self) -> WorkerReports:
        """What came since the last time; waits for something to come.

        Raises:
            Exception: a worker could not be asked, though it is there: a mistake of ours.
        """
        await self._changed.wait_until(lambda: bool(self._messages or self._lost or self._error))
        if self._error is not None:
            raise self._error
        heard = WorkerReports(self._messages, tuple(self._lost.items()))
        self._messages, self._lost = [], {}
        return heard

    def broadcast(self, workers: Iterable[int], call: ActorCall) -> PendingReplies:
        """Calls many actors, and waits for none of them."""
        answers = PendingReplies(workers)
        for worker in sorted(answers.pending):
            try:
                self._batcher.add_call(call(worker), partial(self._on_reply, worker, answers))
            except WorkerLostError as lost:
                self._mark_lost(worker, str(lost))
                answers.mark_done([worker])
        return answers

    def _on_reply(self, worker: int, answers: PendingReplies, answer: Future[Any]) -> None:
        error = answer.exception()
        if isinstance(error, ACTOR_LOST):
            self._mark_lost(worker, death_cause(error))
        elif isinstance(error, Exception):
            answers.mark_failed(error)
            return
        answers.mark_done([worker])

    def _start_poll(self, worker: int) -> None:
        try:
            self._batcher.add_call(
                self._call_poll(worker, WORKER_POLL_S), partial(self._on_poll, worker)
            )
        except WorkerLostError as lost:
            self._mark_lost(worker, str(lost))

    def _on_poll(self, worker: int, answer: Future[list[WorkerMessage]]) -> None:
        error = answer.exception()
        if error is None:
            self._messages.append((worker, answer.result()))
            if worker in self._subscribed:
                self._start_poll(worker)
        elif isinstance(error, ACTOR_LOST):
            self._mark_lost(worker, death_cause(error))
        elif isinstance(error, Exception):
            self._error = error

    def _mark_lost(self, worker: int, why: str) -> None:
        if worker in self._subscribed:
            self._subscribed.discard(worker)
            self._lost[worker] = why
            self._changed.notify()

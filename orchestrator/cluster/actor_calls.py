"""Polls and broadcasts to many Ray actors, whose replies reach the event loop in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

from rayzero.orchestrator.aio import WORKER_POLL_S, ChangeNotifier, PendingReplies, WorkerReports
from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.workers.messages import WorkerMessage

ReplyHandler = Callable[["Future[Any]"], None]
"""Called in the event loop with a completed call: a reply or an error."""

_MAX_BATCH_DELAY_S = 0.01
_DELAY_PER_WORKER_S = 1e-5
_BATCH_FROM_WORKERS = 100


def batch_delay_s(workers: int) -> float:
    """How long to collect replies of this many workers. A wake-up of the event loop costs as much
    as ten replies, and a thousand workers with one message a second would wake it a thousand
    times."""
    if workers < _BATCH_FROM_WORKERS:
        return 0.0
    return min(_MAX_BATCH_DELAY_S, _DELAY_PER_WORKER_S * workers)


class FutureBatcher:
    """Passes replies from Ray's threads to one event loop: no task and no timer for a call, one
    wake-up for a batch, after which it calls `on_batch`. After `close` replies are dropped."""

    def __init__(self, on_batch: Callable[[], None]) -> None:
        self.batch_delay_s = 0.0
        """How long replies are collected after a batch. Errors are delivered at once."""
        self._on_batch = on_batch
        self._done: deque[tuple[ReplyHandler, Future[Any]]] = deque()
        self._lock = Lock()
        self._scheduled = False  # a delivery is requested as soon as the loop runs
        self._timer: asyncio.TimerHandle | None = None  # delivers at the end of the batch delay
        self._closed = False

    def add_call(self, reference: Any, on_done: ReplyHandler) -> None:
        """Calls `on_done` when the call has completed. Called in the event loop."""
        loop = asyncio.get_running_loop()
        reference.future().add_done_callback(partial(self._on_done, loop, on_done))

    def close(self) -> None:
        """Called in the event loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_done(
        self, loop: asyncio.AbstractEventLoop, on_done: ReplyHandler, reply: Future[Any]
    ) -> None:
        """Called by Ray's threads."""
        self._done.append((on_done, reply))
        with self._lock:
            can_wait = self._timer is not None and reply.exception() is None
            if self._scheduled or can_wait:
                return
            self._scheduled = True
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:  # later replies find the new timer, or wake the loop themselves
            self._scheduled = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._done and self.batch_delay_s and not self._closed:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.batch_delay_s, self._deliver)
        while self._done:
            on_done, reply = self._done.popleft()
            if not self._closed:
                on_done(reply)
        self._on_batch()


class ActorPoller:
    """Keeps one long poll open at each subscribed worker, until `close`. Used from one event loop.
    `poll` starts a poll of a worker, which waits up to the given seconds for messages.

    A worker whose poll or command finds it lost is reported once, after all its messages, and
    unsubscribed.
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
        for worker in workers:
            self._subscribed.add(worker)
            self._start_poll(worker)
        self._batcher.batch_delay_s = batch_delay_s(len(self._subscribed))
        self._changed.notify()

    async def receive(self) -> WorkerReports:
        """Messages and losses since the last call; waits until there are some. Raises the error of
        a poll that failed in a worker that is alive, which is a bug."""
        await self._changed.wait_until(lambda: bool(self._messages or self._lost or self._error))
        if self._error is not None:
            raise self._error
        reports = WorkerReports(self._messages, tuple(self._lost.items()))
        self._messages, self._lost = [], {}
        return reports

    def broadcast(self, workers: Iterable[int], call: Callable[[int], Any]) -> PendingReplies:
        """Calls many actors without waiting for their replies. `call` returns the reference to a
        worker's reply, or raises WorkerLostError."""
        replies = PendingReplies(workers)
        for worker in sorted(replies.pending):
            try:
                self._batcher.add_call(call(worker), partial(self._on_reply, worker, replies))
            except WorkerLostError as lost:
                self._mark_lost(worker, str(lost))
                replies.mark_done([worker])
        return replies

    def _on_reply(self, worker: int, replies: PendingReplies, reply: Future[Any]) -> None:
        error = reply.exception()
        if isinstance(error, ACTOR_LOST):
            self._mark_lost(worker, death_cause(error))
        elif isinstance(error, Exception):
            replies.mark_failed(error)
            return
        replies.mark_done([worker])

    def _start_poll(self, worker: int) -> None:
        try:
            self._batcher.add_call(
                self._call_poll(worker, WORKER_POLL_S), partial(self._on_poll, worker)
            )
        except WorkerLostError as lost:
            self._mark_lost(worker, str(lost))

    def _on_poll(self, worker: int, reply: Future[list[WorkerMessage]]) -> None:
        error = reply.exception()
        if error is None:
            self._messages.append((worker, reply.result()))
            if worker in self._subscribed:
                self._start_poll(worker)
        elif isinstance(error, ACTOR_LOST):
            self._mark_lost(worker, death_cause(error))
        elif isinstance(error, Exception):
            self._error = error

    def _mark_lost(self, worker: int, cause: str) -> None:
        if worker in self._subscribed:
            self._subscribed.discard(worker)
            self._lost[worker] = cause
            self._changed.notify()

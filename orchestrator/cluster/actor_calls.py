"""Waits for the ends of many Ray actors, and calls them; replies come in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

from rayzero.orchestrator.aio import ChangeNotifier, PendingReplies, WorkerReports
from rayzero.orchestrator.cluster.node_links import WorkerMail
from rayzero.orchestrator.cluster.ray_api import ACTOR_LOST, death_cause
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.workers.step_rows import ReceivedMessage

ReplyHandler = Callable[["Future[Any]"], None]
"""Called in the event loop with a completed call: a reply or an error."""


class FutureBatcher:
    """Passes replies from Ray's threads to one event loop: no task and no timer for a call, one
    wake-up for all that have come before it, after which it calls `on_batch`. After `close` replies
    are dropped."""

    def __init__(self, on_batch: Callable[[], None]) -> None:
        self._on_batch = on_batch
        self._done: deque[tuple[ReplyHandler, Future[Any]]] = deque()
        self._lock = Lock()
        self._scheduled = False  # a delivery is requested
        self._closed = False

    def add_call(self, reference: Any, on_done: ReplyHandler) -> None:
        """Calls `on_done` when the call has completed. Called in the event loop."""
        loop = asyncio.get_running_loop()
        reference.future().add_done_callback(partial(self._on_done, loop, on_done))

    def close(self) -> None:
        """Called in the event loop."""
        self._closed = True

    def _on_done(
        self, loop: asyncio.AbstractEventLoop, on_done: ReplyHandler, reply: Future[Any]
    ) -> None:
        """Called by Ray's threads."""
        with self._lock:
            self._done.append((on_done, reply))
            if self._scheduled:
                return
            self._scheduled = True
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:  # later replies wake the loop again
            self._scheduled = False
        while self._done:
            on_done, reply = self._done.popleft()
            if not self._closed:
                on_done(reply)
        self._on_batch()


class WorkerWatch:
    """The messages and the losses of subscribed workers, until `close`. Used from one event loop.

    A worker that Ray or a command finds lost is reported once, after the messages received so far,
    and unsubscribed.

    Args:
        mail: has their messages.
        wait_end: begins a call to a worker's actor that fails when its process has ended.
    """

    def __init__(self, mail: WorkerMail, wait_end: Callable[[int], Any]) -> None:
        self._mail = mail
        self._wait_end = wait_end
        self._changed = ChangeNotifier()
        self._batcher = FutureBatcher(self._changed.notify)
        self._subscribed: set[int] = set()
        self._messages: list[tuple[int, list[ReceivedMessage]]] = []
        self._lost: dict[int, str] = {}

    def close(self) -> None:
        self._batcher.close()

    def subscribe(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._subscribed.add(worker)
            try:
                self._batcher.add_call(self._wait_end(worker), partial(self._on_end, worker))
            except WorkerLostError as lost:
                self._mark_lost(worker, str(lost))
                continue
            self._mail.subscribe(worker, self._on_messages)
        self._changed.notify()

    async def receive(self) -> WorkerReports:
        """Messages and losses since the last call; waits until there are some."""
        await self._changed.wait_until(lambda: bool(self._messages or self._lost))
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

    def _on_messages(self, worker: int, messages: list[ReceivedMessage]) -> None:
        self._messages.append((worker, messages))
        self._changed.notify()

    def _on_end(self, worker: int, reply: Future[None]) -> None:
        error = reply.exception()
        self._mark_lost(worker, death_cause(error) if isinstance(error, ACTOR_LOST) else str(error))

    def _mark_lost(self, worker: int, cause: str) -> None:
        if worker in self._subscribed:
            self._subscribed.discard(worker)
            self._mail.unsubscribe(worker)
            self._lost[worker] = cause
            self._changed.notify()

"""One background thread for all files that a job's process writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from rayzero.engine.errors import first_line
from rayzero.orchestrator.top.format import format_size
from rayzero.workers.bounded_queue import MAX_ITEMS, BoundedQueue

RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pause after each consecutive failure; the last one repeats."""
_CLOSING_RETRY_S = 0.2


@dataclass(eq=False)
class WriteQueue:
    """Items that wait to be written to one destination, guarded by the writer's lock.

    Created by `BackgroundWriter.add_queue`. When the queue is full, the oldest items are dropped,
    with a warning. `written` counts, of all items ever put, those that are written or dropped.
    """

    changed: Condition
    subject: str
    write: Callable[[Sequence[Any]], object]
    interval_s: float
    items: BoundedQueue[Any]
    failures: int = 0
    due_s: float = 0.0
    written: int = 0

    def put(self, item: Any) -> None:
        """Queues one item. Never waits for a disk."""
        with self.changed:
            if not self.items:
                self.due_s = time.monotonic() + self.interval_s
                self.changed.notify_all()
            self.items.append(item)
            if self.items.is_half_full and not self.failures and self.due_s > 0:
                self.due_s = 0.0  # at once
                self.changed.notify_all()

    def wake(self) -> None:
        """Makes the thread call `write` once more, even if a call is running now."""
        with self.changed:
            if len(self.items) < 2:
                self.put(None)

    def flush(self, limit_s: float) -> bool:
        """Makes the thread write what is queued now. Blocks for up to `limit_s`; returns whether it
        is written."""
        with self.changed:
            end = self.items.end
            if not self.failures:
                self.due_s = 0.0
            self.changed.notify_all()
            return self.changed.wait_for(lambda: self.written >= end, limit_s)

    def discard(self) -> None:
        """Drops the items that are not written yet."""
        with self.changed:
            self.items.clear()

    @property
    def is_empty(self) -> bool:
        return not self.items


class BackgroundWriter:
    """Owns the daemon thread `rayzero-writer`, which runs from the first `add_queue` to `close`,
    and calls `warn`.

    `put` never waits for a disk: while a write hangs, items collect in a bounded queue. A write
    that raises is retried with the same items.
    """

    def __init__(
        self, warn: Callable[[str], None], retry_delays_s: Sequence[float] = RETRY_DELAYS_S
    ) -> None:
        self.warn = warn
        self._retry_delays_s = retry_delays_s
        self._queues: list[WriteQueue] = []
        self._changed = Condition()
        self._deadline_s: float | None = None
        self._thread = Thread(target=self._run, name="rayzero-writer", daemon=True)

    def add_queue(
        self,
        subject: str,
        write: Callable[[Sequence[Any]], object],
        interval_s: float,
        max_items: int = MAX_ITEMS,
    ) -> WriteQueue:
        """Adds a queue for one destination.

        Args:
            subject: what is written, for warnings.
            write: writes items in order, or raises; called in the thread.
            interval_s: how long items are collected before they are written.
        """
        items: BoundedQueue[Any] = BoundedQueue(max_items=max_items)
        queue = WriteQueue(self._changed, subject, write, interval_s, items)
        with self._changed:
            self._queues.append(queue)
            if len(self._queues) == 1:
                self._thread.start()
        return queue

    def close(self, limit_s: float) -> bool:
        """Writes what is queued, and ends the thread. Blocks for up to `limit_s`. Returns whether
        everything was written in time."""
        with self._changed:
            now_s = time.monotonic()
            self._deadline_s = now_s + limit_s
            for queue in self._queues:
                retry_s = _CLOSING_RETRY_S if queue.failures else 0.0
                queue.due_s = min(queue.due_s, now_s + retry_s)
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(limit_s)
        return not self._thread.is_alive() and all(queue.is_empty for queue in self._queues)

    def _run(self) -> None:
        while (queue := self._wait_due()) is not None:
            self._flush(queue)

    def _wait_due(self) -> WriteQueue | None:
        """Waits until a queue is due, and returns it. Returns None once the writer is closed."""
        with self._changed:
            while True:
                pending = [queue for queue in self._queues if queue.items]
                now_s = time.monotonic()
                if self._deadline_s is not None and (not pending or now_s > self._deadline_s):
                    return None
                if not pending:
                    self._changed.wait()
                    continue
                queue = min(pending, key=lambda queue: queue.due_s)
                if queue.due_s <= now_s or (self._deadline_s is not None and not queue.failures):
                    return queue
                self._changed.wait(queue.due_s - now_s)

    def _flush(self, queue: WriteQueue) -> None:
        with self._changed:
            items, end = list(queue.items.since(0)), queue.items.end
        try:
            queue.write(items)
        except Exception as error:  # noqa: BLE001  # the thread must outlive any of its files
            self._schedule_retry(queue, error)
            return
        with self._changed:
            queue.failures = 0
            queue.due_s = time.monotonic() + queue.interval_s
            dropped, nbytes = queue.items.take_dropped()
            oldest = queue.items.end - len(queue.items)
            # Items that the queue dropped during this write are written, so they do not count.
            dropped -= max(0, min(end, oldest) - (end - len(items)))
            while len(queue.items) > queue.items.end - end:
                queue.items.popleft()
            queue.written = end
            self._changed.notify_all()  # threads that wait in `flush`
        if dropped > 0:
            self.warn(
                f"{queue.subject}: {dropped} entries ({format_size(nbytes)}) were dropped: they"
                " came faster than they could be written"
            )

    def _schedule_retry(self, queue: WriteQueue, error: Exception) -> None:
        """Schedules the next attempt. Warns once for each series of failures."""
        if queue.failures == 0:
            self.warn(f"{queue.subject} cannot be written, retrying: {first_line(error)}")
        with self._changed:
            last = len(self._retry_delays_s) - 1
            delay_s = self._retry_delays_s[min(queue.failures, last)]
            closing = self._deadline_s is not None
            queue.due_s = time.monotonic() + (_CLOSING_RETRY_S if closing else delay_s)
            queue.failures += 1

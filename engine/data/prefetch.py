"""Reads an iterator ahead in a background thread; pins batches and copies them to a device."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch

from rayzero.engine.errors import EngineError
from rayzero.engine.tensor_tree import map_tensors

Item = TypeVar("Item")

_JOIN_TIMEOUT_S = 5.0


class _EndOfStream:
    """The last item: the iterator is exhausted, or it raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _QueueClosedError(Exception):
    """The queue was closed."""


class _BoundedQueue(Generic[Item]):
    """A bounded queue that can be closed, which ends all waits at once: a recovery waits for that.

    `queue.Queue` has `shutdown` only from Python 3.13 on, and its lock is not reentrant.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[Item] = deque()
        self.closed = False
        # Reentrant: the garbage collector may call `close` in a thread that holds the lock.
        self._changed = threading.Condition(threading.RLock())

    def put(self, item: Item) -> None:
        """Add an item, blocking while the queue is full. Raises _QueueClosedError."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._depth)
            if self.closed:
                raise _QueueClosedError
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item:
        """Remove an item, blocking while the queue is empty. Raises _QueueClosedError."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._items)
            if self.closed:
                raise _QueueClosedError
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Drop all items and end current and future waits. Safe to repeat."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


class Prefetch(Generic[Item]):
    """The items of `source`, up to `depth` of them produced ahead.

    Owns one daemon thread, the only one that advances `source`. The thread ends when `source` is
    exhausted or raises (the consumer gets the exception), on `close`, and when this object is
    garbage-collected: the thread refers to the queue, never to this object. An item in production
    at that time is completed and dropped.

    Raises:
        EngineError: advanced after `close`.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._queue: _BoundedQueue[Item | _EndOfStream] = _BoundedQueue(depth)
        self.wait_s = 0.0
        """Seconds that the consumer waited for the last item."""
        self._ended = False
        self._thread = threading.Thread(
            target=_fill_queue, args=(source, self._queue), name="rayzero-prefetch", daemon=True
        )
        weakref.finalize(self, self._queue.close)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        since_s = perf_counter()
        if self._ended:
            raise StopIteration
        try:
            item = self._queue.get()
        except _QueueClosedError:
            raise EngineError(
                "this iterator over the data was closed by a newer one",
                "one iteration at a time",
                "use the newest iterator",
            ) from None
        if not isinstance(item, _EndOfStream):
            self.wait_s = perf_counter() - since_s
            return item
        self._ended = True
        self._thread.join(_JOIN_TIMEOUT_S)
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """End the thread and join it, for at most 5 s if `source` is slow. Safe to repeat."""
        self._queue.close()
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join(_JOIN_TIMEOUT_S)


def _fill_queue(source: Iterator[Item], queue: _BoundedQueue[Item | _EndOfStream]) -> None:
    """Thread body: fill the queue until `source` ends or the queue is closed."""
    end = _EndOfStream(None)
    try:
        for item in source:
            queue.put(item)
    except _QueueClosedError:
        return
    except BaseException as error:  # noqa: BLE001 - re-raised in the consumer
        end = _EndOfStream(error)
    try:
        queue.put(end)
    except _QueueClosedError:
        return


def pin_batch(batch: Any) -> Any:
    """`batch` with its tensors in pinned host memory, for non-blocking copies."""
    return map_tensors(batch, torch.Tensor.pin_memory)


def batch_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`; non-blocking, and `batch` itself for the CPU.

    The copies are enqueued on the current stream, before all later work on it; torch's allocator
    does not reuse a pinned source until its copy is complete.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))

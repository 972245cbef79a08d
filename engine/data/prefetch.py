"""Reads an iterator ahead in a background thread; copies batches to a device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch

from rayzero.engine.device import get_device
from rayzero.engine.errors import EngineError
from rayzero.engine.tensor_tree import map_tensors

Item = TypeVar("Item")

_JOIN_TIMEOUT_S = 5.0


class _EndOfStream:
    """The last item: the iterator is exhausted, or it raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[Item]):
    """The items of `source`, up to `depth` of them read, or being read, ahead.

    Owns one daemon thread, the only one that advances `source`. The thread ends when `source` is
    exhausted or raises (the consumer gets the exception), on `close`, and when this object is
    garbage-collected: the thread refers to the queues, never to this object. An item in production
    at that time is completed and dropped. Raises EngineError if it is advanced after `close`.
    """

    def __init__(
        self, source: Iterator[Item], depth: int = 3, closed: threading.Event | None = None
    ) -> None:
        """
        Args:
            closed: is set when the thread is to end, so that a source that waits can look at it.
        """
        # `SimpleQueue.put` is reentrant: the garbage collector may close this object in a thread
        # that is in the middle of a `put`.
        self._items: SimpleQueue[Item | _EndOfStream] = SimpleQueue()
        self._permits: SimpleQueue[None] = SimpleQueue()  # one for each item that may be read
        closed = closed or threading.Event()
        self.wait_s = 0.0
        """Seconds that the consumer waited for the last item."""
        self._ended = False
        self._thread = threading.Thread(
            target=_read_ahead,
            args=(source, self._items, self._permits, closed),
            name="rayzero-prefetch",
            daemon=True,
        )
        self._stop = weakref.finalize(self, _stop_reading, closed, self._permits)
        for _ in range(depth):
            self._permits.put(None)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self.next_within(None)

    def next_within(self, timeout_s: float | None) -> Item:
        """Returns the next item. Raises queue.Empty if there is none after `timeout_s`;
        StopIteration at the end."""
        since_s = perf_counter()
        self.wait_s = 0.0
        if self._ended:
            raise StopIteration
        if not self._stop.alive:
            raise closed_error()
        try:
            item = self._items.get(timeout=timeout_s)
        finally:
            self.wait_s = perf_counter() - since_s
        if not isinstance(item, _EndOfStream):
            self._permits.put(None)
            return item
        self._ended = True
        self._thread.join(_JOIN_TIMEOUT_S)
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread and joins it, for at most 5 s if `source` is slow. Safe to repeat."""
        self._stop()
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join(_JOIN_TIMEOUT_S)


def closed_error() -> EngineError:
    return EngineError(
        "this iterator over the data was closed by a newer one",
        "one iteration at a time",
        "use the newest iterator",
    )


def _stop_reading(closed: threading.Event, permits: SimpleQueue[None]) -> None:
    closed.set()
    permits.put(None)


def _read_ahead(
    source: Iterator[Item],
    items: SimpleQueue[Item | _EndOfStream],
    permits: SimpleQueue[None],
    closed: threading.Event,
) -> None:
    """Thread body: reads an item for each permit, until `source` ends or `closed` is set."""
    permits.get()
    while not closed.is_set():
        try:
            items.put(next(source))
        except BaseException as error:  # noqa: BLE001 - re-raised in the consumer
            if isinstance(error, StopIteration):
                items.put(_EndOfStream(None))
            else:
                # Once closed, `error` is not kept: its traceback refers to the queue and the
                # source, so it would be a cycle.
                items.put(_EndOfStream(closed_error() if closed.is_set() else error))
            return
        permits.get()


def batch_to_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with its tensors on `device`, non-blocking; `batch` itself for the CPU.

    The copies are enqueued on the current stream, before all later work on it; torch's allocator
    does not reuse a pinned source until its copy is complete.
    """
    own = get_device(device)
    return map_tensors(batch, own.to_device) if own.separate_memory else batch

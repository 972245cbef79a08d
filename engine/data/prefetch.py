"""Background thread, device transfer.

Runs an iterator ahead of its consumer, in a background thread.

Moves whatever a collate function made (tensors in any nest of containers) to a device.
"""

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
    """The producer's last word: the iterator is exhausted, or it raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _QueueClosedError(Exception):
    """Nobody wants any more items."""


class _BoundedQueue(Generic[Item]):
    """A bounded queue whose waits end at once when it is closed: a repair waits for that."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[Item] = deque()
        self.closed = False
        # Reentrant: the garbage collector may close it in a thread that is in here.
        self._changed = threading.Condition(threading.RLock())

    def put(self, item: Item) -> None:
        """Waits for room. Raises _ClosedError."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._depth)
            if self.closed:
                raise _QueueClosedError
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item:
        """Waits for an item. Raises _ClosedError."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._items)
            if self.closed:
                raise _QueueClosedError
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Drops what is there, and ends every wait, now and later. Safe to repeat."""
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


class Prefetch(Generic[Item]):
    """The items of `source`, up to `depth` of them made before they are asked for.

    It owns one daemon thread, which alone advances `source`. The thread ends when `source` is
    exhausted or raises (the consumer gets the exception), on `close`, and when this object is
    garbage: the thread knows the belt between them, never this object. An item that is being made
    when the end comes is finished first and then dropped.

    Raises:
        EngineError: it was advanced after `close`.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._queue: _BoundedQueue[Item | _EndOfStream] = _BoundedQueue(depth)
        self.wait_s = 0.0
        """How long the last item was waited for."""
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
                "this iteration over the data was closed",
                "one iteration at a time: a new one closes the one before",
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
        """Ends the thread and waits for it, at most 5 s when `source` is slow. Safe to repeat."""
        self._queue.close()
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join(_JOIN_TIMEOUT_S)


def _fill_queue(source: Iterator[Item], belt: _BoundedQueue[Item | _EndOfStream]) -> None:
    """The thread: fills the belt until `source` ends or the belt is closed."""
    end = _EndOfStream(None)
    try:
        for item in source:
            belt.put(item)
    except _QueueClosedError:
        return
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the consumer's
        end = _EndOfStream(error)
    try:
        belt.put(end)
    except _QueueClosedError:
        return


def pin_batch(batch: Any) -> Any:
    """`batch` with its tensors in page-locked host memory, from where copies need not block."""
    return map_tensors(batch, torch.Tensor.pin_memory)


def batch_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`: itself on the CPU, else copied without blocking.

    The copies are queued on the current stream, so work queued after them sees them done; torch
    keeps a pinned source until its copy is.
    """
    if device.type == "cpu":
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))

"""Runs an iterator ahead of its consumer, in a background thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from time import perf_counter
from typing import Generic, TypeVar

from rayzero.engine.errors import EngineError

Item = TypeVar("Item")

# The longest that a wait goes without looking whether it is still wanted.
_POLL_S = 0.1
_JOIN_S = 5.0


class _End:
    """The producer's last word: the iterator is exhausted, or it raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[Item]):
    """The items of `source`, up to `depth` of them made before they are asked for.

    It owns one daemon thread, which alone advances `source`. The thread ends when `source` is
    exhausted or raises (the consumer gets the exception), on `close`, and when this object is
    garbage: the thread knows the queue and the stop flag, never this object. An item that is being
    made when the end comes is finished first and then dropped.

    Raises:
        EngineError: it was advanced after `close`.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._items: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self.wait_s = 0.0
        """How long the last item was waited for."""
        self._ended = False
        self._thread = threading.Thread(
            target=_produce,
            args=(source, self._items, self._stop),
            name="rayzero-prefetch",
            daemon=True,
        )
        weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        since_s = perf_counter()
        while not self._ended:
            if self._stop.is_set():
                raise EngineError(
                    "this iteration over the data was closed",
                    "one iteration at a time: a new one closes the one before",
                    "use the newest iterator",
                )
            try:
                item = self._items.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if not isinstance(item, _End):
                self.wait_s = perf_counter() - since_s
                return item
            self._ended = True
            self._thread.join(_JOIN_S)
            if item.error is not None:
                raise item.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread and waits for it, at most 5 s when `source` is slow. Safe to repeat."""
        self._stop.set()
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join(_JOIN_S)


def _produce(
    source: Iterator[Item], items: queue.Queue[Item | _End], stop: threading.Event
) -> None:
    """The thread: fills the queue until `source` ends or `stop` is set."""

    def put(item: Item | _End) -> bool:
        while not stop.is_set():
            try:
                items.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in source:
            if not put(item):
                return
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the consumer's
        put(_End(error))
    else:
        put(_End(None))

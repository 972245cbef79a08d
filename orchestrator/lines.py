"""Many calls of Ray actors at once: their answers come to the event loop in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from threading import Lock
from typing import Any

Answered = Callable[["Future[Any]"], None]
"""Told of an answer, or of an error, in the event loop."""

_GATHER_S = 0.01
_EACH_S = 1e-5
_FEW = 100


def gather_s(workers: int) -> float:
    """How long to gather what so many workers say. To wake the event loop costs as much as to hear
    ten of them, and a thousand that each speak once a second would wake it a thousand times."""
    return min(_GATHER_S, _EACH_S * workers) if workers >= _FEW else 0.0


class _Next(Enum):
    """When the event loop looks again at what arrived."""

    WOKEN = auto()
    """At once; it was told to."""
    LATER = auto()
    """Behind a while of gathering."""
    UNTOLD = auto()
    """When it is told to."""


class Lines:
    """From Ray's threads, where answers arrive, to one event loop. It costs no task and no timer a
    call, and one wake-up a batch. After `close` answers are dropped.

    Args:
        on_batch: called behind every batch.
    """

    def __init__(self, on_batch: Callable[[], None]) -> None:
        self.gather_s = 0.0
        """How long answers are gathered behind a batch. Errors never wait."""
        self._on_batch = on_batch
        self._arrived: deque[tuple[Answered, Future[Any]]] = deque()
        self._lock = Lock()
        self._next = _Next.UNTOLD
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def call(self, reference: Any, answered: Answered) -> None:
        """Waits for a call's answer; from the event loop."""
        loop = asyncio.get_running_loop()
        reference.future().add_done_callback(partial(self._arrive, loop, answered))

    def close(self) -> None:
        """From the event loop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _arrive(
        self, loop: asyncio.AbstractEventLoop, answered: Answered, answer: Future[Any]
    ) -> None:
        self._arrived.append((answered, answer))
        with self._lock:
            waits = self._next is _Next.LATER and answer.exception() is None
            if waits or self._next is _Next.WOKEN:
                return
            self._next = _Next.WOKEN
        with suppress(RuntimeError):  # the loop is over, and nobody waits any more
            loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            # What arrives from now on finds a wake-up or a timer to come, or wakes the loop itself.
            self._next = _Next.LATER if self._arrived and self.gather_s else _Next.UNTOLD
            gathers = self._next is _Next.LATER and not self._closed
        if gathers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.gather_s, self._hand_over)
        while self._arrived:
            answered, answer = self._arrived.popleft()
            if not self._closed:
                answered(answer)
        self._on_batch()

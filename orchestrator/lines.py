"""Many calls of Ray actors at once: their answers come to the event loop in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any

Answered = Callable[["Future[Any]"], None]
"""Told of an answer, or of an error, in the event loop."""


class Lines:
    """From Ray's threads, where answers arrive, to one event loop. It costs no task and no timer a
    call, and one wake-up a batch. After `close` answers are dropped.

    Args:
        on_batch: called behind every batch.
    """

    def __init__(self, on_batch: Callable[[], None]) -> None:
        self._on_batch = on_batch
        self._arrived: deque[tuple[Answered, Future[Any]]] = deque()
        self._lock = Lock()
        self._woken = False
        self._closed = False

    def call(self, reference: Any, answered: Answered) -> None:
        """Waits for a call's answer; from the event loop."""
        loop = asyncio.get_running_loop()
        reference.future().add_done_callback(partial(self._arrive, loop, answered))

    def close(self) -> None:
        self._closed = True

    def _arrive(
        self, loop: asyncio.AbstractEventLoop, answered: Answered, answer: Future[Any]
    ) -> None:
        self._arrived.append((answered, answer))
        with self._lock:
            if self._woken:
                return
            self._woken = True
        with suppress(RuntimeError):  # the loop is over, and nobody waits any more
            loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        with self._lock:
            self._woken = False
        while self._arrived:
            answered, answer = self._arrived.popleft()
            if not self._closed:
                answered(answer)
        self._on_batch()

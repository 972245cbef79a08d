"""Two queues: from the server's thread to a long poll, and from other threads to the server's."""

from __future__ import annotations

import os
from collections import deque
from threading import Condition, Lock
from typing import Generic, TypeVar

from rayzero.workers.messages import ConnectionLost

T = TypeVar("T")


class Losses:
    """Workers' connections that closed, on their way to the controller."""

    def __init__(self) -> None:
        self._losses: deque[ConnectionLost] = deque()
        self._changed = Condition()
        self._closed = False

    def post(self, loss: ConnectionLost) -> None:
        with self._changed:
            self._losses.append(loss)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[ConnectionLost]:
        """What was posted and not taken yet; waits up to `timeout_s` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._losses or self._closed, timeout_s)
            taken = list(self._losses)
            self._losses.clear()
            return taken

    def close(self) -> None:
        """Ends every wait, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Inbox(Generic[T]):
    """What other threads want a selector's thread to have: it can watch `fileno`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = Lock()

    def fileno(self) -> int:
        return self._fd

    def put(self, item: T) -> bool:
        """False when it was closed before."""
        with self._lock:
            if self._fd < 0:
                return False
            self._items.append(item)
            os.eventfd_write(self._fd, 1)
            return True

    def take(self) -> list[T]:
        with self._lock:
            os.eventfd_read(self._fd)
            taken = list(self._items)
            self._items.clear()
            return taken

    def close(self) -> list[T]:
        """Takes no more; returns what nobody took."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1
            return list(self._items)

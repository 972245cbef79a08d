"""How much of the controller's process those who read its page may take, however they behave. Pure
but for the sockets that it is given to close."""

from __future__ import annotations

import socket
from collections import OrderedDict
from contextlib import suppress
from threading import Lock

MOST = 32
"""Connections at a time. One more, and the oldest is closed: it has had its time."""
LIFE_S = 20.0
"""How long a connection may last, from its beginning to the last byte of the answer."""


class Doors:
    """The open connections, each with when it came. Used from several threads."""

    def __init__(self, most: int = MOST, life_s: float = LIFE_S) -> None:
        self._most = most
        self._life_s = life_s
        self._open: OrderedDict[socket.socket, float] = OrderedDict()
        self._lock = Lock()

    def come(self, connection: socket.socket, now_s: float) -> bool:
        """Takes one in; False if those that were told to go are not gone yet."""
        with self._lock:
            if len(self._open) >= 2 * self._most:
                return False
            self._open[connection] = now_s
            for old in list(self._open)[: max(0, len(self._open) - self._most)]:
                _cut(old)
            return True

    def sweep(self, now_s: float) -> None:
        """Ends those that have lasted too long."""
        with self._lock:
            for connection, came_s in self._open.items():
                if now_s - came_s < self._life_s:
                    break  # they are in the order in which they came
                _cut(connection)

    def go(self, connection: socket.socket) -> None:
        """It is over; safe to repeat."""
        with self._lock:
            self._open.pop(connection, None)

    def __len__(self) -> int:
        return len(self._open)


class Effort:
    """A leaky bucket of processor seconds: what is spent flows in, a share of each second out.

    Args:
        share: of one core, in the long run.
        burst_s: that may be spent at once.
    """

    def __init__(self, share: float = 0.25, burst_s: float = 2.0) -> None:
        self._share = share
        self._burst_s = burst_s
        self._level_s = 0.0
        self._at_s = 0.0
        self._lock = Lock()

    def spend(self, cpu_s: float, now_s: float) -> None:
        with self._lock:
            self._leak(now_s)
            self._level_s += cpu_s

    def wait_s(self, now_s: float) -> float:
        """How long to wait before more is begun; 0 while there is room."""
        with self._lock:
            self._leak(now_s)
            return max(0.0, self._level_s - self._burst_s) / self._share

    def _leak(self, now_s: float) -> None:
        gone_s = max(0.0, now_s - self._at_s)
        self._level_s = max(0.0, self._level_s - gone_s * self._share)
        self._at_s = now_s


def _cut(connection: socket.socket) -> None:
    """Its thread finds it ended, and lets go of it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

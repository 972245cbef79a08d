"""Framing, queues between threads.

What passes between a worker and its vault: a line of JSON each way, and file descriptors.

A request is {"id", "op", ...}; an answer {"id", "fds", ...} or {"id", "error"}, where `fds` counts
the descriptors that came with it. A request without an id wants no answer.

Two queues: from the server's thread to a long poll, and from other threads to the server's.
"""

from __future__ import annotations

import json
import os
from collections import deque
from threading import Condition, Lock
from typing import Any, Generic, TypeVar

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.workers.vault.records import (
    ConnectionLost,
    SlotDamagedError,
    SlotGoneError,
    VaultGoneError,
    VaultMemoryError,
)

MAX_LINE_BYTES = 64 * 1024
"""No line is longer; tables and states pass through shared memory."""

_ERROR_TYPES: dict[str, type[RayzeroError]] = {
    one.__name__: one
    for one in (DataError, SlotDamagedError, SlotGoneError, VaultGoneError, VaultMemoryError)
}


def abstract_socket_name(address: str) -> str:
    """An address as the system wants it: an abstract name begins with a zero byte."""
    return "\0" + address.removeprefix("@")


class JsonLineDecoder:
    """Bytes as they come, cut into messages."""

    def __init__(self) -> None:
        self._partial_line = bytearray()

    def feed(self, received: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete.

        Raises:
            DataError: they are no messages.
        """
        self._partial_line += received
        *lines, self._partial_line = self._partial_line.split(b"\n")
        if len(self._partial_line) > MAX_LINE_BYTES:
            raise DataError(f"a message of more than {MAX_LINE_BYTES} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            raise DataError("a message that is not JSON") from None
        if not all(isinstance(one, dict) for one in messages):
            raise DataError("a message that is not an object")
        return messages


def encode_message(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_error(error: Exception) -> list[Any]:
    """An error as JSON; one that is not known over there becomes a DataError of the same text."""
    if type(error).__name__ in _ERROR_TYPES and isinstance(error, RayzeroError):
        _, arguments = error.__reduce__()[:2]
        return [type(error).__name__, *arguments]
    return [DataError.__name__, f"{type(error).__name__}: {error}"]


def decode_error(document: list[Any]) -> RayzeroError:
    name, *arguments = document
    return _ERROR_TYPES[name](*arguments)


T = TypeVar("T")


class LossQueue:
    """Workers' connections that closed, on their way to the controller."""

    def __init__(self) -> None:
        self._losses: deque[ConnectionLost] = deque()
        self._changed = Condition()
        self._closed = False

    def post(self, loss: ConnectionLost) -> None:
        with self._changed:
            self._losses.append(loss)
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[ConnectionLost]:
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


class WakeableQueue(Generic[T]):
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

    def drain(self) -> list[T]:
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

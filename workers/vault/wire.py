"""What passes between a worker and its vault: a line of JSON each way, and file descriptors.

A request is {"id", "op", ...}; an answer {"id", "fds", ...} or {"id", "error"}, where `fds` counts
the descriptors that came with it. A request without an id wants no answer.
"""

from __future__ import annotations

import json
from typing import Any

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.workers.vault.errors import (
    SlotDamagedError,
    SlotGoneError,
    VaultGoneError,
    VaultMemoryError,
)

LINE_BYTES = 64 * 1024
"""No line is longer; tables and states pass through shared memory."""

_ERRORS: dict[str, type[RayzeroError]] = {
    one.__name__: one
    for one in (DataError, SlotDamagedError, SlotGoneError, VaultGoneError, VaultMemoryError)
}


def socket_name(address: str) -> str:
    """An address as the system wants it: an abstract name begins with a zero byte."""
    return "\0" + address.removeprefix("@")


class Lines:
    """Bytes as they come, cut into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, received: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete.

        Raises:
            DataError: they are no messages.
        """
        self._rest += received
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > LINE_BYTES:
            raise DataError(f"a message of more than {LINE_BYTES} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            raise DataError("a message that is not JSON") from None
        if not all(isinstance(one, dict) for one in messages):
            raise DataError("a message that is not an object")
        return messages


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_error(error: Exception) -> list[Any]:
    """An error as JSON; one that is not known over there becomes a DataError of the same text."""
    if type(error).__name__ in _ERRORS and isinstance(error, RayzeroError):
        _, arguments = error.__reduce__()[:2]
        return [type(error).__name__, *arguments]
    return [DataError.__name__, f"{type(error).__name__}: {error}"]


def decode_error(document: list[Any]) -> RayzeroError:
    name, *arguments = document
    return _ERRORS[name](*arguments)

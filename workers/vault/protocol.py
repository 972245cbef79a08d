"""Messages between a worker and its vault: JSON lines over a unix socket, with file descriptors.

A request is one of the dataclasses below. It travels as {"op": its class, "id", its fields}; the
reply as {"id", "fds", "value"} or {"id", "error"}, where `fds` is the number of descriptors sent
along. A request without an id gets no reply.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.workers.vault.records import (
    SlotDamagedError,
    SlotGoneError,
    VaultGoneError,
    VaultMemoryError,
)

MAX_LINE_BYTES = 64 * 1024
"""The longest message; tables and states go through shared memory."""


@dataclass(frozen=True)
class Register:
    """Identifies the worker behind a connection. The reply's value is the vault's node id.

    Args:
        thread: native id of a thread that exits with the process, or after `Deregister`.
    """

    worker: int
    pid: int
    thread: int


@dataclass(frozen=True)
class Reserve:
    """Replaces the worker's unfinished buffers by `buffers` empty ones: the reply's descriptors."""

    generation: int
    rank: int
    world_size: int
    table_bytes: int
    metadata_capacity: int
    data_bytes: int
    buffers: int


@dataclass(frozen=True)
class OpenVersion:
    """Opens a version in this vault: the reply's descriptor."""

    generation: int
    rank: int
    step: int


@dataclass(frozen=True)
class FetchVersion:
    """Reads part of a version's image from another node's vault.

    The reply's descriptor is a file with the bytes read: fewer than `length` at the image's end.
    """

    node_id: str
    generation: int
    rank: int
    step: int
    offset: int
    length: int


@dataclass(frozen=True)
class GenerationComplete:
    """All ranks have a complete version of this generation: older ones can be freed."""

    generation: int


@dataclass(frozen=True)
class Deregister:
    """Closes the session: the end of the connection is then no loss."""


VaultRequest: TypeAlias = (
    Register | Reserve | OpenVersion | FetchVersion | GenerationComplete | Deregister
)

_REQUEST_TYPES: dict[Any, type[VaultRequest]] = {
    kind.__name__: kind
    for kind in (Register, Reserve, OpenVersion, FetchVersion, GenerationComplete, Deregister)
}

_ERROR_TYPES: dict[str, type[RayzeroError]] = {
    kind.__name__: kind
    for kind in (DataError, SlotDamagedError, SlotGoneError, VaultGoneError, VaultMemoryError)
}


def encode_request(request: VaultRequest, request_id: int | None = None) -> bytes:
    message = {"op": type(request).__name__} | vars(request)
    return encode_message(message if request_id is None else message | {"id": request_id})


def decode_request(message: dict[str, Any]) -> VaultRequest:
    """The request in a message.

    Raises:
        DataError: the request is unknown, or a field is missing or of the wrong type.
    """
    kind = _REQUEST_TYPES.get(str(message.get("op")))
    if kind is None:
        raise DataError(f"vault request {message.get('op')!r}", f"one of {[*_REQUEST_TYPES]}")
    arguments: dict[str, Any] = {field.name: message.get(field.name) for field in fields(kind)}
    for field in fields(kind):
        value = arguments[field.name]
        if type(value).__name__ != field.type:
            seen = f"vault request {kind.__name__} with {field.name}={value!r}"
            raise DataError(seen, allowed=str(field.type))
    return kind(**arguments)


def encode_message(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def encode_error(error: Exception) -> list[Any]:
    """The error as JSON; one that the peer does not know becomes a DataError of the same text."""
    if type(error).__name__ in _ERROR_TYPES and isinstance(error, RayzeroError):
        _, arguments = error.__reduce__()[:2]
        return [type(error).__name__, *arguments]
    return [DataError.__name__, f"{type(error).__name__}: {error}"]


def decode_error(document: list[Any]) -> RayzeroError:
    name, *arguments = document
    return _ERROR_TYPES[name](*arguments)


class JsonLineDecoder:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._partial_line = bytearray()

    def feed(self, received: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete.

        Raises:
            DataError: the bytes are not JSON objects, or a message is too long.
        """
        self._partial_line += received
        *lines, self._partial_line = self._partial_line.split(b"\n")
        if len(self._partial_line) > MAX_LINE_BYTES:
            raise DataError(f"a message of more than {MAX_LINE_BYTES} bytes")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            raise DataError("a message that is not JSON") from None
        if not all(isinstance(message, dict) for message in messages):
            raise DataError("a message that is not a JSON object")
        return messages


def abstract_socket_name(address: str) -> str:
    """The address as the kernel expects it: an abstract name starts with a zero byte."""
    return "\0" + address.removeprefix("@")

"""The store where the members of a generation meet, served by one of its workers.

torch's TCPStore is not used. Its server admits any client that reaches its port. Its client asks
the resolver for the name of the server's address at each connection (`getnameinfo`): one lost query
makes a repair 5 seconds longer, and in a cluster without reverse DNS every repair is. Here
connections are authenticated (`authenticated.py`) by a secret that the controller sends with each
assignment. Requests: set, read, add, delete.

Rule of ordering: `stale-generation` (docs/engine.md).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from struct import Struct

import torch.distributed as dist

from rayzero.engine.torch_private import Store
from rayzero.workers.authenticated import MessageConnection, MessageServer

STORE_THREAD = "rayzero-store"
_SECONDS = Struct(">d")


class StoreServer(MessageServer):
    """Serves the keys of one generation. Arguments and errors as in `MessageServer`."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, asyncio.Event] = {}  # set once the key has a value
        super().__init__("the rendezvous store", STORE_THREAD, address, timeout_s)

    async def answer(self, request: list[bytes], is_lost: Callable[[], bool]) -> list[bytes]:
        operation, *fields = request
        if operation == b"read":  # fields: limit, keys. Reply: values, or the keys without one
            limit, *names = fields
            keys = [name.decode() for name in names]
            with suppress(TimeoutError):
                async with asyncio.timeout(*_SECONDS.unpack(limit)):
                    for key in keys:
                        while key not in self._values:
                            await self._waiting.setdefault(key, asyncio.Event()).wait()
            missing = [key.encode() for key in keys if key not in self._values]
            return [b"missing", *missing] if missing else [b"", *(self._values[k] for k in keys)]
        key = fields[0].decode()
        if operation == b"delete":
            return [b"1" if self._values.pop(key, None) is not None else b""]
        value = fields[1]
        if operation == b"add":
            value = b"%d" % (int(self._values.get(key, b"0")) + int(value))
        self._values[key] = value
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting.set()
        return [value if operation == b"add" else b""]


class StoreClient(Store):
    """A member's connection to the store. Used by torch's C++ from any thread.

    Args:
        host, port: of the store.
        secret: of the generation.
        timeout_s: limit for a reply, and for a key that no member has set yet.
        on_connect: called with the socket, which another thread may shut down.
        on_value: called with each value that is set or read, by the same thread.

    Raises:
        DistNetworkError: the store does not answer, or does not know the secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        timeout_s: float,
        on_connect: Callable[[socket.socket], None] = lambda connection: None,
        on_value: Callable[[bytes], None] = lambda value: None,
    ) -> None:
        super().__init__()
        self._arguments = (host, port, secret, timeout_s, on_connect, on_value)
        self._timeout_s = timeout_s
        self._on_value = on_value
        self._clones: list[StoreClient] = []  # C++ does not keep their Python objects
        self._name = f"the rendezvous store at {host}:{port}"
        try:
            self._connection = MessageConnection(host, port, secret, timeout_s, on_connect)
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"{self._name}: {error}") from None

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._on_value(data)
        self._request(b"set", key.encode(), data)

    def get(self, key: str) -> bytes:
        [value] = self._read([key], self._timeout_s)
        self._on_value(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._read(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        state, *_ = self._request(b"read", _SECONDS.pack(0.0), *map(str.encode, keys))
        return not state

    def add(self, key: str, value: int) -> int:
        [total] = self._request(b"add", key.encode(), b"%d" % value)
        return int(total)

    def delete_key(self, key: str) -> bool:
        [existed] = self._request(b"delete", key.encode())
        return bool(existed)

    def clone(self) -> StoreClient:
        """Returns a client with a connection of its own."""
        clone = StoreClient(*self._arguments)
        self._clones.append(clone)
        return clone

    def _read(self, keys: Sequence[str], limit_s: float) -> list[bytes]:
        names = [key.encode() for key in keys]
        state, *values = self._request(b"read", _SECONDS.pack(limit_s), *names, limit_s=limit_s)
        if state:
            missing = [key.decode() for key in values]
            raise dist.DistStoreError(f"no member has set {missing} within {limit_s:g} s")
        return values

    def _request(self, *fields: bytes, limit_s: float = 0.0) -> list[bytes]:
        try:
            return self._connection.request(*fields, limit_s=limit_s)
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"{self._name}: {error}") from None

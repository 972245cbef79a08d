"""The store where the members of a generation meet, served by one of its workers.

torch's TCPStore is not used. Its server admits any client that reaches its port. Its client asks
the resolver for the name of the server's address each time it connects (`getnameinfo`), so that one
lost query makes a repair 5 seconds longer, and a cluster without reverse DNS every repair. Here a
connection is authenticated in both directions, by a secret that the controller sends with each
assignment, before anything else is read from it. What is sent afterwards is neither encrypted nor
authenticated.

A message is a list of fields, each preceded by its length. Requests: set, read, add, delete.

Rule of ordering: `stale-generation` (docs/engine.md).
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from struct import Struct
from threading import Lock, Thread

import torch.distributed as dist

from rayzero.engine.errors import ConfigError
from rayzero.engine.torch_private import Store

STORE_THREAD = "rayzero-store"
_PROOF_BYTES = 32
_CLOSE_S = 5.0
"""Limit for the end of the server's thread, whose callbacks never wait."""
_LENGTH = Struct(">Q")
_SECONDS = Struct(">d")


class StoreServer:
    """Serves the keys of one generation on a free port of `address`, on a thread of its own.

    Args:
        address: of this node; the store listens there only.
        timeout_s: for a client to prove that it knows the secret.

    Raises:
        ConfigError: no interface of this node has that address.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"the rendezvous store cannot listen on {address}, Ray's address of this node: "
                f"{error}",
                allowed="an address of one of the node's interfaces",
                fix="--node-ip-address of `ray start` on that node",
            ) from None
        self.port: int = listener.getsockname()[1]
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._secret = b""
        self._admits = asyncio.Event()
        self._closed = asyncio.Event()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, asyncio.Event] = {}  # set once the key has a value
        self._thread = Thread(target=self._run, args=(listener,), name=STORE_THREAD, daemon=True)
        self._thread.start()

    def admit(self, secret: bytes) -> None:
        """Serves the clients that know `secret`; those that have connected before wait for this."""
        self._secret = secret
        self._loop.call_soon_threadsafe(self._admits.set)

    def close(self) -> None:
        """Ends the server and its connections. Idempotent."""
        with suppress(RuntimeError):  # its loop has been closed
            self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join(_CLOSE_S)

    def _run(self, listener: socket.socket) -> None:
        self._loop.run_until_complete(self._serve(listener))
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve_client, sock=listener)
        await self._closed.wait()
        server.close()
        clients = asyncio.all_tasks() - {asyncio.current_task()}
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._authenticate(reader, writer)
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                request = _unpack(await reader.readexactly(size))
                writer.write(_pack(await self._answer(request)))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the client has left, or is a stranger; or the server ends
        finally:
            writer.transport.abort()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Raises PermissionError if the client does not know the secret."""
        own = os.urandom(_PROOF_BYTES)
        writer.write(own)
        other, proof = [await reader.readexactly(_PROOF_BYTES) for _ in range(2)]
        await self._admits.wait()
        if not hmac.compare_digest(proof, _prove(self._secret, b"client", own + other)):
            raise PermissionError
        writer.write(_prove(self._secret, b"server", own + other))

    async def _answer(self, request: list[bytes]) -> list[bytes]:
        operation, *fields = request
        if operation == b"read":  # limit, keys: their values, or the keys that have none
            limit, *names = fields
            keys = [name.decode() for name in names]
            with suppress(TimeoutError):
                async with asyncio.timeout(*_SECONDS.unpack(limit)):
                    for key in keys:
                        await self._wait_for(key)
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

    async def _wait_for(self, key: str) -> None:
        while key not in self._values:
            await self._waiting.setdefault(key, asyncio.Event()).wait()


class StoreClient(Store):
    """A member's connection. Used by torch's C++ from any thread.

    Args:
        host, port: of the store.
        secret: of the generation.
        timeout_s: for an answer, and for a key that no member has set yet.
        on_connect: called with the connection, which another thread may shut down.
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
        self._lock = Lock()  # of a request and its answer
        self._clones: list[StoreClient] = []  # C++ does not keep their Python objects
        self._name = f"the rendezvous store at {host}:{port}"
        try:
            self._connection = socket.create_connection((host, port), timeout_s)
            on_connect(self._connection)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._authenticate(secret)
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
        """A client with a connection of its own."""
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
            with self._lock:
                self._connection.settimeout(limit_s + self._timeout_s)
                self._connection.sendall(_pack(fields))
                size = _LENGTH.unpack(self._receive(_LENGTH.size))[0]
                return _unpack(self._receive(size))
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"{self._name}: {error}") from None

    def _authenticate(self, secret: bytes) -> None:
        other, own = self._receive(_PROOF_BYTES), os.urandom(_PROOF_BYTES)
        self._connection.sendall(own + _prove(secret, b"client", other + own))
        expected = _prove(secret, b"server", other + own)
        if not hmac.compare_digest(self._receive(_PROOF_BYTES), expected):
            raise PermissionError("the server does not know this generation's secret")

    def _receive(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            if not (part := self._connection.recv(min(size - len(content), 2**20))):
                raise EOFError("the connection was closed")
            content += part
        return bytes(content)


def _prove(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + nonces, "sha256")


def _pack(fields: Sequence[bytes]) -> bytes:
    content = b"".join(_LENGTH.pack(len(field)) + field for field in fields)
    return _LENGTH.pack(len(content)) + content


def _unpack(content: bytes) -> list[bytes]:
    fields, start = [], 0
    while start < len(content):
        start += _LENGTH.size
        end = start + _LENGTH.unpack_from(content, start - _LENGTH.size)[0]
        fields.append(content[start:end])
        start = end
    return fields

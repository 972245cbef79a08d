"""Requests and replies between the processes of a job, on any nodes, over authenticated TCP.

A connection is authenticated in both directions, by a secret that the controller has given to both
sides, before anything else is read from it. What is sent afterwards is neither encrypted nor
authenticated. A message is a list of fields, each preceded by its length.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from select import POLLIN, poll
from struct import Struct
from threading import Lock, Thread
from time import monotonic

from rayzero.engine.errors import ConfigError

_PROOF_BYTES = 32
_CLOSE_S = 5.0
"""Limit for the end of the server's thread, whose callbacks never wait."""
_CHECK_S = 0.05
"""Seconds between two checks whether a wait for a reply is to end."""
_LENGTH = Struct(">Q")


class AuthenticatedServer(ABC):
    """Serves clients on a free port of `address`, on an event loop in a thread of its own, from
    construction until `close`.

    Args:
        name: name of the service, for errors.
        thread: name of the server's thread.
        address: address of this node; the server listens on no other.
        timeout_s: limit for a client to prove that it knows the secret.

    Raises:
        ConfigError: no interface of this node has that address.
    """

    def __init__(self, name: str, thread: str, address: str, timeout_s: float) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise ConfigError(
                f"{name} cannot listen on {address}, Ray's address of this node: {error}",
                allowed="an address of one of the node's interfaces",
                fix="pass another --node-ip-address to `ray start` on that node",
            ) from None
        # Accepted connections inherit this option, which asyncio sets only on sockets created with
        # an explicit protocol. Without it the message of a worker's death waited up to 40 ms for
        # the acknowledgement of the frame before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = listener.getsockname()[1]
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._secret = b""
        self._admits = asyncio.Event()
        self._closed = asyncio.Event()
        self._thread = Thread(target=self._run, args=(listener,), name=thread, daemon=True)
        self._thread.start()

    @abstractmethod
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves an authenticated client until it disconnects; called on the server's thread. May
        raise OSError or EOFError when the client disconnects."""

    def admit(self, secret: bytes) -> None:
        """Begins to serve clients that know `secret`, including those already connected."""
        self._secret = secret
        self.call_soon(self._admits.set)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls `function` on the server's thread, or never if that has ended. Any thread may call
        this."""
        with suppress(RuntimeError):  # the event loop has been closed
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Ends the server and its connections. Idempotent."""
        self.call_soon(self._closed.set)
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

            await self.serve(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # the client has left, or is a stranger; or the server ends
        finally:
            writer.transport.abort()

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Raises PermissionError if the client does not know the secret."""
        nonce = os.urandom(_PROOF_BYTES)
        writer.write(nonce)
        client_nonce = await reader.readexactly(_PROOF_BYTES)
        proof = await reader.readexactly(_PROOF_BYTES)
        nonces = nonce + client_nonce
        await self._admits.wait()
        if not hmac.compare_digest(proof, _prove(self._secret, b"client", nonces)):
            raise PermissionError
        writer.write(_prove(self._secret, b"server", nonces))


class MessageServer(AuthenticatedServer):
    """Answers requests. Arguments and errors as in `AuthenticatedServer`."""

    @abstractmethod
    async def answer(self, request: list[bytes], is_lost: Callable[[], bool]) -> Sequence[bytes]:
        """Returns the reply to a request; called on the server's thread. `is_lost` returns whether
        the client has disconnected."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a client's requests, one at a time."""

        def is_lost() -> bool:
            return reader.at_eof() or writer.is_closing()

        while True:
            (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            request = _unpack(await reader.readexactly(size))
            writer.write(_pack(await self.answer(request, is_lost)))
            await writer.drain()


async def connect(
    host: str, port: int, secret: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to an `AuthenticatedServer`; returns the streams to talk to its `serve`. Raises
    OSError or EOFError; PermissionError if the server does not know the secret."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        server_nonce, nonce = await reader.readexactly(_PROOF_BYTES), os.urandom(_PROOF_BYTES)
        nonces = server_nonce + nonce
        writer.write(nonce + _prove(secret, b"client", nonces))
        expected = _prove(secret, b"server", nonces)
        if not hmac.compare_digest(await reader.readexactly(_PROOF_BYTES), expected):
            raise PermissionError("the server does not know the secret")
        return reader, writer
    except BaseException:
        writer.transport.abort()
        raise


class MessageConnection:
    """A client's connection to a `MessageServer`. Any thread may use it; requests run one by one.
    Every method may raise OSError or EOFError, after which the connection is unusable.

    Args:
        timeout_s: limit for a reply, in addition to the `limit_s` of its request.
        on_connect: called with the socket, which another thread may shut down.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        timeout_s: float,
        on_connect: Callable[[socket.socket], None] = lambda connection: None,
    ) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()  # held for a request and its reply
        self._connection = socket.create_connection((host, port), timeout_s)
        try:
            on_connect(self._connection)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._authenticate(secret)
        except BaseException:
            self.close()
            raise

    def request(
        self,
        *fields: bytes,
        limit_s: float = 0.0,
        check: Callable[[], None] | None = None,
    ) -> list[bytes]:
        """Sends a request; returns the reply, which the server may take `limit_s` to make. `check`
        is called again and again during the wait, and raises to end it."""
        with self._lock:
            self._connection.settimeout(limit_s + self._timeout_s)
            self._connection.sendall(_pack(fields))
            if check is not None:
                self._wait(monotonic() + limit_s + self._timeout_s, check)
            size = _LENGTH.unpack(self._receive(_LENGTH.size))[0]
            return _unpack(self._receive(size))

    def close(self) -> None:
        """Closes the connection, which ends a request in flight on another thread. Idempotent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _wait(self, until_s: float, check: Callable[[], None]) -> None:
        readable = poll()
        readable.register(self._connection, POLLIN)
        while not readable.poll(_CHECK_S * 1000):
            check()
            if monotonic() > until_s:
                raise TimeoutError("no answer")

    def _authenticate(self, secret: bytes) -> None:
        server_nonce, nonce = self._receive(_PROOF_BYTES), os.urandom(_PROOF_BYTES)
        nonces = server_nonce + nonce
        self._connection.sendall(nonce + _prove(secret, b"client", nonces))
        expected = _prove(secret, b"server", nonces)
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

"""Bounded WSGI server, connection and CPU limits.

An HTTP server whose readers cannot hold up, or fill the memory of, the process that it is in.

What a connection may take is bounded in number, time and bytes, and what all of them take of a
core: a bad reader costs the other readers something, never the controller's watch over the job.

How much of the controller's process those who read its page may take, however they behave. Pure
but for the sockets that it is given to close.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from contextlib import suppress
from socketserver import TCPServer
from threading import Event, Lock, Thread
from time import monotonic, thread_time
from typing import Any, BinaryIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_CONNECTIONS = 32
"""Connections at a time. One more, and the oldest is closed: it has had its time."""


CONNECTION_LIFETIME_S = 20.0
"""How long a connection may last, from its beginning to the last byte of the answer."""


class ConnectionLimiter:
    """The open connections, each with when it came. Used from several threads."""

    def __init__(self, most: int = MAX_CONNECTIONS, life_s: float = CONNECTION_LIFETIME_S) -> None:
        self._max_connections = most
        self._lifetime_s = life_s
        self._open: OrderedDict[socket.socket, float] = OrderedDict()
        self._lock = Lock()

    def admit(self, connection: socket.socket, now_s: float) -> bool:
        """Takes one in; False if those that were told to go are not gone yet."""
        with self._lock:
            if len(self._open) >= 2 * self._max_connections:
                return False
            self._open[connection] = now_s
            for old in list(self._open)[: max(0, len(self._open) - self._max_connections)]:
                _shut_down(old)
            return True

    def expire(self, now_s: float) -> None:
        """Ends those that have lasted too long."""
        with self._lock:
            for connection, came_s in self._open.items():
                if now_s - came_s < self._lifetime_s:
                    break  # they are in the order in which they came
                _shut_down(connection)

    def release(self, connection: socket.socket) -> None:
        """It is over; safe to repeat."""
        with self._lock:
            self._open.pop(connection, None)

    def __len__(self) -> int:
        return len(self._open)


class CpuBudget:
    """A leaky bucket of processor seconds: what is spent flows in, a share of each second out.

    Args:
        share: of one core, in the long run.
        burst_s: that may be spent at once.
    """

    def __init__(self, share: float = 0.25, burst_s: float = 2.0) -> None:
        self._share = share
        self._burst_s = burst_s
        self._level_s = 0.0
        self._updated_s = 0.0
        self._lock = Lock()

    def spend(self, cpu_s: float, now_s: float) -> None:
        with self._lock:
            self._leak(now_s)
            self._level_s += cpu_s

    def throttle_s(self, now_s: float) -> float:
        """How long to wait before more is begun; 0 while there is room."""
        with self._lock:
            self._leak(now_s)
            return max(0.0, self._level_s - self._burst_s) / self._share

    def _leak(self, now_s: float) -> None:
        gone_s = max(0.0, now_s - self._updated_s)
        self._level_s = max(0.0, self._level_s - gone_s * self._share)
        self._updated_s = now_s


def _shut_down(connection: socket.socket) -> None:
    """Its thread finds it ended, and lets go of it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


MAX_HEAD_BYTES = 16 * 1024
"""Of a request's first line and headers."""


_BACKLOG = 64


_MAX_THROTTLE_S = 0.2


class BoundedHttpServer(WSGIServer):
    """Owns the thread that accepts, between `serve` and `end`, and one for each connection; those
    end with their connections, `LIFE_S` at the latest."""

    request_queue_size = _BACKLOG

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection_limiter = ConnectionLimiter()
        self._cpu_budget = CpuBudget()
        self._stopping = Event()
        self._accept_cpu_s = 0.0  # the processor time of the thread that accepts
        self._thread = Thread(target=self._accept_loop, name="rayzero-metrics", daemon=True)
        super().__init__(address, _RequestHandler)

    @classmethod
    def for_family(cls, family: int, address: tuple[str, int]) -> BoundedHttpServer:
        kind = type("Server", (cls,), {"address_family": family})
        made: BoundedHttpServer = kind(address)
        return made

    def start(self) -> None:
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """Stops listening at once; requests under way end with the process at the latest."""
        self._stopping.set()
        self.shutdown()
        self.server_close()
        self._thread.join(limit_s)

    def server_bind(self) -> None:
        """Without asking a name server for this machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "rayzero", int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connection_limiter.admit(request, monotonic()):
            self.shutdown_request(request)
            return
        arguments = (request, client_address)
        reader = Thread(
            target=self._serve_connection, args=arguments, name="rayzero-reader", daemon=True
        )
        try:
            reader.start()
        except RuntimeError:  # there are no more threads: nobody else would give its place back
            self._connection_limiter.release(request)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Between two connections: readers that take much are let in more slowly."""
        self._connection_limiter.expire(monotonic())
        before_s, self._accept_cpu_s = self._accept_cpu_s, thread_time()
        self._cpu_budget.spend(self._accept_cpu_s - before_s, monotonic())
        wait_s = self._cpu_budget.throttle_s(monotonic())
        if wait_s > 0:
            self._stopping.wait(min(wait_s, _MAX_THROTTLE_S))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow, is nobody's concern."""

    def _accept_loop(self) -> None:
        self.serve_forever(0.1)

    def _serve_connection(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001  # as socketserver's own threads do
            self.handle_error(request, client_address)
        finally:
            self._connection_limiter.release(request)
            self.shutdown_request(request)
            self._cpu_budget.spend(thread_time(), monotonic())


class _HeadTooLargeError(Exception):
    """A request's head has more bytes than it may have."""


class _RequestHead:
    """A connection's bytes as lines, up to the end of a request's head and no further."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._remaining_bytes = MAX_HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        most = self._remaining_bytes + 1 if limit < 0 else min(limit, self._remaining_bytes + 1)
        line = self._file.readline(most)
        self._remaining_bytes -= len(line)
        if self._remaining_bytes < 0:
            raise _HeadTooLargeError
        return line

    def close(self) -> None:
        self._file.close()


class _RequestHandler(WSGIRequestHandler):
    timeout = CONNECTION_LIFETIME_S  # of one read; the doors bound the whole
    # What an answer to a head that was never read to its end is made with.
    command = requestline = ""
    request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile = _RequestHead(self.rfile)  # type: ignore[assignment,arg-type]

    def handle(self) -> None:
        try:
            super().handle()
        except _HeadTooLargeError:
            self.send_error(431)

    def log_message(self, *args: Any) -> None:
        """Requests are not the job's output."""

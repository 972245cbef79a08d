"""A threaded WSGI server that limits its clients.

Open connections, their lifetime, the size of a request's head, and the CPU time of all of them are
bounded: a misbehaving client costs the other clients something, never the controller, which runs
in the same process.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from threading import Event, Lock, Thread
from time import monotonic, thread_time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MAX_CONNECTIONS = 32
"""Connections served at a time. A further one closes the oldest."""

CONNECTION_LIFETIME_S = 20.0
"""From the connection's start to the last byte of the response."""

MAX_HEAD_BYTES = 16 * 1024
"""Request line and headers."""

_MAX_THROTTLE_S = 0.2


class ConnectionLimiter:
    """The open connections with their start times. Thread-safe."""

    def __init__(
        self, max_connections: int = MAX_CONNECTIONS, lifetime_s: float = CONNECTION_LIFETIME_S
    ) -> None:
        self._max_connections = max_connections
        self._lifetime_s = lifetime_s
        self._open: OrderedDict[socket.socket, float] = OrderedDict()
        self._lock = Lock()

    def admit(self, connection: socket.socket, now_s: float) -> bool:
        """Adds a connection and shuts down the oldest beyond the limit; False if as many again
        that were shut down have not ended yet."""
        with self._lock:
            if len(self._open) >= 2 * self._max_connections:
                return False
            self._open[connection] = now_s
            for oldest in list(self._open)[: max(0, len(self._open) - self._max_connections)]:
                _shut_down(oldest)
            return True

    def expire(self, now_s: float) -> None:
        """Shuts down connections that exceed their lifetime."""
        with self._lock:
            for connection, started_s in self._open.items():
                if now_s - started_s < self._lifetime_s:
                    break  # ordered by start
                _shut_down(connection)

    def release(self, connection: socket.socket) -> None:
        """Removes a closed connection. Idempotent."""
        with self._lock:
            self._open.pop(connection, None)

    def __len__(self) -> int:
        return len(self._open)


class CpuBudget:
    """A leaky bucket of CPU seconds: a `share` of one core in the long run, of which `burst_s` may
    be used at once. Thread-safe."""

    def __init__(self, share: float = 0.25, burst_s: float = 2.0) -> None:
        self._share = share
        self._burst_s = burst_s
        self._empty_at_s = 0.0  # when the bucket has leaked out
        self._lock = Lock()

    def spend(self, cpu_s: float, now_s: float) -> None:
        with self._lock:
            self._empty_at_s = max(self._empty_at_s, now_s) + cpu_s / self._share

    def throttle_s(self, now_s: float) -> float:
        """Time until the budget allows more work; 0 if it does now."""
        return max(0.0, self._empty_at_s - now_s - self._burst_s / self._share)


class BoundedHttpServer(ThreadingMixIn, WSGIServer):
    """Owns the accept thread, from `start` to `stop`, and one daemon thread for each connection,
    which ends with it: after `lifetime_s` at the latest."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        lifetime_s: float = CONNECTION_LIFETIME_S,
    ) -> None:
        self.address_family = family
        self._connections = ConnectionLimiter(lifetime_s=lifetime_s)
        self._cpu_budget = CpuBudget()
        self._stopping = Event()
        self._accept_cpu_s = 0.0
        self._thread = Thread(
            target=self.serve_forever, args=(0.1,), name="rayzero-metrics", daemon=True
        )
        super().__init__(address, _RequestHandler)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stops listening at once; open connections end by themselves."""
        self._stopping.set()
        self.shutdown()
        self.server_close()
        self._thread.join(timeout_s)

    def server_bind(self) -> None:
        """Binds without a reverse DNS lookup of the host name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "rayzero", int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._connections.admit(request, monotonic()):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._connections.release(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        threading.current_thread().name = "rayzero-http-conn"
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release(request)
            self._cpu_budget.spend(thread_time(), monotonic())

    def service_actions(self) -> None:
        """Runs in the accept thread between connections: delays the next one if the CPU budget is
        used up."""
        self._connections.expire(monotonic())
        before_s, self._accept_cpu_s = self._accept_cpu_s, thread_time()
        self._cpu_budget.spend(self._accept_cpu_s - before_s, monotonic())
        wait_s = self._cpu_budget.throttle_s(monotonic())
        if wait_s > 0:
            self._stopping.wait(min(wait_s, _MAX_THROTTLE_S))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect early or are too slow."""


class _RequestHandler(WSGIRequestHandler):
    timeout = CONNECTION_LIFETIME_S  # of one read; `ConnectionLimiter` limits all of them
    # `send_error` needs these when the request line was not parsed.
    command = requestline = ""
    request_version = "HTTP/1.0"

    def handle(self) -> None:
        """Reads the request's head, within its limit, before it is parsed."""
        head = bytearray()
        while (line := self.rfile.readline(MAX_HEAD_BYTES + 1)).strip():
            head += line
            if len(head) > MAX_HEAD_BYTES:
                self.send_error(431)
                return
        self.rfile.close()
        self.rfile = BytesIO(head + line)
        super().handle()

    def log_message(self, *args: Any) -> None:
        """Keeps requests out of the job's log."""


def _shut_down(connection: socket.socket) -> None:
    """Ends the connection for its thread, which then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

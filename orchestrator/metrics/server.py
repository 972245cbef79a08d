"""An HTTP server whose readers cannot hold up, or fill the memory of, the process that it is in.

What a connection may take is bounded in number, time and bytes, and what all of them take of a
core: a bad reader costs the other readers something, never the controller's watch over the job.
"""

from __future__ import annotations

import socket
from socketserver import TCPServer
from threading import Event, Thread
from time import monotonic, thread_time
from typing import Any, BinaryIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from rayzero.orchestrator.metrics.doors import LIFE_S, Doors, Effort

HEAD_BYTES = 16 * 1024
"""Of a request's first line and headers."""
_BACKLOG = 64
_PAUSE_S = 0.2


class Server(WSGIServer):
    """Owns the thread that accepts, between `serve` and `end`, and one for each connection; those
    end with their connections, `LIFE_S` at the latest."""

    request_queue_size = _BACKLOG

    def __init__(self, address: tuple[str, int]) -> None:
        self._doors = Doors()
        self._effort = Effort()
        self._ending = Event()
        self._accepting_s = 0.0  # the processor time of the thread that accepts
        self._thread = Thread(target=self._accept, name="rayzero-metrics", daemon=True)
        super().__init__(address, _Handler)

    @classmethod
    def of_family(cls, family: int, address: tuple[str, int]) -> Server:
        kind = type("Server", (cls,), {"address_family": family})
        made: Server = kind(address)
        return made

    def serve(self) -> None:
        self._thread.start()

    def end(self, limit_s: float) -> None:
        """Stops listening at once; requests under way end with the process at the latest."""
        self._ending.set()
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
        if not self._doors.come(request, monotonic()):
            self.shutdown_request(request)
            return
        arguments = (request, client_address)
        reader = Thread(target=self._answer, args=arguments, name="rayzero-reader", daemon=True)
        try:
            reader.start()
        except RuntimeError:  # there are no more threads: nobody else would give its place back
            self._doors.go(request)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """Between two connections: readers that take much are let in more slowly."""
        self._doors.sweep(monotonic())
        before_s, self._accepting_s = self._accepting_s, thread_time()
        self._effort.spend(self._accepting_s - before_s, monotonic())
        wait_s = self._effort.wait_s(monotonic())
        if wait_s > 0:
            self._ending.wait(min(wait_s, _PAUSE_S))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow, is nobody's concern."""

    def _accept(self) -> None:
        self.serve_forever(0.1)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001  # as socketserver's own threads do
            self.handle_error(request, client_address)
        finally:
            self._doors.go(request)
            self.shutdown_request(request)
            self._effort.spend(thread_time(), monotonic())


class _TooLongError(Exception):
    """A request's head has more bytes than it may have."""


class _Head:
    """A connection's bytes as lines, up to the end of a request's head and no further."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = HEAD_BYTES

    def readline(self, limit: int = -1) -> bytes:
        most = self._left + 1 if limit < 0 else min(limit, self._left + 1)
        line = self._file.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise _TooLongError
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(WSGIRequestHandler):
    timeout = LIFE_S  # of one read; the doors bound the whole
    # What an answer to a head that was never read to its end is made with.
    command = requestline = ""
    request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment,arg-type]

    def handle(self) -> None:
        try:
            super().handle()
        except _TooLongError:
            self.send_error(431)

    def log_message(self, *args: Any) -> None:
        """Requests are not the job's output."""

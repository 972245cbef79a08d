"""An HTTP server between a client and a real one, whose answers fail as they are told to."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOW_S = 1.0


class FlakyServer(ThreadingHTTPServer):
    """The next `left` answers to GET fail.

    Attributes:
        kind: an HTTP status; `reset`: instead of an answer; `cut`: after half of it; `slow`.
        fired: how many have failed, by kind.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.behind = port
        self.kind = ""
        self.left = 0
        self.fired: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FlakyServer

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server = self.server
        kind = ""
        if self.command == "GET" and server.left > 0:
            kind = server.kind
            server.left -= 1
            server.fired[kind] += 1
        if kind.isdigit():
            self._answer(int(kind), [], b"")
            return
        connection = http.client.HTTPConnection("127.0.0.1", server.behind)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if kind == "slow":
            time.sleep(SLOW_S)
        if kind == "reset":
            self._reset()
            return
        self._answer(answer.status, answer.getheaders(), content, cut=kind == "cut")

    do_GET = do_HEAD = _forward  # noqa: N815 -- as the base class calls them

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        sizes = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", sizes[0] if sizes else str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._reset()

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@contextmanager
def flaky_server(port: int) -> Iterator[FlakyServer]:
    """Runs one before the server at that port of this machine."""
    server = FlakyServer(port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)

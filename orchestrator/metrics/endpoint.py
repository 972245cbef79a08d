"""The job's HTTP server: its page, /metrics for Prometheus, /snapshot.json. Only to be read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from time import monotonic
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.metrics.readers import Readers

_CLIENT_S = 10.0
"""How long a client may keep a connection without a word."""
_STOP_S = 5.0
_LOOK_S = 0.1

Page = Callable[[], tuple[str, bytes]]
"""(content type, body)."""
Start = Callable[[str, list[tuple[str, str]]], Any]


class Endpoint:
    """Serves from a thread of its own, and one for each request, until `close`.

    Args:
        host: an address of this machine; `0.0.0.0` or `::` for all of them.
        port: 0 takes a free one; `port` says which.
        registry: what /metrics shows.
        pages: by path.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, pages: dict[str, Page]
    ) -> None:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._server = _server(family, (host, port))
        except OSError as error:
            raise ConfigError(
                f"metrics.port: nothing can be served at {host}:{port}: {error.strerror or error}",
                allowed="a port that is free on the controller's machine; 0 takes any free one",
                fix="metrics.port and metrics.host in the job file",
            ) from None
        self.port = int(self._server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
        self._pages = pages
        self._readers, self._lock = Readers(), Lock()
        self._server.set_app(self._answer)
        self._thread = Thread(
            target=self._server.serve_forever, args=(0.1,), name="rayzero-metrics", daemon=True
        )
        self._thread.start()

    async def heard(self) -> None:
        """Waits until those who read regularly have read once more, for a while at most."""
        ended_s = monotonic()
        while monotonic() < self._wait_until_s(ended_s):
            await asyncio.sleep(_LOOK_S)

    def _wait_until_s(self, ended_s: float) -> float:
        with self._lock:
            return self._readers.wait_until_s(ended_s)

    def close(self) -> None:
        """Stops listening at once; requests under way end with the process at the latest."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_S)

    def _answer(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        known = path == "/metrics" or path in self._pages
        if not known:
            return _plain(start, "404 Not Found", "there is: " + ", ".join(self._paths))
        if method != "GET":
            return _plain(start, "405 Method Not Allowed", "this is only to be read")
        with self._lock:
            self._readers.read(path, monotonic())
        if path == "/metrics":
            return self._metrics(environ, start)
        kind, body = self._pages[path]()
        headers = [("Content-Type", kind), ("Cache-Control", "no-store"), *_SAFE]
        start("200 OK", headers)
        return [body]

    @property
    def _paths(self) -> list[str]:
        return ["/metrics", *self._pages]


def json_page(make: Callable[[], Any]) -> Page:
    """A page that is a JSON value, made anew for each request."""

    def page() -> tuple[str, bytes]:
        return "application/json; charset=utf-8", json.dumps(make(), allow_nan=False).encode()

    return page


_SAFE = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
]


def _plain(start: Start, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), *_SAFE])
    return [f"{status}: {text}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without asking a name server for this machine's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "rayzero", int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow, is nobody's concern."""


def _server(family: int, address: tuple[str, int]) -> _Server:
    kind = type("_Family", (_Server,), {"address_family": family})
    made: _Server = kind(address, _Quiet)
    return made


class _Quiet(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, *args: Any) -> None:
        """Requests are not the job's output."""

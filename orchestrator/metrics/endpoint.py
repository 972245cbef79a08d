"""The job's HTTP server: its page, /metrics for Prometheus, /snapshot.json. Only to be read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable
from errno import EADDRINUSE
from threading import Lock
from time import monotonic
from typing import Any

from prometheus_client import make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.metrics.readers import Readers
from rayzero.orchestrator.metrics.server import Server

_STOP_S = 5.0
_LOOK_S = 0.1

Page = Callable[[], tuple[str, bytes]]
"""(content type, body)."""
Start = Callable[[str, list[tuple[str, str]]], Any]


class Endpoint:
    """Serves from a thread of its own, and one for each request, until `close`.

    Args:
        host: an address of this machine; `0.0.0.0` or `::` for all of them.
        ports: tried in turn; 0 takes any free one. `port` says which it came to be.
        registry: what /metrics shows.
        pages: by path.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self, host: str, ports: range, registry: CollectorRegistry, pages: dict[str, Page]
    ) -> None:
        self._server = _listening(host, ports)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
        self._pages = pages
        self._readers, self._lock = Readers(), Lock()
        self._server.set_app(self._answer)
        self._server.serve()

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
        self._server.end(_STOP_S)

    def _answer(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        known = path == "/metrics" or path in self._pages
        if not known:
            return _plain(start, "404 Not Found", "there is: " + ", ".join(self._paths))
        if method not in ("GET", "HEAD"):
            return _plain(start, "405 Method Not Allowed", "this is only to be read")
        if method == "HEAD":
            start("200 OK", list(_SAFE))
            return []
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


def _listening(host: str, ports: range) -> Server:
    for port in ports:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return Server.of_family(family, (host, port))
        except OSError as error:
            if error.errno == EADDRINUSE and port != ports[-1]:
                continue  # another job's
            which = f"{host}:{port}" if len(ports) == 1 else f"{host}:{ports[0]} to {ports[-1]}"
            raise ConfigError(
                f"metrics.port: nothing can be served at {which}: {error.strerror or error}",
                allowed="a port that is free on the controller's machine; 0 takes any free one",
                fix="metrics.port, metrics.ports and metrics.host in the job file",
            ) from None
    raise ConfigError("metrics.ports: there is none to serve at", fix="metrics.ports: 1 or more")


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

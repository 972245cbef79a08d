"""/metrics, /snapshot.json, page; final scrape.

The job's HTTP server: its page, /metrics for Prometheus, /snapshot.json. Only to be read.

Who reads the job's endpoint again and again, so that the end can wait to be read. Pure.

A job that fails between two scrapes would never be seen as failed, and no alert could tell of it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from errno import EADDRINUSE
from threading import Lock
from time import monotonic
from typing import Any

from prometheus_client import make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.metrics.http_server import BoundedHttpServer

MAX_REGULAR_INTERVAL_S = 60.0
"""Reads further apart than this are nobody's habit."""


MAX_END_WAIT_S = 30.0
"""The longest that an end waits."""


_MAX_INTERVALS = 4


_SLACK_S = 0.5


class ScrapeSchedule:
    """Reads, by what was read. Times are of one clock."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}
        self._intervals_s: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_MAX_INTERVALS)
        )

    def record_scrape(self, what: str, now_s: float) -> None:
        if what in self._last_s:
            self._intervals_s[what].append(now_s - self._last_s[what])
        self._last_s[what] = now_s

    def wait_deadline_s(self, ended_s: float) -> float:
        """Until when somebody is expected who has not read the end yet; `ended_s`, if nobody is."""
        return max([ended_s, *(self._expected_scrape_s(what, ended_s) for what in self._last_s)])

    def _expected_scrape_s(self, what: str, ended_s: float) -> float:
        last_s, every_s = self._last_s[what], self._intervals_s[what]
        if last_s > ended_s or len(every_s) < 2 or max(every_s) > MAX_REGULAR_INTERVAL_S:
            return ended_s
        return min(last_s + 1.5 * max(every_s) + _SLACK_S, ended_s + MAX_END_WAIT_S)


_STOP_TIMEOUT_S = 5.0


_POLL_S = 0.1

PageHandler = Callable[[], tuple[str, bytes]]
"""(content type, body)."""


StartResponse = Callable[[str, list[tuple[str, str]]], Any]


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
        self, host: str, ports: range, registry: CollectorRegistry, pages: dict[str, PageHandler]
    ) -> None:
        self._server = _listen(host, ports)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._metrics_app: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)
        self._pages = pages
        self._scrapes, self._lock = ScrapeSchedule(), Lock()
        self._server.set_app(self._handle_request)
        self._server.start()

    async def await_final_scrape(self) -> None:
        """Waits until those who read regularly have read once more, for a while at most."""
        ended_s = monotonic()
        while monotonic() < self._final_scrape_deadline_s(ended_s):
            await asyncio.sleep(_POLL_S)

    def _final_scrape_deadline_s(self, ended_s: float) -> float:
        with self._lock:
            return self._scrapes.wait_deadline_s(ended_s)

    def close(self) -> None:
        """Stops listening at once; requests under way end with the process at the latest."""
        self._server.stop(_STOP_TIMEOUT_S)

    def _handle_request(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        known = path == "/metrics" or path in self._pages
        if not known:
            return _plain_response(start, "404 Not Found", "there is: " + ", ".join(self._paths))
        if method not in ("GET", "HEAD"):
            return _plain_response(start, "405 Method Not Allowed", "this is only to be read")
        if method == "HEAD":
            start("200 OK", list(_SECURITY_HEADERS))
            return []
        with self._lock:
            self._scrapes.record_scrape(path, monotonic())
        if path == "/metrics":
            return self._metrics_app(environ, start)
        kind, body = self._pages[path]()
        headers = [("Content-Type", kind), ("Cache-Control", "no-store"), *_SECURITY_HEADERS]
        start("200 OK", headers)
        return [body]

    @property
    def _paths(self) -> list[str]:
        return ["/metrics", *self._pages]


def _listen(host: str, ports: range) -> BoundedHttpServer:
    for port in ports:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return BoundedHttpServer.for_family(family, (host, port))
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


def make_json_page(make: Callable[[], Any]) -> PageHandler:
    """A page that is a JSON value, made anew for each request."""

    def page() -> tuple[str, bytes]:
        return "application/json; charset=utf-8", json.dumps(make(), allow_nan=False).encode()

    return page


_SECURITY_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "frame-ancestors 'none'"),
]


def _plain_response(start: StartResponse, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), *_SECURITY_HEADERS])
    return [f"{status}: {text}\n".encode()]

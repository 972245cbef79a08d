"""The job's read-only HTTP endpoint: its page, /metrics for Prometheus, /snapshot.json and
/history.json.

If a job ended right after it failed, no scrape would see the failure, and no alert could fire. So
the end of a job waits, for a limited time, until regular clients have read its final state.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from errno import EADDRINUSE
from http.client import HTTPException
from io import StringIO
from itertools import pairwise
from threading import Lock
from time import monotonic
from typing import Any, TypeAlias
from urllib.request import urlopen

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError, RayzeroError, first_line
from rayzero.orchestrator.metrics.http_server import Answer, HttpServer
from rayzero.orchestrator.metrics.snapshot import to_json

MAX_REGULAR_INTERVAL_S = 60.0
"""Clients that read less often are not waited for."""

MAX_END_WAIT_S = 30.0
"""Maximum time that the end of a job waits for clients."""

FURTHER_PORTS = 100
"""How many ports after the configured ones are tried."""
OWNER_TIMEOUT_S = 1.0
_MAX_OWNER_BYTES = 64 << 20
_MAX_PORT = 65535
_MAX_INTERVALS = 4
_SLACK_S = 0.5
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.1
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "frame-ancestors 'none'",
}

_AWAITED_PATHS = ("/metrics", "/snapshot.json")
"""Paths with the job's state; the end of a job waits for their regular readers only."""

Page: TypeAlias = tuple[str, bytes]
"""(content type, body)"""
_JOB_COLUMNS = tuple(
    (
        "name state error began_s at_s wall_s stage world_size step steps loss samples_per_s "
        "tokens_per_s step_s cpu_cores gpu_utilization goodput faults"
    ).split()
)


class ScrapeSchedule:
    """Recent reads of each path, and when the next one is expected. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._times_s: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_MAX_INTERVALS + 1)
        )

    def record_scrape(self, path: str, now_s: float) -> None:
        with self._lock:
            self._times_s[path].append(now_s)

    def wait_deadline_s(self, ended_s: float) -> float:
        """Returns the time by which all regular clients are expected to have read once more after
        `ended_s`; `ended_s` if there are no such clients."""
        deadline_s = ended_s
        with self._lock:
            recent_s = [tuple(times_s) for times_s in self._times_s.values()]
        for times_s in recent_s:
            intervals_s = [after - before for before, after in pairwise(times_s)]
            is_regular = len(intervals_s) >= 2 and max(intervals_s) <= MAX_REGULAR_INTERVAL_S
            if is_regular and times_s[-1] <= ended_s:
                expected_s = times_s[-1] + 1.5 * max(intervals_s) + _SLACK_S
                deadline_s = max(deadline_s, min(expected_s, ended_s + MAX_END_WAIT_S))
        return deadline_s


class Endpoint:
    """Serves with an `HttpServer`, from construction until `close`. Raises ConfigError if it cannot
    listen on any of the ports.

    Args:
        host: an address of this machine; `0.0.0.0` or `::` for all of them.
        ports: ports that are tried in turn; 0 for any free one. `port` is the port in use.
        registry: the metrics that /metrics exports.
        pages: functions that make the other pages, by path.
    """

    def __init__(
        self,
        host: str,
        ports: range,
        registry: CollectorRegistry,
        pages: dict[str, Callable[[], Page]],
        further_ports: int = FURTHER_PORTS,
    ) -> None:
        self.port_note = ""
        """A text that says why none of `ports` is used; empty if one is."""
        self._registry = registry
        self._pages = pages
        self._scrapes = ScrapeSchedule()
        self._server = self._listen(host, ports, further_ports)
        self.port = self._server.port
        self.url = self._server.url

    def _listen(self, host: str, ports: range, further_ports: int) -> HttpServer:
        """Listens on one of the ports; or on the next free one, as Ray's dashboard does, because a
        job must not fail for its page."""
        last = ports[-1]
        further = range(last + 1, min(last + further_ports, _MAX_PORT) + 1)
        settings = "metrics.port, metrics.ports and metrics.host in the job file"
        answer = page_answer(self._find_page, ", ".join(["/metrics", *self._pages]))
        server = listen(host, [*ports, *further], answer, "metrics.port", settings)
        if server.port in further and 0 not in ports:
            taken = f"port {last} is" if len(ports) == 1 else f"ports {ports[0]} to {last} are"
            owner = _job_at(host, last)
            by = f" by the job {owner}" if owner else ""
            self.port_note = f"{taken} in use{by}: the page is at port {server.port} (metrics.port)"
        return server

    async def await_final_scrape(self) -> None:
        """Waits until regular clients have read once more, `MAX_END_WAIT_S` at most."""
        ended_s = monotonic()
        while monotonic() < self._scrapes.wait_deadline_s(ended_s):
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        self._server.stop(STOP_TIMEOUT_S)

    def _find_page(self, request: web.BaseRequest) -> Page | None:
        if request.path in _AWAITED_PATHS and request.method == "GET":
            self._scrapes.record_scrape(request.path, monotonic())
        if request.path == "/metrics":
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
            names = request.query.getall("name[]", [])
            registry = self._registry.restricted_registry(names) if names else self._registry
            return content_type, encode(registry)
        page = self._pages.get(request.path)
        return None if page is None else page()


def _job_at(host: str, port: int) -> str:
    """Returns the name of the job whose endpoint listens there; an empty string if none does."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{local}]' if ':' in local else local}:{port}/snapshot.json"
    try:
        with urlopen(url, timeout=OWNER_TIMEOUT_S) as response:
            return str(json.loads(response.read(_MAX_OWNER_BYTES))["job"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return ""


def listen(
    host: str, ports: Sequence[int], answer: Answer, setting: str, settings: str
) -> HttpServer:
    """Returns a server on the first of these ports that is free. Raises ConfigError if none is.

    Args:
        setting: setting of the port, for the error.
        settings: all settings that can be changed, for the error.
    """
    for port in ports:
        try:
            return HttpServer(host, port, answer)
        except OSError as error:
            if error.errno == EADDRINUSE and port != ports[-1]:
                continue  # another job may use this port
            where = f"{host}:{port}" if len(ports) == 1 else f"{host}:{ports[0]} to {ports[-1]}"
            raise ConfigError(
                f"{setting}: cannot listen on {where}: {error.strerror or error}",
                allowed="a free port of this machine; 0 takes any free one",
                fix=f"change {settings}",
            ) from None
    raise ConfigError("metrics.ports: no port to listen on", fix="set metrics.ports to 1 or more")


def page_answer(
    find_page: Callable[[web.BaseRequest], Page | None], available: str, *, may_wait: bool = False
) -> Answer:
    """Returns a function that answers requests with pages, compressed if the client accepts that.

    Args:
        find_page: returns the page of a request; None if there is none. May raise RayzeroError.
        available: the available paths, for the answer if there is no page.
        may_wait: `find_page` may block, so it is called in another thread.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            return _refusal(405, "use GET or HEAD")
        try:
            page = await asyncio.to_thread(find_page, request) if may_wait else find_page(request)
        except RayzeroError as error:
            return _refusal(422, first_line(error))
        if page is None:
            return _refusal(404, f"available: {available}")
        content_type, body = page
        headers = {"Content-Type": content_type, **_HEADERS}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 3)
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)

    return answer


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{status}: {text}\n", headers=_HEADERS)


def json_response(value: Any) -> Page:
    """Returns a value, which must not contain inf or nan, as a JSON page."""
    return "application/json; charset=utf-8", to_json(value)


def steps_csv(history: Mapping[str, Any]) -> Page:
    """Returns the curves in /history.json as CSV (RFC 4180). Each curve has a column; there is a
    line for each step at which a row of any curve begins. If the rows of a curve have several
    steps, its column is the mean, and it also has columns NAME_min and NAME_max."""
    lines: dict[int, dict[str, Any]] = {}
    columns: dict[str, None] = {"step": None, "elapsed_s": None}
    for name, rows in history["curves"].items():
        of_several = any(len(row) > 2 for row in rows)
        names = (name, f"{name}_min", f"{name}_max") if of_several else (name,)
        columns |= dict.fromkeys(names)
        for step, *values in rows:
            line = lines.setdefault(step, {"step": step})
            of_names = values[:3] if len(values) > 1 else values * 3
            numbers = ("nan" if value is None else value for value in of_names)
            line.update(zip(names, numbers, strict=False))
    return _to_csv(columns, (lines[step] for step in sorted(lines)))


def jobs_csv(rows: Sequence[Mapping[str, Any]]) -> Page:
    """Returns the rows in /jobs.json as CSV, with a column for each value and each config key."""
    keys = {key: None for row in rows for key in row["config"]}
    return _to_csv([*_JOB_COLUMNS, *keys], ({**row, **row["config"]} for row in rows))


def _to_csv(columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> Page:
    """Returns rows as CSV. Unknown values are empty."""
    text = StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return "text/csv; charset=utf-8", text.getvalue().encode()

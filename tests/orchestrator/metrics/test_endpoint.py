"""The job's HTTP endpoint: its answers, hostile clients, and how long its end waits for clients."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import Gauge
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.metrics.endpoint import MAX_END_WAIT_S, Endpoint, ScrapeSchedule
from rayzero.orchestrator.metrics.http_server import (
    CPU_BURST_S,
    CPU_SHARE,
    MAX_CONNECTIONS,
    CpuBudget,
    HttpServer,
    _BoundedServer,
)

LIMIT_S = 60.0


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = open_endpoint()
    yield endpoint
    endpoint.close()


def open_endpoint(port: int = 0, ports: int = 1, **options: int) -> Endpoint:
    registry = CollectorRegistry()
    Gauge("rayzero_step", "Steps.", registry=registry).set(7)
    pages = {
        "/snapshot.json": lambda: ("application/json", b'{"job": "demo", "step": 7}'),
        "/history.json": lambda: ("application/json", b"[" + b"1," * 9999 + b"1]"),
    }
    return Endpoint("127.0.0.1", range(port, port + ports), registry, pages, **options)


def get(endpoint: Endpoint, path: str, **headers: str) -> bytes:
    request = urllib.request.Request(endpoint.url + path, headers=headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
        return bytes(response.read())


def connect(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=LIMIT_S)


def response_to(endpoint: Endpoint, request: bytes) -> bytes:
    """The complete response to a request."""
    response = b""
    with connect(endpoint) as connection:
        with suppress(OSError):  # the server may disconnect before all was sent
            connection.sendall(request)
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                response += part
    return response


def is_served(endpoint: Endpoint) -> bool:
    return json.loads(get(endpoint, "/snapshot.json")) == {"job": "demo", "step": 7}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[_BoundedServer]:
    """The servers that are opened in the test."""
    opened: list[_BoundedServer] = []
    original = _BoundedServer.__init__

    def construct(server: _BoundedServer, *args: Any, **options: Any) -> None:
        opened.append(server)
        original(server, *args, **options)

    monkeypatch.setattr(_BoundedServer, "__init__", construct)
    return opened


def test_metrics_and_snapshot(endpoint: Endpoint):
    body = get(endpoint, "/metrics")
    assert b"rayzero_step 7.0" in body
    assert gzip.decompress(get(endpoint, "/metrics", **{"Accept-Encoding": "gzip"})) == body
    assert is_served(endpoint)
    body = get(endpoint, "/history.json")
    packed = get(endpoint, "/history.json", **{"Accept-Encoding": "gzip"})
    assert gzip.decompress(packed) == body
    assert len(packed) < len(body) / 10
    for path in ("/snapshot.json", "/metrics"):
        answer = response_to(endpoint, f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.0 200")
        assert answer.partition(b"\r\n\r\n")[2] == b""


PATHS = ("/", "/metrics/", "/etc/passwd", "/favicon.ico", "/../../etc/passwd", "/.", "/%2e%2e/")
PATHS += ("/%2F", "/\0", "*", "//else/", "http://else/x", "/../snapshot.json")
METHODS = ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "PROPFIND", "get", "X", "CONNECT")


@pytest.mark.parametrize(
    ("line", "status"),
    [*((f"GET {it}", "404") for it in PATHS), *((f"{it} /metrics", "405") for it in METHODS)],
)
def test_other_paths_and_methods_are_refused(endpoint: Endpoint, line: str, status: str):
    answer = response_to(endpoint, f"{line} HTTP/1.0\r\n\r\n".encode())
    assert answer.startswith((f"HTTP/1.0 {status}".encode(), b"HTTP/1.0 400")), answer


@pytest.mark.parametrize(
    "request_",
    [b"G" * 200_000, b"GET /" + b"x" * 200_000, b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 50_000],
    ids=["no path", "a long path", "many headers"],
)
def test_long_request_is_rejected(endpoint: Endpoint, request_: bytes):
    answer = response_to(endpoint, request_)
    assert answer == b"" or answer.startswith(b"HTTP/1.0 400"), answer[:100]
    assert is_served(endpoint)


def test_oldest_connection_is_closed_beyond_limit(
    servers: list[_BoundedServer], endpoint: Endpoint
):
    """A request is served in spite of many idle connections, and their number is bounded."""
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(endpoint)) for _ in range(MAX_CONNECTIONS * 3)]
        for connection in idle:
            with suppress(OSError):
                connection.sendall(b"GET / HT")
        assert is_served(endpoint)
        assert len(servers[0].connections) <= MAX_CONNECTIONS
        with suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""  # it has been closed


def test_hundreds_of_connections_leave_nothing(servers: list[_BoundedServer], endpoint: Endpoint):
    threads = threading.active_count()
    for _ in range(300):
        connection = connect(endpoint)
        with suppress(OSError):
            connection.sendall(b"GET / HTTP/1.0\r\n")
        connection.close()
    assert is_served(endpoint)
    until_s = time.monotonic() + LIMIT_S
    while servers[0].connections and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not servers[0].connections
    assert threading.active_count() == threads


def test_slow_client_is_disconnected(monkeypatch: pytest.MonkeyPatch):
    async def answer(_: web.BaseRequest) -> web.Response:
        raise AssertionError("the request is not complete")

    server = HttpServer("127.0.0.1", 0, answer, lifetime_s=1.0)
    began_s = time.monotonic()
    slow = socket.create_connection(("127.0.0.1", server.port), timeout=0.2)
    with slow, suppress(ConnectionError):
        slow.sendall(b"GET / HTTP/1.0\r\na: ")
        while time.monotonic() - began_s < LIMIT_S:
            with suppress(TimeoutError):
                slow.sendall(b"a")  # no single wait is long
                if slow.recv(1) == b"":
                    break
    assert 0.9 < time.monotonic() - began_s < LIMIT_S
    server.stop(LIMIT_S)


def test_answers_that_hang_are_limited(servers: list[_BoundedServer]):
    """Such as commands whose clients have gone: a further connection is closed at once."""
    begun = threading.Semaphore(0)

    async def answer(_: web.BaseRequest) -> web.Response:
        begun.release()
        await asyncio.sleep(LIMIT_S)
        raise AssertionError

    server = HttpServer("127.0.0.1", 0, answer)
    for number in range(MAX_CONNECTIONS + 1):
        until_s = time.monotonic() + LIMIT_S
        while number == MAX_CONNECTIONS and time.monotonic() < until_s:
            if all(request.transport is None for request in servers[0].requests):
                break  # the server has seen that the others are closed
            time.sleep(0.02)
        with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            if number < MAX_CONNECTIONS:
                assert begun.acquire(timeout=LIMIT_S)
                client.shutdown(socket.SHUT_RDWR)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
    assert not begun.acquire(blocking=False)
    server.stop(LIMIT_S)


def test_cpu_budget():
    budget = CpuBudget(now_s=10.0, cpu_s=5.0)
    assert budget.wait_s(10.0, 5.0 + CPU_BURST_S) == 0
    assert budget.wait_s(10.0, 6.0 + CPU_BURST_S) == pytest.approx(1 / CPU_SHARE)
    assert budget.wait_s(12.0, 6.0 + CPU_BURST_S) == pytest.approx(1 / CPU_SHARE - 2)
    assert budget.wait_s(14.0, 6.0 + CPU_BURST_S) == 0
    assert budget.wait_s(1000.0, 6.0 + CPU_BURST_S) == 0
    assert budget.wait_s(1000.0, 8.0 + CPU_BURST_S + 1.0) == pytest.approx(1 / CPU_SHARE)


def test_requests_are_delayed_when_cpu_budget_is_used_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(CpuBudget, "wait_s", lambda *_: 1000.0)
    longest_s, until_s = 0.0, time.monotonic() + LIMIT_S
    while longest_s < 0.1 and time.monotonic() < until_s:
        began_s = time.monotonic()
        assert is_served(endpoint)
        longest_s = max(longest_s, time.monotonic() - began_s)
    assert longest_s >= 0.1


def test_ports_that_are_all_in_use_are_named_and_the_next_one_is_taken(endpoint: Endpoint):
    """As Ray's dashboard does: a page is no reason to fail a job."""
    with contextlib.closing(open_endpoint(port=endpoint.port, ports=20)) as next_job:
        assert endpoint.port < next_job.port < endpoint.port + 20
    listeners = []
    for port in (endpoint.port + 1, endpoint.port + 2):
        with contextlib.suppress(OSError):  # another process may use the port
            listeners.append(socket.create_server(("127.0.0.1", port)))
    other = open_endpoint(port=endpoint.port, ports=3)
    second = open_endpoint(port=endpoint.port)
    try:
        assert other.port > endpoint.port + 2
        where = f"ports {endpoint.port} to {endpoint.port + 2} are in use: "
        assert other.port_note.startswith(where)
        assert f"at port {other.port} (metrics.port)" in other.port_note
        assert f"port {endpoint.port} is in use by the job demo" in second.port_note
    finally:
        other.close()
        second.close()
        for listener in listeners:
            listener.close()


def test_no_free_port_is_an_error(endpoint: Endpoint):
    with pytest.raises(ConfigError, match=rf"metrics\.port: .*127\.0\.0\.1:{endpoint.port}"):
        open_endpoint(port=endpoint.port, further_ports=0)


def test_close_waits_for_regular_clients(endpoint: Endpoint):
    for _ in range(3):
        get(endpoint, "/history.json")  # has no state of the job
        time.sleep(0.1)
    assert final_wait_s(endpoint) < 0.1
    for _ in range(3):
        get(endpoint, "/metrics")
        time.sleep(0.3)
    reader = threading.Timer(0.3, get, (endpoint, "/metrics"))
    reader.start()
    assert final_wait_s(endpoint) > 0.2
    reader.join()
    wait_s = final_wait_s(endpoint)  # the next request of the client never arrives
    assert 0.4 < wait_s < MAX_END_WAIT_S + 20
    endpoint.close()
    open_endpoint(port=endpoint.port).close()  # the port is free at once


def final_wait_s(endpoint: Endpoint) -> float:
    """How long the shutdown waits for a final scrape."""
    start_s = time.monotonic()
    asyncio.run(endpoint.await_final_scrape())
    return time.monotonic() - start_s


STEADY = (80, 85, 90, 95)
SCHEDULES: dict[str, tuple[dict[str, Sequence[float]], float, float]] = {
    "no client": ({}, 100, 100),
    "one read": ({"/metrics": (99,)}, 100, 100),
    "two reads": ({"/metrics": (95, 99)}, 100, 100),
    "irregular": ({"/metrics": (10, 80, 99)}, 100, 100),
    "long ago": ({"/metrics": (1, 2, 3)}, 100, 100),
    "longer than the usual interval": ({"/metrics": STEADY}, 96, 103),
    "the longest interval": ({"/metrics": (60, 75, 90)}, 100, 113),
    "two clients of one path": ({"/metrics": (60, 61, 75, 76, 90, 91)}, 92, 112.5),
    "limited": ({"/metrics": (0, 50, 99)}, 100, 100 + MAX_END_WAIT_S),
    "has read the final values": ({"/metrics": (*STEADY, 100.5)}, 100, 100),
    "each path has its own": (
        {"/metrics": STEADY, "/snapshot.json": (93, 94, 95, 96, 100.5)},
        100,
        103,
    ),
}
"""(reads by path, when the job ended, until when its end waits)"""


@pytest.mark.parametrize(("reads", "ended_s", "until_s"), SCHEDULES.values(), ids=SCHEDULES)
def test_end_waits_for_the_next_read_of_regular_clients(
    reads: dict[str, Sequence[float]], ended_s: float, until_s: float
) -> None:
    scrapes = ScrapeSchedule()
    for path, times in reads.items():
        for now_s in times:
            scrapes.record_scrape(path, now_s)
    assert scrapes.wait_deadline_s(ended_s) == pytest.approx(until_s)

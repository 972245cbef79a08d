"""The HTTP server with slow, many or malicious clients."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.registry import CollectorRegistry

from rayzero.orchestrator.metrics.endpoint import Endpoint
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
    pages = {"/": lambda: ("text/html", b"<p>")}
    server = Endpoint("127.0.0.1", range(1), CollectorRegistry(), pages)
    yield server
    server.close()


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
    with urllib.request.urlopen(endpoint.url + "/", timeout=LIMIT_S) as answer:
        return bool(answer.read() == b"<p>")


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


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/.", "/%2e%2e/", "/%2F", "/\0", "*", "//else/", "http://else/x"],
)
def test_unknown_paths_are_not_found(endpoint: Endpoint, path: str):
    answer = response_to(endpoint, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.0 404", b"HTTP/1.0 400")) or b"<p>" in answer, answer
    assert b"root:" not in answer


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PATCH", "PROPFIND", "get", "X", "CONNECT"])
def test_only_get_and_head_are_allowed(endpoint: Endpoint, method: str):
    answer = response_to(endpoint, f"{method} / HTTP/1.0\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.0 405", b"HTTP/1.0 400")), answer


def test_head_has_no_body(endpoint: Endpoint):
    for path in ("/", "/metrics"):
        answer = response_to(endpoint, f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.0 200")
        assert answer.partition(b"\r\n\r\n")[2] == b""


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


def test_requests_are_delayed_when_cpu_budget_is_used_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CpuBudget, "wait_s", lambda *_: 1000.0)
    pages = {"/": lambda: ("text/html", b"<p>")}
    endpoint = Endpoint("127.0.0.1", range(1), CollectorRegistry(), pages)
    longest_s, until_s = 0.0, time.monotonic() + LIMIT_S
    while longest_s < 0.1 and time.monotonic() < until_s:
        began_s = time.monotonic()
        assert is_served(endpoint)
        longest_s = max(longest_s, time.monotonic() - began_s)
    endpoint.close()
    assert longest_s >= 0.1

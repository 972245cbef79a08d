"""The HTTP server with slow, many or malicious clients."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from prometheus_client.registry import CollectorRegistry

from rayzero.orchestrator.metrics import http_server
from rayzero.orchestrator.metrics.endpoint import Endpoint
from rayzero.orchestrator.metrics.http_server import (
    CONNECTION_LIFETIME_S,
    MAX_CONNECTIONS,
    ConnectionLimiter,
    CpuBudget,
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


def open_connections() -> int:
    return sum(thread.name == "rayzero-http-conn" for thread in threading.enumerate())


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "//", "/.", "/%2e%2e/", "/%2F", "http://else/", "/?/..", "/\0", "*"],
)
def test_unknown_paths_are_not_found(endpoint: Endpoint, path: str):
    answer = response_to(endpoint, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    is_page = path in ("//", "/?/..")  # they name the page
    assert answer.startswith(b"HTTP/1.0 200" if is_page else b"HTTP/1.0 404"), answer
    assert b"root:" not in answer


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "CONNECT", "PATCH", "PROPFIND", "get", "X"])
def test_only_get_and_head_are_allowed(endpoint: Endpoint, method: str):
    assert response_to(endpoint, f"{method} / HTTP/1.0\r\n\r\n".encode()).startswith(
        b"HTTP/1.0 405"
    )


def test_head_has_no_body(endpoint: Endpoint):
    for path in ("/", "/metrics"):
        head, _, body = response_to(endpoint, f"HEAD {path} HTTP/1.0\r\n\r\n".encode()).partition(
            b"\r\n\r\n"
        )
        assert head.startswith(b"HTTP/1.0 200")
        assert body == b""


@pytest.mark.parametrize(
    "request_",
    [b"G" * 200_000, b"GET /" + b"x" * 200_000, b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 50_000],
    ids=["no path", "a long path", "many headers"],
)
def test_long_request_is_rejected(endpoint: Endpoint, request_: bytes):
    answer = response_to(endpoint, request_)
    assert answer == b"" or answer.startswith(b"HTTP/1.0 431"), answer[:100]
    assert is_served(endpoint)


def test_oldest_connection_is_closed_beyond_limit(endpoint: Endpoint):
    """A request is served in spite of many idle connections, and threads are bounded."""
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(endpoint)) for _ in range(MAX_CONNECTIONS * 3)]
        for connection in idle:
            with suppress(OSError):
                connection.sendall(b"GET / HT")
        assert is_served(endpoint)
        assert open_connections() <= 2 * MAX_CONNECTIONS
        assert idle[0].recv(1) == b""  # it has been closed


def test_hundreds_of_connections_leave_no_threads(endpoint: Endpoint):
    for _ in range(300):
        connection = connect(endpoint)
        with suppress(OSError):
            connection.sendall(b"GET / HTTP/1.0\r\n")
        connection.close()
        assert open_connections() <= 2 * MAX_CONNECTIONS
    assert is_served(endpoint)
    until_s = time.monotonic() + LIMIT_S
    while open_connections() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert open_connections() == 0


def test_slow_client_is_disconnected(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    with connect(endpoint) as slow:
        slow.sendall(b"GET / HTTP/1.0\r\na: ")
        until_s = time.monotonic() + LIMIT_S
        while not open_connections():  # it is accepted, by the real clock
            assert time.monotonic() < until_s
            time.sleep(0.01)
        monkeypatch.setattr(
            http_server, "monotonic", lambda: time.monotonic() + CONNECTION_LIFETIME_S + 1
        )
        slow.settimeout(0.2)
        while time.monotonic() < until_s:
            try:
                slow.sendall(b"a")  # no single wait is long
                assert slow.recv(1) == b""
                return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        raise AssertionError("the connection is still open")


def test_connection_is_closed_if_thread_cannot_start(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
):
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoThread)
        for _ in range(2 * MAX_CONNECTIONS):  # the limit of open connections
            assert response_to(endpoint, b"GET / HTTP/1.0\r\n\r\n") == b""
    assert len(endpoint._server._connections) == 0
    assert is_served(endpoint)


def test_connections_are_limited_in_number_and_time():
    limiter = ConnectionLimiter(max_connections=2, lifetime_s=5)
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(5)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
                end.settimeout(LIMIT_S)
        assert [limiter.admit(server, now_s) for now_s, (server, _) in enumerate(pairs)] == [
            *[True] * 4,
            False,
        ]
        assert [client.recv(1) for _, client in pairs[:2]] == [b"", b""]  # 2 and 3 are admitted
        limiter.release(pairs[0][0])
        limiter.release(pairs[0][0])
        assert len(limiter) == 3
        client = pairs[3][1]
        client.settimeout(0)
        limiter.expire(7.9)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        limiter.expire(8.0)
        assert client.recv(1) == b""


def test_cpu_budget():
    budget = CpuBudget(share=0.25, burst_s=2.0)
    budget.spend(2.0, 10.0)
    assert budget.throttle_s(10.0) == 0
    budget.spend(1.0, 10.0)
    assert budget.throttle_s(10.0) == pytest.approx(4.0)
    assert budget.throttle_s(12.0) == pytest.approx(2.0)
    assert budget.throttle_s(14.0) == 0
    budget.spend(1.0, 13.0)  # a clock that another thread read a little earlier
    assert budget.throttle_s(14.0) == pytest.approx(4.0)


def test_connections_are_delayed_when_cpu_budget_is_used_up(endpoint: Endpoint):
    server = endpoint._server
    server._cpu_budget.spend(1000.0, time.monotonic())
    began_s = time.monotonic()
    assert is_served(endpoint)
    assert is_served(endpoint)
    assert time.monotonic() - began_s >= 0.19

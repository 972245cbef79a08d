"""Readers of a job's page that are slow, many, long-winded or after something else."""

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
    made = Endpoint("127.0.0.1", range(1), CollectorRegistry(), pages)
    yield made
    made.close()


def connect(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=LIMIT_S)


def said(endpoint: Endpoint, request: bytes) -> bytes:
    """All that is answered to some bytes, up to the connection's end."""
    found = b""
    with connect(endpoint) as one:
        with suppress(OSError):  # it may hang up before all was sent
            one.sendall(request)
        with suppress(ConnectionError):
            while part := one.recv(65536):
                found += part
    return found


def is_served(endpoint: Endpoint) -> bool:
    with urllib.request.urlopen(endpoint.url + "/", timeout=LIMIT_S) as answer:
        return bool(answer.read() == b"<p>")


def readers() -> int:
    return sum(one.name == "rayzero-http-conn" for one in threading.enumerate())


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "//", "/.", "/%2e%2e/", "/%2F", "http://else/", "/?/..", "/\0", "*"],
)
def test_no_path_leads_anywhere_else(endpoint: Endpoint, path: str):
    answer = said(endpoint, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    known = path in ("//", "/?/..")  # the page, as many a server reads it
    assert answer.startswith(b"HTTP/1.0 200" if known else b"HTTP/1.0 404"), answer
    assert b"root:" not in answer


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "CONNECT", "PATCH", "PROPFIND", "get", "X"])
def test_no_method_but_two(endpoint: Endpoint, method: str):
    assert said(endpoint, f"{method} / HTTP/1.0\r\n\r\n".encode()).startswith(b"HTTP/1.0 405")


def test_head_has_no_body(endpoint: Endpoint):
    for path in ("/", "/metrics"):
        head, _, body = said(endpoint, f"HEAD {path} HTTP/1.0\r\n\r\n".encode()).partition(
            b"\r\n\r\n"
        )
        assert head.startswith(b"HTTP/1.0 200")
        assert body == b""


@pytest.mark.parametrize(
    "request_",
    [b"G" * 200_000, b"GET /" + b"x" * 200_000, b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 50_000],
    ids=["no path", "a long path", "many headers"],
)
def test_a_long_request_is_not_read_to_its_end(endpoint: Endpoint, request_: bytes):
    answer = said(endpoint, request_)
    assert answer == b"" or answer.startswith(b"HTTP/1.0 431"), answer[:100]
    assert is_served(endpoint)


def test_who_waits_longest_gives_way(endpoint: Endpoint):
    """Many that ask for nothing: one that asks is served all the same, and threads are bounded."""
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(endpoint)) for _ in range(MAX_CONNECTIONS * 3)]
        for one in idle:
            with suppress(OSError):
                one.sendall(b"GET / HT")
        assert is_served(endpoint)
        assert readers() <= 2 * MAX_CONNECTIONS
        assert idle[0].recv(1) == b""  # it has been closed


def test_hundreds_leave_nothing(endpoint: Endpoint):
    for _ in range(300):
        one = connect(endpoint)
        with suppress(OSError):
            one.sendall(b"GET / HTTP/1.0\r\n")
        one.close()
        assert readers() <= 2 * MAX_CONNECTIONS
    assert is_served(endpoint)
    until_s = time.monotonic() + LIMIT_S
    while readers() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert readers() == 0


def test_one_that_drips_is_cut_off(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    with connect(endpoint) as slow:
        slow.sendall(b"GET / HTTP/1.0\r\na: ")
        until_s = time.monotonic() + LIMIT_S
        while not readers():  # it has come in, by the real clock
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
        raise AssertionError("it drips still")


def test_a_reader_for_whom_there_is_no_thread_takes_no_place(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
):
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", NoThread)
        for _ in range(2 * MAX_CONNECTIONS):  # as many as there may be at a time
            assert said(endpoint, b"GET / HTTP/1.0\r\n\r\n") == b""
    assert len(endpoint._server._connections) == 0
    assert is_served(endpoint)


def test_doors_close_behind_those_that_stay():
    doors = ConnectionLimiter(max_connections=2, lifetime_s=5)
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(5)]
        for pair in pairs:
            for end in pair:
                stack.enter_context(end)
                end.settimeout(LIMIT_S)
        assert [doors.admit(ours, at) for at, (ours, _) in enumerate(pairs)] == [*[True] * 4, False]
        assert [theirs.recv(1) for _, theirs in pairs[:2]] == [b"", b""]  # 2 and 3 are in
        doors.release(pairs[0][0])
        doors.release(pairs[0][0])
        assert len(doors) == 3
        theirs = pairs[3][1]
        theirs.settimeout(0)
        doors.expire(7.9)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        doors.expire(8.0)
        assert theirs.recv(1) == b""


def test_effort_is_a_share_of_a_core():
    effort = CpuBudget(share=0.25, burst_s=2.0)
    effort.spend(2.0, 10.0)
    assert effort.throttle_s(10.0) == 0
    effort.spend(1.0, 10.0)
    assert effort.throttle_s(10.0) == pytest.approx(4.0)
    assert effort.throttle_s(12.0) == pytest.approx(2.0)
    assert effort.throttle_s(14.0) == 0
    effort.spend(1.0, 13.0)  # a clock that another thread read a little earlier
    assert effort.throttle_s(14.0) == pytest.approx(4.0)


def test_those_that_take_much_are_let_in_more_slowly(endpoint: Endpoint):
    made = endpoint._server
    made._cpu_budget.spend(1000.0, time.monotonic())
    began_s = time.monotonic()
    assert is_served(endpoint)
    assert is_served(endpoint)
    assert time.monotonic() - began_s >= 0.19

"""The job's HTTP endpoint: its pages and its end, and slow, many or malicious clients."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress

import pytest
from prometheus_client import Gauge
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.metrics import endpoint as module
from rayzero.orchestrator.metrics import http_server
from rayzero.orchestrator.metrics.endpoint import MAX_END_WAIT_S, Endpoint, ScrapeSchedule
from rayzero.orchestrator.metrics.http_server import (
    CONNECTION_LIFETIME_S,
    MAX_CONNECTIONS,
    ConnectionLimiter,
    CpuBudget,
)

LIMIT_S = 60.0
METHODS = ["OPTIONS", "TRACE", "CONNECT", "PATCH", "PROPFIND", "get", "X", "POST", "PUT", "DELETE"]
PATHS = [
    *("/../../etc/passwd", "/etc/passwd", "/metrics/", "/../job.yaml", "/favicon.ico", "//", "/."),
    *("/%2e%2e/", "/%2F", "http://else/", "/?/..", "/\0", "*"),
]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with closing(open_endpoint()) as opened:
        yield opened


def open_endpoint(host: str = "127.0.0.1", port: int = 0, ports: int = 1) -> Endpoint:
    registry = CollectorRegistry()
    Gauge("rayzero_step", "Steps.", registry=registry).set(7)
    pages = {
        "/": lambda: ("text/html", b"<p>"),
        "/snapshot.json": lambda: ("application/json", b'{"job": "demo", "step": 7}'),
        "/history.json": lambda: ("application/json", b"[" + b"1," * 9999 + b"1]"),
    }
    return Endpoint(host, range(port, port + ports), registry, pages)


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


@pytest.mark.parametrize("path", PATHS)
def test_unknown_paths_are_not_found(endpoint: Endpoint, path: str):
    answer = response_to(endpoint, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    is_page = path in ("//", "/?/..")  # they name the page
    assert answer.startswith(b"HTTP/1.0 200" if is_page else b"HTTP/1.0 404"), answer
    assert b"root:" not in answer


@pytest.mark.parametrize("path", ["/", "/metrics"])
@pytest.mark.parametrize("method", METHODS)
def test_only_get_and_head_are_allowed(endpoint: Endpoint, method: str, path: str):
    answer = response_to(endpoint, f"{method} {path} HTTP/1.0\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 405")


def test_head_has_no_body(endpoint: Endpoint):
    for path in ("/", "/metrics"):
        answer = response_to(endpoint, f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = answer.partition(b"\r\n\r\n")
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


def get(endpoint: Endpoint, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(endpoint.url + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_metrics_and_snapshot(endpoint: Endpoint):
    status, body = get(endpoint, "/metrics")
    assert (status, b"rayzero_step 7.0" in body) == (200, True)
    packed = get(endpoint, "/metrics", **{"Accept-Encoding": "gzip"})[1]
    assert gzip.decompress(packed) == body
    status, body = get(endpoint, "/snapshot.json")
    assert (status, json.loads(body)) == (200, {"job": "demo", "step": 7})
    body = get(endpoint, "/history.json")[1]
    packed = get(endpoint, "/history.json", **{"Accept-Encoding": "gzip"})[1]
    assert gzip.decompress(packed) == body
    assert len(packed) < len(body) / 10


def test_idle_client_does_not_delay_others(endpoint: Endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port)):
        assert get(endpoint, "/metrics")[0] == 200


def test_jobs_on_one_head_use_ports_in_turn(endpoint: Endpoint):
    """The next job uses the next free port."""
    first = endpoint.port
    with closing(open_endpoint(port=first, ports=20)) as other:
        assert first < other.port <= first + 19


def test_ports_that_are_all_in_use_are_named_and_the_next_one_is_taken(endpoint: Endpoint):
    """As Ray's dashboard does: a page is no reason to fail a job."""
    listeners = []
    for port in (endpoint.port + 1, endpoint.port + 2):
        with suppress(OSError):  # another process may use the port
            listeners.append(socket.create_server(("127.0.0.1", port)))
    with (
        closing(open_endpoint(port=endpoint.port, ports=3)) as other,
        closing(open_endpoint(port=endpoint.port)) as second,
    ):
        assert other.port > endpoint.port + 2
        where = f"ports {endpoint.port} to {endpoint.port + 2} are in use: "
        assert other.port_note.startswith(where)
        assert f"at port {other.port} (metrics.port)" in other.port_note
        assert f"port {endpoint.port} is in use by the job demo" in second.port_note
    for listener in listeners:
        listener.close()


def test_no_free_port_is_an_error(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FURTHER_PORTS", 0)
    with pytest.raises(ConfigError, match=rf"metrics\.port: .*127\.0\.0\.1:{endpoint.port}"):
        open_endpoint(port=endpoint.port)


def test_foreign_host_address_is_an_error():
    with pytest.raises(ConfigError, match=r"metrics\.host"):
        open_endpoint(host="192.0.2.1")


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


def final_wait_s(endpoint: Endpoint) -> float:
    """How long the shutdown waits for a final scrape."""
    start_s = time.monotonic()
    asyncio.run(endpoint.await_final_scrape())
    return time.monotonic() - start_s


def test_port_is_free_after_close():
    endpoint = open_endpoint()
    endpoint.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=5)
    again = open_endpoint(port=endpoint.port)  # and the port is free at once
    again.close()


def schedule(*times: float, path: str = "/metrics") -> ScrapeSchedule:
    scrapes = ScrapeSchedule()
    for now_s in times:
        scrapes.record_scrape(path, now_s)
    return scrapes


@pytest.mark.parametrize(
    ("times", "now_s", "least_s", "most_s"),
    [
        *((times, 100, 100, 100) for times in ((), (99,), (95, 99), (10, 80, 99), (1, 2, 3))),
        ((80, 85, 90, 95), 96, 103, 103),  # longer than the usual interval
        ((60, 75, 90), 100, 113, 113),
        ((60, 61, 75, 76, 90, 91), 92, 105, 200),  # two clients
        ((0, 50, 99), 100, 100 + MAX_END_WAIT_S, 100 + MAX_END_WAIT_S),
        ((80, 85, 90, 95, 100.5), 100, 100, 100),  # it has read the final values
    ],
)
def test_close_waits_for_the_next_scrape_of_regular_clients(
    times: Sequence[float], now_s: float, least_s: float, most_s: float
) -> None:
    assert least_s - 1e-6 <= schedule(*times).wait_deadline_s(now_s) <= most_s + 1e-6


def test_each_path_has_its_own_clients() -> None:
    scrapes = schedule(80, 85, 90, 95)
    for now_s in (93, 94, 95, 96):
        scrapes.record_scrape("/snapshot.json", now_s)
    scrapes.record_scrape("/snapshot.json", 100.5)
    assert scrapes.wait_deadline_s(100) > 100

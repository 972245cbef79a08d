"""The job's HTTP endpoint, and how long its shutdown waits for clients."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client import Gauge
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.metrics import endpoint as module
from rayzero.orchestrator.metrics.endpoint import MAX_END_WAIT_S, Endpoint, ScrapeSchedule


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = open_endpoint()
    yield endpoint
    endpoint.close()


def open_endpoint(host: str = "127.0.0.1", port: int = 0, ports: int = 1) -> Endpoint:
    registry = CollectorRegistry()
    Gauge("rayzero_step", "Steps.", registry=registry).set(7)
    pages = {
        "/snapshot.json": lambda: ("application/json", b'{"job": "demo", "step": 7}'),
        "/history.json": lambda: ("application/json", b"[" + b"1," * 9999 + b"1]"),
    }
    return Endpoint(host, range(port, port + ports), registry, pages)


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


@pytest.mark.parametrize("path", ["/", "/metrics/", "/etc/passwd", "/../job.yaml", "/favicon.ico"])
def test_other_paths_are_not_found(endpoint: Endpoint, path: str):
    assert get(endpoint, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/metrics", "/snapshot.json"])
def test_other_methods_are_not_allowed(endpoint: Endpoint, path: str, method: str):
    assert get(endpoint, path, method)[0] == 405


def test_idle_client_does_not_delay_others(endpoint: Endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port)):
        assert get(endpoint, "/metrics")[0] == 200


def test_jobs_on_one_head_use_ports_in_turn(endpoint: Endpoint):
    """The next job uses the next free port."""
    first, last = endpoint.port, endpoint.port + 19
    other = open_endpoint(port=first, ports=20)
    try:
        assert first < other.port <= last
    finally:
        other.close()


def test_ports_that_are_all_in_use_are_named_and_the_next_one_is_taken(endpoint: Endpoint):
    """As Ray's dashboard does: a page is no reason to fail a job."""
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


@pytest.mark.parametrize("times", [(), (99,), (95, 99), (10, 80, 99), (1, 2, 3)])
def test_close_does_not_wait_for_irregular_clients(times: Sequence[float]) -> None:
    assert schedule(*times).wait_deadline_s(100) == 100


def test_wait_is_longer_than_usual_interval() -> None:
    assert schedule(80, 85, 90, 95).wait_deadline_s(96) == pytest.approx(103)
    assert schedule(60, 75, 90).wait_deadline_s(100) == pytest.approx(113)


def test_two_clients_of_one_path_are_both_waited_for() -> None:
    assert schedule(60, 61, 75, 76, 90, 91).wait_deadline_s(92) >= 105


def test_wait_is_limited() -> None:
    assert schedule(0, 50, 99).wait_deadline_s(100) == 100 + MAX_END_WAIT_S


def test_close_does_not_wait_for_client_that_read_final_values() -> None:
    scrapes = schedule(80, 85, 90, 95)
    scrapes.record_scrape("/metrics", 100.5)
    assert scrapes.wait_deadline_s(100) == 100


def test_each_path_has_its_own_clients() -> None:
    scrapes = schedule(80, 85, 90, 95)
    for now_s in (93, 94, 95, 96):
        scrapes.record_scrape("/snapshot.json", now_s)
    scrapes.record_scrape("/snapshot.json", 100.5)
    assert scrapes.wait_deadline_s(100) > 100

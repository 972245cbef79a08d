"""The job's HTTP server, asked over HTTP."""

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
from collections.abc import Iterator

import pytest
from prometheus_client import Gauge
from prometheus_client.registry import CollectorRegistry

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.metrics.endpoint import MAX_END_WAIT_S, Endpoint


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = opened()
    yield made
    made.close()


def opened(host: str = "127.0.0.1", port: int = 0, ports: int = 1) -> Endpoint:
    registry = CollectorRegistry()
    Gauge("rayzero_step", "Steps.", registry=registry).set(7)
    pages = {"/snapshot.json": lambda: ("application/json", b'{"step": 7}')}
    return Endpoint(host, range(port, port + ports), registry, pages)


def get(endpoint: Endpoint, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(endpoint.url + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_metrics_and_the_snapshot(endpoint: Endpoint):
    status, body = get(endpoint, "/metrics")
    assert (status, b"rayzero_step 7.0" in body) == (200, True)
    packed = get(endpoint, "/metrics", **{"Accept-Encoding": "gzip"})[1]
    assert gzip.decompress(packed) == body
    status, body = get(endpoint, "/snapshot.json")
    assert (status, json.loads(body)) == (200, {"step": 7})


@pytest.mark.parametrize("path", ["/", "/metrics/", "/etc/passwd", "/../job.yaml", "/favicon.ico"])
def test_there_is_nothing_else(endpoint: Endpoint, path: str):
    assert get(endpoint, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/metrics", "/snapshot.json"])
def test_it_is_only_to_be_read(endpoint: Endpoint, path: str, method: str):
    assert get(endpoint, path, method)[0] == 405


def test_a_client_that_says_nothing_keeps_nobody_waiting(endpoint: Endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port)):
        assert get(endpoint, "/metrics")[0] == 200


def test_a_port_in_use_is_named_with_its_setting(endpoint: Endpoint):
    with pytest.raises(ConfigError, match=rf"metrics\.port: .*127\.0\.0\.1:{endpoint.port}"):
        opened(port=endpoint.port)


def test_jobs_on_one_head_take_ports_in_turn(endpoint: Endpoint):
    """Where the next port is free, which is nobody's promise, the next job has it."""
    first, last = endpoint.port, endpoint.port + 19
    other = opened(port=first, ports=20)
    try:
        assert first < other.port <= last
    finally:
        other.close()


def test_ports_that_are_all_in_use_are_named(endpoint: Endpoint):
    held = []
    for port in (endpoint.port + 1, endpoint.port + 2):
        with contextlib.suppress(OSError):  # somebody else's, which is as good
            held.append(socket.create_server(("127.0.0.1", port)))
    try:
        where = rf"127\.0\.0\.1:{endpoint.port} to {endpoint.port + 2}"
        with pytest.raises(ConfigError, match=where):
            opened(port=endpoint.port, ports=3)
    finally:
        for one in held:
            one.close()


def test_a_host_that_is_not_this_machines_is_named():
    with pytest.raises(ConfigError, match=r"metrics\.host"):
        opened(host="192.0.2.1")


def test_the_end_waits_for_who_reads_regularly(endpoint: Endpoint):
    assert seconds(endpoint) < 5  # nobody does: MOST_S is more
    for _ in range(3):
        get(endpoint, "/metrics")
        time.sleep(0.3)
    reader = threading.Timer(0.3, get, (endpoint, "/metrics"))
    reader.start()
    assert seconds(endpoint) > 0.2
    reader.join()
    assert 0.4 < seconds(endpoint) < MAX_END_WAIT_S + 20  # it would come again, and does not


def seconds(endpoint: Endpoint) -> float:
    """How long the end waits."""
    began = time.monotonic()
    asyncio.run(endpoint.await_final_scrape())
    return time.monotonic() - began


def test_nobody_listens_after_the_end():
    made = opened()
    made.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", made.port), timeout=5)
    again = opened(port=made.port)  # and the port is free at once
    again.close()

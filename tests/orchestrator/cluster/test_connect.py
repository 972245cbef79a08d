"""Errors of connections to clusters, and the process state after them; Ray is not started."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.cluster import connect
from rayzero.orchestrator.errors import JobFailedError


@pytest.fixture(autouse=True)
def _no_local_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "local_head_addresses", set)


def failing(error: Exception) -> Any:
    def init(*_: object, **__: object) -> None:
        raise error

    return init


def test_start_of_a_local_cluster_is_retried_and_its_failure_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    outcomes: list[Exception | None] = [Exception("The current node timed out during startup.")] * 2
    outcomes += [None, Exception("No space left on device\nduring start")]

    def init(**_: object) -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    cluster = connect.connect(None)
    assert (cluster.owned, cluster.can_grow, len(outcomes)) == (True, False, 1)
    assert "trying again: The current node timed out" in caplog.text
    with pytest.raises(JobFailedError) as caught:
        connect.connect(None)
    assert "could not be started on this machine: No space left on device" in caught.value.seen
    assert "rayzero doctor" in caught.value.fix


def test_error_of_a_connection_names_its_class_or_both_versions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "init", failing(ConnectionError()))
    with pytest.raises(ConfigError, match="there is no Ray cluster at 'auto': ConnectionError"):
        connect.connect("auto")
    message = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.10.13\n"
        "This process on node 10.0.0.2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    monkeypatch.setattr(ray, "init", failing(RuntimeError(message)))
    with pytest.raises(ConfigError) as caught:
        connect.connect("auto")
    assert caught.value.seen == (
        "the cluster at 'auto' has Ray 2.50.0 and Python 3.10.13, "
        "and this process Ray 2.60.0 and Python 3.11.7"
    )
    assert "http://HOST:8265" in caught.value.fix


@pytest.mark.parametrize(
    ("before", "expected"), [(signal.SIG_DFL, SystemExit), (signal.SIG_IGN, None)]
)
def test_sigterm_handler_is_restored_after_ray_replaced_it(
    before: signal.Handlers, expected: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
):
    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: print("Ray prints a stack"))

    monkeypatch.setattr(ray, "init", init)
    previous = signal.signal(signal.SIGTERM, before)
    try:
        connect.connect("auto")
        if expected is None:
            assert signal.getsignal(signal.SIGTERM) is before
        else:
            with pytest.raises(expected, match=str(128 + signal.SIGTERM)):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_connection_from_another_thread_keeps_sigterm_handler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "init", lambda **_: None)
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(connect.connect, "auto").result(30).owned
    assert signal.getsignal(signal.SIGTERM) is before

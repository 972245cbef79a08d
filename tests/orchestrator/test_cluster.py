"""What a user hears of a cluster that cannot be had; Ray is not started."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator import cluster
from rayzero.orchestrator.errors import JobFailedError


def failing(error: Exception) -> Any:
    def init(*_: object, **__: object) -> None:
        raise error

    return init


def test_a_cluster_of_our_own_that_does_not_start_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", failing(Exception("The current node timed out\nduring start")))
    with pytest.raises(JobFailedError) as caught:
        cluster.connect(None)
    assert "could not be started on this machine: The current node timed out" in caught.value.seen
    assert "rayzero doctor" in caught.value.fix


def test_a_cluster_that_says_nothing_about_why_it_refuses_is_told_by_the_errors_kind(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ray, "init", failing(ConnectionError()))
    with pytest.raises(ConfigError, match="there is no Ray cluster at 'auto': ConnectionError"):
        cluster.connect("auto")

"""The wait for the first workers' reservations, in virtual time and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.cluster import ray_api
from rayzero.orchestrator.cluster.ray_api import NodeTable
from rayzero.orchestrator.cluster.worker_group import WAITING_INTERVAL_S, WorkerGroup
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.policies.placement import Capacity, ResourceRequest
from tests.integration.tiny import make_spec
from tests.orchestrator.support import VirtualClock, settle


class FullPool:
    """No reservation is granted until `granted`, then all."""

    def __init__(self) -> None:
        self.granted = False
        self.jobs = {"a": Capacity(2, 0)}
        self.workers: list[Any] = []

    async def reserve(self, number: int, need: ResourceRequest) -> None:
        self.requested = number

    async def start_in_ready(self, need: ResourceRequest) -> list[Any]:
        if self.granted:
            self.workers = [object()] * self.requested
        return self.workers

    async def held_by_other_jobs(self) -> dict[str, Capacity]:
        return self.jobs

    async def remove_all(self) -> None:
        self.workers = []


@pytest.fixture
def full_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inline(function: Callable[[], Any]) -> Any:
        return function()

    nodes = NodeTable({"n": Capacity(2, 0)}, {"n": Capacity(0, 0)})
    monkeypatch.setattr(ray_api, "node_snapshot", lambda: nodes)
    monkeypatch.setattr(asyncio, "to_thread", inline)


def queueing(timeout_s: float) -> tuple[FullPool, VirtualClock, list[tuple[float, str]], Any]:
    pool, clock = FullPool(), VirtualClock()
    said: list[tuple[float, str]] = []
    vaults: Any = None
    group = WorkerGroup(make_spec(Path("unused")), clock, False, vaults, object)
    group._pool = pool  # type: ignore[assignment]
    group._resources = ResourceRequest(2, 2, 1.0, 0.0, timeout_s)
    waiting = group._acquire(lambda text: said.append((clock.now(), text)))
    return pool, clock, said, asyncio.ensure_future(waiting)


@pytest.mark.usefixtures("full_cluster")
async def test_queueing_is_said_after_some_seconds_and_again(folder: Path):
    pool, clock, said, waiting = queueing(timeout_s=300.0)
    await clock.advance(WAITING_INTERVAL_S - 0.1)
    assert said == []  # a cluster that is only slow says nothing
    await clock.advance(0.2)
    assert [text for _, text in said] == ["2 CPUs: held by job a (2 CPUs)"]
    pool.jobs = {"b": Capacity(2, 0)}
    await clock.advance(WAITING_INTERVAL_S)
    assert [text for _, text in said][1:] == ["2 CPUs: held by job b (2 CPUs)"]
    pool.granted = True
    await clock.advance(0.1)
    assert waiting.done()


@pytest.mark.usefixtures("full_cluster")
async def test_error_of_a_queue_that_lasts_says_who_holds_the_resources(folder: Path):
    _, clock, said, waiting = queueing(timeout_s=4.0)
    await clock.advance(4.1)
    await settle()
    assert said == []
    with pytest.raises(JobFailedError, match=r"it waited for 2 CPUs: held by job a \(2 CPUs\)"):
        await waiting

"""Workers and vaults on clusters of several nodes: added, drained and lost nodes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.errors import VaultLostError, WorkerLostError
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import WorkerInfo
from tests.integration.nodes import CPUS, Nodes
from tests.integration.tiny import (
    LIMIT_S,
    groups,
    next_events,
    next_worker,
    request,
    wait_until_lost,
)

pytestmark = pytest.mark.slow


async def test_initial_workers_share_a_node_and_growth_uses_other_nodes(
    nodes: Nodes, tmp_path: Path
):
    (first,) = nodes.start(1)
    second = nodes.add(cpus=1)

    async with groups(tmp_path) as (workers, vaults):
        initial = await workers.start_workers(request(2, 2))
        assert {worker.node_id for worker in initial} == {first}
        workers.resize(2, 4)
        added = await next_worker(workers)
        assert added.node_id == second
        third = nodes.add()
        added = await next_worker(workers)
        assert added.node_id == third
        assert len(set((await vaults.open([first, second, third])).values())) == 3


async def next_live_worker(workers: WorkerGroup) -> Any:
    """The next worker. Skips workers whose start on the lost node failed."""
    while True:
        try:
            return await next_worker(workers)
        except WorkerLostError as error:
            assert "node" in str(error)  # noqa: PT017


async def test_lost_node_loses_workers_and_vault_and_reservations_move(
    nodes: Nodes, tmp_path: Path
):
    first, second = nodes.start(2)

    async with groups(tmp_path) as (workers, vaults):
        initial = await workers.start_workers(request(1, 2, cpus=CPUS))
        assert Counter(worker.node_id for worker in initial) == {first: 1, second: 1}
        await vaults.open([first, second])
        (on_second,) = [worker for worker in initial if worker.node_id == second]

        async def poll_until_lost() -> None:
            while True:  # the worker's end may come first
                await next_events(vaults, second)

        polls = [
            asyncio.ensure_future(wait_until_lost(workers, on_second.index)),
            asyncio.ensure_future(poll_until_lost()),
        ]
        await asyncio.sleep(0.5)
        nodes.kill(second)
        results = await asyncio.wait_for(asyncio.gather(*polls, return_exceptions=True), LIMIT_S)
        assert [type(result) for result in results] == [dict, VaultLostError]
        workers.replace(on_second.index, 0.0, [])  # before Ray detects that the node is lost
        third = nodes.add()
        assert (await next_live_worker(workers)).node_id == third
        with pytest.raises(VaultLostError):
            await vaults.open([second])
        await vaults.open([first, third])


async def check_drain(nodes: Nodes, workers: WorkerGroup, other: str, *on_node: WorkerInfo) -> None:
    """Drain the node that these two workers share."""
    draining = on_node[0].node_id
    assert await workers.draining_nodes() == frozenset()
    nodes.drain(draining)
    deadline = time.monotonic() + LIMIT_S
    while await workers.draining_nodes() != {draining}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    await workers.leave_nodes({draining})
    assert await workers.call(on_node[0].index, WorkerCalls.open_store) == on_node[0].pid, (
        "workers of a draining node keep running"
    )
    moved = [await next_worker(workers) for _ in range(2)]
    assert {worker.node_id for worker in moved} == {other}
    await workers.release_worker(on_node[0].index)  # frees no reservation: it was moved
    workers.replace(on_node[1].index, 0.0, [])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(workers.next_worker(), 2)


async def test_reservations_move_off_avoided_and_draining_nodes(nodes: Nodes, tmp_path: Path):
    first, second = nodes.start(2)

    async with groups(tmp_path) as (workers, _):
        (worker,) = await workers.start_workers(request(1, 1))
        await workers.kill(0)
        workers.replace(0, 0.0, [worker.node_id])
        new = await next_worker(workers)
        assert {worker.node_id, new.node_id} == {first, second}
        workers.replace(new.index, 0.0, [])
        newest = await next_worker(workers)
        assert newest.node_id == new.node_id
        workers.resize(1, 2)
        added = await next_worker(workers)
        assert added.node_id == newest.node_id
        await check_drain(nodes, workers, worker.node_id, newest, added)

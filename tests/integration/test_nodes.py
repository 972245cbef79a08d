"""Workers and vaults on clusters of several nodes: nodes that come, drain, and are lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.errors import VaultLostError, WorkerLostError
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.messages import WorkerCalls
from rayzero.workers.vault.vault import Vault
from tests.integration.namespaces import alone
from tests.integration.nodes import Nodes
from tests.integration.tiny import TinyWorker, lost, setup

pytestmark = pytest.mark.slow
WAIT_S = 150.0


@asynccontextmanager
async def groups(folder: Path) -> AsyncIterator[tuple[WorkerGroup, VaultGroup]]:
    vaults = VaultGroup(setup(folder))
    workers = WorkerGroup(setup(folder), Clock(), True, vaults, TinyWorker)
    try:
        yield workers, vaults
    finally:
        await workers.release()
        await vaults.release()


def need(least: int, most: int) -> ResourceRequest:
    return ResourceRequest(least, most, 1.0, 0.0, WAIT_S)


def test_neighbours_share_a_node_and_growth_uses_the_other_nodes(nodes: Nodes, tmp_path: Path):
    first, second = nodes.add(), nodes.add()

    async def run() -> None:
        async with groups(tmp_path) as (workers, vaults):
            two = await workers.start_workers(need(2, 2))
            (shared,) = {worker.node_id for worker in two}
            workers.resize(2, 6)
            late = [await asyncio.wait_for(workers.next_worker(), WAIT_S) for _ in range(2)]
            assert {worker.node_id for worker in late} == {first, second} - {shared}
            third = nodes.add()
            last = [await asyncio.wait_for(workers.next_worker(), WAIT_S) for _ in range(2)]
            assert {worker.node_id for worker in last} == {third}
            assert len(set((await vaults.open([first, second, third])).values())) == 3

    asyncio.run(run())


def test_a_lost_node_loses_its_workers_and_vault_and_its_reservations_move(
    nodes: Nodes, tmp_path: Path
):
    first, second = nodes.add(), nodes.add()

    async def run() -> None:
        async with groups(tmp_path) as (workers, vaults):
            four = await workers.start_workers(need(2, 4))
            assert Counter(worker.node_id for worker in four) == {first: 2, second: 2}
            await vaults.open([first, second])
            gone = [worker for worker in four if worker.node_id == second]
            deaths = lost(workers, *(worker.index for worker in gone))
            polls = [
                asyncio.ensure_future(deaths),
                asyncio.ensure_future(vaults.call(second, Vault.poll, 30)),
            ]
            await asyncio.sleep(0.5)
            nodes.lose(second)
            answers = await asyncio.wait_for(asyncio.gather(*polls, return_exceptions=True), WAIT_S)
            assert [type(answer) for answer in answers] == [dict, VaultLostError]
            for worker in gone:  # before Ray has noticed the loss
                workers.replace(worker.index, 0.0, [])
            third = nodes.add()
            new = [await come(workers) for _ in gone]
            assert {worker.node_id for worker in new} == {third}
            with pytest.raises(VaultLostError):
                await vaults.open([second])
            await vaults.open([first, third])

    async def come(workers: WorkerGroup) -> Any:
        """The next worker; on the way, some may have been started on the lost node."""
        while True:
            try:
                return await asyncio.wait_for(workers.next_worker(), WAIT_S)
            except WorkerLostError as error:
                assert "node" in str(error)  # noqa: PT017

    asyncio.run(run())


def test_a_reservation_moves_off_a_node_to_avoid(nodes: Nodes, tmp_path: Path):
    first, second = nodes.add(), nodes.add()

    async def run() -> None:
        async with groups(tmp_path) as (workers, _):
            (first_worker,) = await workers.start_workers(need(1, 1))
            await workers.kill(0)
            workers.replace(0, 0.0, [first_worker.node_id])
            new = await asyncio.wait_for(workers.next_worker(), WAIT_S)
            assert {first_worker.node_id, new.node_id} == {first, second}
            workers.replace(new.index, 0.0, [])
            again = await asyncio.wait_for(workers.next_worker(), WAIT_S)
            assert again.node_id == new.node_id

    asyncio.run(run())


def test_a_draining_node_is_reported_and_its_reservations_requested_elsewhere(
    nodes: Nodes, tmp_path: Path
):
    first, second = nodes.add(), nodes.add()

    async def run() -> None:
        async with groups(tmp_path) as (workers, _):
            first_worker, second_worker = await workers.start_workers(need(2, 2))
            assert first_worker.node_id == second_worker.node_id
            assert await workers.draining_nodes() == frozenset()
            nodes.drain(first_worker.node_id)
            until = time.monotonic() + WAIT_S
            while await workers.draining_nodes() != {first_worker.node_id}:
                assert time.monotonic() < until
                await asyncio.sleep(0.1)
            assert await workers.call(0, WorkerCalls.open_store) == first_worker.pid, (
                "a drained node's workers go on"
            )
            new = [await asyncio.wait_for(workers.next_worker(), WAIT_S) for _ in range(2)]
            assert {worker.node_id for worker in new} == {first, second} - {first_worker.node_id}
            await workers.release_worker(first_worker.index)  # its reservation is removed with it
            workers.replace(second_worker.index, 0.0, [])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(workers.next_worker(), 2)

    asyncio.run(run())


def test_a_cut_cable_is_detected_and_the_reservations_move():
    seen = alone("tests.integration.linked", "cut_link")
    assert seen["as_expected"]
    assert seen["noticed_s"] < 60, "less than by Ray's own settings"
    assert seen["new_are_here"]
    assert seen["left"] == 0, "the workers behind the cable ended when it was put back"

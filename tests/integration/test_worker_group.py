"""Reservations, workers and vaults on one node of a real cluster, without training."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import ray

from rayzero.orchestrator.aio import Clock
from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.errors import JobFailedError, VaultLostError, WorkerLostError
from rayzero.orchestrator.policies.placement import ResourceRequest
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerCalls
from rayzero.workers.vault.records import ConnectionLost
from rayzero.workers.vault.vault import Vault
from tests.integration.conftest import CPUS, Head
from tests.integration.tiny import TinyWorker, lost, setup

pytestmark = pytest.mark.slow
WAIT_S = 150.0


@pytest.fixture(scope="module", autouse=True)
def connected(head: Head) -> Iterator[None]:
    ray.init(address=head.address, log_to_driver=False)
    yield
    ray.shutdown()


@asynccontextmanager
async def groups(
    folder: Path, can_grow: bool = True, **args: str
) -> AsyncIterator[tuple[WorkerGroup, VaultGroup]]:
    """Released at the end, and everything they held must be free again."""
    made = setup(folder, args=args)
    vaults = VaultGroup(made)
    workers = WorkerGroup(made, Clock(), can_grow, vaults, TinyWorker)
    try:
        yield workers, vaults
    finally:
        await workers.release()
        await vaults.release()
    await workers.release()  # twice does no harm
    await free(CPUS)


async def free(cpus: int) -> None:
    """Waits until so many CPUs are free: Ray's view lags behind."""
    deadline_s = time.monotonic() + WAIT_S
    while (
        available := ray.available_resources().get("CPU", 0)
    ) != cpus and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    assert available == cpus


def need(least: int, most: int, timeout_s: float = WAIT_S) -> ResourceRequest:
    return ResourceRequest(least, most, 1.0, 0.0, timeout_s)


async def gone(pid: int) -> None:
    """Waits until the process has ended."""
    deadline_s = time.monotonic() + WAIT_S
    while lives(pid):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_as_many_as_fit_start_at_once_and_the_others_when_there_is_room(tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path) as (workers, _):
            before = time.monotonic()
            first = await workers.start_workers(need(1, CPUS + 1))
            assert time.monotonic() - before < WAIT_S, "it did not wait for the fifth"
            assert [worker.index for worker in first] == list(range(CPUS))
            waiting = asyncio.ensure_future(workers.next_worker())
            await asyncio.sleep(1)
            assert not waiting.done()
            await workers.release_worker(1)
            late = await asyncio.wait_for(waiting, WAIT_S)
            assert late.index == CPUS
            await gone(first[1].pid)
            assert "released" in (await asyncio.wait_for(lost(workers, 1), WAIT_S))[1]

    asyncio.run(run())


def test_limits_may_be_lowered_while_the_first_workers_start(tmp_path: Path):
    gate = tmp_path / "gate"

    async def run() -> None:
        async with groups(tmp_path, gate=str(gate)) as (workers, _):
            placing = asyncio.ensure_future(workers.start_workers(need(1, 2)))
            deadline_s = time.monotonic() + WAIT_S
            while len(list(tmp_path.glob("gate-*"))) < 2 and time.monotonic() < deadline_s:
                await asyncio.sleep(0.05)
            workers.resize(1, 1)
            await free(CPUS - 1)
            gate.touch()
            assert [worker.index for worker in await asyncio.wait_for(placing, WAIT_S)] == [0]

    asyncio.run(run())


def test_a_lost_worker_is_reported_and_replaced_in_its_reservation(tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path) as (workers, _):
            first = await workers.start_workers(need(CPUS, CPUS))
            death = asyncio.ensure_future(lost(workers, 2))
            await asyncio.sleep(0.2)
            os.kill(first[2].pid, signal.SIGKILL)
            assert "exit" in (await asyncio.wait_for(death, WAIT_S))[2]
            workers.replace(2, 1.5, [])
            before = time.monotonic()
            new = await asyncio.wait_for(workers.next_worker(), WAIT_S)
            assert time.monotonic() - before > 1.4
            assert (new.index, new.node_id) == (CPUS, first[2].node_id)
            assert await workers.call(CPUS, WorkerCalls.open_store) == new.pid

    asyncio.run(run())


def test_a_stopped_worker_is_killed_at_once_through_its_vault(tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path) as (workers, vaults):
            first = await workers.start_workers(need(2, 2))
            node = first[0].node_id
            addresses = await vaults.open([node])
            places = {
                worker.index: RankAssignment(worker.index, worker.index, 2, addresses[node])
                for worker in first
            }
            await workers.assign(GenerationSpec(1, 2, "", 0), places).wait_all()
            os.kill(first[1].pid, signal.SIGSTOP)
            notice = asyncio.ensure_future(vaults.call(node, Vault.poll, WAIT_S))
            await asyncio.sleep(0.1)
            await workers.kill(1)
            assert await notice == [ConnectionLost(1, first[1].pid)]
            await asyncio.wait_for(lost(workers, 1), WAIT_S)
            assert lives(first[0].pid)

    asyncio.run(run())


def test_a_worker_without_a_vault_is_killed(tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path) as (workers, _):
            (worker,) = await workers.start_workers(need(1, 1))
            process = psutil.Process(worker.pid)
            await workers.kill(0)
            await asyncio.wait_for(lost(workers, 0), WAIT_S)  # Ray kills a little later
            await gone(process.pid)

    asyncio.run(run())


def test_resize_requests_more_and_removes_only_unannounced_workers(tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path) as (workers, _):
            await workers.start_workers(need(1, 1))
            workers.resize(1, 3)
            new = [await asyncio.wait_for(workers.next_worker(), WAIT_S) for _ in range(2)]
            started = {worker.index for worker in new}
            assert started == {1, 2}
            workers.resize(1, CPUS + 2)  # more than fit
            await asyncio.sleep(0.2)
            workers.resize(1, 2)
            await asyncio.sleep(1.5)
            assert [await workers.call(i, WorkerCalls.open_store) > 0 for i in range(3)] == [
                True
            ] * 3
            await workers.release_worker(2)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(workers.next_worker(), 1.5)
            await free(CPUS - 2)

    asyncio.run(run())


def test_a_cluster_that_cannot_grow_gets_requests_that_fit(tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path, can_grow=False) as (workers, _):
            before = time.monotonic()
            with pytest.raises(JobFailedError, match="room for 4 of at least 5"):
                await workers.start_workers(need(CPUS + 1, CPUS + 2))
            assert time.monotonic() - before < WAIT_S, "nothing to wait for"
            assert len(await workers.start_workers(need(1, CPUS + 2))) == CPUS

    asyncio.run(run())


def test_workers_that_do_not_start(tmp_path: Path):
    trouble = tmp_path / "trouble"

    async def run() -> None:
        async with groups(tmp_path, trouble=str(trouble)) as (workers, _):
            trouble.touch()
            with pytest.raises(JobFailedError, match="a worker could not start"):
                await workers.start_workers(need(1, 1))
            await workers.release()
            trouble.unlink()
            await workers.start_workers(need(1, 1))
            trouble.touch()
            workers.resize(1, 2)
            with pytest.raises(WorkerLostError, match=r"did not start, trying again in 1 s"):
                await asyncio.wait_for(workers.next_worker(), WAIT_S)
            trouble.unlink()
            assert (await asyncio.wait_for(workers.next_worker(), WAIT_S)).index >= 2

    asyncio.run(run())


def test_a_cancelled_start_leaves_nothing(tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path) as (workers, _):
            placing = asyncio.ensure_future(workers.start_workers(need(CPUS + 1, CPUS + 1)))
            await asyncio.sleep(0.7)
            placing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await placing

    asyncio.run(run())


def test_a_lost_vault_is_reported_and_opened_again(head: Head, tmp_path: Path):
    async def run() -> None:
        async with groups(tmp_path) as (workers, vaults):
            (worker,) = await workers.start_workers(need(1, 1))
            node = worker.node_id
            first = await vaults.open([node])
            assert await vaults.open([node, node]) == first
            assert await vaults.call(node, Vault.inventory) == []
            (vault,) = head.processes("ray::VaultActor")
            poll = asyncio.ensure_future(vaults.call(node, Vault.poll, 30))
            await asyncio.sleep(0.2)
            vault.kill()
            with pytest.raises(VaultLostError):
                await asyncio.wait_for(poll, WAIT_S)
            with pytest.raises(VaultLostError, match="has no vault"):
                await vaults.call(node, Vault.usage)
            again = await vaults.open([node])
            assert again[node] != first[node]
            assert set(await vaults.call(node, Vault.usage)) >= {"slots", "replicas", "available"}

    asyncio.run(run())

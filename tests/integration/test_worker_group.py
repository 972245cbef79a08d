"""Reservations, workers and vaults on one node of a real cluster, without training."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray

from rayzero.orchestrator.cluster.vault_group import VaultGroup
from rayzero.orchestrator.cluster.worker_group import WorkerGroup
from rayzero.orchestrator.errors import JobFailedError, VaultLostError, WorkerLostError
from rayzero.workers.calls import WorkerCalls
from rayzero.workers.messages import GenerationSpec, RankAssignment, WorkerInfo
from rayzero.workers.vault.records import ConnectionLost
from rayzero.workers.vault.vault import Vault
from tests.integration.conftest import CPUS, Head
from tests.integration.tiny import (
    LIMIT_S,
    groups,
    next_events,
    next_lines,
    next_worker,
    request,
    wait_until_lost,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]


async def wait_for_free_cpus(cpus: int) -> None:
    """Wait until this many CPUs are free; Ray's accounting lags behind."""
    deadline = time.monotonic() + LIMIT_S
    while (free := ray.available_resources().get("CPU", 0)) != cpus and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert free == cpus


async def wait_for_exit(pid: int) -> None:
    """Wait until the process has exited."""
    deadline = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def check_replacement(workers: WorkerGroup, lost: WorkerInfo) -> None:
    """Only the lost worker's reservation has room for the new one."""
    loss = asyncio.ensure_future(wait_until_lost(workers, lost.index))
    await asyncio.sleep(0.2)
    os.kill(lost.pid, signal.SIGKILL)
    assert "exit" in (await loss)[lost.index]
    workers.replace(lost.index, 1.5, [])
    before = time.monotonic()
    new = await next_worker(workers)
    assert time.monotonic() - before > 1.4
    assert (new.index, new.node_id) == (lost.index + 1, lost.node_id)
    assert await workers.call(new.index, WorkerCalls.open_store) == new.pid


async def test_workers_are_added_released_and_replaced(tmp_path: Path):
    async with groups(tmp_path) as (workers, _):
        first = await workers.start_workers(request(1, 3, cpus=CPUS / 2))  # two fit
        assert [worker.index for worker in first] == [0, 1]
        workers.resize(1, 2)  # removes the pending one
        await asyncio.sleep(1.5)
        pids = [await workers.call(index, WorkerCalls.open_store) for index in range(2)]
        assert pids == [worker.pid for worker in first]
        await workers.release_worker(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(workers.next_worker(), 1.5)
        await wait_for_free_cpus(CPUS // 2)
        workers.resize(1, 3)
        assert (await next_worker(workers)).index == 2
        pending = asyncio.ensure_future(next_worker(workers))
        await asyncio.sleep(1)
        assert not pending.done()
        await workers.release_worker(0)
        late = await pending
        assert late.index == 3
        await wait_for_exit(first[0].pid)
        assert "released" in (await wait_until_lost(workers, 0))[0]
        await check_replacement(workers, late)


async def test_limits_can_be_lowered_while_workers_start(tmp_path: Path):
    gate = tmp_path / "gate"

    async with groups(tmp_path, gate=str(gate)) as (workers, _):
        starting = asyncio.ensure_future(workers.start_workers(request(1, 2)))
        deadline = time.monotonic() + LIMIT_S
        while len(list(tmp_path.glob("gate-*"))) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        workers.resize(1, 1)
        await wait_for_free_cpus(CPUS - 1)
        gate.touch()
        assert [worker.index for worker in await asyncio.wait_for(starting, LIMIT_S)] == [0]


async def test_fixed_cluster_gets_only_requests_that_fit(tmp_path: Path):
    async with groups(tmp_path, can_grow=False) as (workers, _):
        before = time.monotonic()
        with pytest.raises(JobFailedError, match="room for 4 of at least 5"):
            await workers.start_workers(request(CPUS + 1, CPUS + 2))
        assert time.monotonic() - before < LIMIT_S, "fails without waiting"
        assert len(await workers.start_workers(request(1, CPUS + 2, cpus=CPUS / 2))) == 2


async def test_workers_that_crash_at_start(tmp_path: Path):
    crash_file = tmp_path / "crash"

    async with groups(tmp_path, crash_file=str(crash_file)) as (workers, _):
        crash_file.touch()
        with pytest.raises(JobFailedError, match="a worker could not start"):
            await workers.start_workers(request(1, 1))
        await workers.release()
        crash_file.unlink()
        await workers.start_workers(request(1, 1))
        crash_file.touch()
        workers.resize(1, 2)
        with pytest.raises(WorkerLostError, match=r"did not start, trying again in 1 s"):
            await next_worker(workers)
        crash_file.unlink()
        assert (await next_worker(workers)).index >= 2


async def test_cancelled_start_releases_everything(tmp_path: Path):
    async with groups(tmp_path) as (workers, _):
        starting = asyncio.ensure_future(workers.start_workers(request(3, 3, cpus=CPUS / 2)))
        await asyncio.sleep(0.7)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting


async def check_kill_of_hung_worker(
    workers: WorkerGroup, vaults: VaultGroup, first: WorkerInfo, second: WorkerInfo
) -> None:
    """Kill the second worker, which is stopped, through the vault."""
    node = first.node_id
    addresses = await vaults.open([node])
    assignments = {
        worker.index: RankAssignment(worker.index, worker.index, 2, addresses[node])
        for worker in (first, second)
    }
    await workers.assign(GenerationSpec(1, 2, "", 0), assignments).wait_all()
    os.kill(second.pid, signal.SIGSTOP)
    poll = asyncio.ensure_future(next_events(vaults, node))
    await asyncio.sleep(0.1)
    await workers.kill(1)
    ends = await poll
    while not any(isinstance(it, ConnectionLost) and it.has_ended for it in ends):
        ends += await next_events(vaults, node)
    assert ends == [ConnectionLost(1, second.pid)] * 2, "its threads, then its process"
    await wait_until_lost(workers, 1)
    assert is_running(first.pid)


async def check_lost_vault(head: Head, vaults: VaultGroup, node: str) -> None:
    first = await vaults.open([node])
    assert await vaults.open([node, node]) == first
    assert await vaults.call(node, Vault.inventory) == []
    (vault,) = head.processes("ray::VaultActor")
    poll = asyncio.ensure_future(next_events(vaults, node))
    await asyncio.sleep(0.2)
    vault.kill()
    with pytest.raises(VaultLostError):
        await asyncio.wait_for(poll, LIMIT_S)
    with pytest.raises(VaultLostError, match="has no vault"):
        await vaults.call(node, Vault.usage)
    reopened = await vaults.open([node])
    assert reopened[node] != first[node]
    assert set(await vaults.call(node, Vault.usage)) >= {"slots", "replicas", "available"}


async def test_workers_are_killed_with_and_without_vault_which_is_reopened_when_lost(
    head: Head, tmp_path: Path
):
    async with groups(tmp_path) as (workers, vaults):
        first, second = await workers.start_workers(request(2, 2))
        workers.subscribe([first.index])
        await check_kill_of_hung_worker(workers, vaults, first, second)
        before = await next_lines(workers, first.index, 10)
        await check_lost_vault(head, vaults, first.node_id)
        lines = before + await next_lines(workers, first.index, 30)
        assert lines == [*range(lines[0], lines[-1] + 1)], "none is lost or repeated"
        await vaults.close(first.node_id)
        await workers.kill(0)
        await wait_until_lost(workers, 0)
        await wait_for_exit(first.pid)  # Ray kills the process asynchronously

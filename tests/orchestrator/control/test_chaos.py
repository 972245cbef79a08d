"""Faults that the controller injects itself or forwards to workers and vaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster
from tests.orchestrator.support import Harness, settle


def start_job(folder: Path, *faults: str, **changes: object) -> Harness:
    return Harness(folder, "aabb", workers=(2, 4), faults=list(faults), **changes)


def fired_faults(folder: Path) -> list[str]:
    return [fired.fault for fired in FaultRecord(folder / "job").read()]


async def inject(harness: Harness, *faults: str) -> str:
    return await harness.controller.inject(faults)


async def test_worker_fault_reaches_current_and_future_workers(folder: Path):
    harness = await start_job(folder).trained(3)
    reply = await inject(harness, "kill(rank=1)", "hang(rank=2, step=90)")
    faults = ("kill(rank=1, step=4)", "hang(rank=2, step=90)")
    scheduled = [f"job: {fault} at the next opportunity" for fault in faults]
    assert reply == "\n".join(scheduled) + " from that step on"
    await settle()
    assert sorted(harness.cluster.injected) == [(worker, faults) for worker in range(4)]
    assert harness.cluster.vaults.injected == faults
    harness.cluster.kill(1)
    await harness.steps(1)
    (injected,) = {assign.faults for assign in harness.assignments.values()}
    assert injected == tuple(map(parse_fault, faults))
    await inject(harness, "slow(rank=0, seconds=1)")
    await settle()
    assert harness.cluster.injected[-1][1] == (*faults, "slow(rank=0, step=5, seconds=1)")


async def test_injected_vault_fault_fires_after_current_step(folder: Path):
    harness = await start_job(folder).trained(2)
    reply = await inject(harness, "kill_vault(node=0)")
    assert reply == "job: kill_vault(node=0, step=3) at the next opportunity"
    await harness.steps(1)
    assert harness.cluster.vaults.node_faults == [("a", "kill_vault(node=0, step=3)")]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kil(rank=1)", "did you mean 'kill'"),
        ("kill(rank=4)", "the job has at most 4 workers"),
        ("kill_vault(node=2)", "the job is on 2 nodes now"),
        ("drop_node(node=0)", "not possible there"),
        ("full_disk()", "writes no checkpoints"),
    ],
)
async def test_impossible_fault_is_rejected_and_nothing_is_scheduled(
    folder: Path, fault: str, message: str
):
    harness = start_job(folder)
    harness.cluster.vaults.not_injectable["a"] = "not possible there"
    await harness.steps(1)
    with pytest.raises(ConfigError, match=message):
        await inject(harness, "kill(rank=1)", fault)
    await settle()
    assert harness.cluster.injected == []


@pytest.mark.parametrize("place", ["disk", "bucket"])
async def test_file_on_a_disk_is_torn_after_checkpoint_is_written(folder: Path, place: str):
    root = str(folder) if place == "disk" else "s3://bucket/job"
    store = FakeCheckpointStore()
    store.folder = lambda step: f"{root}/step-{step}"  # type: ignore[method-assign]
    path, later = folder / "step-4" / "rank-1", folder / "step-6" / "rank-1"
    for file in (path, later):
        file.parent.mkdir()
        file.write_bytes(b"abc")
    fault = 'tear_file(step=3, rank=1, how="cut")'
    faults = [fault, 'tear_file(step=3, rank=1, how="remove")']  # of the next checkpoint's file
    settings = {"checkpoint": {"every_steps": 2}, "faults": faults}
    harness = Harness(folder, FakeCluster(3, checkpoint_every=2), store, workers=(3, 3), **settings)
    await harness.steps(3)
    assert path.read_bytes() == b"abc"
    await harness.steps(2)
    if place == "disk":
        assert path.read_bytes() == b"a"
        assert FaultRecord(folder / "job").read() == (FaultFired(1, 4, fault),)
        await harness.steps(2)
        assert not later.exists()
    else:
        assert fired_faults(folder) == []
        assert harness.warnings.count(f"{root}/step-4 is not on a local or mounted disk") == 2


@pytest.mark.parametrize("resumed", [False, True])
async def test_fault_record_of_earlier_run_applies_only_to_resumed_run(folder: Path, resumed: bool):
    fault = "kill_vault(node=0, step=2)"
    record = FaultRecord(folder / "job")
    (folder / "job").mkdir()
    record.add(FaultFired(0, 2, fault))
    record.add(FaultFired(1, 9, str(parse_fault("kill(rank=1, step=9)"))))

    harness = Harness(
        folder, 2, FakeCheckpointStore(20) if resumed else FakeCheckpointStore(), faults=[fault]
    )
    await settle()
    assert fired_faults(folder) == ([fault] if resumed else [])
    if not resumed:
        await harness.steps(2)
        assert fired_faults(folder) == [fault]

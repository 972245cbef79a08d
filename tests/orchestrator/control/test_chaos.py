"""Faults that the controller injects itself or forwards, in a fake cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job_events import JobWarning
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster
from tests.orchestrator.support import Harness, async_test, settle


def on_two_nodes(folder: Path, *faults: str, **changes: object) -> Harness:
    cluster = FakeCluster(4, node_of=lambda index: "ab"[index // 2])
    return Harness(folder, cluster, workers={"min": 2, "max": 4}, faults=list(faults), **changes)


def happened(folder: Path) -> list[str]:
    return [one.fault for one in FaultRecord(folder / "job").read()]


def warnings(harness: Harness) -> str:
    return "\n".join(one.text for one in harness.log.of(JobWarning))


async def injected(harness: Harness, *faults: str) -> str:
    return await harness.controller.inject(faults)


@async_test
async def test_a_vault_is_killed_once_recorded_before_and_opened_again(folder: Path):
    harness = on_two_nodes(folder, "kill_vault(node=1, step=3)")
    await harness.steps(1)
    assert happened(folder) == []
    await harness.steps(1)
    vaults = harness.cluster.vaults
    assert vaults.node_faults == [("b", "kill_vault(node=1, step=3)")]
    assert happened(folder) == ["kill_vault(node=1, step=3)"]
    assert harness.log.of(FaultFired) == [FaultFired(2, 3, "kill_vault(node=1, step=3)")]
    assert vaults.opened.count("b") == 2
    await harness.steps(3)
    assert len(vaults.node_faults) == 1
    await harness.finish()


@async_test
async def test_a_dropped_node_is_repaired(folder: Path):
    harness = on_two_nodes(folder, "drop_node(node=1, step=3)")
    await harness.steps(4)
    assert happened(folder) == ["drop_node(node=1, step=3)"]
    assert {worker.info.node_id for worker in harness.cluster.members} == {"a"}
    await harness.finish()


@async_test
async def test_a_fault_that_cannot_be_injected_is_warned_of_once_and_not_recorded(folder: Path):
    harness = on_two_nodes(folder, "partition(node=0, step=2, seconds=5)")
    harness.cluster.vaults.not_injectable["a"] = "the job's controller runs on that node"
    await harness.steps(5)
    assert harness.cluster.vaults.node_faults == []
    assert happened(folder) == []
    assert warnings(harness).count("was not injected: the job's controller runs on that") == 1
    await harness.finish()


@async_test
async def test_a_fault_of_a_node_without_ranks_waits_for_one(folder: Path):
    harness = on_two_nodes(folder, "kill_vault(node=2, step=2)")
    await harness.steps(3)
    harness.cluster.join("c")
    harness.controller.scale(2, 5)
    await harness.clock.advance(1)
    await harness.steps(3)
    assert harness.cluster.vaults.node_faults == [("c", "kill_vault(node=2, step=2)")]
    await harness.finish()


@async_test
async def test_a_fault_of_a_worker_reaches_everyone_now_and_later(folder: Path):
    harness = on_two_nodes(folder)
    await harness.steps(3)
    told = await injected(harness, "kill(rank=1)", "hang(rank=2, step=90)")
    assert told == (
        "job: kill(rank=1, step=4) at the next opportunity\n"
        "job: hang(rank=2, step=90) at the next opportunity from that step on"
    )
    await settle()
    faults = ("kill(rank=1, step=4)", "hang(rank=2, step=90)")
    assert sorted(harness.cluster.injected) == [(worker, faults) for worker in range(4)]
    assert harness.cluster.vaults.injected == faults
    harness.cluster.kill(1)
    await harness.steps(1)
    assert {assign.faults for assign in harness.assignments.values()} == {
        tuple(map(parse_fault, faults))
    }
    await injected(harness, "slow(rank=0, seconds=1)")
    await settle()
    assert harness.cluster.injected[-1][1] == (*faults, "slow(rank=0, step=5, seconds=1)")
    await harness.finish()


@async_test
async def test_an_injected_fault_of_a_vault_happens_after_the_step_at_work(folder: Path):
    harness = on_two_nodes(folder)
    await harness.steps(2)
    assert await injected(harness, "kill_vault(node=0)") == (
        "job: kill_vault(node=0, step=3) at the next opportunity"
    )
    await harness.steps(1)
    assert harness.cluster.vaults.node_faults == [("a", "kill_vault(node=0, step=3)")]
    await harness.finish()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("kil(rank=1)", "did you mean 'kill'"),
        ("kill(rank=4)", "the job has at most 4 workers"),
        ("kill_vault(node=2)", "the job is on 2 nodes now"),
        ("drop_node(node=0)", "it is in the way"),
        ("full_disk()", "writes no checkpoints"),
    ],
)
def test_an_impossible_fault_is_refused_and_nothing_is_scheduled(
    tmp_path: Path, fault: str, why: str
):
    @async_test
    async def scene(folder: Path) -> None:
        harness = on_two_nodes(folder)
        harness.cluster.vaults.not_injectable["a"] = "it is in the way"
        await harness.steps(1)
        with pytest.raises(ConfigError, match=why):
            await injected(harness, "kill(rank=1)", fault)
        await settle()
        assert harness.cluster.injected == []
        await harness.finish()

    scene(tmp_path)


@async_test
async def test_files_are_torn_when_their_checkpoint_exists(folder: Path):
    class Disk(FakeCheckpointStore):
        def folder(self, step: int) -> str:
            return str(folder / f"step-{step}")

    path = folder / "step-4" / "rank-1"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    harness = Harness(
        folder,
        FakeCluster(3, checkpoint_every=2),
        Disk(),
        workers={"min": 3},
        checkpoint={"every_steps": 2},
        faults=['tear_file(step=3, rank=1, how="cut")'],
    )
    await harness.steps(3)
    assert path.read_bytes() == b"abc"
    await harness.steps(2)
    assert path.read_bytes() == b"a"
    assert FaultRecord(folder / "job").read() == (
        FaultFired(1, 4, 'tear_file(step=3, rank=1, how="cut")'),
    )
    await harness.finish()


@async_test
async def test_an_object_store_cannot_be_torn(folder: Path):
    class Bucket(FakeCheckpointStore):
        def folder(self, step: int) -> str:
            return f"s3://bucket/job/step-{step}"

    harness = Harness(
        folder,
        FakeCluster(2, checkpoint_every=2),
        Bucket(),
        checkpoint={"every_steps": 2},
        faults=["tear_file(step=1, rank=0)"],
    )
    await harness.steps(5)
    assert happened(folder) == []
    assert warnings(harness).count("s3://bucket/job/step-2 is not on a local or mounted disk") == 1
    await harness.finish()


@pytest.mark.parametrize("resumed", [False, True])
def test_faults_of_an_earlier_run_count_only_if_that_run_is_continued(
    tmp_path: Path, resumed: bool
):
    fault = "kill_vault(node=0, step=2)"
    record = FaultRecord(tmp_path / "job")
    (tmp_path / "job").mkdir()
    record.add(FaultFired(0, 2, fault))
    record.add(FaultFired(1, 9, str(parse_fault("kill(rank=1, step=9)"))))

    @async_test
    async def scene(folder: Path) -> None:
        harness = Harness(
            folder,
            FakeCluster(2),
            FakeCheckpointStore(20) if resumed else FakeCheckpointStore(),
            faults=[fault],
        )
        await settle()
        assert happened(folder) == ([fault] if resumed else [])
        if not resumed:
            await harness.steps(2)
            assert happened(folder) == [fault]
        await harness.finish()

    scene(tmp_path)

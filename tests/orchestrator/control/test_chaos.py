"""Faults that the controller acts out or hands on, in a world of fakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator.job_events import JobWarning
from rayzero.workers.chaos.inject import FaultRecord
from rayzero.workers.chaos.spec import FaultFired, parse_fault
from tests.orchestrator.support import Stage, played, settle
from tests.orchestrator.world import Shelf, World


def on_two_nodes(folder: Path, *faults: str, **changes: object) -> Stage:
    world = World(4, node_of=lambda index: "ab"[index // 2])
    return Stage(folder, world, workers={"min": 2, "max": 4}, faults=list(faults), **changes)


def happened(folder: Path) -> list[str]:
    return [one.fault for one in FaultRecord(folder / "job").read()]


def warnings(stage: Stage) -> str:
    return "\n".join(one.text for one in stage.notebook.of(JobWarning))


async def injected(stage: Stage, *faults: str) -> str:
    return await stage.controller.inject(faults)


@played
async def test_a_vault_is_killed_once_recorded_before_and_opened_again(folder: Path):
    stage = on_two_nodes(folder, "kill_vault(node=1, step=3)")
    await stage.steps(1)
    assert happened(folder) == []
    await stage.steps(1)
    vaults = stage.world.vaults
    assert vaults.strikes == [("b", "kill_vault(node=1, step=3)")]
    assert happened(folder) == ["kill_vault(node=1, step=3)"]
    assert stage.notebook.of(FaultFired) == [FaultFired(2, 3, "kill_vault(node=1, step=3)")]
    assert vaults.opened.count("b") == 2
    await stage.steps(3)
    assert len(vaults.strikes) == 1
    await stage.finish()


@played
async def test_a_dropped_node_is_repaired(folder: Path):
    stage = on_two_nodes(folder, "drop_node(node=1, step=3)")
    await stage.steps(4)
    assert happened(folder) == ["drop_node(node=1, step=3)"]
    assert {worker.info.node_id for worker in stage.world.members} == {"a"}
    await stage.finish()


@played
async def test_what_cannot_be_acted_out_is_told_once_and_did_not_happen(folder: Path):
    stage = on_two_nodes(folder, "partition(node=0, step=2, seconds=5)")
    stage.world.vaults.obstacles["a"] = "the job's controller runs on that node"
    await stage.steps(5)
    assert stage.world.vaults.strikes == []
    assert happened(folder) == []
    assert warnings(stage).count("was not injected: the job's controller runs on that") == 1
    await stage.finish()


@played
async def test_a_place_that_nobody_has_is_waited_for(folder: Path):
    stage = on_two_nodes(folder, "kill_vault(node=2, step=2)")
    await stage.steps(3)
    stage.world.arrive("c")
    stage.controller.scale(2, 5)
    await stage.clock.turn(1)
    await stage.steps(3)
    assert stage.world.vaults.strikes == [("c", "kill_vault(node=2, step=2)")]
    await stage.finish()


@played
async def test_a_fault_of_a_worker_reaches_everyone_now_and_later(folder: Path):
    stage = on_two_nodes(folder)
    await stage.steps(3)
    told = await injected(stage, "kill(rank=1)", "hang(rank=2, step=90)")
    assert told == (
        "job: kill(rank=1, step=4) at the next opportunity\n"
        "job: hang(rank=2, step=90) at the next opportunity from that step on"
    )
    await settle()
    faults = ("kill(rank=1, step=4)", "hang(rank=2, step=90)")
    assert sorted(stage.world.injected) == [(worker, faults) for worker in range(4)]
    assert stage.world.vaults.injected == faults
    stage.world.kill(1)
    await stage.steps(1)
    assert {assign.faults for assign in stage.newest.values()} == {tuple(map(parse_fault, faults))}
    await injected(stage, "slow(rank=0, seconds=1)")
    await settle()
    assert stage.world.injected[-1][1] == (*faults, "slow(rank=0, step=5, seconds=1)")
    await stage.finish()


@played
async def test_an_injected_fault_of_a_vault_happens_after_the_step_at_work(folder: Path):
    stage = on_two_nodes(folder)
    await stage.steps(2)
    assert await injected(stage, "kill_vault(node=0)") == (
        "job: kill_vault(node=0, step=3) at the next opportunity"
    )
    await stage.steps(1)
    assert stage.world.vaults.strikes == [("a", "kill_vault(node=0, step=3)")]
    await stage.finish()


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
def test_what_can_never_happen_is_refused_and_nothing_is_scheduled(
    tmp_path: Path, fault: str, why: str
):
    @played
    async def scene(folder: Path) -> None:
        stage = on_two_nodes(folder)
        stage.world.vaults.obstacles["a"] = "it is in the way"
        await stage.steps(1)
        with pytest.raises(ConfigError, match=why):
            await injected(stage, "kill(rank=1)", fault)
        await settle()
        assert stage.world.injected == []
        await stage.finish()

    scene(tmp_path)


@played
async def test_files_are_torn_when_their_checkpoint_exists(folder: Path):
    class Disk(Shelf):
        def folder(self, step: int) -> str:
            return str(folder / f"step-{step}")

    path = folder / "step-4" / "rank-1"
    path.parent.mkdir()
    path.write_bytes(b"abc")
    stage = Stage(
        folder,
        World(3, checkpoint_every=2),
        Disk(),
        workers={"min": 3},
        checkpoint={"every_steps": 2},
        faults=['tear_file(step=3, rank=1, how="cut")'],
    )
    await stage.steps(3)
    assert path.read_bytes() == b"abc"
    await stage.steps(2)
    assert path.read_bytes() == b"a"
    assert FaultRecord(folder / "job").read() == (
        FaultFired(1, 4, 'tear_file(step=3, rank=1, how="cut")'),
    )
    await stage.finish()


@played
async def test_an_object_store_cannot_be_torn(folder: Path):
    class Bucket(Shelf):
        def folder(self, step: int) -> str:
            return f"s3://bucket/job/step-{step}"

    stage = Stage(
        folder,
        World(2, checkpoint_every=2),
        Bucket(),
        checkpoint={"every_steps": 2},
        faults=["tear_file(step=1, rank=0)"],
    )
    await stage.steps(5)
    assert happened(folder) == []
    assert warnings(stage).count("s3://bucket/job/step-2 is not on a local or mounted disk") == 1
    await stage.finish()


@pytest.mark.parametrize("resumed", [False, True])
def test_what_happened_in_an_earlier_run_counts_only_if_that_is_gone_on_with(
    tmp_path: Path, resumed: bool
):
    fault = "kill_vault(node=0, step=2)"
    record = FaultRecord(tmp_path / "job")
    (tmp_path / "job").mkdir()
    record.add(FaultFired(0, 2, fault))
    record.add(FaultFired(1, 9, str(parse_fault("kill(rank=1, step=9)"))))

    @played
    async def scene(folder: Path) -> None:
        stage = Stage(folder, World(2), Shelf(20) if resumed else Shelf(), faults=[fault])
        await settle()
        assert happened(folder) == ([fault] if resumed else [])
        if not resumed:
            await stage.steps(2)
            assert happened(folder) == [fault]
        await stage.finish()

    scene(tmp_path)

"""Repairs that need more than `test_courses` can say: single messages, notes, turns of the loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rayzero.orchestrator import machine
from rayzero.orchestrator.control.failures import COLLECTIVE_GRACE_S
from rayzero.orchestrator.errors import JobFailedError
from rayzero.orchestrator.job_events import FaultDetected, Repaired, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.messages import (
    Crashed,
    Finished,
    InProcessStateInfo,
    Joined,
    Notes,
    Restored,
    Stopped,
    WentBack,
)
from rayzero.workers.vault.records import SlotInfo
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, settle


def start_three(folder: Path, least: int = 2, **changes: Any) -> Harness:
    return Harness(folder, 3, workers=(least, 3), **changes)


async def test_functions_are_told_what_the_ones_before_have_done(folder: Path):
    """By the lowest rank whose notes are of the restored step."""
    harness = await start_three(folder, least=1).trained(3)
    cluster = harness.cluster
    cluster.leaving = {0, 1, 2}
    cluster.processes[0].notes = Notes(4, b"of a step that is lost")
    cluster.processes[1].notes = Notes(3, b"rank 1")
    cluster.processes[2].notes = Notes(3, b"rank 2")
    await harness.crash(2, "collective", wait_s=COLLECTIVE_GRACE_S + 1)
    assert harness.restored == {3}
    assert {it.notes for it in harness.assignments.values()} == {b"rank 1"}


async def test_late_messages_of_lost_workers_and_old_generations_are_ignored(folder: Path):
    harness = await start_three(folder).trained(3)
    await harness.kill(1, reported=False)
    harness.cluster.send(1, Stopped(1, 1), Joined(2, 1), Restored(2, 1, 3))
    harness.cluster.send(0, Crashed(1, 0, "user", 4, "ValueError", ""), Stopped(1, 0))
    for worker in (0, 2):
        harness.cluster.send(worker, Finished(1, worker, None, {}, 1))
    harness.cluster.report_cause(1, "exit code 9")
    await settle()
    assert harness.states[-1] is State.RUNNING
    assert "exit code 9" in harness.warnings  # reported after the repair
    assert len(harness.log.of(FaultDetected)) == 1


async def test_script_goes_back_to_its_own_checkpoint(folder: Path):
    """Within the generation that entered it again: the repair counts the steps done again."""
    harness = await start_three(folder).trained(5)
    await harness.kill(1)
    harness.cluster.send(0, WentBack(1, 0, 1))  # late, of the generation before
    await settle()
    assert "its own checkpoint" not in harness.warnings
    harness.cluster.send(0, WentBack(2, 0, 3))
    for index in (0, 2):
        harness.cluster.processes[index].step = 3
    await harness.steps(1)
    assert harness.log.of(StepRecord)[-1].step == 4
    assert "its own checkpoint of step 3" in harness.warnings
    assert "2 finished steps will be done again" in harness.warnings
    (repaired,) = harness.log.of(Repaired)
    assert (repaired.step, repaired.steps_redone) == (3, 2)
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (5, 2)


async def test_state_is_salvaged_from_survivor_if_vaults_have_none(folder: Path):
    cluster = FakeCluster(3, mirrors=False)
    harness = await Harness(folder, cluster, workers=(2, 3)).trained(5)
    cluster._memory = lambda process: InProcessStateInfo(process.step, True, 1, 3)  # type: ignore[method-assign]

    async def salvage(worker: int, vault: str, step: int) -> SlotInfo:
        slot = SlotInfo(1, 1, 1, step, 64, pinned=False)
        cluster.vaults.by_node["a"].slots[1, 1, 5] = slot
        cluster.commands.append(("salvage", worker))
        return slot

    cluster.salvage = salvage  # type: ignore[method-assign]
    await harness.kill(0)
    assert [command for command, _ in cluster.commands].count("salvage") == 1
    restores = [a.restore for a in harness.assignments.values()]
    assert [(it.step, len(it.slots)) for it in restores if it] == [(5, 1), (5, 1)]


async def test_new_worker_that_is_left_out_has_no_state_to_salvage(folder: Path):
    """Its function failed after an update, of which nobody has a copy."""
    harness = await start_three(folder).trained(3)
    await harness.kill(1)
    await harness.steps(1)
    worker = await harness.join()
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 2, worker]
    for process in harness.cluster.processes.values():
        process.memory_step = 6
    await harness.crash(worker, "user", step=6, wait_s=1)
    assert "without rank 1, whose function failed" in harness.warnings
    assert sorted(harness.assignments) == [0, 2]
    assert {it.restore.step for it in harness.assignments.values() if it.restore} == {5}


async def test_hung_rank_is_killed_and_fails_the_job_when_it_hangs_each_time(folder: Path):
    recovery = {"hang_timeout_s": 10.0, "max_faults": 20}
    harness = await start_three(folder, recovery=recovery).trained(3)
    cluster = harness.cluster
    culprits: list[int] = []
    for _ in range(3):
        culprit = max(harness.assignments.keys() & {0, 1, 2})  # a new process has more time
        cluster.processes[culprit].hangs_at = "data.py:12, in __getitem__"
        for worker in sorted(harness.assignments.keys() - {culprit}):
            cluster.send_heartbeat(worker, step=4, collective=7, waiting=True, silent_s=10.5)
        cluster.send_heartbeat(culprit, step=4, collective=6, phase="data", silent_s=11.0)
        await harness.join(wait_s=2)
        culprits.append(culprit)
        assert "the stack" in harness.warnings
    assert {it.cause for it in harness.log.of(FaultDetected)} == {"hang"}
    assert {it for command, it in cluster.commands if command == "stack"} >= {*culprits}
    assert [it for command, it in cluster.commands if command == "kill"] == culprits[:2]
    failure = await harness.fails(JobFailedError, r"3 times in a row at data\.py:12")
    assert failure.traceback == "the stack"


async def test_losses_are_in_the_step_that_the_survivors_tell_of(folder: Path):
    """Their reports may arrive after the loss; without them no loss was equal to another."""
    harness = start_three(folder, recovery={"max_faults": 20})
    cluster = harness.cluster
    for attempt in range(3):
        await settle()
        members = sorted(harness.assignments)
        if attempt == 0:
            await harness.clock.advance(1)
            await harness.steps(3)
            for worker in members:
                cluster.processes[worker].delayed = True
            assert cluster.step()
            assert cluster.step()
        (victim,) = (w for w in members if harness.assignments[w].rank == 1)
        cluster.processes[victim].backlog.clear()
        cluster.processes[victim].delayed = False
        cluster.kill(victim)
        await harness.join(wait_s=0)
        for worker in members:
            cluster.deliver_delayed(worker)
        await harness.clock.advance(1)
    await harness.fails(JobFailedError, r"ended in step 6 3 times in a row")


async def test_stopped_process_is_inspected_by_vault_and_killed(folder: Path):
    harness = await start_three(folder, recovery={"hang_timeout_s": 10.0}).trained(3)
    harness.cluster.send_heartbeat(1)
    await settle()
    harness.cluster.processes[1].unresponsive = True
    for second in range(12):
        for worker in (0, 2):
            waits = {"step": 4, "collective": 7, "waiting": True, "silent_s": float(second)}
            harness.cluster.send_heartbeat(worker, **waits)
        await harness.clock.advance(1)
    assert ("kill", 1) in harness.cluster.commands
    assert "process 101 is stopped" in harness.warnings
    assert sorted(harness.assignments) == [0, 2]


async def test_worker_is_fenced_only_after_its_assignment(folder: Path):
    harness = await Harness(folder, 4, workers=(2, 4)).trained(3)
    harness.cluster.delays["assign"] = 60
    harness.cluster.kill(0)
    while harness.controller._members.generation.number == 1:
        await asyncio.sleep(0)
    harness.cluster.kill(1)  # while the assignments of generation 2 are in progress
    await settle()
    await settle()
    commands = [command for command, worker in harness.cluster.commands if worker == 2]
    ends = [command for command in commands if command in ("fence", "assign")]
    assert ends[-4:] == ["fence", "assign", "fence", "assign"]
    assert {a.generation for a in harness.assignments.values()} == {3}
    harness.cluster.delays.clear()
    await settle()


async def test_events_of_replaced_generation_are_ignored(folder: Path):
    harness = await start_three(folder).trained(3)
    await harness.kill(1)
    for kind in (machine.GenerationFormed, machine.FaultRecoverable, machine.AllFinished):
        harness.controller.post_event(kind(1))
    harness.controller.post_event(machine.ResizeRequested(1, "more workers"))
    await settle()
    assert harness.states[-2:] == [State.RECOVERING, State.RUNNING]
    assert {a.generation for a in harness.assignments.values()} == {2}


async def test_generation_that_loses_member_while_joining_never_runs(folder: Path):
    """The member is lost in the same turn of the event loop in which the last one joins."""
    harness = await start_three(folder).trained(3)
    harness.cluster.auto = False
    await harness.kill(0)
    harness.cluster.auto = True
    await harness.join(wait_s=0)
    generation = harness.controller._members.generation
    generation.on_joined(2, Joined(2, generation.assignments[2].rank))
    generation.on_joined(1, Joined(2, generation.assignments[1].rank))
    harness.controller._parts.failures.on_worker_lost(2, "killed")
    await harness.kill(2, reported=False)
    running = [e.generation for e in harness.log.of(StateEntered) if e.state is State.RUNNING]
    assert running == [1, 3]


async def test_member_lost_while_another_store_opens_is_not_waited_for(folder: Path):
    """The worker of the first store is lost while that opens; then, while another one does, a
    member: in each turn of the event loop, so also in the one in which that store is open."""
    for turns in range(8, 15):
        cluster = FakeCluster(3)
        cluster.delays["store"] = 12
        harness = Harness(folder, cluster, workers=(1, 3))
        while not harness.states:
            await asyncio.sleep(0)
        await run_turns(6)
        cluster.kill(0, reported=False)
        while not harness.controller._members.generation.number:
            await asyncio.sleep(0)
        await run_turns(turns)
        await harness.kill(2, wait_s=1)
        assert harness.states[-2:] == [State.RECOVERING, State.RUNNING], turns
        await harness.finish()


async def run_turns(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_rank_that_returns_early_is_named(folder: Path):
    harness = await Harness(folder, 2, workers=(2, 2)).trained(2)
    cluster = harness.cluster
    for attempt, worker in enumerate((0, 2)):
        generation = harness.assignments[worker].generation
        cluster.send_heartbeat(worker, step=2, collective=7)
        cluster.processes[worker].assign = None
        cluster.send(worker, Finished(generation, 0, {}, {}, 1))
        cluster.send_heartbeat(1, collective=8, waiting=True, silent_s=4)
        await harness.clock.advance(1.5)
        if attempt == 0:
            assert [fault.cause for fault in harness.log.of(FaultDetected)] == ["early_return"]
            assert sorted(harness.assignments) == [1, 2]
    await harness.fails(JobFailedError, r"rank 0 .*it returned from the training function")
    assert len(harness.log.of(FaultDetected)) == 2

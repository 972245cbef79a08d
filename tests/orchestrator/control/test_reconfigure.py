"""Recovery of the controller from faults of workers, vaults and checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator import machine
from rayzero.orchestrator.control import reconfigure
from rayzero.orchestrator.control.elastic import REPLACE_DELAY_S
from rayzero.orchestrator.control.failures import COLLECTIVE_GRACE_S
from rayzero.orchestrator.control.vaults import VAULT_POLL_S
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
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
from tests.orchestrator.fake_cluster import FakeCheckpointStore, FakeCluster
from tests.orchestrator.support import Harness, settle


def start_three(folder: Path, least: int = 2, **changes: Any) -> Harness:
    return Harness(folder, 3, workers=(least, 3), **changes)


@pytest.mark.parametrize("started", [1, 3])
async def test_functions_that_do_not_continue_are_called_in_new_processes(
    folder: Path, started: int
):
    """The job waits for all that start in its reservations, not only for the least number: one
    that came later would make all begin again; but not longer than they need."""
    harness = await start_three(folder, least=1).trained(3)
    cluster = harness.cluster
    harness.controller._context.registry.start_s = 5.0
    cluster.leaving, cluster.auto = {0, 1}, False
    await harness.kill(2)
    assert [worker for command, worker in cluster.commands if command == "kill"] == [2, 0, 1]
    assert sorted(cluster.replaced) == [(worker, 0.0, ()) for worker in range(3)]
    cluster.auto = True
    for _ in range(started - 1):
        await harness.join(wait_s=4)
        assert not cluster.members
    await harness.join(wait_s=0)
    if started == 1:
        await harness.clock.advance(9)
        assert not cluster.members
        await harness.clock.advance(1)
    assert sorted(harness.assignments) == [3, 4, 5][:started]
    assert harness.restored == {3}
    assert "is called again, in new processes (ranks 0, 1)" in harness.warnings
    assert (await harness.finish()).metrics["steps_redone"] == 0


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


async def test_functions_bound_to_their_ranks_wait_for_the_lost_one(folder: Path):
    """They would have to be called again with fewer; so they are if no worker comes."""
    harness = start_three(folder, least=1)
    cluster, registry = harness.cluster, harness.controller._context.registry
    cluster.bound = True
    await harness.steps(3)
    registry.start_s = 5.0
    await harness.kill(1, wait_s=4)
    assert not cluster.members
    await harness.join(wait_s=0)
    assert harness.ranks == {0: 0, 2: 2, 3: 1}
    assert {it.survivors_stay for it in harness.assignments.values()} == {True}
    await harness.steps(1)
    await harness.kill(2, wait_s=10)
    assert sorted(harness.assignments) == [4, 5]
    assert {it.survivors_stay for it in harness.assignments.values()} == {False}


async def test_rank_of_a_lost_worker_is_its_replacements(folder: Path):
    """Rank 0's is another's until then, which the log says."""
    harness = await start_three(folder).trained(3)
    await harness.kill(0)
    assert harness.ranks == {2: 0, 1: 1}
    assert "rank 0 is the worker on node" in harness.warnings
    assert "which was entered as rank 2" in harness.warnings
    await harness.steps(1)
    await harness.join(wait_s=1)
    await harness.steps(1)
    assert harness.ranks == {3: 0, 1: 1, 2: 2}


@pytest.mark.parametrize("least", [2, 3])
async def test_job_goes_on_without_a_new_worker_whose_function_fails(folder: Path, least: int):
    """Also with fewer than `workers.min`. The next fault tries again."""
    harness = await start_three(folder, least).trained(3)
    cluster = harness.cluster
    await harness.kill(1)
    if least == 2:
        await harness.steps(1)
    assert cluster.replaced == [(1, 0.0, ())]
    step = harness.cluster.committed
    await harness.join(wait_s=1)
    if least == 2:
        await harness.steps(1)
        step += 1
    assert sorted(harness.assignments) == [0, 2, 3]
    await harness.crash(3, "user", "ZeroDivisionError: division by zero", step=step + 1)
    assert harness.running == [0, 2]
    assert not cluster.processes[3].alive
    assert "the job continues without rank 1, whose function failed" in harness.warnings
    assert [it.cause for it in harness.log.of(FaultDetected)] == ["lost", "newcomer"]
    await harness.steps(3)
    await harness.clock.advance(60)
    assert len(cluster.replaced) == 1, "not before the next fault or resize"
    await harness.kill(2)
    await harness.clock.advance(REPLACE_DELAY_S)
    assert {worker for worker, _, _ in cluster.replaced[1:]} == {2, 3}
    cluster.join()
    await harness.join(wait_s=10)
    await harness.steps(2)
    assert len(harness.assignments) == 3


async def test_survivors_of_lost_worker_continue_at_last_step_without_delay(folder: Path):
    harness = await start_three(folder).trained(7)
    await harness.kill(1)
    assert harness.running == [0, 2]
    for assign in harness.assignments.values():
        assert (assign.generation, assign.world_size) == (2, 2)
        assert assign.restore.step == 7
        slots = [(slot.generation, slot.rank, slot.step) for slot in assign.restore.slots]
        assert slots == [(1, 0, 7), (1, 1, 7), (1, 2, 7)]
    await harness.steps(1)
    (repaired,) = harness.log.of(Repaired)
    assert (repaired.cause, repaired.step, repaired.steps_redone) == ("lost", 7, 0)
    assert (repaired.world_size_before, repaired.world_size) == (3, 2)
    assert repaired.lost == ("rank 1 on node host-a (pid 101)",)
    assert list(repaired.seconds) == [
        *("detect", "fence", "select_step", "select_members", "rendezvous", "load", "recompute")
    ]
    assert repaired.total_s == 0
    result = await harness.finish()
    assert result.steps == 9
    assert (result.metrics["repairs"], result.metrics["steps_redone"]) == (1, 0)
    assert result.metrics["faults"] == {"lost": 1}
    assert result.metrics["world_sizes"] == [3, 2]


async def test_recovery_sends_only_necessary_commands(folder: Path):
    harness = await start_three(folder).trained(2)
    harness.cluster.commands.clear()
    await harness.kill(0)
    commands = [command for command in harness.cluster.commands if command[0] != "kill"]
    assert sorted(commands[:2]) == [("fence", 1), ("fence", 2)]
    assert commands[2] == ("store", 1)
    assert sorted(commands[3:]) == [("assign", 1), ("assign", 2)]
    assert len(commands) == 5


@pytest.mark.parametrize("turns", range(30))
async def test_two_lost_workers_in_quick_succession(
    folder: Path, monkeypatch: pytest.MonkeyPatch, turns: int
):
    # In a large job, forming a generation takes several turns of the event loop.
    monkeypatch.setattr(reconfigure, "LARGE_JOB_WORKERS", 1)
    harness = await start_three(folder, least=1).trained(2)
    harness.cluster.kill(1)
    await run_turns(turns)
    await harness.kill(2)
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (3, 0)
    assert result.metrics["faults"] == {"lost": 2}


async def test_replacement_starts_after_repair_and_joins_at_step_boundary(folder: Path):
    harness = await start_three(folder).trained(3)
    harness.cluster.processes[2].stuck = True
    await harness.kill(1)
    assert harness.cluster.replaced == []  # the repair is in progress
    harness.cluster.release_stuck(2)
    await settle()
    assert harness.cluster.replaced == []  # its imports would compete with the first step
    await harness.steps(1)
    assert harness.cluster.replaced == [(1, 0.0, ())]
    await harness.join(wait_s=1)
    assert harness.states[-1] is State.RESIZING  # waits for the end of the current step
    await harness.steps(1)
    assert sorted(harness.assignments) == [0, 2, 3]
    assert harness.restored == {5}
    assert (await harness.finish()).metrics["world_sizes"] == [3, 2, 3]


@pytest.mark.parametrize("when", ["assigned", "joined"])
async def test_worker_lost_while_first_generation_forms(folder: Path, when: str):
    cluster = FakeCluster(3, auto=False)
    harness = await Harness(folder, cluster, workers=(2, 3)).started()
    if when == "joined":
        cluster.send(0, Joined(1, 0))
    cluster.auto = True
    await harness.kill(2, wait_s=1)
    assert harness.states == [State.STARTING, State.RECOVERING, State.RUNNING]
    assert {a.restore for a in harness.assignments.values()} == {None}
    assert (await harness.finish()).steps == 1


@pytest.mark.parametrize("when", ["fenced", "joined"])
async def test_second_lost_worker_restarts_recovery(folder: Path, when: str):
    harness = await Harness(folder, 4, workers=(2, 4)).trained(5)
    cluster = harness.cluster
    cluster.processes[3].stuck = when == "fenced"
    cluster.auto = when == "fenced"
    await harness.kill(0)
    assert harness.states[-1] is State.RECOVERING
    if when == "joined":
        cluster.send(1, Joined(2, 0))
    cluster.auto = True
    await harness.kill(2)
    cluster.release_stuck(3)
    await settle()
    assert sorted(harness.assignments) == [1, 3]
    assert harness.restored == {5}
    await harness.steps(1)
    (repaired,) = harness.log.of(Repaired)
    assert len(repaired.lost) == 2


async def test_late_messages_of_lost_workers_and_old_generations_are_ignored(folder: Path):
    harness = await start_three(folder).trained(3)
    await harness.kill(1, reported=False)
    harness.cluster.send(1, Stopped(1, 1), Joined(2, 1), Restored(2, 1, 3))
    harness.cluster.send(0, Crashed(1, 0, "user", 4, "ValueError", ""), Stopped(1, 0))
    harness.cluster.report_cause(1, "exit code 9")
    await settle()
    assert harness.states[-1] is State.RUNNING
    assert "exit code 9" in harness.warnings  # reported after the repair
    assert len(harness.log.of(FaultDetected)) == 1


async def test_worker_lost_after_other_workers_finished(folder: Path):
    harness = await start_three(folder).trained(3)
    await settle()
    members = harness.cluster.members
    for process in members[:2]:
        harness.cluster.send(process.info.index, Finished(1, process.assign.rank, None, {}, 1))
        process.assign = None
    await settle()
    await harness.kill(2, wait_s=1)
    assert harness.running == [3, 4]  # the functions of 0 and 1 have returned


async def test_finished_worker_that_dies_is_no_fault(folder: Path):
    harness = await start_three(folder).trained(1)
    harness.cluster.send(0, Finished(1, 0, None, {}, 1))
    harness.cluster.processes[0].assign = None
    await settle()
    await harness.kill(0)
    assert harness.states[-1] is State.RUNNING
    for rank in (1, 2):
        harness.cluster.send(rank, Finished(1, rank, None, {}, 1))
    await settle()
    assert (await harness.result()).metrics["faults"] == {}


@pytest.mark.parametrize("cause", ["lost", "collective"])
async def test_failed_collective_waits_for_a_lost_worker_that_explains_it(folder: Path, cause: str):
    harness = await start_three(folder).trained(3)
    await harness.crash(0, "collective", "timed out", wait_s=COLLECTIVE_GRACE_S / 2)
    assert harness.states[-1] is State.RUNNING
    if cause == "lost":
        await harness.kill(1)
    else:
        await harness.clock.advance(COLLECTIVE_GRACE_S / 2)
    assert sorted(harness.assignments) == ([0, 2] if cause == "lost" else [0, 1, 2])
    await harness.steps(1)
    (repaired,) = harness.log.of(Repaired)
    assert (repaired.cause, len(repaired.lost)) == (cause, cause == "lost")
    assert repaired.seconds["detect"] == COLLECTIVE_GRACE_S / (2 if cause == "lost" else 1)


async def test_worker_with_a_broken_device_is_ended_and_replaced(folder: Path):
    """Also in its first step, twice in the same way: it is not the function's error."""
    harness = start_three(folder)
    for rank in (1, 0):
        await settle()
        (worker,) = [it for it, member in harness.assignments.items() if member.rank == rank]
        await harness.crash(worker, "device", "CUDA error: uncorrectable ECC error", step=1)
        assert harness.states[-1] is State.RUNNING or rank == 0
        assert ("kill", worker) in harness.cluster.commands
        fault = harness.log.of(FaultDetected)[-1]
        assert (fault.cause, fault.step) == ("device", 1)
        assert "cannot use its device" in fault.text
        await harness.clock.advance(REPLACE_DELAY_S)
        await harness.join(wait_s=1)
    result = await harness.finish()
    assert result.metrics["faults"] == {"device": 2}


async def test_device_that_is_found_broken_after_a_fence_is_lost(folder: Path):
    """The fault that ended the generation was another one's."""
    harness = await start_three(folder).trained(3)
    harness.cluster.processes[2].stuck = True
    await harness.kill(1)
    assert harness.states[-1] is State.RECOVERING
    await harness.crash(2, "device", "cuda:0 is broken: no answer within 60 s")
    assert ("kill", 2) in harness.cluster.commands
    await harness.join(wait_s=0)
    assert harness.states[-1] is State.RUNNING
    assert (await harness.finish()).metrics["faults"] == {"device": 1, "lost": 1}


async def test_worker_unresponsive_to_assignment_is_lost(folder: Path):
    cluster = FakeCluster(3)
    cluster.processes[1].unresponsive = True
    harness = Harness(folder, cluster, workers=(2, 3))
    await harness.clock.advance(15)  # a quarter of recovery.hang_timeout_s
    assert ("kill", 1) in cluster.commands
    assert sorted(harness.assignments) == [3, 4, 5]


async def test_user_error_is_retried_once_per_step(folder: Path):
    harness = await start_three(folder, least=1).trained(4)
    await harness.crash(1, "user", "ValueError: at 0x0")
    assert sorted(harness.assignments) == [0, 2]  # its function would have to be called again
    await harness.steps(1)
    await harness.crash(2, "user", "ValueError: at 0x1")
    assert harness.states[-1] is State.RUNNING
    await harness.crash(0, "user", "ValueError: at 0x2")
    caught = await harness.fails(JobFailedError, r"step 6 on rank 0.*a second time")
    assert caught.traceback == "the user's frames"


async def test_exhausted_fault_budget_fails_job_and_lists_faults(folder: Path):
    recovery = {"max_faults": 1, "fault_window_s": 9}
    harness = Harness(folder, 5, workers=(1, 5), recovery=recovery)
    for worker in (4, 3):
        await harness.steps(1)
        await harness.kill(worker, f"cause {worker}", wait_s=10)
    assert harness.states[-1] is State.RUNNING, "old faults leave the window"
    for worker in (2, 1):
        await harness.steps(1)
        await harness.kill(worker, f"cause {worker}")
    text = str(await harness.fails(JobFailedError, "rank 1 .* was lost after step 4"))
    assert "before that: rank 2 on node host-a (pid 102) was lost after step 3: cause 2" in text
    assert harness.states[-1] is State.FAILED


async def test_fatal_loss_waits_for_cause_reported_by_cluster(folder: Path):
    harness = await start_three(folder, recovery={"max_faults": 0}).trained(1)
    await harness.kill(1, reported=False, wait_s=0.4)
    assert not harness.run.done()
    harness.cluster.report_cause(1, "out of memory")
    await settle()
    await harness.fails(JobFailedError, "was lost after step 1: out of memory")


async def test_job_with_too_few_workers_waits_for_replacement(folder: Path):
    harness = await Harness(folder).trained(3)  # at least two of two
    await harness.kill(1)
    assert harness.states[-1] is State.RECOVERING
    waiting = "1 of at least 2 workers are left: waiting up to 300 s for replacements"
    assert waiting in harness.warnings
    assert harness.cluster.replaced == [(1, 0.0, ())]
    await harness.clock.advance(20)
    await harness.join(wait_s=0)
    assert sorted(harness.assignments) == [0, 2]
    assert harness.restored == {3}


async def test_job_fails_if_replacement_does_not_start_in_time(folder: Path):
    harness = await Harness(folder, workers={"start_timeout_s": 30}).trained(3)
    await harness.kill(1, wait_s=30)
    await harness.fails(JobFailedError, "1 of at least 2 workers are left")


async def test_replacements_back_off_and_avoid_failing_node(folder: Path):
    harness = Harness(folder, "aaaabb", workers=(1, 6), recovery={"replicas": 0})
    for worker in (0, 1, 2, 3):
        await harness.steps(1)
        await harness.kill(worker)
    await harness.clock.advance(REPLACE_DELAY_S)  # replacements do not wait for a step forever
    replaced = [(delay, avoid) for _, delay, avoid in harness.cluster.replaced]
    assert replaced == [(0.0, ()), (1.0, ()), (2.0, ("a",)), (4.0, ("a",))]
    assert "node host-a had 3 hardware faults" in harness.warnings


async def test_newest_checkpoint_is_used_if_all_replicas_are_lost(folder: Path):
    harness = await Harness(
        folder, "aab", FakeCheckpointStore(2), workers=(2, 3), recovery={"replicas": 0}
    ).trained(3)
    harness.cluster.lose_node("b")
    await settle()
    assert "going back to the checkpoint of step 2" in harness.warnings
    assert "3 finished steps will be done again" in harness.warnings
    restores = [assign.restore for assign in harness.assignments.values()]
    assert {restore.checkpoint for restore in restores if restore} == {"/runs/job/step-2"}
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (3, 3)


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


async def test_job_without_replica_or_checkpoint_starts_over(folder: Path):
    cluster = FakeCluster(3, mirrors=False)
    for process in cluster.processes.values():
        process.engine = False
    harness = await Harness(folder, cluster, workers=(2, 3)).trained(4)
    await harness.kill(2, wait_s=1)
    assert "going back to the beginning" in harness.warnings
    assert {a.restore for a in harness.assignments.values()} == {None}
    result = await harness.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (1, 4)


async def test_damaged_checkpoint_is_excluded(folder: Path):
    harness = Harness(folder, FakeCluster(2, auto=False), FakeCheckpointStore(10, 20))
    await settle()
    harness.cluster.auto = True
    harness.cluster.send(0, Joined(1, 0))
    harness.cluster.send(1, Joined(1, 1))
    await harness.crash(1, "state", "step-20/rank-0 is damaged", step=0)
    assert harness.restored == {10}
    assert "step-20 cannot be read" in harness.warnings
    assert (await harness.finish()).metrics["faults"] == {"state": 1}


async def test_job_does_not_begin_anew_if_all_checkpoints_are_damaged(folder: Path):
    store, cluster = FakeCheckpointStore(10, 20), FakeCluster(2, mirrors=False)
    for process in cluster.processes.values():
        process.engine = False  # it holds no state in memory
    harness = Harness(folder, cluster, store)
    for step, worker in ((20, 1), (10, 3)):
        await harness.clock.advance(1)
        cluster.crash(worker, "state", f"step-{step}/rank-0 is damaged", 0)
    await settle()
    caught = await harness.fails(JobFailedError, "/runs/job/step-10 cannot be read")
    assert "--restart" in str(caught)
    marked = {step: text.partition(" ")[0] for step, text in store.marked.items()}
    assert marked == {20: "step-20/rank-0", 10: "step-10/rank-0"}


async def test_damaged_slots_are_excluded(folder: Path):
    harness = await Harness(folder, 3, FakeCheckpointStore(1), workers=(2, 3)).trained(3)
    harness.cluster.auto = False
    await harness.kill(2)
    harness.cluster.auto, harness.cluster.losses_allowed = True, True
    await harness.crash(0, "state", "a slot's checksum is wrong", step=0)
    steps = [a.restore.step for _, a in harness.cluster.assigned if a.restore]
    assert steps == [1, 1, 1, 4, 4, 3, 3]  # step 3 is complete too


async def test_state_is_salvaged_from_survivor_if_vaults_have_none(folder: Path):
    cluster = FakeCluster(3, mirrors=False)
    harness = await Harness(folder, cluster, workers=(2, 3)).trained(5)
    cluster._memory = lambda process: InProcessStateInfo(process.step, whole=True)  # type: ignore[method-assign]

    async def salvage(worker: int, vault: str) -> SlotInfo:
        slot = SlotInfo(1, 1, 1, 5, 64, pinned=False)
        cluster.vaults.by_node["a"].slots[1, 1, 5] = slot
        cluster.commands.append(("salvage", worker))
        return slot

    cluster.salvage = salvage  # type: ignore[method-assign]
    await harness.kill(0)
    assert [command for command, _ in cluster.commands].count("salvage") == 1
    restores = [a.restore for a in harness.assignments.values()]
    assert [(it.step, len(it.slots)) for it in restores if it] == [(5, 1), (5, 1)]


@pytest.mark.parametrize(("failure", "polls"), [("", 0), ("hangs", 3), ("broken", 1)])
async def test_vault_that_fails_is_replaced_without_fault(folder: Path, failure: str, polls: int):
    harness = await start_three(folder).trained(3)
    vaults = harness.cluster.vaults
    vaults.by_node["a"].failure = failure
    if failure == "":
        vaults.kill("a")
    if failure == "hangs":
        await harness.clock.advance(harness.plan.worker_spec.hang_timeout_s)
        assert vaults.opened == ["a"], "a slow answer is no fault"
        await harness.steps(1)
    await harness.clock.advance(polls * VAULT_POLL_S)
    assert vaults.closed == ["a"]
    assert vaults.opened == ["a", "a"]
    assert harness.states[-1] is State.RESIZING
    await harness.steps(1)
    assert {a.vault for a in harness.assignments.values()} == {"vault-a-2"}
    assert harness.running == [0, 1, 2]
    metrics = (await harness.finish()).metrics
    assert (metrics["faults"], metrics["steps_redone"]) == ({}, 0)


async def test_training_continues_without_vault(folder: Path):
    harness = await start_three(folder).trained(1)
    harness.cluster.vaults.may_open = False
    harness.cluster.vaults.kill("a")
    await harness.clock.advance(30)
    assert "no vault on node host-a" in harness.warnings
    assert harness.states[-1] is State.RUNNING
    await harness.steps(2)
    harness.cluster.vaults.may_open = True
    await harness.clock.advance(60)
    assert harness.states[-1] is State.RESIZING


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
    assert [it for command, it in cluster.commands if command == "stack"] == culprits
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


async def test_stop_during_repair(folder: Path):
    harness = await start_three(folder).trained(2)
    harness.cluster.processes[2].stuck = True
    await harness.kill(1)
    await harness.stop()
    harness.cluster.release_stuck(2)
    await settle()
    await harness.fails(JobStoppedError, "after step 2")


async def test_worker_is_fenced_only_after_its_assignment(folder: Path):
    harness = await Harness(folder, 4, workers=(2, 4)).trained(3)
    harness.cluster.delays["assign"] = 60
    harness.cluster.kill(0)
    while harness.controller._context.generation.number == 1:
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
    generation = harness.controller._context.generation
    generation.on_joined(2, Joined(2, generation.assignments[2].rank))
    generation.on_joined(1, Joined(2, generation.assignments[1].rank))
    harness.controller._failures.on_worker_lost(2, "killed")
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
        while not harness.controller._context.generation.number:
            await asyncio.sleep(0)
        await run_turns(turns)
        await harness.kill(2, wait_s=1)
        assert harness.states[-2:] == [State.RECOVERING, State.RUNNING], turns
        await harness.finish()


async def run_turns(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)

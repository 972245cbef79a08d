"""Faults of every kind at every time, with fake workers and virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rayzero.orchestrator import machine
from rayzero.orchestrator.control import reconfigure
from rayzero.orchestrator.control.context import COMMAND_TIMEOUT_S
from rayzero.orchestrator.control.elastic import REPLACE_DELAY_S
from rayzero.orchestrator.control.failures import COLLECTIVE_GRACE_S
from rayzero.orchestrator.control.reconfigure import FENCE_TIMEOUT_S
from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.job_events import FaultDetected, JobWarning, Repaired, StateEntered
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import (
    Crashed,
    Finished,
    InProcessStateInfo,
    Joined,
    Restored,
    Stopped,
)
from rayzero.workers.vault.records import SlotInfo
from tests.orchestrator.support import Stage, played, settle
from tests.orchestrator.world import Shelf, World

TWO_OF_THREE = {"min": 2, "max": 3}


def three(folder: Path, **changes: object) -> Stage:
    workers = TWO_OF_THREE | dict(changes.pop("workers", {}))  # type: ignore[call-overload]
    return Stage(folder, World(3), workers=workers, **changes)


def texts(stage: Stage) -> str:
    return "\n".join(notice.text for notice in stage.notebook.of(JobWarning))


@played
async def test_the_survivors_of_a_death_go_on_at_the_last_step_without_any_time_passing(
    folder: Path,
):
    stage = three(folder)
    await stage.steps(7)
    stage.world.kill(1)
    await settle()
    assert stage.states[-2:] == [State.RECOVERING, State.RUNNING]
    assert sorted(stage.newest) == [0, 2]
    for assign in stage.newest.values():
        assert (assign.generation, assign.world_size) == (2, 2)
        assert assign.restore is not None
        assert assign.restore.step == 7
        assert [(s.generation, s.rank, s.step) for s in assign.restore.slots] == [
            (1, 0, 7),
            (1, 1, 7),
            (1, 2, 7),
        ]
    await stage.steps(1)
    (repaired,) = stage.notebook.of(Repaired)
    assert (repaired.cause, repaired.step, repaired.steps_redone) == ("lost", 7, 0)
    assert (repaired.world_size_before, repaired.world_size) == (3, 2)
    assert repaired.lost == ("rank 1 on node host-a (pid 101)",)
    assert list(repaired.seconds) == [
        *("detect", "fence", "select_step", "select_members", "rendezvous", "load", "recompute"),
    ]
    assert repaired.total_s == 0
    result = await stage.finish()
    assert result.steps == 9
    assert (result.metrics["repairs"], result.metrics["steps_redone"]) == (1, 0)
    assert result.metrics["faults"] == {"lost": 1}
    assert result.metrics["world_sizes"] == [3, 2]


@played
async def test_only_those_who_must_hear_something_hear_it_and_all_at_once(folder: Path):
    stage = three(folder)
    await stage.steps(2)
    stage.world.told.clear()
    stage.world.kill(0)
    await settle()
    told = [(what, who) for what, who in stage.world.told if what != "kill"]
    assert sorted(told[:2]) == [("fence", 1), ("fence", 2)]
    assert told[2] == ("store", 1)
    assert sorted(told[3:]) == [("assign", 1), ("assign", 2)]
    assert len(told) == 5
    stage.controller.post_event(machine.StopRequested())
    await settle()


def test_two_deaths_however_close_are_two_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # As in a large job, whose generations take several turns of the event loop.
    monkeypatch.setattr(reconfigure, "LARGE_JOB_WORKERS", 1)

    async def deaths(turns: int) -> dict[str, int]:
        folder = tmp_path / str(turns)
        folder.mkdir()
        stage = Stage(folder, World(3), workers={"min": 1, "max": 3})
        await stage.steps(2)
        stage.world.kill(1)
        for _ in range(turns):
            await asyncio.sleep(0)
        stage.world.kill(2)
        await settle()
        result = await stage.finish()
        assert (result.steps, result.metrics["steps_redone"]) == (3, 0)
        faults: dict[str, int] = result.metrics["faults"]
        return faults

    assert [asyncio.run(deaths(turns)) for turns in range(30)] == [{"lost": 2}] * 30


@played
async def test_a_replacement_is_started_behind_the_repair_and_joins_at_a_step_boundary(
    folder: Path,
):
    stage = three(folder)
    await stage.steps(3)
    stage.world.processes[2].stuck = True
    stage.world.kill(1)
    await settle()
    assert stage.world.replaced == []  # the repair is not over
    stage.world.processes[2].stuck = False
    stage.world._unwind(stage.world.processes[2])
    await settle()
    assert stage.world.replaced == []  # its imports would compete with the first step
    await stage.steps(1)
    assert stage.world.replaced == [(1, 0.0, ())]
    stage.world.arrive()
    await stage.clock.turn(1)
    assert stage.states[-1] is State.RESIZING  # waits for the end of the step at hand
    await stage.steps(1)
    assert sorted(stage.newest) == [0, 2, 3]
    assert {a.restore.step for a in stage.newest.values() if a.restore} == {5}
    assert (await stage.finish()).metrics["world_sizes"] == [3, 2, 3]


@pytest.mark.parametrize("when", ["assigned", "joined"])
def test_a_worker_that_dies_while_the_first_generation_forms(tmp_path: Path, when: str):
    @played
    async def scene(folder: Path) -> None:
        world = World(3, auto=False)
        stage = Stage(folder, world, workers=TWO_OF_THREE)
        await settle()
        if when == "joined":
            world.say(0, Joined(1, 0))
        world.auto = True
        world.kill(2)
        await settle()
        assert stage.states == [State.STARTING, State.RECOVERING, State.RUNNING]
        assert {a.restore for a in stage.newest.values()} == {None}
        assert (await stage.finish()).steps == 1

    scene(tmp_path)


@played
async def test_a_second_death_on_the_way_begins_the_way_again(folder: Path):
    stage = Stage(folder, World(4), workers={"min": 2, "max": 4})
    await stage.steps(5)
    stage.world.processes[3].stuck = True
    stage.world.kill(0)
    await settle()
    assert stage.states[-1] is State.RECOVERING
    stage.world.kill(1)
    await settle()
    stage.world.processes[3].stuck = False
    stage.world._unwind(stage.world.processes[3])
    await settle()
    assert sorted(stage.newest) == [2, 3]
    assert {a.restore.step for a in stage.newest.values() if a.restore} == {5}
    await stage.steps(1)
    (repaired,) = stage.notebook.of(Repaired)
    assert len(repaired.lost) == 2
    await stage.finish()


@played
async def test_a_member_that_dies_while_the_new_generation_forms(folder: Path):
    stage = Stage(folder, World(4), workers={"min": 2, "max": 4})
    await stage.steps(5)
    stage.world.auto = False
    stage.world.kill(0)
    await settle()
    assert stage.states[-1] is State.RECOVERING
    stage.world.say(1, Joined(2, 0))
    stage.world.auto = True
    stage.world.kill(2)
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert sorted(stage.newest) == [1, 3]
    assert {a.generation for a in stage.newest.values()} == {3}
    assert (await stage.finish()).steps == 6


@played
async def test_late_news_of_the_dead_and_of_older_generations_changes_nothing(folder: Path):
    stage = three(folder)
    await stage.steps(3)
    stage.world.kill(1, told=False)
    await settle()
    stage.world.say(1, Stopped(1, 1), Joined(2, 1), Restored(2, 1, 3))
    stage.world.say(0, Crashed(1, 0, "user", 4, "ValueError", ""), Stopped(1, 0))
    stage.world.explain(1, "exit code 9")
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert "exit code 9" in texts(stage)  # the cluster's word on it comes after the repair
    assert len(stage.notebook.of(FaultDetected)) == 1
    await stage.finish()


@played
async def test_a_worker_lost_while_others_have_finished(folder: Path):
    stage = three(folder)
    await stage.steps(3)
    await settle()
    members = stage.world.members
    for process in members[:2]:
        assert process.assign is not None
        stage.world.say(process.info.index, Finished(1, process.assign.rank, None, {}, 1))
        process.assign = None
    await settle()
    stage.world.kill(2)
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert sorted(stage.newest) == [0, 1]
    await stage.finish()


@played
async def test_a_worker_that_dies_after_it_finished_is_no_fault(folder: Path):
    stage = three(folder)
    await stage.steps(1)
    stage.world.say(0, Finished(1, 0, None, {}, 1))
    stage.world.processes[0].assign = None
    await settle()
    stage.world.kill(0)
    await settle()
    assert stage.states[-1] is State.RUNNING
    for rank in (1, 2):
        stage.world.say(rank, Finished(1, rank, None, {}, 1))
    await settle()
    assert (await stage.result()).metrics["faults"] == {}


@played
async def test_a_failed_collective_is_repaired_as_soon_as_a_death_explains_it(folder: Path):
    stage = three(folder)
    await stage.steps(3)
    stage.world.crash(0, "collective", "Connection closed by peer")
    await stage.clock.turn(COLLECTIVE_GRACE_S / 2)
    assert stage.states[-1] is State.RUNNING
    stage.world.kill(1)
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert sorted(stage.newest) == [0, 2]
    await stage.steps(1)
    (repaired,) = stage.notebook.of(Repaired)
    assert repaired.cause == "lost"
    assert repaired.seconds["detect"] == COLLECTIVE_GRACE_S / 2
    await stage.finish()


@played
async def test_a_failed_collective_that_nobody_explains_is_repaired_after_a_grace(folder: Path):
    stage = three(folder)
    await stage.steps(3)
    stage.world.crash(0, "collective", "timed out")
    await stage.clock.turn(COLLECTIVE_GRACE_S)
    assert sorted(stage.newest) == [0, 1, 2]
    await stage.steps(1)
    (repaired,) = stage.notebook.of(Repaired)
    assert (repaired.cause, repaired.lost) == ("collective", ())
    await stage.finish()


@played
async def test_a_survivor_that_does_not_unwind_is_killed_and_left_behind(folder: Path):
    stage = Stage(folder, World(4), workers={"min": 2, "max": 4})
    await stage.steps(3)
    stage.world.processes[1].stuck = True
    stage.world.kill(0)
    await stage.clock.turn(FENCE_TIMEOUT_S - 0.1)
    assert stage.states[-1] is State.RECOVERING
    await stage.clock.turn(0.1)
    assert ("kill", 1) in stage.world.told
    assert sorted(stage.newest) == [2, 3]
    assert (await stage.finish()).metrics["faults"] == {"lost": 1}  # one fault, not two


@played
async def test_a_worker_that_does_not_take_its_place_counts_as_lost(folder: Path):
    world = World(3)
    world.processes[1].deaf = True
    stage = Stage(folder, world, workers=TWO_OF_THREE)
    await stage.clock.turn(COMMAND_TIMEOUT_S)
    assert ("kill", 1) in world.told
    assert sorted(stage.newest) == [0, 2]
    await stage.finish()


@played
async def test_user_code_gets_one_more_try_at_the_same_step_and_then_fails(folder: Path):
    stage = three(folder)
    await stage.steps(4)
    stage.world.crash(1, "user", "ValueError: at 0x1")
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert sorted(stage.newest) == [0, 1, 2]  # nobody died
    stage.world.crash(1, "user", "ValueError: at 0x2")
    await settle()
    with pytest.raises(JobFailedError, match=r"step 5 on rank 1.*a second time") as caught:
        await stage.result()
    assert caught.value.traceback == "the user's frames"


@played
async def test_user_code_that_fails_elsewhere_the_second_time_goes_on(folder: Path):
    stage = three(folder)
    await stage.steps(4)
    stage.world.crash(1, "user")
    await stage.steps(1)
    stage.world.crash(1, "user")
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert (await stage.finish()).metrics["faults"] == {"user": 2}


@played
async def test_a_spent_budget_ends_the_job_and_names_the_faults(folder: Path):
    stage = Stage(folder, World(5), workers={"min": 1, "max": 5}, recovery={"max_faults": 2})
    for worker in (4, 3, 2):
        await stage.steps(1)
        stage.world.kill(worker, f"cause {worker}")
        await settle()
    with pytest.raises(JobFailedError) as caught:
        await stage.result()
    text = str(caught.value)
    assert "rank 2 on node host-a (pid 102) was lost in step 4" in text
    assert "before that: rank 3 on node host-a (pid 103) was lost in step 3: cause 3" in text
    assert "recovery.max_faults" in text
    assert stage.states[-1] is State.FAILED


@played
async def test_old_faults_leave_the_window(folder: Path):
    stage = Stage(
        folder,
        World(5),
        workers={"min": 1, "max": 5},
        recovery={"max_faults": 1, "fault_window_s": 9},
    )
    for worker in (4, 3, 2):
        await stage.steps(1)
        stage.world.kill(worker)
        await stage.clock.turn(10)
    assert stage.states[-1] is State.RUNNING
    await stage.finish()


@played
async def test_when_the_job_would_fail_the_cluster_may_say_why_first(folder: Path):
    stage = three(folder, recovery={"max_faults": 0})
    await stage.steps(1)
    stage.world.kill(1, told=False)
    await stage.clock.turn(0.4)
    assert not stage.run.done()
    stage.world.explain(1, "out of memory")
    await settle()
    with pytest.raises(JobFailedError, match="was lost in step 2: out of memory"):
        await stage.result()


@played
async def test_a_job_that_cannot_go_on_waits_for_a_replacement(folder: Path):
    stage = Stage(folder)  # at least two of two
    await stage.steps(3)
    stage.world.kill(1)
    await settle()
    assert stage.states[-1] is State.RECOVERING
    assert "1 of at least 2 workers are left: waiting up to 300 s for replacements" in texts(stage)
    assert stage.world.replaced == [(1, 0.0, ())]
    await stage.clock.turn(20)
    stage.world.arrive()
    await settle()
    assert sorted(stage.newest) == [0, 2]
    assert {a.restore.step for a in stage.newest.values() if a.restore} == {3}
    await stage.finish()


@played
async def test_a_job_without_a_replacement_in_time_fails_and_names_the_settings(folder: Path):
    stage = Stage(folder, workers={"start_timeout_s": 30})
    await stage.steps(3)
    stage.world.kill(1)
    await stage.clock.turn(30)
    with pytest.raises(JobFailedError) as caught:
        await stage.result()
    assert "1 of at least 2 workers are left" in str(caught.value)
    assert "workers.start_timeout_s" in str(caught.value)


@played
async def test_replacements_wait_longer_and_longer_and_avoid_a_node_that_keeps_failing(
    folder: Path,
):
    world = World(6, node_of=lambda index: "a" if index < 4 else "b")
    stage = Stage(folder, world, workers={"min": 1, "max": 6}, recovery={"replicas": 0})
    for worker in (0, 1, 2, 3):
        await stage.steps(1)
        world.kill(worker)
        await settle()
    await stage.clock.turn(REPLACE_DELAY_S)  # no step comes, but it need not wait for ever
    assert [(delay, avoid) for _, delay, avoid in world.replaced] == [
        (0.0, ()),
        (1.0, ()),
        (2.0, ("a",)),
        (4.0, ("a",)),
    ]
    assert "node host-a had 3 hardware faults" in texts(stage)
    stage.controller.post_event(machine.StopRequested())
    await settle()


@played
async def test_when_all_copies_are_gone_the_newest_checkpoint_is_used_and_it_says_so(
    folder: Path,
):
    world = World(3, node_of=lambda index: "ab"[index // 2])
    stage = Stage(folder, world, Shelf(2), workers=TWO_OF_THREE, recovery={"replicas": 0})
    await stage.steps(3)
    world.drop_node("b")
    await settle()
    assert "going back to the checkpoint of step 2" in texts(stage)
    assert "3 finished steps will be done again" in texts(stage)
    assert {a.restore.checkpoint for a in stage.newest.values() if a.restore} == {
        "/runs/job/step-2"
    }
    result = await stage.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (3, 3)


@played
async def test_without_any_copy_the_job_begins_again_and_says_so(folder: Path):
    world = World(3, mirrors=False)
    for process in world.processes.values():
        process.engine = False
    stage = Stage(folder, world, workers=TWO_OF_THREE)
    await stage.steps(4)
    world.kill(2)
    await settle()
    assert "going back to the beginning" in texts(stage)
    assert {a.restore for a in stage.newest.values()} == {None}
    result = await stage.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (1, 4)


@played
async def test_a_damaged_checkpoint_is_left_out_and_an_older_one_is_used(folder: Path):
    stage = Stage(folder, World(2, auto=False), Shelf(10, 20))
    await settle()
    stage.world.auto = True
    stage.world.say(0, Joined(1, 0))
    stage.world.say(1, Joined(1, 1))
    stage.world.crash(1, "state", "step-20/rank-0 is damaged", 0)
    await settle()
    assert {a.restore.step for a in stage.newest.values() if a.restore} == {10}
    assert "step-20 cannot be read" in texts(stage)
    assert (await stage.finish()).metrics["faults"] == {"state": 1}


@played
async def test_slots_that_cannot_be_read_are_left_out(folder: Path):
    stage = Stage(folder, World(3), Shelf(1), workers=TWO_OF_THREE)
    await stage.steps(3)
    stage.world.auto = False
    stage.world.kill(2)
    await settle()
    stage.world.auto, stage.world.excused = True, True
    stage.world.crash(0, "state", "a slot's checksum is wrong", 0)
    await settle()
    steps = [a.restore.step for _, a in stage.world.assigned if a.restore]
    assert steps == [1, 1, 1, 4, 4, 3, 3]  # the version before the damaged one is whole too
    await stage.finish()


@played
async def test_a_survivors_memory_is_used_where_vaults_have_less(folder: Path):
    world = World(3, mirrors=False)
    stage = Stage(folder, world, workers=TWO_OF_THREE)
    await stage.steps(5)
    world._memory = lambda process: InProcessStateInfo(process.step, whole=True)  # type: ignore[method-assign]

    async def salvage(worker: int, vault: str) -> SlotInfo:
        slot = SlotInfo(1, 1, 1, 5, 64, pinned=False)
        world.vaults.of["a"].slots[1, 1, 5] = slot
        world.told.append(("salvage", worker))
        return slot

    world.salvage = salvage  # type: ignore[method-assign]
    world.kill(0)
    await settle()
    assert len([one for one in world.told if one[0] == "salvage"]) == 1
    restores = [a.restore for a in stage.newest.values()]
    assert [(one.step, len(one.slots)) for one in restores if one] == [(5, 1), (5, 1)]
    await stage.finish()


@played
async def test_a_vault_that_dies_is_filled_again_without_a_fault(folder: Path):
    stage = three(folder)
    await stage.steps(3)
    stage.world.vaults.kill("a")
    await settle()
    assert stage.world.vaults.opened == ["a", "a"]
    assert stage.states[-1] is State.RESIZING
    await stage.steps(1)
    assert {a.vault for a in stage.newest.values()} == {"vault-a-2"}
    assert sorted(stage.newest) == [0, 1, 2]
    result = await stage.finish()
    assert (result.metrics["faults"], result.metrics["steps_redone"]) == ({}, 0)


@played
async def test_a_vault_that_cannot_be_opened_does_not_stop_training(folder: Path):
    stage = three(folder)
    await stage.steps(1)
    stage.world.vaults.may_open = False
    stage.world.vaults.kill("a")
    await stage.clock.turn(30)
    assert "no vault on node host-a" in texts(stage)
    assert stage.states[-1] is State.RUNNING
    await stage.steps(2)
    stage.world.vaults.may_open = True
    await stage.clock.turn(60)
    assert stage.states[-1] is State.RESIZING
    await stage.finish()


@played
async def test_a_hung_rank_is_named_with_its_stack_killed_and_repaired(folder: Path):
    stage = three(folder, recovery={"hang_timeout_s": 10.0})
    await stage.steps(3)
    for worker in (0, 2):
        stage.world.beat(worker, step=4, collective=7, waiting=True, silent_s=10.5)
    stage.world.beat(1, step=4, collective=6, silent_s=11.0)
    await stage.clock.turn(1)
    assert ("stack", 1) in stage.world.told
    assert ("kill", 1) in stage.world.told
    assert "the stack" in texts(stage)
    (fault,) = stage.notebook.of(FaultDetected)
    assert (fault.cause, fault.rank) == ("hang", 1)
    assert sorted(stage.newest) == [0, 2]
    assert (await stage.finish()).metrics["faults"] == {"hang": 1}


@played
async def test_a_stopped_process_is_inspected_by_its_vault_and_killed(folder: Path):
    stage = three(folder, recovery={"hang_timeout_s": 10.0})
    await stage.steps(3)
    stage.world.beat(1)
    await settle()
    stage.world.processes[1].deaf = True
    for second in range(12):
        for worker in (0, 2):
            stage.world.beat(worker, step=4, collective=7, waiting=True, silent_s=float(second))
        await stage.clock.turn(1)
    assert ("kill", 1) in stage.world.told
    assert "process 101 is stopped" in texts(stage)
    assert sorted(stage.newest) == [0, 2]
    await stage.finish()


@played
async def test_a_stop_in_the_middle_of_a_repair(folder: Path):
    stage = three(folder)
    await stage.steps(2)
    stage.world.processes[2].stuck = True
    stage.world.kill(1)
    await settle()
    stage.controller.post_event(machine.StopRequested())
    await settle()
    stage.world.processes[2].stuck = False
    stage.world._unwind(stage.world.processes[2])
    await settle()
    with pytest.raises(JobStoppedError, match="after step 2"):
        await stage.result()


@played
async def test_nobody_begins_before_those_who_were_given_up_are_dead(folder: Path):
    """The world does not take two generations at once."""
    stage = Stage(folder, World(4), workers={"min": 2, "max": 4})
    await stage.steps(3)
    stage.world.processes[1].stuck = True
    stage.world.lag["kill"] = 80
    stage.world.kill(0)
    await stage.clock.turn(FENCE_TIMEOUT_S)
    assert sorted(stage.newest) == [2, 3]
    assert stage.states[-1] is State.RUNNING
    await stage.finish()


@played
async def test_a_worker_that_is_still_being_told_its_place_is_fenced_behind_that(folder: Path):
    stage = Stage(folder, World(4), workers={"min": 2, "max": 4})
    await stage.steps(3)
    stage.world.lag["assign"] = 60
    stage.world.kill(0)
    while stage.controller._context.generation.number == 1:
        await asyncio.sleep(0)
    stage.world.kill(1)  # the others are about to hear of generation 2
    await settle()
    await settle()
    heard = [what for what, who in stage.world.told if who == 2]
    commands = [what for what in heard if what in ("fence", "assign")]
    assert commands[-4:] == ["fence", "assign", "fence", "assign"]
    assert {a.generation for a in stage.newest.values()} == {3}
    stage.world.lag.clear()
    await settle()
    await stage.finish()


@played
async def test_events_about_a_replaced_generation_change_nothing(folder: Path):
    stage = three(folder)
    await stage.steps(3)
    stage.world.kill(1)
    await settle()
    for event in (
        machine.GenerationFormed(1),
        machine.FaultRecoverable(1),
        machine.AllFinished(1),
        machine.ResizeRequested(1, "more workers"),
    ):
        stage.controller.post_event(event)
    await settle()
    assert stage.states[-2:] == [State.RECOVERING, State.RUNNING]
    assert {a.generation for a in stage.newest.values()} == {2}
    await stage.finish()


@played
async def test_a_generation_that_is_lost_while_it_joins_is_never_formed(folder: Path):
    """The last member's Joined is handled after another member's loss, in the same turn."""
    stage = Stage(folder, World(3), workers={"min": 2, "max": 3})
    await stage.steps(3)
    stage.world.auto = False
    stage.world.kill(0)
    await settle()
    stage.world.auto = True
    stage.world.arrive()
    await settle()
    generation = stage.controller._context.generation
    generation.on_joined(2, Joined(2, generation.assignments[2].rank))
    generation.on_joined(1, Joined(2, generation.assignments[1].rank))
    stage.controller._context.changed.notify()
    stage.controller._failures.on_worker_lost(2, "killed")
    stage.world.kill(2, told=False)
    await settle()
    running = [e.generation for e in stage.notebook.of(StateEntered) if e.state is State.RUNNING]
    assert running == [1, 3]
    await stage.finish()

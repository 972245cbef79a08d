"""Workers come and go by wish: newcomers, scaling, spares, leaving nodes. No fault is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayzero.engine.errors import ConfigError
from rayzero.orchestrator import machine
from rayzero.orchestrator.control.elastic import DRAIN_POLL_INTERVAL_S, JOIN_BATCH_S
from rayzero.orchestrator.control.vaults import CLOSE_UNUSED_AFTER_S
from rayzero.orchestrator.errors import JobStoppedError, WorkerLostError
from rayzero.orchestrator.job_events import FaultDetected, JobWarning, Resized, WorkersReady
from rayzero.orchestrator.machine import State
from tests.orchestrator.support import Stage, played, settle
from tests.orchestrator.world import World


@played
async def test_newcomers_that_come_together_join_together_at_a_step_boundary(folder: Path):
    stage = Stage(folder, workers={"min": 2, "max": 4})
    await stage.steps(3)
    stage.world.arrive()
    await stage.clock.turn(JOIN_BATCH_S / 2)
    stage.world.arrive()
    await stage.clock.turn(JOIN_BATCH_S)
    assert stage.states[-1] is State.RESIZING
    assert stage.world.can_step  # training goes on until everybody has heard
    await stage.steps(2)
    assert sorted(stage.newest) == [0, 1, 2, 3]
    (resized,) = stage.notebook.of(Resized)
    assert (resized.reason, resized.step) == ("from 2 to 4 workers", 4)
    assert list(resized.seconds) == [
        *("drain", "select_step", "select_members", "rendezvous", "load", "recompute"),
    ]
    result = await stage.finish()
    assert (result.steps, result.metrics["steps_redone"]) == (6, 0)
    assert result.metrics["world_sizes"] == [2, 4]


@played
async def test_a_newcomer_beyond_max_stays_a_spare_and_takes_a_lost_ones_place(folder: Path):
    stage = Stage(folder, World(3), workers={"min": 2, "max": 2, "spares": 1})
    await stage.steps(3)
    assert stage.plan.resources.max_workers == 3
    assert sorted(stage.newest) == [0, 1]
    stage.world.kill(0)
    await settle()
    assert stage.states[-2:] == [State.RECOVERING, State.RUNNING]
    assert sorted(stage.newest) == [1, 2]
    assert {a.world_size for a in stage.newest.values()} == {2}
    await stage.finish()


@played
async def test_a_spare_that_dies_is_replaced_and_costs_nothing(folder: Path):
    stage = Stage(folder, World(3), workers={"min": 2, "spares": 1}, recovery={"max_faults": 0})
    await stage.steps(3)
    stage.world.kill(2)
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert stage.world.replaced == [(2, 0.0, ())]
    (fault,) = stage.notebook.of(FaultDetected)
    assert fault.rank is None
    assert "worker 2 on node host-a" in fault.text
    await stage.finish()


@played
async def test_scaling_down_dismisses_who_is_left_out_once_the_others_go_on(folder: Path):
    stage = Stage(folder, World(4), workers={"min": 2, "max": 4})
    await stage.steps(2)
    assert stage.controller.scale(2, 2) == "job: 2 to 2 workers; now 4"
    await settle()
    assert stage.world.resized == [(2, 2)]
    assert stage.states[-1] is State.RESIZING
    assert not [one for one in stage.world.told if one[0] == "dismiss"]
    await stage.steps(1)
    assert sorted(stage.newest) == [0, 1]
    assert [one for one in stage.world.told if one[0] == "dismiss"] == [
        ("dismiss", 2),
        ("dismiss", 3),
    ]
    result = await stage.finish()
    assert result.metrics["faults"] == {}
    assert stage.notebook.of(FaultDetected) == []


@played
async def test_scaling_up_waits_for_newcomers_and_goes_on_meanwhile(folder: Path):
    stage = Stage(folder)
    await stage.steps(1)
    stage.controller.scale(3, 5)
    await stage.steps(3)
    assert stage.states[-1] is State.RUNNING
    stage.world.arrive()
    await stage.clock.turn(JOIN_BATCH_S)
    await stage.steps(1)
    assert sorted(stage.newest) == [0, 1, 2]
    await stage.finish()


@played
async def test_a_size_that_the_engine_config_cannot_have_is_refused(folder: Path):
    engine = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    stage = Stage(folder, engine=engine)
    await stage.steps(1)
    with pytest.raises(ConfigError, match="train_batch_size 4 is less than the world size 5"):
        stage.controller.scale(2, 5)
    assert stage.world.resized == []
    await stage.finish()


@played
async def test_the_work_moves_off_a_leaving_node_before_it_goes(folder: Path):
    world = World(4, node_of=lambda index: "ab"[index // 2])
    stage = Stage(folder, world, workers={"min": 2, "max": 4}, recovery={"max_faults": 0})
    await stage.steps(3)
    world.leaving = frozenset({"b"})
    await stage.clock.turn(DRAIN_POLL_INTERVAL_S)
    assert stage.states[-1] is State.RESIZING
    await stage.steps(1)
    assert sorted(stage.newest) == [0, 1]
    assert world.replaced == [(2, 0.0, ("b",)), (3, 0.0, ("b",))]
    world.drop_node("b")
    await settle()
    await stage.steps(1)
    (resized,) = stage.notebook.of(Resized)
    assert resized.reason == "a node is draining"
    assert any("node host-b is draining" in one.text for one in stage.notebook.of(JobWarning))
    assert (await stage.finish()).metrics["faults"] == {}


@played
async def test_a_worker_lost_with_a_leaving_node_costs_no_budget(folder: Path):
    world = World(3, node_of=lambda index: "aab"[index])
    stage = Stage(folder, world, workers={"min": 2, "max": 3}, recovery={"max_faults": 0})
    await stage.steps(3)
    world.leaving = frozenset({"b"})
    await stage.clock.turn(DRAIN_POLL_INTERVAL_S)
    world.kill(2)  # before the step at hand was over
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert (await stage.finish()).metrics["faults"] == {"preempted": 1}


@played
async def test_where_too_few_would_stay_a_leaving_node_is_used_to_the_end(folder: Path):
    world = World(2, node_of=lambda index: "ab"[index])
    stage = Stage(folder, world)
    await stage.steps(1)
    world.leaving = frozenset({"b"})
    await stage.clock.turn(DRAIN_POLL_INTERVAL_S)
    assert stage.states[-1] is State.RUNNING
    world.arrive("a")
    await stage.clock.turn(JOIN_BATCH_S)
    await stage.steps(1)
    assert sorted(stage.newest) == [0, 2]
    await stage.finish()


@played
async def test_a_function_without_an_engine_is_never_resized(folder: Path):
    world = World(2)
    for process in world.processes.values():
        process.engine = False
    stage = Stage(folder, world, workers={"min": 2, "max": 4})
    await stage.steps(2)
    world.arrive()
    await stage.clock.turn(10)
    assert stage.states[-1] is State.RUNNING
    await stage.finish()


@played
async def test_nobody_is_resized_for_a_job_that_is_about_to_end(folder: Path):
    stage = Stage(folder, workers={"min": 2, "max": 4})
    await stage.steps(1)
    stage.world.arrive()
    await settle()
    assert stage.world.step(last=True)
    await stage.clock.turn(10)
    assert (await stage.result()).steps == 2


@played
async def test_a_drain_that_comes_too_late_ends_with_the_job(folder: Path):
    stage = Stage(folder, workers={"min": 2, "max": 4})
    await stage.steps(1)
    stage.world.arrive()
    await stage.clock.turn(JOIN_BATCH_S)
    assert stage.states[-1] is State.RESIZING
    assert (await stage.finish()).steps == 2


@played
async def test_a_death_during_a_drain(folder: Path):
    stage = Stage(folder, World(3), workers={"min": 2, "max": 5})
    await stage.steps(3)
    stage.world.arrive()
    await stage.clock.turn(JOIN_BATCH_S)
    assert stage.states[-1] is State.RESIZING
    stage.world.kill(1)
    await settle()
    assert stage.states[-2:] == [State.RECOVERING, State.RUNNING]
    assert sorted(stage.newest) == [0, 2, 3]  # the newcomer comes along
    await stage.finish()


@played
async def test_a_newcomer_that_dies_before_it_is_needed(folder: Path):
    stage = Stage(folder, workers={"min": 2, "max": 3})
    await stage.steps(1)
    newcomer = stage.world.arrive()
    await settle()
    stage.world.kill(newcomer)
    await stage.clock.turn(JOIN_BATCH_S)
    assert stage.states[-1] is State.RUNNING
    await stage.finish()


@played
async def test_a_newcomer_that_dies_when_it_is_to_begin(folder: Path):
    stage = Stage(folder, workers={"min": 2, "max": 3})
    await stage.steps(1)
    newcomer = stage.world.arrive()
    await stage.clock.turn(JOIN_BATCH_S)
    stage.world.auto = False
    assert stage.world.step()
    await settle()
    stage.world.auto = True
    stage.world.kill(newcomer)
    await settle()
    assert stage.states[-1] is State.RUNNING
    assert sorted(stage.newest) == [0, 1]
    await stage.finish()


@played
async def test_a_newcomer_that_does_not_start_is_told(folder: Path):
    stage = Stage(folder, workers={"min": 2, "max": 3})
    await stage.steps(1)
    stage.world.newcomers.put_nowait(WorkerLostError("a worker did not start: no torch"))
    stage.world.arrive()
    await settle()
    assert any("no torch" in one.text for one in stage.notebook.of(JobWarning))
    assert len(stage.notebook.of(WorkersReady)) == 2
    stage.controller.post_event(machine.StopRequested())
    await settle()
    with pytest.raises(JobStoppedError):
        await stage.result()


@played
async def test_a_vault_on_a_node_without_workers_is_closed_after_a_while(folder: Path):
    world = World(3, node_of=lambda index: "aab"[index])
    stage = Stage(folder, world, workers={"min": 2, "max": 3})
    await stage.steps(3)
    world.leaving = frozenset({"b"})
    await stage.clock.turn(DRAIN_POLL_INTERVAL_S)
    await stage.steps(2)
    assert sorted(stage.newest) == [0, 1]
    assert world.vaults.closed == []
    await stage.clock.turn(CLOSE_UNUSED_AFTER_S)
    await stage.steps(1)
    assert world.vaults.closed == ["b"]
    assert not any("vault" in one.text for one in stage.notebook.of(JobWarning))
    await stage.finish()

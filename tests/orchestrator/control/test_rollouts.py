"""The buffer of a job's rollouts, in virtual time: where it is, what it is told, and its loss."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.errors import JobFailedError, JobStoppedError
from rayzero.orchestrator.job_events import Repaired, Resized
from rayzero.orchestrator.machine import State, StopRequested
from rayzero.workers.messages import Finished, Heartbeat, InProcessStateInfo
from rayzero.workers.roles.view import TASKS_PHASE
from tests.orchestrator.fake_cluster import FakeCluster, FakeProcess
from tests.orchestrator.fake_roles import FakeRoleGroup
from tests.orchestrator.support import Harness, settle

JOB: dict[str, Any] = {
    "engine": {"train_batch_size": 8},
    "rollouts": {"group": 2},
    "roles": {"rollout": {"entrypoint": "m:generate", "takes": "prompts"}},
}


async def started(folder: Path, nodes: str = "ab", **changes: Any) -> tuple[Harness, FakeRoleGroup]:
    harness = Harness(folder, FakeCluster(nodes), **JOB, **changes)
    group = harness.roles["rollout"]
    await settle()
    group.start(nodes[-1])
    await settle()
    return await harness.trained(1), group


async def test_buffer_is_on_the_node_of_rank_0_and_everybody_knows_it(folder: Path):
    harness, group = await started(folder)
    vault = harness.cluster.vaults.by_node["a"]
    assert vault.rollouts == harness.plan.rollouts
    assert harness.cluster.vaults.by_node["b"].rollouts is None
    addresses = {it.rollouts for _, it in harness.cluster.assigned}
    assert addresses == {harness.controller._parts.roles.rollouts.address} != {None}
    assert {group.views[101][-1].buffer} == addresses
    await harness.steps(2)
    await settle()
    assert vault.told == (1, 3, ()), "a version is a step that all ranks have mirrored"
    counts = harness.telemetry.snapshot()["rollouts"]
    assert (counts["published"], counts["leased"]) == (3, {"rollout": 0})


async def test_lost_and_hung_workers_have_no_tasks(folder: Path):
    harness, group = await started(folder)
    group.lose(101)
    await settle()
    group.start("b")
    await settle()
    group.post(102, Heartbeat(0, 0, "run", 500.0))  # before its first task: it may load a model
    await settle()
    assert group.killed == [101]
    group.post(102, Heartbeat(0, 0, TASKS_PHASE, 121.0))
    await settle()
    assert group.killed == [101, 102]
    assert harness.cluster.vaults.by_node["a"].told[2] == (101, 102)
    assert harness.controller.status().roles["rollout"].faults == {"hang": 1, "lost": 1}


async def test_lost_buffer_ends_the_generation_that_reads_from_it(folder: Path):
    harness, group = await started(folder)
    lost = harness.controller._parts.roles.rollouts.address
    harness.cluster.delays["vault"] = 50
    harness.cluster.vaults.kill("a")
    await settle()
    await harness.steps(2)
    assert harness.states.count(State.RECOVERING) == 1
    repairs = [(it.cause, it.steps_redone) for it in harness.log.of(Repaired)]
    assert repairs == [("rollouts", 0)], "the state is in the ranks' memory"
    (new,) = {it.rollouts for _, it in harness.cluster.assigned if it.generation == 2}
    assert new not in (None, lost)
    heard = [buffer for buffer, _ in groupby(view.buffer for view in group.views[101])]
    assert heard == [lost, None, new]
    assert harness.controller.status().faults == {}, "no worker is at fault"


async def test_lost_buffer_loses_no_step_that_all_ranks_have_finished(folder: Path):
    """Where one rank has ended the next step, in which the others were interrupted."""
    checkpoint = {"every_steps": 2}
    harness, _ = await started(folder, "aa", checkpoint=checkpoint)
    await harness.steps(2)
    cluster = harness.cluster
    ahead = cluster.processes[0]

    def left(process: FakeProcess) -> InProcessStateInfo:
        step = process.step + (process is ahead)
        return InProcessStateInfo(step, False, 1, 2, copies=(step - 1, step))

    cluster._memory = left  # type: ignore[method-assign]
    cluster.vaults.kill("a")
    await settle()
    await harness.steps(1)
    repairs = [(it.cause, it.step, it.steps_redone) for it in harness.log.of(Repaired)]
    assert repairs == [("rollouts", 3, 0)], "its copy of the step before is in its memory"
    assert [it for it in cluster.commands if it[0] == "salvage"] == [("salvage", 0), ("salvage", 1)]


async def test_function_that_returns_makes_no_more_samples(folder: Path):
    """Its ranks would wait for ever."""
    workers = {"min": 1, "max": 2, "start_timeout_s": 20.0}
    roles = {"rollout": JOB["roles"]["rollout"] | {"workers": workers}}
    harness = Harness(folder, FakeCluster("ab"), **(JOB | {"roles": roles}))
    group = harness.roles["rollout"]
    await settle()
    group.start()
    await settle()
    await harness.trained(1)
    group.post(101, Finished(0, 0, {}, {}, 1))
    for _ in range(25):
        await harness.clock.advance(1.0)
    failure = await harness.fails(JobFailedError, "role rollout has 0 of at least 1 workers")
    assert "in 1 more the function has returned" in failure.seen


@pytest.mark.parametrize("stops", [False, True])
async def test_resize_and_stop_interrupt_a_wait_for_samples(folder: Path, stops: bool):
    """One rank waits for them, the other one for that rank: nobody makes any."""
    checkpoint = {"every_steps": 100, "grace_period_s": 60.0}
    harness, group = await started(folder, "aa", workers=(1, 2), checkpoint=checkpoint)
    await harness.steps(2)
    cluster = harness.cluster
    group.lose(101)
    await settle()
    if stops:
        harness.controller.post_event(StopRequested())
    else:
        harness.controller.scale(1, 1)
    began_s = harness.clock.now()
    for waits in (False, True):
        assert [it.assign.generation for it in cluster.members] == [1, 1]
        assert not [it for it in cluster.commands if it[0] == "fence"]
        for _ in range(10):
            phase = "samples" if waits else "data"
            cluster.send_heartbeat(0, step=4, phase=phase)
            cluster.send_heartbeat(1, step=4, phase="forward", waiting=True)
            await harness.clock.advance(1.0)
    assert len([it for it in cluster.commands if it[0] == "fence"]) == 2
    if stops:
        assert harness.run.done()
        with pytest.raises(JobStoppedError, match="stopped after step 3"):
            await harness.run
        assert harness.clock.now() - began_s < 30, "checkpoint.grace_period_s is not used up"
        return
    await harness.steps(1)
    assert [it.assign.world_size for it in cluster.members] == [1]
    assert [(it.step, it.world_size) for it in harness.log.of(Resized)] == [(3, 1)]
    assert not harness.log.of(Repaired)


async def test_another_vault_may_be_lost(folder: Path):
    harness, _ = await started(folder)
    buffer = harness.controller._parts.roles.rollouts.address
    harness.cluster.vaults.kill("b")
    await settle()
    await harness.steps(2)
    assert State.RECOVERING not in harness.states
    assert harness.controller._parts.roles.rollouts.address == buffer


async def test_buffer_is_opened_where_members_are_left(folder: Path):
    harness, _ = await started(folder, workers=(1, 2))
    harness.cluster.vaults.kill("a")
    await harness.kill(0, "lost with its node")
    await harness.steps(2)
    vaults = harness.cluster.vaults.by_node
    assert [node for node in vaults if vaults[node].rollouts] == ["b"]
    address = harness.controller._parts.roles.rollouts.address
    assert address is not None
    assert address.secret.decode() == vaults["b"].address


async def test_member_to_be_is_lost_while_the_buffer_opens(folder: Path):
    harness, _ = await started(folder, "aa", workers={"min": 1, "max": 2, "spares": 1})
    spare = await harness.join("b")
    harness.cluster.delays["rollouts"] = 1000
    harness.cluster.vaults.opening_rollouts = False
    harness.cluster.lose_node("a")
    for _ in range(50):
        await harness.clock.advance(0.1)
        if harness.cluster.vaults.opening_rollouts:
            break
    harness.cluster.kill(spare)
    harness.cluster.delays.clear()
    harness.cluster.join("b")
    await harness.clock.advance(10)
    await harness.steps(1)


async def test_slow_worker_hears_only_the_newest(folder: Path):
    harness, group = await started(folder, "aa")
    group.updating.clear()  # a process that is stopped
    before = len(group.views[101])
    for _ in range(3):
        harness.cluster.vaults.kill("a")
        await settle()
        await harness.steps(1)
    assert len(group.views[101]) == before + 1
    group.updating.set()
    await settle()
    assert len(group.views[101]) == before + 2
    view = group.views[101][-1]
    assert view.buffer == harness.controller._parts.roles.rollouts.address
    assert view.weights is not None
    assert view.weights.progress == (4, 4)

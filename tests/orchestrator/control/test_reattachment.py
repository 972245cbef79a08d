"""A controller that continues with the workers or the vaults that have outlived the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rayzero.orchestrator.job_events import (
    Checkpointed,
    FaultDetected,
    Reattached,
    Repaired,
    RunAdopted,
    WorkersReady,
)
from rayzero.orchestrator.machine import State
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.messages import GenerationSpec, RankAssignment, StepReport
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness, reread, settle


async def test_whole_generation_goes_on_and_each_step_is_told_once(folder: Path):
    first = Harness(folder, FakeCluster("ab"), unix=time.time)
    await first.steps(2)
    journal = reread(first.events.facts)
    await first.steps(2)  # the journal has none of these, and the agents neither
    assigned, cluster = list(first.cluster.assigned), first.cluster

    second = await first.succeeded_by(
        folder, lambda: [cluster.step() for _ in range(3)], past=journal
    )
    await second.steps(1)
    assert cluster.assigned == assigned
    assert second.states == [State.RUNNING]
    (event,) = second.log.of(Reattached)
    assert (event.step, event.generation, event.lost_ranks) == (7, 1, ())
    assert not second.log.of(RunAdopted)
    assert [record.step for record in second.log.of(StepRecord)] == [5, 6, 7, 8]
    facts = second.events.facts
    assert (facts.step, facts.steps_redone, facts.counters.done) == (8, 0, 8)
    assert [entry.world_size for entry in facts.generations] == [2, 2]
    assert "adoption" not in second.telemetry.seconds()


async def test_step_of_the_journal_is_not_told_again(folder: Path):
    first = Harness(folder, FakeCluster("ab"), unix=time.time)
    await first.steps(2)
    journal = reread(first.events.facts)

    def send_again() -> None:
        for rank in (0, 1):  # the agents have no acknowledgement of it
            first.cluster.send(rank, StepReport(1, rank, 2, {}, {"step_s": 0.1}))

    second = await first.succeeded_by(folder, send_again, past=journal)
    await second.steps(1)
    assert [record.step for record in second.log.of(StepRecord)] == [3]
    assert second.events.facts.counters.done == 3


def _kill(cluster: FakeCluster) -> None:
    cluster.step()
    cluster.kill(1)


def _kill_and_notice(cluster: FakeCluster) -> None:
    """The others' exchange with it fails."""
    _kill(cluster)
    cluster.crash(0, "collective")
    cluster.crash(2, "collective")


def _lose_node(cluster: FakeCluster) -> None:
    cluster.step()
    cluster.lose_node("b")


def _drain(cluster: FakeCluster) -> None:
    for process in cluster.processes.values():
        process.drain = True
    cluster.step()


def _assign_two_of_three(cluster: FakeCluster) -> None:
    """The controller is lost while it forms the next generation: one member has not heard of it,
    and the others wait for that where they join."""
    _drain(cluster)
    (before,) = {assign.generation: assign for _, assign in cluster.assigned}.values()
    spec = GenerationSpec(2, 3, "", 0, members=before.members, survivors_stay=True)
    for worker in (0, 2):
        cluster._assign(worker, spec, RankAssignment(worker, 0, 0, before.vault))


@pytest.mark.parametrize(
    ("happens", "ranks", "cause", "redone"),
    [
        (_kill, 2, "lost", 0),
        (_kill_and_notice, 2, "lost", 0),
        (_lose_node, 2, "node", 3),
        (_drain, 3, "controller", 0),
        (_assign_two_of_three, 3, "controller", 0),
    ],
)
async def test_generation_that_is_not_whole_is_repaired_from_memory(
    folder: Path, happens: Callable[[FakeCluster], None], ranks: int, cause: str, redone: int
):
    limits = {"workers": {"min": 1, "max": 3}, "recovery": {"replicas": 1}}
    first = await Harness(
        folder, FakeCluster("aba", checkpoint_every=0), unix=time.time, **limits
    ).trained(2)
    cluster = first.cluster
    second = await first.succeeded_by(folder, lambda: happens(cluster), **limits)
    await second.clock.advance(5)
    await second.steps(1)
    (repair,) = second.log.of(Repaired)
    assert (repair.cause, repair.steps_redone, repair.world_size) == (cause, redone, ranks)
    assert second.restored == ({3} if not redone else set())
    assert redone or all(assign.survivors_stay for assign in second.assignments.values())
    assert bool(second.log.of(FaultDetected)) == (cause != "controller")
    assert 1 not in second.assignments or ranks == 3


async def test_job_that_has_finished_meanwhile_succeeds(folder: Path):
    first = await Harness(folder, FakeCluster(2), unix=time.time).trained(2)
    cluster = first.cluster
    second = await first.succeeded_by(folder, lambda: cluster.step(last=True))
    await settle()
    assert (await second.result()).steps == 3


@pytest.mark.parametrize("is_known", [True, False])
async def test_step_that_was_pinned_becomes_a_checkpoint(folder: Path, is_known: bool):
    """`is_known`: the lost controller had its messages, and had not written it."""
    changes = {"checkpoint": {"every_steps": 2}}
    cluster = FakeCluster("aa", checkpoint_every=2)
    first = Harness(folder, cluster, unix=time.time, **changes)
    cluster.vaults.may_write.clear()
    await first.steps(1 + is_known)
    second = await first.succeeded_by(folder, cluster.step, **changes)
    cluster.vaults.may_write.set()
    await second.steps(3 - is_known)
    assert [event.step for event in second.log.of(Checkpointed)] == [2, 4]


async def test_steps_that_no_controller_has_seen_are_not_made_again(folder: Path):
    first = Harness(folder, FakeCluster("ab"), unix=time.time)
    await first.steps(2)
    seen = reread(first.events.facts)
    await first.steps(3)  # the journal has none of these
    vaults = dict(first.cluster.vaults.by_node)
    first.run.cancel()
    await settle()
    cluster = FakeCluster("a")
    cluster.committed = first.cluster.committed  # its workers must begin with this step
    cluster.vaults.by_node, cluster.vaults.attached = vaults, ("a", "b", "gone")
    second = Harness(folder, cluster, past=seen, workers={"min": 1})
    await second.steps(1)
    (adopted,) = second.log.of(RunAdopted)
    assert adopted.step == 2
    assert second.restored == {5}
    assert second.controller.status().step == 6


async def test_functions_that_are_called_again_wait_for_all_that_start(folder: Path):
    """For twice the time that the first workers took, which the lost controller has measured."""
    limits = {"workers": {"min": 1, "max": 3}}
    first = await Harness(folder, FakeCluster("aaa"), unix=time.time, **limits).trained(3)
    first.events.emit(WorkersReady((), start_s=5.0))
    cluster = first.cluster
    cluster.leaving, cluster.auto = {0, 1}, False
    second = await first.succeeded_by(folder, lambda: cluster.kill(2), **limits)
    await settle()
    cluster.auto = True
    for _ in range(3):
        await second.clock.advance(4.0)
        assert not cluster.members
        cluster.join()
    await settle()
    assert [process.info.index for process in cluster.members] == [3, 4, 5]

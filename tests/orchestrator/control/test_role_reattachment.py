"""A controller that continues with the roles and the buffer that have outlived the one before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.event_text import event_lines
from rayzero.orchestrator.job_events import (
    Reattached,
    Repaired,
    RoleFault,
    RoleWorkerEnded,
    RoleWorkerReady,
    RunAdopted,
)
from rayzero.orchestrator.machine import State
from rayzero.workers.messages import Crashed, Finished
from tests.orchestrator.fake_cluster import LAST_WORKER, FakeCluster
from tests.orchestrator.fake_roles import FakeRoleGroup
from tests.orchestrator.support import Harness, reread, settle

JOB: dict[str, Any] = {
    "engine": {"train_batch_size": 8},
    "rollouts": {"group": 2},
    "roles": {
        "rollout": {
            "entrypoint": "m:generate",
            "takes": "prompts",
            "workers": {"min": 1, "max": 2, "spares": 1},
        }
    },
}


async def started(folder: Path) -> tuple[Harness, FakeRoleGroup]:
    """A job with two workers of its role, 101 and 102, and a spare one, 103."""
    harness = Harness(folder, FakeCluster("ab"), unix=time.time, **JOB)
    group = harness.roles["rollout"]
    await settle()
    for _ in range(3):
        group.start("b")
        await settle()
    return await harness.trained(2), group


async def test_workers_buffer_and_spares_go_on(folder: Path):
    first, group = await started(folder)
    cluster, began, assigned = first.cluster, dict(group.began), list(first.cluster.assigned)
    buffer = first.controller._parts.roles.rollouts.address

    def train() -> None:
        """The lost controller had the reports, and had told nobody."""
        cluster.step()
        for process in cluster.processes.values():
            process.unsent.clear()

    second = await first.succeeded_by(folder, train, **JOB)
    await settle()
    vault = cluster.vaults.by_node["a"]
    lost = tuple(it for it in range(LAST_WORKER + 1) if it not in (101, 102, 103))
    assert vault.told == (1, 3, lost), "the ranks wait for samples: no step would publish it"
    for worker in (101, 102):
        view = group.views[worker][-1]
        assert (view.buffer, view.vault) == (buffer, "vault-b-1")
        assert view.weights is not None
        assert view.weights.version.step == 3
    await second.steps(2)
    assert vault.told == (1, 5, lost)
    assert (group.began, cluster.assigned) == (began, assigned), "no function is called again"
    assert (group.killed, group.released, group.wanted) == ([], [], (1, 3))
    assert second.states == [State.RUNNING]
    (event,) = second.log.of(Reattached)
    assert event.roles == {"rollout": 2}
    (line,) = event_lines(event)
    assert line.endswith("after 0 s without the job's process, with 2 workers of role rollout")
    facts = reread(second.events.facts).roles["rollout"]
    assert [size.workers for size in facts.sizes] == [1, 2], "they have not ended meanwhile"
    group.lose(102)
    await settle()
    assert group.began[103] == (1, "vault-b-1"), "the spare takes its place"
    assert vault.told[2] == (*lost, 102)


def _kill(group: FakeRoleGroup) -> None:
    group.alive.pop(102)


def _crash(group: FakeRoleGroup) -> None:
    group.post(102, Crashed(0, 1, "user", 0, "ValueError: a", "line 3"))


def _return(group: FakeRoleGroup) -> None:
    group.post(102, Finished(0, 1, None, {}, 0))


@pytest.mark.parametrize(
    ("happens", "number", "faults", "ended"),
    [(_kill, 1, 0, 0), (_crash, 1, 1, 0), (_return, None, 0, 1)],
)
@pytest.mark.parametrize("is_sent", [False, True])
async def test_what_has_happened_meanwhile(
    folder: Path,
    happens: Callable[[FakeRoleGroup], None],
    number: int | None,
    faults: int,
    ended: int,
    is_sent: bool,
):
    """`is_sent`: the lost controller had the message, and had done nothing yet."""
    first, group = await started(folder)

    def between() -> None:
        happens(group)
        while is_sent and not group._reports.empty():
            group._reports.get_nowait()

    second = await first.succeeded_by(folder, between, **JOB)
    await second.steps(1)
    assert [it.cause for it in second.log.of(RoleFault)] == ["user"] * faults
    assert [it.has_returned for it in second.log.of(RoleWorkerEnded)] == [True] * ended
    spare = [(103, number)] if number is not None else []
    assert [(worker, began[0]) for worker, began in group.began.items()][2:] == spare
    assert group.released == [102] * ended
    assert 102 in second.cluster.vaults.by_node["a"].told[2]
    assert second.controller.status().roles["rollout"].finished == ended


async def test_function_that_had_returned_is_not_called_again(folder: Path):
    first, group = await started(folder)
    group.post(101, Finished(0, 0, None, {}, 0))
    await settle()
    assert group.began.get(103) is None
    second = await first.succeeded_by(folder, lambda: group.start("b"), **JOB)
    await second.steps(1)
    assert sorted(group.began) == [101, 102]
    assert group.wanted == (1, 2)
    assert second.controller.status().roles["rollout"].finished == 1


async def test_of_two_workers_with_a_number_the_newer_one_goes_on(folder: Path):
    first, group = await started(folder)

    def replaced() -> None:
        """The lost controller has not ended the one that it had replaced."""
        group.began[103] = group.began[101]
        group.views[103] = []

    second = await first.succeeded_by(folder, replaced, **JOB)
    await second.steps(1)
    assert group.killed == [101]
    assert [worker for worker, _ in group.replaced] == [101]
    assert 101 in second.cluster.vaults.by_node["a"].told[2]
    assert second.controller.status().roles["rollout"].workers == 2


async def test_too_many_workers_are_ended(folder: Path):
    first, group = await started(folder)
    first.controller.scale(1, 1, "rollout")  # which ends 102
    second = await first.succeeded_by(folder, **JOB)
    await second.steps(1)
    assert group.released == [102]
    assert second.controller.status().roles["rollout"].workers == 1


@pytest.mark.parametrize("dies", ["buffer", "rank"])
async def test_repair_after_it(folder: Path, dies: str):
    first, group = await started(folder)
    cluster, buffer = first.cluster, first.controller._parts.roles.rollouts.address

    def between() -> None:
        if dies == "buffer":
            cluster.vaults.kill("a")
        else:
            cluster.kill(1)

    second = await first.succeeded_by(folder, between, **JOB)
    await second.clock.advance(5)
    if dies == "rank":
        cluster.join("b")
        await second.clock.advance(5)
    await second.steps(2)
    (repair,) = second.log.of(Repaired)
    assert (repair.cause, repair.steps_redone) == ("rollouts" if dies == "buffer" else "lost", 0)
    now = second.controller._parts.roles.rollouts.address
    assert (now == buffer) == (dies == "rank"), "what is in a living buffer is not made again"
    assert {assign.rollouts for assign in second.assignments.values()} == {now}
    assert {group.views[worker][-1].buffer for worker in (101, 102)} == {now}
    assert sorted(group.began) == [101, 102]


async def test_adopted_run_closes_the_buffer_that_was_left(folder: Path):
    """Its workers are others, on another node."""
    first, _ = await started(folder)
    first.run.cancel()
    await settle()
    cluster, old = FakeCluster("cb"), first.cluster.vaults
    cluster.committed, cluster.versions = first.cluster.committed, first.cluster.versions
    cluster.vaults.by_node, cluster.vaults.attached = dict(old.by_node), ("a", "b")
    second = Harness(folder, cluster, past=reread(first.events.facts), **JOB)
    await settle()
    second.roles["rollout"].start("b")
    await second.steps(1)
    assert second.log.of(RunAdopted)
    vaults = cluster.vaults.by_node
    assert [node for node in vaults if vaults[node].buffer] == ["c"]
    assert not second.log.of(RoleWorkerReady)[1:]

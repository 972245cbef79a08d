"""What a step and a repair cost the controller, by the number of workers and nodes: counted calls,
since times depend on the machine."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayzero.orchestrator.aio import ChangeNotifier
from rayzero.orchestrator.cluster.node_links import WorkerMail
from rayzero.orchestrator.facts import JobFacts
from rayzero.orchestrator.policies import failure
from rayzero.orchestrator.policies.failure import Fault, FaultCause
from rayzero.orchestrator.policies.membership import WorkerLimits, WorkerRegistry
from rayzero.orchestrator.policies.placement import CallState, FunctionCall
from rayzero.workers.agent.batches import make_batch
from rayzero.workers.agent.link import Frame, FrameKind
from rayzero.workers.messages import Heartbeat, StepReport, WorkerInfo
from rayzero.workers.step_rows import Heartbeats
from tests.orchestrator.fake_cluster import FakeCluster
from tests.orchestrator.support import Harness

PER_NODE = 8


class CallCounter:
    """Counts the calls that the orchestrator's code makes, and gets, while it is entered."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> CallCounter:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if "/orchestrator/" in name and "/tests/" not in name:
            self.calls += event in ("call", "c_call")


async def repair_calls(folder: Path, workers: int) -> int:
    """The calls of a repair, and the replacement's start, in a job of that size."""
    folder.mkdir()
    harness = await Harness(folder, workers, workers=(1, workers)).trained(3)
    with CallCounter() as counter:
        await harness.kill(1)
        await harness.trained(5)
    assert len(harness.assignments) >= workers - 1
    await harness.finish()
    return counter.calls


async def test_repair_costs_in_proportion_to_the_ranks(folder: Path):
    few, many = [await repair_calls(folder / str(it), it) for it in (16, 64)]
    assert 16 * 10 < few < many < 4.4 * few, (few, many)


async def loss_work(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, JobFacts]:
    """Half of the workers, all of one node, are lost at once: the calls of the repair, and how many
    faults its judgements looked at."""
    looked_at = []
    folder.mkdir()
    cluster = FakeCluster("b" * (workers // 2) + "a" * (workers // 2))
    harness = Harness(folder, cluster, workers=(1, workers), recovery={"max_faults": workers})
    await harness.trained(3)
    decide = failure.decide

    def count(faults: Sequence[Fault], earlier: Sequence[Fault], *args: Any, **more: Any) -> Any:
        looked_at.append(len(faults) + len(earlier))
        return decide(faults, earlier, *args, **more)

    monkeypatch.setattr(failure, "decide", count)
    with CallCounter() as counter:
        for worker in range(workers // 2):
            harness.cluster.kill(worker, "it was killed")
        await harness.trained(5)
    monkeypatch.undo()
    await harness.finish()
    return counter.calls, sum(looked_at), harness.events.facts


async def test_many_losses_at_once_are_judged_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each was judged by itself, with all before it: quadratic in the losses."""
    few, many = [await loss_work(folder / str(it), it, monkeypatch) for it in (16, 64)]
    assert many[2].faults_by_cause == {FaultCause.PROCESS_LOST: 32}
    assert len(many[2].recoveries) == 1
    assert 8 <= few[1] < many[1] <= 4.4 * few[1], (few[1], many[1])
    assert many[0] < 4.4 * few[0], (few[0], many[0])


@pytest.mark.parametrize("state", [CallState.WAITING, CallState.RUNNING])
def test_no_table_of_all_workers_is_copied_for_one(state: CallState):
    """Each worker of a generation leaves it: a copy each time was quadratic."""
    registry = WorkerRegistry(WorkerLimits(1, 100), ChangeNotifier().notify)
    registry.add(WorkerInfo(it, "a", "a", "10.0.0.1", it) for it in range(100))
    calls = registry.calls = {it: FunctionCall(it, 100) for it in range(100)}
    selection = registry.select_members()
    for worker in range(100):
        registry.set_state(worker, state, keeps_rank=True)
    assert registry.calls is calls
    assert {(it.state, it.keeps_rank) for it in calls.values()} == {(state, True)}
    assert registry.select_members() is selection, "selected anew only if others may be"


@pytest.mark.parametrize("nodes", [4, 16])
def test_step_is_one_message_of_each_node(nodes: int):
    mail, messages = WorkerMail(), list[Any]()

    def receive(worker: int, its: list[Any]) -> None:
        messages.extend(it for it in its if not isinstance(it, Heartbeats))

    for worker in range(nodes * PER_NODE):
        mail.subscribe(worker, receive)
    for node in range(nodes):
        frames = []
        for worker in range(node * PER_NODE, (node + 1) * PER_NODE):
            sent = [StepReport(1, worker, 7, {}, {"loss": 1.0}), Heartbeat(worker, 8, "data", 0.0)]
            frames.append((worker, Frame(FrameKind.STEPS, 1, 0, pickle.dumps(sent))))
        mail.deliver(make_batch(frames))
    assert len(messages) == nodes
    assert [it for rows in messages for it in rows.ranks] == [*range(nodes * PER_NODE)]

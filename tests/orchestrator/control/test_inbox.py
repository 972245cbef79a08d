"""Delivery of worker messages in slices, lost workers first, and detection of silent workers."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, cast

import pytest
from ray.exceptions import ActorUnschedulableError

from rayzero.engine.errors import EngineError
from rayzero.orchestrator.aio import WORKER_POLL_S, WorkerReports
from rayzero.orchestrator.cluster.actor_calls import FutureBatcher, WorkerWatch
from rayzero.orchestrator.cluster.node_links import WorkerMail
from rayzero.orchestrator.control.inbox import DISPATCH_SLICE_S, UndeliveredLines, WorkerInbox
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.orchestrator.policies.membership import WorkerLimits
from rayzero.workers.agent.batches import NodeBatch
from rayzero.workers.agent.link import WorkerFrame
from rayzero.workers.messages import Heartbeat, LogLine, StepReport, WorkerMessage
from tests.orchestrator.support import VirtualClock, settle

PATIENCE_S = 120.0


class SlowClock(VirtualClock):
    """A clock that advances with every reading."""

    def now(self) -> float:
        self._now += DISPATCH_SLICE_S / 4
        return self._now


class InboxHarness:
    """An inbox with a fake worker group; `delivered` records what the inbox delivers."""

    def __init__(self, clock: VirtualClock) -> None:
        self.delivered: list[str] = []
        self.reports: asyncio.Queue[WorkerReports] = asyncio.Queue()
        self.clock = clock
        loop = JobLoop(clock, lambda error: self.delivered.append(str(error)))
        members, group = Members(WorkerLimits(1, 1), 0), cast(Any, self)
        self.make = partial(WorkerInbox, loop, members, group, PATIENCE_S)
        self.inbox = self.make(self._on_message, self._on_lost)

    def _on_message(self, worker: int, message: WorkerMessage) -> None:
        self.delivered.append(f"{worker} {type(message).__name__}")

    def _on_lost(self, worker: int, cause: str) -> None:
        self.delivered.append(f"{worker} lost: {cause}")

    def subscribe(self, workers: Any) -> None:
        """All workers are always subscribed."""

    async def receive(self) -> WorkerReports:
        return await self.reports.get()


HEARTBEAT = Heartbeat(0, 1, "forward", 0.0)


async def test_undelivered_log_lines_are_bounded():
    harness = InboxHarness(SlowClock())
    lines: list[str] = []

    def dispatch(worker: int, message: WorkerMessage) -> None:
        harness.delivered.append(f"{worker} {type(message).__name__}")
        if isinstance(message, LogLine):
            lines.append(message.text)

    harness.inbox = harness.make(dispatch, harness._on_lost, UndeliveredLines(250))
    harness.inbox.start(range(5))
    line = LogLine(7, "stdout", "x" * 100)
    for _ in range(2):
        batch: list[WorkerMessage] = [line, HEARTBEAT]
        harness.reports.put_nowait(WorkerReports([(n, list(batch)) for n in range(5)]))
        await settle()
    assert len(harness.delivered) == 20, "nothing but lines is dropped"
    assert lines.count("x" * 100) == 4, "there is room again after each delivery"
    assert sum("(1 lines" in text for text in lines) == 6


async def test_lost_worker_is_delivered_before_queued_messages():
    harness = InboxHarness(SlowClock())
    harness.inbox.start(range(100))
    harness.reports.put_nowait(WorkerReports([(worker, [HEARTBEAT]) for worker in range(100)]))
    while not harness.delivered:
        await asyncio.sleep(0)
    assert len(harness.delivered) < 10, "only a slice"
    harness.reports.put_nowait(WorkerReports(lost=[(99, "it was killed")]))
    await settle()
    index = harness.delivered.index("99 lost: it was killed")
    assert index < 30
    assert harness.delivered[index - 1] == "99 Heartbeat", "its own messages come first"
    assert len(harness.delivered) == 101


async def test_messages_of_worker_are_delivered_in_order():
    harness = InboxHarness(SlowClock())
    harness.inbox.start(range(50))
    harness.reports.put_nowait(WorkerReports([(worker, [HEARTBEAT]) for worker in range(50)]))
    harness.reports.put_nowait(WorkerReports([(49, [StepReport(0, 0, 1)]), (49, [HEARTBEAT])]))
    await settle()
    delivered = [text for text in harness.delivered if text.startswith("49")]
    assert delivered == ["49 Heartbeat", "49 StepRows", "49 Heartbeat"]
    assert 49 in harness.inbox.history.reported
    assert 48 not in harness.inbox.history.reported


async def test_silent_worker_is_reported_lost_once():
    harness = InboxHarness(VirtualClock())
    harness.inbox.start(range(2))
    timeout_s = WORKER_POLL_S + PATIENCE_S + 10
    await harness.clock.advance(timeout_s - 1)
    harness.inbox.expire_silent()
    assert harness.inbox.is_any_silent([0, 1], timeout_s - 2)
    assert not harness.inbox.is_any_silent([0, 1], timeout_s - 1)
    harness.reports.put_nowait(WorkerReports([(1, [])]))
    await settle()
    assert not harness.inbox.is_any_silent([1], 0.0), "the other one is"
    await harness.clock.advance(1)
    harness.inbox.expire_silent()
    harness.inbox.expire_silent()
    assert harness.delivered == [f"0 lost: its process did not respond for {timeout_s:g} s"]


class FakeActorCalls:
    """Actor calls that a test completes from another thread, as Ray does."""

    def __init__(self) -> None:
        self.pending: dict[int, Future[Any]] = {}
        self.removed: set[int] = set()

    def __call__(self, worker: int, timeout_s: float = 0.0) -> Any:
        if worker in self.removed:
            raise WorkerLostError("it was dismissed or replaced")
        future: Future[Any] = Future()
        self.pending[worker] = future
        reference: Any = type("Reference", (), {"future": lambda _: future})()
        return reference

    def complete(self, worker: int, result: Any) -> None:
        future = self.pending.pop(worker)
        complete = future.set_exception if isinstance(result, Exception) else future.set_result
        thread = Thread(target=complete, args=(result,))
        thread.start()
        thread.join()


def send(mail: WorkerMail, worker: int, number: int, *messages: WorkerMessage) -> None:
    frame = WorkerFrame(worker, number, pickle.dumps([*messages]))
    mail.deliver(NodeBatch([], [], [], [frame]))


async def test_messages_come_until_worker_is_lost():
    ends, mail = FakeActorCalls(), WorkerMail()
    watch = WorkerWatch(mail, ends)
    ends.removed.add(3)
    send(mail, 2, 1)
    watch.subscribe([1, 2, 3])
    send(mail, 1, 1, HEARTBEAT)
    reports = await watch.receive()
    assert sorted(reports.messages) == [(1, [HEARTBEAT]), (2, [])]
    assert "dismissed" in dict(reports.lost)[3]
    ends.complete(2, ActorUnschedulableError("it died"))
    assert "it died" in dict((await watch.receive()).lost)[2]
    send(mail, 2, 2, HEARTBEAT)
    send(mail, 1, 2)
    assert (await watch.receive()).messages == [(1, [])]
    watch.close()


async def test_batcher_delivers_every_result():
    calls, results = FakeActorCalls(), []
    batcher = FutureBatcher(lambda: None)
    for worker in range(20):  # some before the loop has a turn, some after it
        batcher.add_call(calls(worker), results.append)
        calls.complete(worker, [HEARTBEAT])
        while len(results) <= worker and worker % 3:
            await asyncio.sleep(0.001)
    while len(results) < 20:
        await asyncio.sleep(0.001)
    batcher.close()


async def test_broadcast_waits_for_live_workers():
    ends, commands = FakeActorCalls(), FakeActorCalls()
    watch = WorkerWatch(WorkerMail(), ends)
    watch.subscribe([1, 2, 3])
    commands.removed.add(3)
    replies = watch.broadcast([1, 2, 3], commands)
    assert replies.pending == {1, 2}
    commands.complete(1, None)
    await replies.wait_any(frozenset({1}))
    assert replies.pending == {2}
    commands.complete(2, ActorUnschedulableError("it died"))
    await replies.wait_all()
    assert {worker for worker, _ in (await watch.receive()).lost} == {2, 3}
    replies = watch.broadcast([1], commands)
    commands.complete(1, EngineError("it is still busy"))
    with pytest.raises(EngineError, match="busy"):
        await replies.wait_all()
    watch.close()

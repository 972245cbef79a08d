"""Delivery of worker messages in slices, lost workers first, and detection of silent workers."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayzero.engine.errors import EngineError
from rayzero.orchestrator.aio import WORKER_POLL_S, WorkerReports
from rayzero.orchestrator.cluster.node_links import WorkerMail
from rayzero.orchestrator.cluster.worker_commands import Call, WorkerCommands
from rayzero.orchestrator.cluster.worker_watch import WorkerWatch
from rayzero.orchestrator.control.inbox import DISPATCH_SLICE_S, UndeliveredLines, WorkerInbox
from rayzero.orchestrator.control.loop import JobLoop
from rayzero.orchestrator.control.members import Members
from rayzero.orchestrator.errors import WorkerLostError
from rayzero.orchestrator.policies.membership import WorkerLimits
from rayzero.workers.agent.batches import NodeBatch
from rayzero.workers.agent.link import Attach, WorkerFrame
from rayzero.workers.messages import (
    Heartbeat,
    Joined,
    LogLine,
    Restored,
    StepReport,
    WorkerInfo,
    WorkerMessage,
)
from rayzero.workers.step_rows import NodeMessages
from rayzero.workers.vault.records import ConnectionLost
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
        self.members, group = Members(WorkerLimits(1, 1), 0), cast(Any, self)
        self.make = partial(WorkerInbox, loop, self.members, group, PATIENCE_S)
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
    assert harness.delivered[index - 1] == "99 Heartbeats", "its own messages come first"
    assert len(harness.delivered) == 101


async def test_messages_of_worker_are_delivered_in_order():
    harness = InboxHarness(SlowClock())
    harness.inbox.start(range(50))
    harness.reports.put_nowait(WorkerReports([(worker, [HEARTBEAT]) for worker in range(50)]))
    harness.reports.put_nowait(WorkerReports([(49, [StepReport(0, 0, 1)]), (49, [HEARTBEAT])]))
    await settle()
    delivered = [text for text in harness.delivered if text.startswith("49")]
    assert delivered == ["49 Heartbeats", "49 StepRows", "49 Heartbeats"]
    assert 49 in harness.inbox.history.reported
    assert 48 not in harness.inbox.history.reported


async def test_messages_of_a_node_are_their_workers_and_come_after_earlier_ones():
    harness = InboxHarness(SlowClock())
    harness.inbox.start(range(50))
    harness.reports.put_nowait(WorkerReports([(worker, [HEARTBEAT]) for worker in range(50)]))
    record = NodeMessages((48, 49), (Joined(1, 0), Restored(1, 1, 5)))
    harness.reports.put_nowait(WorkerReports([(48, [record])]))
    await settle()
    delivered = [text for text in harness.delivered if text.startswith(("48", "49"))]
    assert delivered == ["48 Heartbeats", "49 Heartbeats", "48 Joined", "49 Restored"]


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


async def test_member_lost_before_its_generation_begins_is_not_waited_for():
    harness = InboxHarness(VirtualClock())
    harness.inbox.start(range(2))
    harness.members.registry.members = (0, 1)
    harness.reports.put_nowait(WorkerReports(lost=[(1, "it was killed")]))
    await settle()
    harness.inbox.start_generation()
    await harness.clock.advance(100.0)
    harness.reports.put_nowait(WorkerReports([(0, [])]))
    await settle()
    assert not harness.inbox.is_any_silent([0, 1], 50.0)
    await harness.clock.advance(PATIENCE_S)
    harness.inbox.expire_silent()
    assert harness.delivered == ["1 lost: it was killed"]


async def test_silence_says_nothing_where_only_a_head_that_is_away_could_start_an_agent():
    harness = InboxHarness(VirtualClock())
    registry = harness.members.registry
    registry.add(WorkerInfo(index, node, node, "", index) for index, node in enumerate("ab"))
    harness.members.vault_addresses = {"b": "/vault/b"}
    harness.inbox.start(range(2))
    timeout_s = WORKER_POLL_S + PATIENCE_S + 10
    registry.head_answers = False
    await harness.clock.advance(timeout_s)
    harness.inbox.excuse_cut_off(registry.ready)
    harness.inbox.expire_silent()
    lost = f"lost: its process did not respond for {timeout_s:g} s"
    assert harness.delivered == [f"1 {lost}"], "that one has an agent"
    registry.head_answers = True
    await harness.clock.advance(timeout_s)
    harness.inbox.excuse_cut_off(registry.ready)
    harness.inbox.expire_silent()
    assert harness.delivered == [f"1 {lost}", f"0 {lost}"]


class WatchHarness:
    """A watch of the workers 1, 2 and 3 on a node; 3 was dismissed. Ray says why one has ended when
    a test does."""

    def __init__(self) -> None:
        self.mail = WorkerMail()
        self.link: Any = SimpleNamespace(is_connected=True, command=lambda command: None)
        self.causes: dict[int, asyncio.Future[str]] = {}
        self.commands = WorkerCommands(Attach(1, b"me"), lambda node: self.link)
        self.watch = WorkerWatch(self.mail, self.commands, self._node_of, self._find_cause)

    def _node_of(self, worker: int) -> str:
        if worker == 3:
            raise WorkerLostError("it was dismissed or replaced")
        return "node"

    async def _find_cause(self, worker: int) -> str:
        self.causes[worker] = asyncio.get_running_loop().create_future()
        return await self.causes[worker]

    def answer(self, worker: int, number: int, error: Exception | None = None) -> None:
        reply = pickle.dumps((error, None))
        self.commands.on_answer([worker], pickle.dumps((b"me", number, reply)))

    def cut(self) -> None:
        self.link.is_connected = False
        self.commands.on_news("node", [])

    def end(self, worker: int) -> None:
        for has_ended in (False, True):
            self.commands.on_news("node", [ConnectionLost(worker, 100, has_ended=has_ended)])

    async def lost(self) -> dict[int, str]:
        return dict((await self.watch.receive()).lost)


def send(mail: WorkerMail, worker: int, number: int, *messages: WorkerMessage) -> None:
    frame = WorkerFrame(worker, number, pickle.dumps([*messages]))
    mail.deliver(NodeBatch([], [], [frame], []))


async def test_messages_come_until_worker_is_lost():
    harness = WatchHarness()
    watch, mail = harness.watch, harness.mail
    send(mail, 2, 1)
    watch.subscribe([1, 2, 3])
    send(mail, 1, 1, HEARTBEAT)
    reports = await watch.receive()
    assert sorted(reports.messages) == [(1, [HEARTBEAT]), (2, [])]
    assert "dismissed" in dict(reports.lost)[3]
    await settle()
    assert not harness.causes, "Ray is not asked about workers that an agent sees"
    harness.commands.on_news("node", [ConnectionLost(2, 100)])
    await settle()
    assert not harness.causes, "before its process has ended"
    harness.end(2)
    await settle()
    assert harness.causes.keys() == {2}
    harness.causes[2].set_result("it died")
    assert (await harness.lost()) == {2: "it died"}
    assert not watch._asking
    send(mail, 2, 2, HEARTBEAT)
    send(mail, 1, 2)
    assert (await watch.receive()).messages == [(1, [])]
    watch.close()


@pytest.mark.parametrize("how", ["cut before", "cut after", "never heard"])
async def test_ray_is_asked_while_no_agent_sees_a_worker(how: str):
    harness = WatchHarness()
    if how != "never heard":
        send(harness.mail, 1, 1)
    if how == "cut before":
        harness.cut()
    harness.watch.subscribe([1])
    if how == "cut after":
        await harness.watch.receive()
        harness.cut()
    await settle()
    harness.link.is_connected = True
    send(harness.mail, 1, 2)
    await settle()
    assert harness.causes[1].cancelled(), "the agent says it"
    await harness.watch.receive()
    harness.cut()
    harness.cut()
    await settle()
    harness.causes[1].set_result("its node died")
    assert await harness.lost() == {1: "its node died"}
    with pytest.raises(WorkerLostError):
        await harness.commands.call(1, "node", Call("open_store", (), in_order=False))
    harness.watch.close()


async def test_broadcast_waits_for_live_workers():
    harness = WatchHarness()
    watch = harness.watch
    watch.subscribe([1, 2, 3])
    call = Call("stop", (1,), in_order=True)
    replies = watch.broadcast([1, 2, 3], call)
    assert replies.pending == {1, 2}
    harness.answer(1, 1)
    assert replies.pending == {2}
    harness.commands.on_news("node", [ConnectionLost(2, 100)])
    await replies.wait_all()
    assert not watch.broadcast([2], call).pending
    replies = watch.broadcast([1], call)
    harness.answer(1, 1)  # again
    assert replies.pending == {1}
    harness.answer(1, 3, EngineError("it is still busy"))
    with pytest.raises(EngineError, match="busy"):
        await replies.wait_all()
    watch.close()

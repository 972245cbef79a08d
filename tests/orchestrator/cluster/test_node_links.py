"""A node's stream with real sockets: cuts, silence, strangers, and two controllers."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import time
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator.cluster import node_links
from rayzero.orchestrator.cluster.node_links import WorkerMail
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.workers.agent import message_sender, node_agent
from rayzero.workers.agent.batches import make_batch
from rayzero.workers.agent.link import (
    Frame,
    FrameKind,
    Link,
)
from rayzero.workers.agent.message_sender import MessageSender
from rayzero.workers.messages import Heartbeat, LogLine, Restored, StepReport, WorkerMessage
from rayzero.workers.step_rows import NodeRecord
from tests.orchestrator.cluster.streams import (
    LIMIT_S,
    Commands,
    Proxy,
    agent,
    linked,
    next_events,
    within,
)


def delays_small_frames(port: int) -> bool:
    """Whether a connection of this process from that port keeps what it sends until what it sent
    before is acknowledged (Nagle's algorithm), which takes up to 40 ms."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                is_its = copy.family == socket.AF_INET and copy.getsockname()[1] == port
                if is_its and not copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
                    return True
        except OSError:  # no socket, or closed meanwhile
            continue
    return False


async def test_commands_events_and_errors_pass():
    commands = Commands()
    with agent(commands) as (_, address):
        async with linked(address) as link:
            assert await within(link.call("note", 7)) == 7, "also before it is attached"
            await within(link.attached())
            assert not delays_small_frames(address.port)
            with pytest.raises(DataError, match="no such slot"):
                await within(link.call("fail"))
            with pytest.raises(RayzeroError, match="cannot be sent"):
                await within(link.call("unpicklable"))
            slow = asyncio.ensure_future(link.call("wait"))
            assert len(await within(link.call("zeros", 5 * 2**20))) == 5 * 2**20
            assert not slow.done()
            commands.may_return.set()
            assert await within(slow) == "done"
            commands.events.put("died")
            assert await next_events(link, 1) == ["died"]
            commands.events.put(RayzeroError("the thread has ended"))
            with pytest.raises(VaultLostError, match="thread has ended"):
                await next_events(link, 1)
            with pytest.raises(VaultLostError, match="thread has ended"):
                await link.call("note", 8)


async def test_cuts_anywhere_lose_and_repeat_nothing(monkeypatch: pytest.MonkeyPatch):
    """Each connection ends a few bytes later than the one before: within the greeting, within
    frames, and between them."""
    monkeypatch.setattr(node_links, "RETRY_S", 0.01)
    commands = Commands()
    with agent(commands) as (_, address):
        proxy = Proxy(address.port)
        port = await proxy.listen()
        proxy.drop_from = 1
        async with linked(replace(address, port=port)) as link:
            calls = [asyncio.ensure_future(link.call("note", number)) for number in range(20)]
            for number in range(20):
                commands.events.put(number)
            events = asyncio.ensure_future(next_events(link, 20))
            while not (events.done() and all(call.done() for call in calls)):
                connections = proxy.connections
                while proxy.connections == connections and not events.done():
                    await asyncio.sleep(0.001)
                proxy.drop_from += 7
                await asyncio.sleep(0.001)
            assert await within(asyncio.gather(*calls)) == list(range(20))
            assert await events == list(range(20))
        assert sorted(commands.calls) == list(range(20)), "none was run twice"
        assert proxy.connections > 5
        await proxy.close()


def short_silences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_links, "SILENT_S", 0.3)
    monkeypatch.setattr(node_links, "TICK_S", 0.05)
    monkeypatch.setattr(node_agent, "BEAT_S", 0.05)


async def test_silent_connection_is_made_anew(monkeypatch: pytest.MonkeyPatch):
    short_silences(monkeypatch)
    with agent(commands := Commands()) as (_, address):
        proxy = Proxy(address.port)
        port = await proxy.listen()
        async with linked(replace(address, port=port)) as link:
            await within(link.attached())
            proxy.passes.clear()
            reply = asyncio.ensure_future(link.call("note", 1))
            while proxy.connections < 3:
                await asyncio.sleep(0.01)
            assert not reply.done()
            proxy.passes.set()
            assert await within(reply) == 1
        assert commands.calls == [1]
        await proxy.close()


async def test_controller_that_was_busy_keeps_its_connections(monkeypatch: pytest.MonkeyPatch):
    """What came while it did not look is read before a silence is counted."""
    short_silences(monkeypatch)
    with agent(Commands()) as (_, address):
        async with linked(address) as link:
            await within(link.attached())
            hello = link.hello
            for _ in range(3):
                time.sleep(0.6)  # the whole loop
                await asyncio.sleep(0.02)
            await within(link.call("note", 1))
            assert link.hello is hello, "the same connection"


async def test_agent_whose_node_is_not_served_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    """It sends messages and replies, but no beats; an event counts as one."""
    short_silences(monkeypatch)
    with agent(commands := Commands()) as (_, address):
        async with linked(address) as link:
            await within(link.attached())
            events = asyncio.ensure_future(link.events(0.3))
            _, waiting = await asyncio.wait([events], timeout=0.7)
            assert waiting, "beats come"
            monkeypatch.setattr(node_agent, "BEAT_S", LIMIT_S)
            commands.events.put("died")
            assert await within(events) == ["died"]
            began_s, events = time.monotonic(), asyncio.ensure_future(link.events(0.6))
            while not events.done():
                await within(link.call("note", 1))
                await asyncio.sleep(0.02)
            with pytest.raises(TimeoutError, match=r"did not respond for 0\.6 s"):
                await events
            assert 0.55 < time.monotonic() - began_s < 5.0
            assert link.is_connected


async def test_end_of_the_process_ends_the_stream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_links, "CAUSE_WAIT_S", 0.05)
    with agent(commands := Commands()) as (running, address):
        async with linked(address) as link:
            await within(link.attached())
            reply = asyncio.ensure_future(link.call("wait"))
            while running.port and not commands.calls and not reply.done():
                await within(link.call("note", 1))
            await asyncio.to_thread(running.close)
            with pytest.raises(VaultLostError, match="has ended"):
                await within(reply)
            with pytest.raises(VaultLostError, match="has ended"):
                await next_events(link, 1)


@pytest.mark.parametrize("later", [5, 4])
async def test_one_controller_is_obeyed(later: int):
    """Of two with the same epoch neither has come to hold the job's folder."""
    commands = Commands()
    with agent(commands) as (_, address):
        async with linked(address, epoch=4) as first:
            await within(first.attached())
            late = asyncio.ensure_future(first.call("wait"))
            await within(first.call("note", 1))
            async with linked(address, epoch=later) as second:
                await within(second.attached())
                commands.may_return.set()
                with pytest.raises(JobFailedError, match=rf"taken over \(epoch {later}\)"):
                    await within(late)
                with pytest.raises(JobFailedError, match="taken over"):
                    await first.call("note", 2)
                commands.events.put("died")
                assert await next_events(second, 1) == ["died"]
                assert await within(second.call("note", 3)) == 3
                await within(first.fenced())
            async with linked(address, epoch=later - 1) as third:
                with pytest.raises(JobFailedError, match="taken over"):
                    await within(third.attached())
    assert commands.calls == [1, 3]


async def test_successor_gets_what_was_not_acknowledged():
    commands = Commands()
    with agent(commands) as (_, address):
        for number in range(3):
            commands.events.put(number)
        while commands.events.qsize():
            await asyncio.sleep(0.01)
        async with linked(address, epoch=1) as link:
            assert await next_events(link, 3) == [0, 1, 2]


async def test_stranger_is_not_unpickled():
    commands = Commands()
    with agent(commands) as (_, address):
        async with linked(replace(address, secret=b"another's")) as link:
            call = asyncio.ensure_future(link.call("note", 1))
            await asyncio.sleep(0.3)
            assert not call.done()
            call.cancel()
    assert commands.calls == []


class Worker:
    """A worker's outbox, and what the controller gets of it."""

    def __init__(self, index: int, mail: WorkerMail, socket: str) -> None:
        self.index = index
        self.posted: SimpleQueue[WorkerMessage] = SimpleQueue()
        self.received: list[WorkerMessage] = []
        mail.subscribe(index, self._receive)
        MessageSender(socket, index, self._poll)

    def _receive(self, worker: int, messages: list[WorkerMessage]) -> None:
        for it in messages:
            self.received += it.messages if isinstance(it, NodeRecord) else [it]

    def _poll(self, timeout_s: float) -> list[WorkerMessage]:
        try:
            return [self.posted.get(timeout=timeout_s)]
        except Empty:
            return [Heartbeat(self.index, 0, "run", 0.0)]

    async def reports(self, number: int) -> list[int]:
        """The steps of the reports received so far; waits for this many."""
        steps: list[int] = []
        async with asyncio.timeout(LIMIT_S):
            while len(steps) < number:
                await asyncio.sleep(0.01)
                steps = [it.step for it in self.received if isinstance(it, StepReport)]
        return steps


async def test_messages_survive_cuts_and_agents():
    """Reports, and changes between them, come once each, in order: while connections are cut, and
    when another agent takes the place of one that had not passed on what it had."""
    commands, mail = Commands(), WorkerMail()
    workers = [Worker(index, mail, commands.socket) for index in range(2)]
    with agent(commands) as (_, address):
        proxy = Proxy(address.port)
        port = await proxy.listen()
        async with linked(replace(address, port=port), mail=mail) as link:
            await within(link.attached())
            for step in range(1, 101):
                for worker in workers:
                    worker.posted.put(StepReport(1, worker.index, step))
                    if step % 10 == 0:
                        worker.posted.put(Restored(1, worker.index, step))
                if step % 20 == 0:
                    proxy.cut()
                    await asyncio.sleep(0.05)
            for worker in workers:
                assert await worker.reports(100) == [*range(1, 101)]
                its = [it.step for it in worker.received if isinstance(it, StepReport | Restored)]
                assert its[:109] == sorted([*range(1, 101), *range(10, 100, 10)])
            proxy.passes.clear()  # what comes to this agent from now on stays there
            for worker in workers:
                worker.posted.put(StepReport(1, worker.index, 101))
            await asyncio.sleep(0.2)
        await proxy.close()
    for worker in workers:
        worker.posted.put(StepReport(1, worker.index, 102))
    with agent(commands) as (_, address):
        async with linked(address, mail=mail):
            for worker in workers:
                assert await worker.reports(102) == [*range(1, 103)]


async def test_worker_waits_for_a_controller_with_bounded_memory():
    commands, mail = Commands(), WorkerMail()
    worker = Worker(3, mail, commands.socket)
    with agent(commands) as (_, address):
        for step in range(1, 1001):
            worker.posted.put(StepReport(1, 3, step))
        await asyncio.sleep(0.5)
        assert worker.posted.qsize() > 900, "the rest waits in the outbox"
        async with linked(address, mail=mail):
            assert await worker.reports(1000) == [*range(1, 1001)]


async def test_worker_without_room_learns_from_the_next_connection_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its agent has no other news for it: the controller acknowledged nothing before the cut."""
    monkeypatch.setattr(message_sender, "_MAX_FRAMES", 1)
    monkeypatch.setattr(node_links, "TICK_S", LIMIT_S)
    commands, mail = Commands(), WorkerMail()
    worker = Worker(0, mail, commands.socket)
    for step in (1, 2):
        worker.posted.put(StepReport(1, 0, step))
    with agent(commands) as (_, address):
        proxy = Proxy(address.port)
        port = await proxy.listen()
        async with linked(replace(address, port=port), mail=mail):
            assert await worker.reports(1) == [1]
            assert worker.posted.qsize() == 1
            proxy.cut()
            assert await worker.reports(2) == [1, 2]
        await proxy.close()


async def test_end_of_a_worker_follows_its_messages():
    commands, mail = Commands(), WorkerMail()
    worker = Worker(0, mail, commands.socket)
    with agent(commands) as (_, address):
        async with linked(address, mail=mail) as link:
            await within(link.attached())
            worker.posted.put(StepReport(1, 0, 1))
            await worker.reports(1)
            worker.posted.put(LogLine(0, "stdout", "the last"))
            await asyncio.sleep(0.02)  # less than it waits for others
            commands.events.put("died")
            assert await next_events(link, 1) == ["died"]
            assert worker.received[-1] == LogLine(0, "stdout", "the last")


def report(worker: int, step: int, **gauges: float) -> tuple[int, Frame]:
    """A frame of a worker whose rank is ten times its index."""
    messages = [StepReport(1, worker * 10, step, {"tokens": 2.0}, gauges, 5.0), beat(worker)]
    return worker, Frame(FrameKind.STEPS, step, 0, pickle.dumps(messages))


def beat(worker: int) -> Heartbeat:
    return Heartbeat(worker * 10, 1, "run", 0.0)


def other(worker: int, number: int) -> tuple[int, Frame]:
    return worker, Frame(FrameKind.URGENT, number, 0, pickle.dumps([number]))


def test_reports_of_a_step_are_combined_and_come_once():
    """An agent's successor sends what it has got again, in other batches; a worker may have no
    subscriber yet, or none any more; gauges differ."""
    mail, received = WorkerMail(), list[tuple[int, Any]]()

    def receive(worker: int, messages: list[Any]) -> None:
        for it in messages:
            is_record = isinstance(it, NodeRecord)
            its = zip(it.workers, it.messages, strict=True) if is_record else [(worker, it)]
            received.extend(its)

    for worker in (1, 2, 3):
        mail.subscribe(worker, receive)
    frames = [report(it, 1, loss=float(it), lr=0.1) for it in (1, 2, 3, 4)]
    batch = make_batch(frames)
    assert [len(record.workers) for record, _ in batch.records] == [4, 4]
    rows = batch.records[0][0]
    assert [(it.rank, it.gauges) for it in rows.messages] == [
        (worker * 10, {"loss": float(worker), "lr": 0.1}) for worker in (1, 2, 3, 4)
    ]
    assert len({id(name) for it in rows.messages for name in it.gauges}) == 2
    mail.deliver(make_batch(frames[:1]))
    mail.deliver(batch)  # worker 1's come again, and nobody has asked for worker 4's
    assert [worker for worker, it in received if isinstance(it, StepReport)] == [1, 2, 3]
    assert [it for _, it in received if isinstance(it, Heartbeat)] == [*map(beat, (1, 2, 3))]
    mail.subscribe(4, receive)
    assert [worker for worker, _ in received[-2:]] == [4, 4]
    mail.unsubscribe(2)
    received.clear()
    later = [report(1, 2, loss=0.0), report(2, 2, loss=0.0), report(3, 2, loss=0.0, gpu=1.0)]
    mail.deliver(make_batch(later))
    expected = [StepReport(1, it * 10, 2, {"tokens": 2.0}, {"loss": 0.0}, 5.0) for it in (1, 3)]
    expected[1].gauges["gpu"] = 1.0
    assert [it for _, it in received if isinstance(it, StepReport)] == expected


def test_messages_of_a_worker_stay_in_order():
    """A record of a node's changes comes after that of its steps, so a step after a change is left
    as it came."""
    mail, received = WorkerMail(), list[list[Any]]()

    def receive(worker: int, messages: list[Any]) -> None:
        for it in messages:
            received.append(it.messages if isinstance(it, NodeRecord) else [it])

    for worker in (1, 2):
        mail.subscribe(worker, receive)

    def change(worker: int, number: int) -> tuple[int, Frame]:
        messages = [Restored(1, worker * 10, number), beat(worker)]
        return worker, Frame(FrameKind.CHANGES, number, 0, pickle.dumps(messages))

    def passed(*frames: tuple[int, Frame]) -> list[Any]:
        received.clear()
        mail.deliver(make_batch(frames))
        its = [it for together in received for it in together if not isinstance(it, Heartbeat)]
        return [getattr(it, "step", it) for it in its if getattr(it, "rank", 10) == 10]

    ahead = [report(2, 3), report(1, 1), report(1, 2), report(1, 3)]  # another is ahead of it
    assert passed(*ahead, other(1, 4), report(1, 5), other(1, 6)) == [1, 2, 3, 4, 5, 6]
    assert passed(report(1, 7), change(2, 4), change(1, 8), change(1, 9)) == [7, 8, 9]
    assert len(received) == 3, "a node's changes come together"
    assert passed(change(1, 10), report(1, 11), change(1, 12)) == [10, 11, 12]


def test_early_messages_reach_a_later_subscriber_once():
    mail, received = WorkerMail(), []
    for number in (1, 1, 2):
        mail.deliver(make_batch([other(4, number)]))
    mail.subscribe(4, lambda worker, messages: received.extend(messages))
    mail.deliver(make_batch([other(4, 3)]))
    mail.unsubscribe(4)
    mail.deliver(make_batch([other(4, 4)]))
    assert received == [1, 2, 3]


def test_acknowledged_frames_are_forgotten():
    sent: list[bytes] = []
    link = Link()
    for number in range(3):
        link.send(FrameKind.EVENTS, b"%d" % number)
    link.open(sent.append, 1)
    assert (link.kept, len(sent)) == (2, 2)
    link.open(sent.append, 3)
    assert link.kept == 0


def test_beat_goes_with_the_next_frame_or_alone_before_another_one():
    link, written = Link(), list[bytes]()
    link.open(written.append, 0)
    link.beat_with_next()
    assert not written
    link.send(FrameKind.MESSAGES, b"1")
    link.send(FrameKind.MESSAGES, b"2")
    link.beat_with_next()
    link.beat_with_next()
    alone, frame = Link().encode(FrameKind.BEAT), len(written[1])
    assert written == [alone + written[0][-frame:], written[1], alone]

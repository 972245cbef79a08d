"""Commands to workers over real sockets: order, cuts, lost agents, stopped workers, two
controllers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import pytest

from rayzero.engine.errors import DataError, RayzeroError
from rayzero.orchestrator.aio import PendingReplies
from rayzero.orchestrator.cluster import node_links
from rayzero.orchestrator.cluster.node_links import NodeLink, WorkerMail
from rayzero.orchestrator.cluster.worker_commands import Call, WorkerCommands
from rayzero.orchestrator.cluster.worker_watch import WorkerWatch
from rayzero.workers.agent.commands import CommandRunner
from rayzero.workers.agent.link import AgentAddress, Attach, WorkerCommand, pack_call
from rayzero.workers.agent.message_sender import MessageSender
from rayzero.workers.messages import Heartbeat, WorkerMessage
from tests.orchestrator.cluster.streams import (
    LIMIT_S,
    Commands,
    Proxy,
    agent,
    linked,
    next_events,
    within,
)

NODE = "node"
PROCESS = """
import sys, time
from rayzero.workers.agent.message_sender import MessageSender
class Target:
    seen = []
    def note(self, number, *rest):
        self.seen.append(number)
    def all(self):
        return self.seen
def poll(limit_s):
    time.sleep(limit_s)
    return []
MessageSender("\\0" + sys.argv[1], int(sys.argv[2]), poll, Target())
time.sleep(600)
"""


class UnreadableError(Exception):
    """Cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


class Target:
    """What a worker's commands call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.may_return = Event()

    def note(self, number: int, *rest: Any) -> None:
        self.seen.append(number)

    def wait(self) -> int:
        self.seen.append("wait")
        self.may_return.wait(LIMIT_S)
        return len(self.seen)

    def fail(self) -> None:
        raise DataError("no such state")

    def fail_unreadably(self) -> None:
        raise UnreadableError(1, 2)


def poll(timeout_s: float) -> list[WorkerMessage]:
    Event().wait(min(0.05, timeout_s))
    return [Heartbeat(0, 0, "run", 0.0)]


@contextmanager
def worker_process(socket: str, index: int) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own."""
    command = [sys.executable, "-c", PROCESS, socket[1:], str(index)]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@dataclass
class Controller:
    """The workers 0 and 1 of a node, and the controller's part of their commands."""

    attach: Attach = field(default_factory=lambda: Attach(1, os.urandom(16)))
    mail: WorkerMail = field(default_factory=WorkerMail)
    link: NodeLink | None = None

    def __post_init__(self) -> None:
        self.commands = WorkerCommands(self.attach, lambda node: self.link)
        self.mail.on_answer = self.commands.on_answer
        self.watch = WorkerWatch(self.mail, self.commands, lambda worker: NODE, self.find_cause)

    async def find_cause(self, worker: int) -> str:
        while worker not in self.commands._ended:
            await asyncio.sleep(0.01)
        return "Ray's cause"

    @asynccontextmanager
    async def on(self, address: AgentAddress) -> AsyncIterator[NodeLink]:
        """With the stream of an agent."""
        async with linked(address, mail=self.mail, attach=self.attach) as self.link:
            self.commands.send_again(NODE)
            await within(self.link.attached())
            yield self.link
        self.link = None

    def broadcast(self, method: str, *arguments: Any, **own: Any) -> PendingReplies:
        return self.watch.broadcast([0, 1], Call(method, arguments, in_order=True, **own))

    async def call(self, worker: int, method: str, *arguments: Any) -> Any:
        call = Call(method, arguments, in_order=False)
        return await within(self.commands.call(worker, NODE, call))


async def test_commands_run_in_their_order_beside_calls_that_take_long():
    commands, controller, targets = Commands(), Controller(), [Target(), Target()]
    with agent(commands) as (_, address):
        async with controller.on(address):
            early = controller.broadcast("note", 0)  # before the workers are connected
            for index, target in enumerate(targets):
                MessageSender(commands.socket, index, poll, target)
            slow = asyncio.ensure_future(controller.call(0, "wait"))
            replies = [controller.broadcast("note", number) for number in range(1, 50)]
            last = controller.broadcast("note", own={0: (50,), 1: (51,)})
            await within(asyncio.gather(*(it.wait_all() for it in (early, *replies, last))))
            assert [it for it in targets[0].seen if it != "wait"] == [*range(51)]
            assert targets[1].seen == [*range(50), 51]
            with pytest.raises(DataError, match="no such state"):
                await controller.call(1, "fail")
            with pytest.raises(RayzeroError, match="cannot be read"):
                await controller.call(1, "fail_unreadably")
            assert not slow.done()
            targets[0].may_return.set()
            assert await within(slow) == 52


async def test_cuts_anywhere_in_broadcasts_lose_and_repeat_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_links, "RETRY_S", 0.01)
    commands, controller, targets = Commands(), Controller(), [Target(), Target()]
    for index, target in enumerate(targets):
        MessageSender(commands.socket, index, poll, target)
    with agent(commands) as (_, address):
        proxy = Proxy(address.port)
        proxy.drop_from, proxy.drop_down = 200, 200
        async with controller.on(replace(address, port=await proxy.listen())):
            replies = [controller.broadcast("note", number) for number in range(40)]
            done = asyncio.gather(*(it.wait_all() for it in replies))
            while not done.done():
                connections = proxy.connections
                while proxy.connections == connections and not done.done():
                    await asyncio.sleep(0.001)
                proxy.drop_from += 61
                proxy.drop_down += 67
            await within(done)
        assert [target.seen for target in targets] == [[*range(40)]] * 2
        assert proxy.connections > 5
        await proxy.close()


async def test_agent_is_lost_between_a_command_and_its_answer():
    commands, controller, targets = Commands(), Controller(), [Target(), Target()]
    for index, target in enumerate(targets):
        MessageSender(commands.socket, index, poll, target)
    with agent(commands) as (lost, address):
        async with controller.on(address):
            calls = [asyncio.ensure_future(controller.call(index, "wait")) for index in range(2)]
            while not all(target.seen for target in targets):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(lost.close)
            unsent = controller.broadcast("note", 1)  # to the one that is lost
            for target in targets:
                target.may_return.set()
            await asyncio.sleep(0.1)
            assert not any(call.done() for call in calls)
    waiting = controller.broadcast("note", 2)  # without an agent
    with agent(commands) as (_, address):
        async with controller.on(address):
            assert await within(asyncio.gather(*calls)) == [1, 1]
            await within(asyncio.gather(unsent.wait_all(), waiting.wait_all()))
    assert [target.seen for target in targets] == [["wait", 1, 2]] * 2, "each once"


async def test_commands_of_an_earlier_controller_are_refused():
    commands, target = Commands(), Target()
    old, new = Controller(Attach(4, b"old")), Controller(Attach(5, b"new"))
    MessageSender(commands.socket, 0, poll, target)
    with agent(commands) as (_, address):
        async with old.on(address):
            late = asyncio.ensure_future(old.call(0, "wait"))
            while not target.seen:
                await asyncio.sleep(0.01)
            async with new.on(address):
                old.commands.send({0: NODE}, Call("note", (1,), in_order=True), lambda *_: None)
                target.may_return.set()
                await new.call(0, "note", 2)
                await new.call(0, "note", 3)
            late.cancel()
    assert target.seen == ["wait", 2, 3]
    runner = CommandRunner(target, lambda answer: None)  # whose agent is new, and obeys all
    for name, epoch, number in (("a", 5, 1), ("b", 4, 2), ("a", 5, 1), ("c", 5, 1), ("a", 5, 2)):
        call = pack_call("note", (f"{name}{number}",))
        runner.begin(WorkerCommand(Attach(epoch, name.encode()), number, True, call, ()))
        runner._in_order.submit(int).result()
    runner._in_order.shutdown(wait=True)
    assert target.seen[3:] == ["a1", "c1"]


async def test_stopped_worker_holds_nobody_up_and_a_dead_one_is_seen():
    commands, controller, target = Commands(), Controller(), Target()
    MessageSender(commands.socket, 1, poll, target)
    with agent(commands) as (_, address), worker_process(commands.socket, 0) as process:
        async with controller.on(address) as link:
            controller.watch.subscribe([0, 1])
            await controller.call(0, "note", 0)
            process.send_signal(signal.SIGSTOP)
            large = os.urandom(2**20)  # more than a socket's buffer has room for
            replies = [controller.broadcast("note", number, large) for number in range(20)]
            for reply in replies:
                while 1 in reply.pending:
                    await asyncio.sleep(0.001)
                assert reply.pending == {0}
            assert await within(link.call("note", 7)) == 7
            process.send_signal(signal.SIGCONT)
            await within(asyncio.gather(*(reply.wait_all() for reply in replies)))
            assert await controller.call(0, "all") == [0, *range(20)]
            process.kill()
            ((worker, pid, pidfd),) = await next_events(link, 1)
            assert (worker, pid, pidfd >= 0) == (0, process.pid, True)

"""The controller's end of each node's stream: commands to the agent, replies and events from it.

A stream outlives its connections: frames that were not acknowledged are sent again over the next
connection. The stream ends when the agent's process has ended, which its closed port shows, or when
`NodeLink.end` is called.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias

from rayzero.orchestrator.aio import ChangeNotifier, resolve
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.workers.agent.batches import NodeBatch
from rayzero.workers.agent.link import (
    AgentAddress,
    Attach,
    Frame,
    FrameKind,
    FrameReceiver,
    Hello,
    Link,
    NodeCommand,
)
from rayzero.workers.authenticated import connect
from rayzero.workers.messages import WorkerMessage
from rayzero.workers.step_rows import ReceivedMessage

SILENT_S = 3.0
"""A connection is replaced, which loses nothing, if making it takes longer than this, or no frame
arrives for this long (three beats). The second limit doubles each time it is exceeded."""
RETRY_S = 0.2
"""Pause before a connection is made again."""
TICK_S = 0.5
"""How long acknowledgements of small frames are collected (a worker keeps frames until they are
acknowledged, and sends none after 64 of them), and the precision of `Silence`."""
READ_SLICE_S = 0.0003
"""How long messages are read, or acknowledged, before other tasks get a turn."""
_LARGE_BYTES = 64 * 1024
_MAX_EARLY_FRAMES = 256
CAUSE_WAIT_S = 1.0
"""How long the stream's owner may take to end it with the cause, after the port has closed."""


MailReceiver: TypeAlias = Callable[[int, list[ReceivedMessage]], None]
"""Called with a worker's index and messages. A `NodeRecord`, which has messages of several workers
with the same receiver, is passed as a message of the first of them."""


class WorkerMail:
    """Passes the messages of the workers of all nodes to their subscribers, each message once: a
    new agent of a node may send again what the previous one has sent."""

    def __init__(self) -> None:
        self.timer = LinkTimer()
        """Timer of the streams of all nodes."""
        self._numbers: dict[int, int] = {}  # the number of each worker's newest frame
        self._subscribers: dict[int, MailReceiver | None] = {}
        self._early: dict[int, deque[bytes]] = {}  # messages received before `subscribe`
        self._unread: dict[object, list[bytes]] = {}  # batches, by the stream they came over
        self.on_answer: Callable[[Sequence[int], bytes], None] = lambda workers, payload: None
        """Called with workers and their answer to a command. An answer may come more than once."""

    def has_heard(self, worker: int) -> bool:
        """Returns whether a message of the worker has arrived. If so, its agent reports its end."""
        return worker in self._numbers

    def subscribe(self, worker: int, receive: MailReceiver) -> None:
        """Calls `receive` with the worker's index and each list of its messages, including messages
        that arrived before."""
        self._subscribers[worker] = receive
        for payload in self._early.pop(worker, ()):
            receive(worker, pickle.loads(payload))

    def unsubscribe(self, worker: int) -> None:
        """Drops the worker's messages from now on."""
        self._subscribers[worker] = None

    def put(self, stream: object, batch: bytes) -> None:
        """Reads a batch later, in a slice of the event loop's time. The batches of all nodes arrive
        together, and a worker's death must not wait until all are read."""
        if not self._unread:
            asyncio.get_running_loop().call_soon(self._read_slice)
        self._unread.setdefault(stream, []).append(batch)

    def read(self, stream: object) -> None:
        """Reads all batches that have arrived over a stream at once."""
        for batch in self._unread.pop(stream, ()):
            self.deliver(pickle.loads(batch))

    def _read_slice(self) -> None:
        until_s = time.monotonic() + READ_SLICE_S
        while self._unread and time.monotonic() < until_s:
            self.read(next(iter(self._unread)))
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read_slice)

    def deliver(self, batch: NodeBatch) -> None:
        """Passes on the messages in a batch that were not received before."""
        known = self._numbers
        new = [
            (worker, number) for worker, number in batch.combined if number > known.get(worker, 0)
        ]
        known |= new  # a worker's numbers are in order, so the last one is the greatest
        all_new = len(new) == len(batch.combined)
        for record, numbers in batch.records:
            receivers = {self._subscribers.get(worker) for worker in record.workers}
            receive = receivers.pop()
            if receive is not None and not receivers and all_new:  # one receiver gets the record
                receive(record.workers[0], [record])
                continue
            messages: Sequence[WorkerMessage] = record.messages
            for worker, number, message in zip(record.workers, numbers, messages, strict=True):
                if (worker, number) in new:
                    self._pass(worker, [message])
        for worker, number, payload in batch.frames:
            if number > known.get(worker, 0):
                known[worker] = number
                self._pass(worker, payload)
        for payload, workers in batch.answers:
            self.on_answer(workers, payload)

    def _pass(self, worker: int, messages: bytes | list[ReceivedMessage]) -> None:
        """Passes messages, or their pickled form, to the worker's subscriber."""
        if worker not in self._subscribers:
            payload = messages if isinstance(messages, bytes) else pickle.dumps(messages)
            self._early.setdefault(worker, deque(maxlen=_MAX_EARLY_FRAMES)).append(payload)
        elif (receive := self._subscribers[worker]) is not None:
            receive(worker, messages if isinstance(messages, list) else pickle.loads(messages))


class LinkTimer:
    """Calls `on_tick` of the streams of all nodes about every `TICK_S`. A timer for each stream
    would cost more than the call. However long the event loop was busy, that counts as one tick:
    frames that arrived meanwhile are read before the next tick."""

    def __init__(self) -> None:
        self._links: dict[NodeLink, None] = {}
        self._timer: asyncio.Handle | None = None

    def add(self, link: NodeLink) -> None:
        self._links[link] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick, [])

    def remove(self, link: NodeLink) -> None:
        del self._links[link]
        if not self._links and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, links: list[NodeLink]) -> None:
        """Calls `on_tick` of some streams, for at most `READ_SLICE_S`.

        Args:
            links: the streams that remain of this tick; an empty list begins a new tick.
        """
        links = links or [*self._links]
        until_s = time.monotonic() + READ_SLICE_S
        while links and time.monotonic() < until_s:
            links.pop().on_tick()
        loop = asyncio.get_running_loop()
        delay_s = 0.0 if links else TICK_S
        self._timer = loop.call_later(delay_s, self._tick, links)


class Silence:
    """Measures how long there was no sign of life, in ticks.

    Args:
        limit_s: how long a silence may last.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._ticks = 0

    @property
    def is_over_limit(self) -> bool:
        return self._ticks * TICK_S > self.limit_s

    def end(self) -> None:
        """Ends the silence: there was a sign of life."""
        self._ticks = 0

    def on_tick(self) -> None:
        self._ticks += 1


class NodeLink:
    """The stream of one agent, from construction until `end`. Used from one event loop, in which
    the object owns a task.

    Args:
        mail: gets the messages of the node's workers.
        on_news: called with new events, before `events` returns them; with an empty list when a
            connection has ended.
    """

    def __init__(
        self,
        address: AgentAddress,
        attach: Attach,
        mail: WorkerMail,
        on_news: Callable[[list[Any]], None] = lambda events: None,
    ) -> None:
        self._mail = mail
        self._on_news = on_news
        self._silence = Silence(SILENT_S)  # no frame has arrived over the connection
        self._unserved = Silence(SILENT_S)  # the agent has not shown that it serves its node
        self._receiver: FrameReceiver | None = None  # receives the connection's frames
        self._address = address
        self._attach = attach
        self._link = Link()
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._events: list[Any] = []  # received since the last call of `events`
        self.hello: Hello | None = None
        """The agent's `Hello`, once it obeys this controller."""
        self._error: Exception | None = None
        self._changed = ChangeNotifier()
        self._task = asyncio.get_running_loop().create_task(self._run())
        mail.timer.add(self)

    @property
    def is_connected(self) -> bool:
        """Whether the stream has a connection now."""
        return self._link.is_open

    async def attached(self) -> None:
        """Waits until the agent obeys this controller. Raises as `call`."""
        await self._changed.wait_until(lambda: bool(self.hello or self._error))
        if self._error is not None:
            raise self._error

    async def fenced(self) -> None:
        """Waits until the agent obeys a later controller."""
        await self._changed.wait_until(lambda: isinstance(self._error, JobFailedError))

    async def call(self, method: str, *args: Any) -> Any:
        """Calls one of the agent's methods. Returns its result, or raises its error.

        Raises:
            VaultLostError: the stream has ended.
            JobFailedError: the agent obeys a later controller.
        """
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(FrameKind.CALL, pickle.dumps((number, method, args)))
            return await reply
        finally:
            del self._replies[number]

    def command(self, command: NodeCommand) -> None:
        """Sends a command to workers of the node. `WorkerMail.on_answer` gets their answers."""
        self._link.send(FrameKind.COMMAND, pickle.dumps(command, pickle.HIGHEST_PROTOCOL))

    async def events(self, limit_s: float) -> list[Any]:
        """Returns the events since the last call. Waits until there are some.

        Raises as `call`, and:
            TimeoutError: for `limit_s`, nothing has shown that the agent serves its node.
        """
        unserved = self._unserved
        unserved.limit_s = limit_s
        await self._changed.wait_until(
            lambda: bool(self._events or self._error or unserved.is_over_limit)
        )
        events, self._events = self._events, []
        if events:
            return events
        if self._error is not None:
            raise self._error
        raise TimeoutError(f"its process did not respond for {limit_s:g} s")

    def on_tick(self) -> None:
        """Sends the acknowledgement that is due, and measures silences."""
        self._link.acknowledge()
        self._unserved.on_tick()
        if self._unserved.is_over_limit:
            self._changed.notify()
        self._silence.on_tick()
        if self._receiver is not None and self._silence.is_over_limit:
            self._silence.limit_s *= 2  # a long frame over a slow network always takes long
            self._receiver.connection_lost(None)

    def end(self, error: Exception) -> None:
        """Ends the stream: everything that waits for it raises `error`. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._mail.timer.remove(self)
        self._task.cancel()
        for reply in self._replies.values():
            resolve(reply, error)
        self._changed.notify()

    async def _run(self) -> None:
        while self._error is None:
            try:
                await self._serve_connection()
            except ConnectionRefusedError:  # the agent's port is closed
                await asyncio.sleep(CAUSE_WAIT_S)
                self.end(VaultLostError("its process has ended"))
            except (OSError, EOFError, TimeoutError):
                await asyncio.sleep(RETRY_S)
            finally:
                self._link.close()
                self._on_news([])

    async def _serve_connection(self) -> None:
        """Connects, and receives frames. Raises OSError, EOFError or TimeoutError at the end of the
        connection."""
        async with asyncio.timeout(SILENT_S):
            address = self._address
            _, writer = await connect(address.host, address.port, address.secret)
        self._silence.end()

        def receive(frame: Frame) -> None:
            self._silence.end()
            if self._link.is_open:
                self._receive(frame)
            else:
                self._begin(frame, writer.write)

        self._receiver = FrameReceiver(receive)
        try:
            writer.transport.set_protocol(self._receiver)  # before the agent sends anything
            writer.write(self._link.encode(FrameKind.ATTACH, pickle.dumps(self._attach)))
            await self._receiver.ended
            raise EOFError("the connection has ended")
        finally:
            self._receiver = None
            writer.transport.abort()

    def _begin(self, hello: Frame, write: Callable[[bytes], object]) -> None:
        """Handles the agent's answer to `Attach`."""
        if hello.kind is FrameKind.FENCED:
            epoch = pickle.loads(hello.payload)
            text = f"another controller of this job has taken over (epoch {epoch})"
            self.end(JobFailedError(text, allowed="one controller at a time"))
            return
        self.hello = pickle.loads(hello.payload)
        self._unserved.end()
        self._link.open(write, hello.acknowledged)
        self._changed.notify()

    def _receive(self, frame: Frame) -> None:
        if not self._link.accept(frame):
            return
        if frame.number:  # so no long frame is due again, which would have been sent first
            self._silence.limit_s = SILENT_S
        match frame.kind:
            case FrameKind.REPLY:
                number, error, result = pickle.loads(frame.payload)
                if (reply := self._replies.get(number)) is not None:
                    resolve(reply, error, result)
            case FrameKind.MESSAGES:
                self._mail.put(self, frame.payload)
            case FrameKind.EVENTS:
                self._unserved.end()
                self._mail.read(self)  # a worker's messages come before the event of its end
                events = pickle.loads(frame.payload)
                if isinstance(events, Exception):  # it has ended the agent's service
                    self.end(VaultLostError(str(events)))
                    return
                self._on_news(events)
                self._events += events
                self._changed.notify()
            case FrameKind.BEAT:
                self._unserved.end()
        if len(frame.payload) >= _LARGE_BYTES:
            self._link.acknowledge()

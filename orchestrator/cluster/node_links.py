"""The controller's end of the stream of each node: commands down, replies and events up.

A stream outlives its connections: what was not acknowledged is sent again over the next one. It
ends when the agent's process has, as its closed port shows, or the caller knows.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from rayzero.orchestrator.aio import ChangeNotifier
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
"""A connection over which no frame has come for three beats, or that takes as long to be made, is
made anew, which loses nothing; after twice as long each time."""
SILENT_BEATS = 3
RETRY_S = 0.2
"""Pause before a connection is made again."""
ACKNOWLEDGE_S = 0.5
"""How long acknowledgements of small frames are collected. A worker keeps what is not acknowledged,
and waits with more after 64 frames."""
READ_SLICE_S = 0.0003
"""How long messages are read before other tasks get a turn."""
_LARGE_BYTES = 64 * 1024
_MAX_EARLY_FRAMES = 256
CAUSE_WAIT_S = 1.0
"""How long the caller may take to find the cause of a process's end, once its port is closed."""


MailReceiver: TypeAlias = Callable[[int, list[ReceivedMessage]], None]
"""Called with a worker's index and messages. A `NodeRecord` is of several workers with the same
receiver, and comes as a message of the first one."""


class WorkerMail:
    """Passes the messages of the workers of all nodes to those that subscribe to them. A worker's
    come once each: an agent's successor may send again what the agent has sent."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # of the newest frame, by worker
        self._subscribers: dict[int, MailReceiver | None] = {}
        self._early: dict[int, deque[bytes]] = {}
        self._unread: dict[object, list[bytes]] = {}  # batches, by the stream they came over
        self.on_answer: Callable[[Sequence[int], bytes], None] = lambda workers, payload: None
        """Called with workers and their answer to a command; one that is sent again comes again."""

    def has_heard(self, worker: int) -> bool:
        """Whether a message of the worker has come, so that its agent sees it end."""
        return worker in self._numbers

    def subscribe(self, worker: int, receive: MailReceiver) -> None:
        """Calls `receive` with the index and each list of messages, those that came before
        included."""
        self._subscribers[worker] = receive
        for payload in self._early.pop(worker, ()):
            receive(worker, pickle.loads(payload))

    def unsubscribe(self, worker: int) -> None:
        """Drops what comes from now on."""
        self._subscribers[worker] = None

    def put(self, stream: object, batch: bytes) -> None:
        """Reads a batch soon: those of all nodes come together, and a death must not wait for
        them."""
        if not self._unread:
            asyncio.get_running_loop().call_soon(self._read_slice)
        self._unread.setdefault(stream, []).append(batch)

    def read(self, stream: object) -> None:
        """Reads now what has come over a stream."""
        for batch in self._unread.pop(stream, ()):
            self.deliver(pickle.loads(batch))

    def _read_slice(self) -> None:
        until_s = time.monotonic() + READ_SLICE_S
        while self._unread and time.monotonic() < until_s:
            self.read(next(iter(self._unread)))
        if self._unread:
            asyncio.get_running_loop().call_soon(self._read_slice)

    def deliver(self, batch: NodeBatch) -> None:
        known = self._numbers
        new = {it for it in batch.combined if it[1] > known.get(it[0], 0)}
        known |= sorted(new)
        for record, numbers in batch.records:
            receive, *others = {*map(self._subscribers.get, record.workers)}
            if receive is not None and not others and len(new) == len(batch.combined):
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


class SilenceWatch:
    """Calls `on_silent` once `SILENT_BEATS` periods in a row have ended without `heard`. However
    long the event loop was busy, it is one period: what came meanwhile is read in the next.

    Args:
        silent_s: all periods together.
    """

    def __init__(self, silent_s: float, on_silent: Callable[[], None]) -> None:
        self._period_s = silent_s / SILENT_BEATS
        self._on_silent = on_silent
        self._missed = -1
        self._check()

    def heard(self) -> None:
        """A frame has come."""
        self._missed = 0

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._missed += 1
        if self._missed <= SILENT_BEATS:
            self._timer = loop.call_later(self._period_s, self._check)
        else:
            self._on_silent()


class NodeLink:
    """The stream of one agent, from construction until `end`. Used from one event loop, in which
    it owns a task.

    Args:
        mail: gets the messages of the node's workers.
        on_news: called with what `events` returns later; with nothing when a connection has ended.
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
        self._will_acknowledge = False
        self._silent_s = SILENT_S
        self._address = address
        self._attach = attach
        self._link = Link()
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._events: list[Any] | None = None  # since the last `events`; None: no frame has come
        self.hello: Hello | None = None
        """The agent's, once it obeys."""
        self._error: Exception | None = None
        self._changed = ChangeNotifier()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection now."""
        return self._link.is_open

    async def attached(self) -> None:
        """Waits until the agent obeys. Raises as `call`."""
        await self._changed.wait_until(lambda: bool(self.hello or self._error))
        if self._error is not None:
            raise self._error

    async def fenced(self) -> None:
        """Waits until the agent obeys a later controller."""
        await self._changed.wait_until(lambda: isinstance(self._error, JobFailedError))

    async def call(self, method: str, *args: Any) -> Any:
        """The result of one of the agent's methods; raises what it raises.

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
        """Sends a command to workers of the node, whose messages have their answers."""
        self._link.send(FrameKind.COMMAND, pickle.dumps(command, pickle.HIGHEST_PROTOCOL))

    async def events(self) -> list[Any]:
        """The events since the last call; waits until there are some, or the agent shows that it
        serves. Raises as `call`."""
        await self._changed.wait_until(lambda: self._events is not None or self._error is not None)
        events, self._events = self._events or [], None
        if not events and self._error is not None:
            raise self._error
        return events

    def end(self, error: Exception) -> None:
        """Ends the stream: everything that waits for it raises `error`. Idempotent."""
        if self._error is not None:
            return
        self._error = error
        self._task.cancel()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)
        self._changed.notify()

    async def _run(self) -> None:
        while self._error is None:
            try:
                await self._serve_connection()
            except ConnectionRefusedError:  # nobody listens there any more
                await asyncio.sleep(CAUSE_WAIT_S)
                self.end(VaultLostError("its process has ended"))
            except (OSError, EOFError, TimeoutError):
                await asyncio.sleep(RETRY_S)
            finally:
                self._link.close()
                self._on_news([])

    async def _serve_connection(self) -> None:
        """Connects, and receives until the connection's end, which it raises."""
        async with asyncio.timeout(SILENT_S):
            address = self._address
            _, writer = await connect(address.host, address.port, address.secret)
        silence = SilenceWatch(self._silent_s, partial(self._end_silent, writer))

        def receive(frame: Frame) -> None:
            silence.heard()
            if self._link.is_open:
                self._receive(frame)
            else:
                self._begin(frame, writer.write)

        receiver = FrameReceiver(receive)
        try:
            writer.transport.set_protocol(receiver)  # before the agent sends anything
            writer.write(self._link.encode(FrameKind.ATTACH, pickle.dumps(self._attach)))
            await receiver.ended
            raise EOFError("the connection has ended")
        finally:
            silence.cancel()
            writer.transport.abort()

    def _begin(self, hello: Frame, write: Callable[[bytes], object]) -> None:
        """The agent has answered to `Attach`."""
        if hello.kind is FrameKind.FENCED:
            self.end(taken_over_error(pickle.loads(hello.payload)))
            return
        self.hello = pickle.loads(hello.payload)
        self._link.open(write, hello.acknowledged)
        self._changed.notify()

    def _end_silent(self, writer: asyncio.StreamWriter) -> None:
        self._silent_s *= 2  # a long frame over a slow network takes long each time
        writer.transport.abort()

    def _receive(self, frame: Frame) -> None:
        if not self._link.accept(frame):
            return
        if frame.number:  # a long one, that has to be sent again, would be the first
            self._silent_s = SILENT_S
        match frame.kind:
            case FrameKind.REPLY:
                number, error, result = pickle.loads(frame.payload)
                self._resolve(number, error, result)
                return
            case FrameKind.MESSAGES:
                self._mail.put(self, frame.payload)
                self._acknowledge(len(frame.payload))
                return
            case FrameKind.EVENTS:
                self._mail.read(self)  # what a worker has sent comes before its end
                events = pickle.loads(frame.payload)
                if isinstance(events, Exception):  # that ended the agent's service
                    self.end(VaultLostError(str(events)))
                    return
                self._on_news(events)
                self._events = [*(self._events or ()), *events]
        if frame.number:
            self._acknowledge(len(frame.payload))
        self._events = self._events or []
        self._changed.notify()

    def _acknowledge(self, nbytes: int) -> None:
        """Lets the agent forget acknowledged frames: not for each small one."""
        if nbytes >= _LARGE_BYTES:
            self._link.signal(FrameKind.BEAT)
        elif not self._will_acknowledge:
            self._will_acknowledge = True
            asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._acknowledge_now)

    def _acknowledge_now(self) -> None:
        self._will_acknowledge = False
        self._link.signal(FrameKind.BEAT)

    def _resolve(self, number: int, error: Exception | None, result: Any) -> None:
        reply = self._replies.get(number)
        if reply is None or reply.done():  # its caller has given up
            return
        if error is not None:
            reply.set_exception(error)
        else:
            reply.set_result(result)


def taken_over_error(epoch: int) -> JobFailedError:
    """The error of a controller whose agents obey its successor."""
    return JobFailedError(
        f"another controller of this job has taken over (epoch {epoch})",
        allowed="one controller at a time",
    )

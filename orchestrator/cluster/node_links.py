"""The controller's end of the stream of each node: commands down, replies and events up.

A stream outlives its connections: what was not acknowledged is sent again over the next one. It
ends when the agent's process has, as its closed port shows, or the caller knows.
"""

from __future__ import annotations

import asyncio
import pickle
from itertools import count
from typing import Any

from rayzero.orchestrator.aio import ChangeNotifier
from rayzero.orchestrator.errors import JobFailedError, VaultLostError
from rayzero.workers.agent.link import AgentAddress, Attach, Frame, FrameKind, Link, read_frame
from rayzero.workers.authenticated import connect

SILENT_S = 3.0
"""A connection over which nothing has come for three beats, or that takes as long to be made, is
made anew, which loses nothing."""
RETRY_S = 0.2
"""Pause before a connection is made again."""
CAUSE_WAIT_S = 1.0
"""How long the caller may take to find the cause of a process's end, once its port is closed."""


class NodeLink:
    """The stream of one agent, from construction until `end`. Used from one event loop, in which
    it owns a task."""

    def __init__(self, address: AgentAddress, attach: Attach) -> None:
        self._address = address
        self._attach = attach
        self._link = Link()
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._events: list[Any] = []
        self._news = 0  # frames since the last `events`
        self._is_attached = False
        self._error: Exception | None = None
        self._changed = ChangeNotifier()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def attached(self) -> None:
        """Waits until the agent obeys. Raises as `call`."""
        await self._changed.wait_until(lambda: self._is_attached or self._error is not None)
        if self._error is not None:
            raise self._error

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

    async def events(self) -> list[Any]:
        """The events since the last call; waits until there are some, or the agent shows that it
        serves. Raises as `call`."""
        await self._changed.wait_until(lambda: self._news > 0 or self._error is not None)
        events, self._events, self._news = self._events, [], 0
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

    async def _serve_connection(self) -> None:
        """Connects, and receives until the connection's end, which it raises."""
        async with asyncio.timeout(SILENT_S):
            address = self._address
            reader, writer = await connect(address.host, address.port, address.secret)
        try:
            writer.write(self._link.encode(FrameKind.ATTACH, pickle.dumps(self._attach)))
            hello = await read_frame(reader, SILENT_S)
            if hello.kind is FrameKind.FENCED:
                self.end(taken_over_error(pickle.loads(hello.payload)))
                return
            self._link.open(writer.write, hello.acknowledged)
            self._is_attached = True
            self._changed.notify()
            while True:
                self._receive(await read_frame(reader, SILENT_S))
        finally:
            writer.transport.abort()

    def _receive(self, frame: Frame) -> None:
        if not self._link.accept(frame):
            return
        match frame.kind:
            case FrameKind.REPLY:
                number, error, result = pickle.loads(frame.payload)
                self._resolve(number, error, result)
                return
            case FrameKind.EVENTS:
                events = pickle.loads(frame.payload)
                if isinstance(events, Exception):  # that ended the agent's service
                    self.end(VaultLostError(str(events)))
                    return
                self._events += events
                self._link.signal(FrameKind.BEAT)  # so that the agent need not keep them
            case _:
                self._link.signal(FrameKind.BEAT)
        self._news += 1
        self._changed.notify()

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

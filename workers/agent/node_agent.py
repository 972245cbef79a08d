"""The agent of a node: runs the controller's commands, and sends it the node's events.

An agent obeys one controller at a time: the one with the highest epoch that it has seen. Frames
that the controller has not acknowledged wait for its next connection, or for its successor.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event, Thread
from typing import Any

from rayzero.engine.errors import RayzeroError
from rayzero.workers.agent.commands import run_call
from rayzero.workers.agent.link import Attach, FrameKind, Hello, Link, Obedience, read_frame
from rayzero.workers.agent.local_workers import LocalWorkers
from rayzero.workers.authenticated import AuthenticatedServer

AGENT_THREAD = "rayzero-agent"
COMMAND_THREADS = 8
"""Threads for commands. A checkpoint, a copy and a stack dump each hold one for a while."""
BEAT_S = 1.0
"""Time between two beats. Each beat waits this long for a frame that can carry it."""
_ATTACH_TIMEOUT_S = 10.0


class AgentServer(AuthenticatedServer):
    """Serves one controller at a time, until `close`. Raises the errors of `AuthenticatedServer`.

    Args:
        address: this node's address, on which it listens.
        commands: the object whose methods the commands call, on threads of this server.
        poll: returns events, or nothing after the given time, in seconds. The agent then sends a
            beat, so `poll` must return only if the node is served. Its error ends the service.
        end_event: returns the event for the end of a worker's process; has the arguments of
            `on_end` of `LocalWorkers`.
    """

    def __init__(
        self,
        address: str,
        commands: Any,
        poll: Callable[[float], Sequence[Any]],
        end_event: Callable[[int, int, int], Any],
    ) -> None:
        self._commands = commands
        self._poll = poll
        self._link = Link()
        self._end_event = end_event
        self._workers = LocalWorkers(partial(self._link.send, FrameKind.MESSAGES), self._send_end)
        self._writer: asyncio.StreamWriter | None = None  # of the controller that is obeyed
        self._obedience = Obedience()
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(COMMAND_THREADS, "rayzero-command")
        super().__init__("the agent of a node", AGENT_THREAD, address, _ATTACH_TIMEOUT_S)
        self.secret = os.urandom(32)
        """The secret that a controller must know."""
        self.admit(self.secret)
        self._serving: dict[str, asyncio.Task[None]] = {}
        Thread(target=self._watch, name="rayzero-agent-events", daemon=True).start()

    def serve_workers(self, address: str) -> None:
        """Listens for this node's workers at a unix socket. Idempotent."""
        self.call_soon(partial(self._listen, address))

    @property
    def is_obeying(self) -> bool:
        """Whether a controller is connected."""
        return self._writer is not None

    def close(self) -> None:
        """Ends the connection. Commands in progress finish in the background, and their replies are
        discarded. The thread that polls ends within `BEAT_S`. Idempotent."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _watch(self) -> None:
        """Sends events as they happen, and a beat when there are none. Runs on a thread of its own,
        which waits for nothing else."""
        while not self._stopped.is_set():
            try:
                events: Sequence[Any] = self._poll(BEAT_S)
            except RayzeroError as error:
                self.call_soon(partial(self._send_events, pickle.dumps(error)))
                return
            if events:
                self.call_soon(partial(self._send_events, pickle.dumps(events)))
            else:
                self.call_soon(self._link.beat_with_next)

    def _run_command(self, controller: bytes, payload: bytes) -> None:
        """Runs a command, on one of the pool's threads."""
        call, name, arguments = pickle.loads(payload)
        reply = run_call(self._commands, name, arguments, call)
        self.call_soon(partial(self._reply, controller, reply))

    # The methods below run on the server's thread.

    def _listen(self, address: str) -> None:
        if address not in self._serving:
            loop = asyncio.get_running_loop()
            self._serving[address] = loop.create_task(self._workers.serve(address))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await read_frame(reader)
        attach: Attach = pickle.loads(first.payload)
        if first.kind is not FrameKind.ATTACH or not self._obedience.accepts(attach):
            newest = self._obedience.obeyed.epoch
            writer.write(self._link.encode(FrameKind.FENCED, pickle.dumps(newest)))
            writer.close()
            await writer.wait_closed()  # an abort instead would lose the refusal
            return
        if self._writer is not None:  # an earlier connection, of this controller or another one
            self._writer.transport.abort()
        if self._obedience.supersede(attach):
            self._link.restart()
            self._link.drop(FrameKind.REPLY)
            self._workers.drop_commands()
        self._writer = writer
        hello = Hello(self._workers.last_index)
        writer.write(self._link.encode(FrameKind.HELLO, pickle.dumps(hello)))
        self._link.open(writer.write, first.acknowledged)
        self._workers.on_acknowledged(self._link.acknowledged)
        try:
            while True:
                frame = await read_frame(reader)
                if self._writer is not writer:
                    return
                is_new = self._link.accept(frame)
                self._workers.on_acknowledged(self._link.acknowledged)
                if is_new and frame.kind is FrameKind.COMMAND:
                    self._workers.command(attach, pickle.loads(frame.payload))
                elif is_new and frame.kind is FrameKind.CALL:
                    with suppress(RuntimeError):  # the agent is closing
                        self._pool.submit(self._run_command, attach.controller, frame.payload)
        finally:
            if self._writer is writer:
                self._writer = None
                self._link.close()

    def _reply(self, controller: bytes, reply: bytes) -> None:
        if controller == self._obedience.obeyed.controller:
            self._link.send(FrameKind.REPLY, reply)

    def _send_end(self, worker: int, pid: int, pidfd: int) -> None:
        self._send_events(pickle.dumps([self._end_event(worker, pid, pidfd)]))

    def _send_events(self, payload: bytes) -> None:
        self._workers.flush()  # a worker's messages come before the event of its end
        self._link.send(FrameKind.EVENTS, payload)

"""An agent, a network and a controller's end of a stream, for tests with real sockets."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from rayzero.engine.errors import DataError
from rayzero.orchestrator.cluster.node_links import NodeLink, WorkerMail
from rayzero.orchestrator.errors import VaultLostError
from rayzero.workers.agent.link import AgentAddress, Attach, worker_socket
from rayzero.workers.agent.node_agent import AgentServer

LIMIT_S = 30.0


class Commands:
    """An agent's commands, and its events."""

    def __init__(self) -> None:
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.calls: list[int] = []
        self.may_return = threading.Event()
        self.socket = worker_socket("job", os.urandom(8).hex(), "node")

    def poll(self, timeout_s: float) -> Sequence[Any]:
        try:
            event = self.events.get(timeout=timeout_s)
        except Empty:
            return []
        if isinstance(event, Exception):
            raise event
        return [event]

    def note(self, number: int) -> int:
        self.calls.append(number)
        return number

    def wait(self) -> str:
        self.may_return.wait(LIMIT_S)
        return "done"

    def fail(self) -> None:
        raise DataError("no such slot")

    def unpicklable(self) -> Any:
        return threading.Lock()

    def zeros(self, nbytes: int) -> bytes:
        return bytes(nbytes)


class Proxy:
    """A network between controller and agent, which a test cuts or silences."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.passes = asyncio.Event()
        self.passes.set()
        self.drop_from: int | None = None
        """The connection ends after this many bytes from the agent."""
        self.drop_down: int | None = None
        """The same, from the controller."""

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up, down = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, down]
        await asyncio.gather(
            self._copy(reader, down, self.drop_down), self._copy(up, writer, self.drop_from)
        )

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None = None
    ) -> None:
        try:
            while data := await reader.read(1 if left else 2**16):
                await self.passes.wait()
                writer.write(data)
                if left is not None and (left := left - 1) <= 0:
                    self.cut()
        except OSError:
            pass
        writer.transport.abort()

    def cut(self) -> None:
        while self._writers:
            self._writers.pop().transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.sleep(0)


@contextmanager
def agent(commands: Commands) -> Iterator[tuple[AgentServer, AgentAddress]]:
    """A running agent, and where it is found."""
    server = AgentServer("127.0.0.1", commands, commands.poll, lambda *end: end)
    server.serve_workers(commands.socket)
    try:
        yield server, AgentAddress("@vault", "127.0.0.1", server.port, server.secret)
    finally:
        commands.may_return.set()
        server.close()


@asynccontextmanager
async def linked(
    address: AgentAddress,
    epoch: int = 0,
    mail: WorkerMail | None = None,
    attach: Attach | None = None,
) -> AsyncIterator[NodeLink]:
    attach = attach or Attach(epoch, os.urandom(16))
    link = NodeLink(address, attach, mail or WorkerMail())
    try:
        yield link
    finally:
        link.end(VaultLostError("closed"))
        await asyncio.sleep(0)


async def within(work: Any) -> Any:
    return await asyncio.wait_for(work, LIMIT_S)


async def next_events(link: NodeLink, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += await within(link.events(LIMIT_S))
    return found

"""Passes messages of a node's workers to the controller in batches, and commands to the workers.

A worker's frame is acknowledged when the controller has acknowledged the batch that holds it. If an
agent dies, its workers send the unacknowledged frames to the next agent.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rayzero.workers.agent.batches import make_batch
from rayzero.workers.agent.link import (
    Attach,
    Frame,
    FrameKind,
    Link,
    NodeCommand,
    WorkerCommand,
    peer_of,
    read_frame,
)

REPORTS_DELAY_S = 0.05
"""How long the first reports of a batch wait for those of the node's other workers."""
QUIET_DELAY_S = 0.5
"""How long messages wait that only say that a worker lives."""
_BRIEFLY = (FrameKind.REPORTS, FrameKind.STEPS)
_BIND_RETRY_S = 0.1
_MAX_BATCH_BYTES = 2**20


@dataclass(eq=False)
class _LocalWorker:
    """A worker's stream, which is kept when its connection ends.

    Args:
        writer: the writer of the current connection; None: there is no connection.
        pidfd: refers to the worker's process; -1: the process is unknown, or has no pidfd here.
    """

    link: Link = field(default_factory=lambda: Link(relays=True))
    writer: asyncio.StreamWriter | None = None
    pidfd: int = -1


class LocalWorkers:
    """The streams of a node's workers. Used on the agent's event loop.

    Args:
        send: sends a batch to the controller; returns the number of its frame.
        on_end: called at the end of a worker's process, with the worker's index, its pid and a
            pidfd, or -1.
    """

    def __init__(
        self,
        send: Callable[[bytes], int],
        on_end: Callable[[int, int, int], None] = lambda worker, pid, pidfd: None,
    ) -> None:
        self._send = send
        self._on_end = on_end
        self._workers: dict[int, _LocalWorker] = {}
        self._batch: list[tuple[int, Frame]] = []
        self._batch_bytes = 0
        self._unheard: set[int] = set()  # connected workers without reports in this batch
        self._due: asyncio.TimerHandle | None = None
        self._unconfirmed: deque[tuple[int, dict[int, int]]] = deque()

    @property
    def last_index(self) -> int:
        """The greatest index of the known workers; -1: none."""
        return max(self._workers, default=-1)

    async def serve(self, address: str) -> None:
        """Listens until it is cancelled. Waits for the address, which the process of an earlier
        agent may still hold while its memory is freed."""
        while True:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(address)
                break
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE:
                    raise
            await asyncio.sleep(_BIND_RETRY_S)
        server = await asyncio.start_unix_server(self._serve_worker, sock=listener)
        async with server:
            await server.serve_forever()

    def command(self, controller: Attach, command: NodeCommand) -> None:
        """Passes a command to its workers, once they are connected. Commands that a worker does not
        read wait here; the controller bounds their number."""
        number, in_order, call, own = command
        for index, arguments in own.items():
            worker = self._workers.setdefault(index, _LocalWorker())
            payload = pickle.dumps(WorkerCommand(controller, number, in_order, call, arguments))
            worker.link.send(FrameKind.COMMAND, payload)

    def drop_commands(self) -> None:
        """Forgets the commands of a controller that is not obeyed any more."""
        for worker in self._workers.values():
            worker.link.drop(FrameKind.COMMAND)

    def add(self, worker: int, frame: Frame) -> None:
        """Adds a worker's new frame to the batch."""
        self._batch.append((worker, frame))
        self._batch_bytes += len(frame.payload)
        if frame.kind is not FrameKind.QUIET:
            self._unheard.discard(worker)
        if self._batch_bytes > _MAX_BATCH_BYTES:
            self.flush()
        elif frame.kind is FrameKind.QUIET:
            self._flush_within(QUIET_DELAY_S)
        elif frame.kind in _BRIEFLY and self._unheard:
            self._flush_within(REPORTS_DELAY_S)
        else:
            self._flush_within(0.0)  # with all frames of this iteration of the event loop

    def flush(self) -> None:
        """Sends the messages received so far."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._batch:
            batch = self._batch
            self._batch = []
            self._batch_bytes = 0
            self._unheard = {
                index for index, worker in self._workers.items() if worker.writer is not None
            }
            payload = pickle.dumps(make_batch(batch), pickle.HIGHEST_PROTOCOL)
            newest = {worker: frame.number for worker, frame in batch}
            self._unconfirmed.append((self._send(payload), newest))

    def on_acknowledged(self, number: int) -> None:
        """Acknowledges the workers' frames in the batches up to that number."""
        confirmed: dict[int, int] = {}
        while self._unconfirmed and self._unconfirmed[0][0] <= number:
            confirmed |= self._unconfirmed.popleft()[1]
        for worker, received in confirmed.items():
            self._workers[worker].link.confirm(received)

    async def _serve_worker(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            pid, user = peer_of(writer.get_extra_info("socket"))
            if user != os.getuid():
                return
            first = await read_frame(reader)
            index = int.from_bytes(first.payload)
            worker = self._workers.setdefault(index, _LocalWorker())
            worker.writer = writer
            self._unheard.add(index)
            self._watch(index, pid)
            writer.write(worker.link.encode(FrameKind.HELLO))
            worker.link.open(writer.write, first.acknowledged)
            try:
                while worker.writer is writer:
                    frame = await read_frame(reader)
                    if worker.link.accept(frame) and frame.number:
                        self.add(index, frame)
            finally:
                if worker.writer is writer:
                    worker.writer = None
                    worker.link.close()
                    self._unheard.discard(index)
                    if worker.pidfd < 0:  # the connection's end is the only sign of its end
                        self._on_end(index, pid, -1)
        except (OSError, EOFError, ValueError):
            pass  # the worker's process has ended, or the peer is no worker
        finally:
            writer.transport.abort()

    def _watch(self, index: int, pid: int) -> None:
        """Watches for the end of a worker's process. The end of its connection is not enough: a
        child process may hold the connection open."""
        worker = self._workers[index]
        if worker.pidfd < 0:
            with suppress(OSError):
                worker.pidfd = os.pidfd_open(pid)
                loop = asyncio.get_running_loop()
                loop.add_reader(worker.pidfd, self._see_end, worker, index, pid)

    def _see_end(self, worker: _LocalWorker, index: int, pid: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.pidfd)
        worker.link.drop(FrameKind.COMMAND)
        # The end is reported after the worker's last messages, which are still being read.
        loop.call_later(REPORTS_DELAY_S, self._report_end, index, pid, worker.pidfd)

    def _report_end(self, index: int, pid: int, pidfd: int) -> None:
        self._on_end(index, pid, pidfd)
        os.close(pidfd)

    def _flush_within(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._due is not None:
            if self._due.when() <= loop.time() + delay_s:
                return
            self._due.cancel()
        self._due = loop.call_later(delay_s, self.flush)

"""Receives the simulated workers' messages in the controller's process, for `control_plane`."""

from __future__ import annotations

import asyncio
import select
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.control_cluster import ReportBatch
from rayzero.orchestrator.aio import ChangeNotifier, WorkerReports
from rayzero.orchestrator.cluster.actor_calls import batch_delay_s
from rayzero.workers.messages import WorkerMessage

_MAX_READ_S = 0.002


class Decoder:
    """Receives and unpickles objects from pipes.

    Attributes:
        cpu_s: CPU seconds spent on it. On a real cluster, Ray does this work.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def receive(self, pipe: Connection) -> Any:
        """The next object; None if the pipe is closed."""
        start_s = time.thread_time()
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return None
        finally:
            self.cpu_s += time.thread_time() - start_s


class ReportReceiver:
    """Collects workers' messages in one event loop, like the receiver of Ray actor results.

    Attributes:
        num_workers: number of subscribed workers.
    """

    def __init__(self, pipe: Connection, decoder: Decoder) -> None:
        self.num_workers = 0
        self._pipe = pipe
        self._decoder = decoder
        self._messages: list[tuple[int, list[WorkerMessage]]] = []
        self._lost: list[tuple[int, str]] = []
        self._changed = ChangeNotifier()
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLIN)
        self._loop = asyncio.get_running_loop()
        self._is_idle = False
        self._wait_for_data()

    def close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    async def receive(self) -> WorkerReports:
        await self._changed.wait_until(lambda: bool(self._messages or self._lost))
        reports = WorkerReports(self._messages, self._lost)
        self._messages, self._lost = [], []
        return reports

    def _wait_for_data(self) -> None:
        """Register a reader callback until the pipe has data."""
        if not self._is_idle:
            self._loop.add_reader(self._pipe.fileno(), self._read)
            self._is_idle = True

    def _read(self) -> None:
        """Read pending data for a limited time, so that faults are not delayed by messages."""
        if self._pipe.closed:
            return
        deadline = time.monotonic() + _MAX_READ_S
        has_data = bool(self._poll.poll(0))
        if not has_data:
            self._wait_for_data()
            return
        if self._is_idle:
            self._loop.remove_reader(self._pipe.fileno())
            self._is_idle = False
        while has_data and time.monotonic() < deadline:
            batch: ReportBatch | None = self._decoder.receive(self._pipe)
            if batch is None:
                return
            self._messages += batch.messages
            self._lost += [(worker, "it was killed") for worker in batch.lost]
            has_data = bool(self._poll.poll(0))
        self._changed.notify()
        self._loop.call_later(0.0 if has_data else batch_delay_s(self.num_workers), self._read)

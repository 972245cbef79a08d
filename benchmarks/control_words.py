"""What the simulated workers say, as the controller hears it, for `control_plane`."""

from __future__ import annotations

import asyncio
import select
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.control_world import Words
from rayzero.orchestrator.aio import ChangeNotifier, WorkerReports
from rayzero.orchestrator.cluster.actor_calls import batch_delay_s
from rayzero.workers.messages import WorkerMessage

_READ_S = 0.002


class Decoder:
    """Takes what comes through pipes apart.

    Attributes:
        spent_s: CPU seconds of that, which on a cluster is Ray's.
    """

    def __init__(self) -> None:
        self.spent_s = 0.0

    def received(self, pipe: Connection) -> Any:
        """The next that came; None when the pipe is closed."""
        began_s = time.thread_time()
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return None
        finally:
            self.spent_s += time.thread_time() - began_s


class Ears:
    """Gathers what workers say, as `Lines` gathers what comes of Ray; from one event loop.

    Attributes:
        workers: so many are listened to.
    """

    def __init__(self, pipe: Connection, decoder: Decoder) -> None:
        self.workers = 0
        self._pipe = pipe
        self._decoder = decoder
        self._said: list[tuple[int, list[WorkerMessage]]] = []
        self._lost: list[tuple[int, str]] = []
        self._bell = ChangeNotifier()
        self._there = select.poll()
        self._there.register(pipe.fileno(), select.POLLIN)
        self._loop = asyncio.get_running_loop()
        self._asleep = False
        self._sleep()

    def close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()

    async def hear(self) -> WorkerReports:
        await self._bell.wait_until(lambda: bool(self._said or self._lost))
        heard = WorkerReports(self._said, self._lost)
        self._said, self._lost = [], []
        return heard

    def _sleep(self) -> None:
        """Until somebody speaks."""
        if not self._asleep:
            self._loop.add_reader(self._pipe.fileno(), self._read)
            self._asleep = True

    def _read(self) -> None:
        """Everything that is there, for a while: a death must not wait behind what was said."""
        if self._pipe.closed:
            return
        until_s = time.monotonic() + _READ_S
        more = bool(self._there.poll(0))
        if not more:
            self._sleep()
            return
        if self._asleep:
            self._loop.remove_reader(self._pipe.fileno())
            self._asleep = False
        while more and time.monotonic() < until_s:
            words: Words | None = self._decoder.received(self._pipe)
            if words is None:
                return
            self._said += words.said
            self._lost += [(worker, "it was killed") for worker in words.lost]
            more = bool(self._there.poll(0))
        self._bell.notify()
        self._loop.call_later(0.0 if more else batch_delay_s(self.workers), self._read)

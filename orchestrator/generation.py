"""Who is how far in one generation: from the workers' messages to the machine's events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.policies.failure import Cause, Fault
from rayzero.orchestrator.policies.placement import Place
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    Joined,
    Message,
    Stopped,
    WorkerInfo,
)


class Generation:
    """The members of one generation and what became of each. Number 0 has no members yet."""

    def __init__(self, number: int, places: Sequence[Place], workers: Sequence[WorkerInfo]) -> None:
        self.number = number
        self.places = tuple(places)
        self.faults: list[Fault] = []
        self.returned: dict[str, Any] = {}
        self._workers = {worker.index: worker for worker in workers}
        self._ranks = {place.worker: place.rank for place in places}
        self._joined: set[int] = set()
        self._finished: set[int] = set()
        self._stopped: set[int] = set()
        self._step = 0

    @property
    def world_size(self) -> int:
        return len(self.places)

    def take(self, worker: int, message: Message) -> Iterator[ev.Event]:
        """The events that a message completes. A crash is noted in `faults` instead."""
        if isinstance(message, Heartbeat):
            # Ranks go in step, and a lost one may not have told its newest: take the furthest.
            self._step = max(self._step, message.step)
        elif isinstance(message, Crashed) and message.generation == self.number:
            self._crashed(worker, message)
        elif isinstance(message, Joined | Finished | Stopped) and message.generation == self.number:
            yield from self._progressed(message)

    def lost(self, worker: int, cause: str) -> None:
        """Notes that a worker's process is gone."""
        info = self._workers[worker]
        rank = self._ranks.get(worker, worker)
        where = (rank, info.node, info.pid, self._step)
        self.faults.append(Fault(Cause.PROCESS_LOST, *where, cause))

    def _crashed(self, worker: int, message: Crashed) -> None:
        info = self._workers[worker]
        self.faults.append(
            Fault(
                Cause(message.kind),
                message.rank,
                info.node,
                info.pid,
                message.step,
                message.error,
                message.traceback,
            )
        )

    def _progressed(self, message: Joined | Finished | Stopped) -> Iterator[ev.Event]:
        if isinstance(message, Joined):
            self._joined.add(message.rank)
            if len(self._joined) == self.world_size:
                yield ev.GenerationFormed(self.number)
            return
        if isinstance(message, Finished):
            self._finished.add(message.rank)
            if message.rank == 0 and message.result:
                self.returned = message.result
        else:
            self._stopped.add(message.rank)
        if len(self._finished) == self.world_size:
            yield ev.AllFinished(self.number)
        elif self._stopped and len(self._finished | self._stopped) == self.world_size:
            yield ev.TrainingStopped()

"""Who is how far in one generation: from the workers' messages to the machine's events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rayzero.orchestrator import events as ev
from rayzero.orchestrator.policies.failure import Cause, Fault
from rayzero.orchestrator.policies.placement import Place
from rayzero.orchestrator.policies.recovery import Remembered
from rayzero.workers.messages import (
    Crashed,
    Finished,
    Heartbeat,
    Joined,
    Memory,
    Restore,
    Restored,
    Stopped,
    WorkerInfo,
)


class Generation:
    """The members of one generation and what became of each. Number 0 has no members.

    A member is *in* from the moment it is told its place until its function is unwound, whatever
    the way: a generation of which nobody is in can do nothing more.
    """

    def __init__(
        self,
        number: int = 0,
        passage: int = 0,
        places: Sequence[Place] = (),
        workers: Sequence[WorkerInfo] = (),
        restore: Restore | None = None,
    ) -> None:
        self.number = number
        self.passage = passage
        self.places = tuple(places)
        self.restore = restore
        self.faults: list[Fault] = []
        """Not judged yet."""
        self.returned: dict[str, Any] = {}
        self.fenced = False
        """Whether its members were asked to leave at once: then a crash is only a way out."""
        self.step = 0 if restore is None else restore.step
        """The step that its furthest rank works on, counted from 1."""
        self._workers = {worker.index: worker for worker in workers}
        self._ranks = {place.worker: place.rank for place in places}
        self._in: set[int] = set()
        self._joined: set[int] = set()
        self._restored: set[int] = set()
        self._finished: set[int] = set()
        self._memories: dict[int, Memory] = {}

    @cached_property
    def world_size(self) -> int:
        return len(self.places)

    @cached_property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """The members, by rank."""
        return tuple(self._workers[place.worker] for place in self.places)

    @cached_property
    def members(self) -> frozenset[int]:
        """The members' indices."""
        return frozenset(self._workers)

    @cached_property
    def spread(self) -> bool:
        """Whether it lies on several nodes."""
        return len({worker.node_id for worker in self._workers.values()}) > 1

    @property
    def still_in(self) -> frozenset[int]:
        """The members that have not left the user's function."""
        return frozenset(self._in)

    @property
    def deserted(self) -> bool:
        """Whether every member has left the user's function."""
        return not self._in

    def holds(self, worker: int) -> bool:
        """Whether that member is in the user's function."""
        return worker in self._in

    @property
    def over(self) -> bool:
        """Whether some member's function returned: there is nothing left to resize for."""
        return bool(self._finished)

    @property
    def finished(self) -> bool:
        """Whether every member's function returned."""
        return bool(self.places) and len(self._finished) == self.world_size

    @property
    def restored(self) -> bool:
        """Whether every member has an engine, its state loaded: it can be moved without loss."""
        return len(self._restored) == self.world_size > 0

    def rank_of(self, worker: int) -> int | None:
        return self._ranks.get(worker)

    def remembered(self) -> Remembered:
        """What is in the memory of the members that were unwound; those that died forget."""
        by_rank = {self._ranks[worker]: (worker, one) for worker, one in self._memories.items()}
        return Remembered(self.world_size, by_rank)

    def enter(self) -> None:
        """The members are being told their places."""
        self._in |= self.members

    def reached(self, step: int) -> None:
        """Some rank works on that step."""
        self.step = max(self.step, step)

    def beats(self, worker: int, beat: Heartbeat) -> bool:
        """Whether that heartbeat is of a member that is in."""
        if worker not in self._in or beat.rank != self._ranks[worker]:
            return False
        # Ranks go in step, and a lost one may not have told its newest: take the furthest.
        if beat.step > self.step:
            self.step = beat.step
        return True

    def joins(self, worker: int, message: Joined) -> ev.GenerationFormed | None:
        """A member has joined. The event, if it was the last one."""
        if message.generation != self.number or worker not in self._in:
            return None
        self._joined.add(worker)
        if len(self._joined) < self.world_size:
            return None
        return ev.GenerationFormed(self.number, self.passage)

    def restores(self, worker: int, message: Restored) -> bool:
        """A member has the state. Whether it was the last one."""
        if message.generation != self.number or worker not in self._in:
            return False
        self._restored.add(worker)
        self.reached(message.step + 1)
        return self.restored

    def leaves(self, worker: int, message: Finished | Stopped | Crashed, at_s: float) -> bool:
        """Whether that was a member that is in no longer. A crash is noted in `faults`."""
        if message.generation != self.number or worker not in self._in:
            return False
        self._in.discard(worker)
        self._left(worker, message, at_s)
        return True

    def lost(self, worker: int, cause: Cause, detail: str, at_s: float) -> Fault | None:
        """A worker's process is gone. The fault, if it was a member that had not finished."""
        self._in.discard(worker)
        self._memories.pop(worker, None)
        if worker not in self._ranks or worker in self._finished:
            return None
        fault = Fault(
            cause, self._workers[worker], self._ranks[worker], self.step, detail, at_s, self.number
        )
        self.faults.append(fault)
        return fault

    def _left(self, worker: int, message: Finished | Stopped | Crashed, at_s: float) -> None:
        if isinstance(message, Finished):
            self._finished.add(worker)
            if message.rank == 0 and message.result:
                self.returned = message.result
            return
        if message.memory is not None:
            self._memories[worker] = message.memory
        if isinstance(message, Crashed) and not self.fenced:
            self.faults.append(
                Fault(
                    Cause(message.kind),
                    self._workers[worker],
                    self._ranks[worker],
                    message.step,
                    message.error,
                    at_s,
                    self.number,
                    message.traceback,
                )
            )

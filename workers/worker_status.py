"""A worker's record of its newest generation, for a controller that has not formed it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock

from rayzero.workers.messages import (
    Assignment,
    Crashed,
    Divided,
    Finished,
    Joined,
    RankMessage,
    Restored,
    StepDivided,
    StepReport,
    Stopped,
    WorkerInfo,
    WorkerMessage,
)

_KEPT = (Joined, Restored, StepDivided, Divided, Finished, Stopped, Crashed)


@dataclass(frozen=True)
class FunctionBegin:
    """The rank, number of ranks and generation at the call of a training function."""

    rank: int
    world_size: int
    generation: int


@dataclass(frozen=True)
class WorkerStatus:
    """The answer of a worker to a controller that has not started it.

    Args:
        group: the id of the worker's placement group.
        assignment: of the newest generation, without the lists that grow with the number of ranks;
            None: the worker never had one.
        begin: call of the training function; None: not called, or called ahead.
        messages: of the newest generation, those that are sent once in a generation.
        step: the newest step reported in that generation; 0: none.
        is_leaving: the controller has ordered the worker to leave that generation.
        role: the worker's role; empty for a rank. A role's worker has no generation; its `messages`
            have the end of its function.
        number: the worker's number in its role; None: its function was not called.
    """

    info: WorkerInfo
    group: str
    assignment: Assignment | None = None
    begin: FunctionBegin | None = None
    messages: tuple[RankMessage, ...] = ()
    step: int = 0
    is_leaving: bool = False
    role: str = ""
    number: int | None = None

    @property
    def generation(self) -> int:
        """The number of the newest generation; 0 without one."""
        return 0 if self.assignment is None else self.assignment.generation

    def has_sent(self, *kinds: type[RankMessage]) -> bool:
        return any(isinstance(message, kinds) for message in self.messages)


class GenerationRecord:
    """The newest generation of a worker. Used by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._begin: FunctionBegin | None = None
        self._assignment: Assignment | None = None
        self._messages: tuple[RankMessage, ...] = ()
        self._step = 0

    @property
    def members(self) -> tuple[WorkerInfo, ...]:
        """The members of the generation, by rank."""
        return () if self._assignment is None else self._assignment.members

    def assign(self, assignment: Assignment) -> None:
        """Called when the worker is about to begin a generation."""
        new = FunctionBegin(assignment.rank, assignment.world_size, assignment.generation)
        with self._lock:
            if not assignment.is_ahead:
                self._begin = self._begin or new
            self._assignment, self._step = assignment, 0
            self._messages = tuple(
                sent for sent in self._messages if sent.generation == assignment.generation
            )

    def note(self, message: WorkerMessage) -> None:
        """Called when the worker is about to send a message."""
        if isinstance(message, StepReport):
            self._step = message.step
        elif isinstance(message, _KEPT):
            with self._lock:
                self._messages = (*self._messages, message)

    def status(self, info: WorkerInfo, group: str, is_leaving: bool) -> WorkerStatus:
        with self._lock:
            assignment, begin, messages = self._assignment, self._begin, self._messages
        if assignment is None:
            return WorkerStatus(info, group)
        if assignment.restore is not None:
            assignment = replace(assignment, restore=replace(assignment.restore, slots=()))
        assignment = replace(assignment, members=(), notes=b"")
        messages = tuple(sent for sent in messages if sent.generation == assignment.generation)
        return WorkerStatus(info, group, assignment, begin, messages, self._step, is_leaving)

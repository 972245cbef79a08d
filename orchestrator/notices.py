"""What the controller tells whoever watches a job: a console, a log, a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rayzero.orchestrator.progress import StepRecord
from rayzero.orchestrator.states import State
from rayzero.workers.messages import LogLine, WorkerInfo


@dataclass(frozen=True)
class StateEntered:
    state: State
    generation: int
    world_size: int


@dataclass(frozen=True)
class WorkersUp:
    """The workers' processes are alive, in the order of their index."""

    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True)
class Warned:
    text: str


Notice: TypeAlias = StateEntered | WorkersUp | Warned | StepRecord | LogLine


class Observer(Protocol):
    def see(self, notice: Notice) -> None:
        """Called in the controller's thread, in order; must not block for long."""


class Unwatched:
    """An observer that looks away."""

    def see(self, notice: Notice) -> None:
        del notice

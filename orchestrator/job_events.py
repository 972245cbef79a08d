"""What observers are told (notices + probe merged).

What the controller tells whoever watches a job: a console, a log, a test.

What the controller lets pass by for whoever counts: too much, or too often, to be a notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rayzero.orchestrator.events import State
from rayzero.orchestrator.policies.failure import Fault
from rayzero.orchestrator.progress import StepRecord
from rayzero.workers.chaos.spec import FaultFired
from rayzero.workers.messages import Heartbeat, LogLine, StepReport, WorkerInfo


@dataclass(frozen=True)
class StateEntered:
    state: State
    generation: int
    world_size: int


@dataclass(frozen=True)
class MetricsServed:
    """The job's numbers are served, at `url`/metrics and `url`/snapshot.json."""

    url: str


@dataclass(frozen=True)
class WorkersReady:
    """These workers' processes are alive and ready for work."""

    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True)
class JobWarning:
    text: str


@dataclass(frozen=True)
class Resumed:
    """The job goes on from a checkpoint of an earlier run."""

    step: int
    folder: str


@dataclass(frozen=True)
class RunAdopted:
    """The job goes on with a run whose controller was lost.

    Args:
        step: it had finished so many at least; what is behind the newest checkpoint is done again.
        generation: the newest it had.
        silent_s: since it told anything.
    """

    step: int
    generation: int
    silent_s: float


@dataclass(frozen=True)
class FaultDetected:
    """Something broke.

    Args:
        cause: a `failure.Cause`.
        rank: None when the worker was no member of the generation.
        text: all of it in words.
    """

    cause: str
    worker: WorkerInfo
    rank: int | None
    step: int
    text: str


@dataclass(frozen=True)
class Repaired:
    """The job is past a fault: a step was finished after it.

    Args:
        cause: of the first fault, when several fell together.
        lost: who is gone, as "rank 1 on node a (pid 7)".
        step: the step that was gone back to.
        steps_redone: finished steps that had to be done again.
        world_size_before, world_size: ranks before and after.
        seconds: how long each part took: `detect` (from the first sign to the judgement), `fence`,
            `select_step`, `select_members`, `rendezvous`, `load`, `recompute` (to the next finished step,
            less that step).
    """

    cause: str
    lost: tuple[str, ...]
    step: int
    steps_redone: int
    world_size_before: int
    world_size: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Resized:
    """The job goes on with other members, by wish. `seconds` as in `Repaired`, but `drain`."""

    reason: str
    step: int
    world_size_before: int
    world_size: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint is durable.

    Args:
        seconds: from the pinned step to the manifest, behind training.
        stopped_s: how long training stood still for it, on the slowest rank.
    """

    step: int
    folder: str
    nbytes: int
    seconds: float
    stopped_s: float


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written. Training goes on.

    Args:
        tries: so far.
        again_in_s: when it is tried again; None: it is given up.
    """

    step: int
    text: str
    tries: int
    again_in_s: float | None


JobEvent: TypeAlias = (
    StateEntered
    | MetricsServed
    | WorkersReady
    | JobWarning
    | Resumed
    | RunAdopted
    | FaultDetected
    | FaultFired
    | Repaired
    | Resized
    | Checkpointed
    | CheckpointFailed
    | StepRecord
    | LogLine
)


class JobObserver(Protocol):
    def on_event(self, notice: JobEvent) -> None:
        """Called in the controller's thread, in order; must not block for long."""


class NullObserver:
    """An observer that looks away."""

    def on_event(self, notice: JobEvent) -> None:
        del notice


class Probe(Protocol):
    """Called in the controller's thread; returns at once, and raises nothing."""

    def reported(self, report: StepReport) -> None:
        """A rank of the newest generation finished a step. Comes before the step's record."""

    def beat(self, heartbeat: Heartbeat, node: str) -> None:
        """A member of the newest generation, on that node, says how far it is."""

    def judged(self, fault: Fault) -> None:
        """A fault goes on record: the root of a repair, or of the job's end."""

    def limited(self, least: int, most: int) -> None:
        """The job may have so many workers from now on."""

    def sends(self, so: bool) -> None:
        """Whether the step that was just finished is to be copied to other nodes, too."""

    def copied(self, step: int, nbytes: int) -> None:
        """A step lies on other nodes: so much of it had to be copied."""


class Unprobed:
    """A probe that counts nothing."""

    def reported(self, report: StepReport) -> None:
        del report

    def beat(self, heartbeat: Heartbeat, node: str) -> None:
        del heartbeat, node

    def judged(self, fault: Fault) -> None:
        del fault

    def limited(self, least: int, most: int) -> None:
        del least, most

    def sends(self, so: bool) -> None:
        del so

    def copied(self, step: int, nbytes: int) -> None:
        del step, nbytes

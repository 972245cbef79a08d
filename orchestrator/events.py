"""State, Event, Instruction values.

The states of a job.

What can happen to a job. Policies have spoken already: a fault comes as what it means.

An event with a `generation` is about that process group; once a newer one exists it is stale. One
with a `passage` is about that way to a new generation; once the job set out again it is stale.

What the machine tells the controller to do. The controller answers each with an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from rayzero.engine.errors import RayzeroError


class State(StrEnum):
    PENDING = "pending"
    """Accepted; nothing was asked of the cluster yet."""
    STARTING = "starting"
    """Waiting for resources, for the workers' processes, and for their first process group."""
    RUNNING = "running"
    """Every member of the generation is in the user's function."""
    RESIZING = "resizing"
    """Between two generations because the world size changes, by wish."""
    RECOVERING = "recovering"
    """Between two generations because a worker was lost."""
    STOPPING = "stopping"
    """The user's functions are being unwound, by wish."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({State.SUCCEEDED, State.FAILED, State.STOPPED})


@dataclass(frozen=True)
class JobState:
    """Where a job stands.

    Args:
        generation: the number of its newest process group; 0: none yet.
        passage: how often it set out for a new generation. A fault on the way sets out again, and
            what the way before still brings is stale.
    """

    state: State = State.PENDING
    generation: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class Submitted:
    """The job was accepted."""


@dataclass(frozen=True)
class WorkersPlaced:
    """The workers' processes are alive and answer."""


@dataclass(frozen=True)
class GenerationFormed:
    """Every member joined the generation's process group and goes on to the user's function."""

    generation: int
    attempt: int


@dataclass(frozen=True)
class AllFinished:
    """The user's function returned on every rank, and what was pinned is stored."""

    generation: int


@dataclass(frozen=True)
class FaultRecoverable:
    """A fault the job survives, by the failure policy."""

    generation: int
    lost_ranks: tuple[int, ...]


@dataclass(frozen=True)
class FaultFatal:
    """A fault that ends the job, by the failure policy; or the job cannot start."""

    error: RayzeroError


@dataclass(frozen=True)
class ResizeRequested:
    """Other members, or other places for them, by the elasticity policy or by hand."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Fenced:
    """The old generation can do nothing more: its survivors are out of the user's function."""

    attempt: int


@dataclass(frozen=True)
class RecoveryStepSelected:
    """The newest step of which every range is held somewhere."""

    attempt: int
    step: int


@dataclass(frozen=True)
class MembersSelected:
    """Who takes part in the next generation."""

    attempt: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class StopRequested:
    """The user wants the job to end: Ctrl-C, SIGTERM, `stop()`."""


@dataclass(frozen=True)
class TrainingStopped:
    """Every user's function was unwound, and a last checkpoint is written if one was due."""


@dataclass(frozen=True)
class StopTimedOut:
    """The time for a stop is over; what still runs will be killed."""


Event: TypeAlias = (
    Submitted
    | WorkersPlaced
    | GenerationFormed
    | AllFinished
    | FaultRecoverable
    | FaultFatal
    | ResizeRequested
    | Fenced
    | RecoveryStepSelected
    | MembersSelected
    | StopRequested
    | TrainingStopped
    | StopTimedOut
)


@dataclass(frozen=True)
class PlaceWorkers:
    """Reserve resources and start the workers; then WorkersPlaced or FaultFatal."""


@dataclass(frozen=True)
class FormGeneration:
    """Open a store on a live worker and give every member its rank; then GenerationFormed."""

    generation: int
    attempt: int


@dataclass(frozen=True)
class DrainGeneration:
    """Unwind the users' functions at the end of a step, nobody being lost; then Fenced."""

    attempt: int


@dataclass(frozen=True)
class FenceGeneration:
    """Make sure that the generation can do nothing more, whatever state it is in; then Fenced."""

    attempt: int


@dataclass(frozen=True)
class SelectRecoveryStep:
    """Find the newest step of which every range is held; then RecoveryStepSelected."""

    attempt: int


@dataclass(frozen=True)
class SelectMembers:
    """Survivors plus ready spares and newcomers; then MembersSelected."""

    attempt: int


@dataclass(frozen=True)
class ReleaseNotChosen:
    """What a formed generation no longer waits for: end who was left out, start replacements for
    who was lost, look for a better membership."""


@dataclass(frozen=True)
class StopTraining:
    """Ask every worker to unwind, write a last checkpoint if checkpoints are on; then
    TrainingStopped or StopTimedOut."""


@dataclass(frozen=True)
class ReleaseWorkers:
    """End the workers' processes and give the resources back. Always the last or next to last."""


@dataclass(frozen=True)
class WriteSummary:
    """Write `summary.json`."""


Instruction: TypeAlias = (
    PlaceWorkers
    | FormGeneration
    | ReleaseNotChosen
    | DrainGeneration
    | FenceGeneration
    | SelectRecoveryStep
    | SelectMembers
    | StopTraining
    | ReleaseWorkers
    | WriteSummary
)

"""What can happen to a job. Policies have spoken already: a fault comes as what it means.

An event with a `generation` is about that process group; once a newer one exists it is stale. One
with a `passage` is about that way to a new generation; once the job set out again it is stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rayzero.engine.errors import RayzeroError


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
    passage: int


@dataclass(frozen=True)
class AllFinished:
    """The user's function returned on every rank, and what was pinned is stored."""

    generation: int


@dataclass(frozen=True)
class FaultNoticed:
    """A fault the job survives, by the failure policy."""

    generation: int
    lost_ranks: tuple[int, ...]


@dataclass(frozen=True)
class FaultFatal:
    """A fault that ends the job, by the failure policy; or the job cannot start."""

    error: RayzeroError


@dataclass(frozen=True)
class ResizeWanted:
    """Other members, or other places for them, by the elasticity policy or by hand."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Fenced:
    """The old generation can do nothing more: its survivors are out of the user's function."""

    passage: int


@dataclass(frozen=True)
class RecoveryStepPicked:
    """The newest step of which every range is held somewhere."""

    passage: int
    step: int


@dataclass(frozen=True)
class MembershipSettled:
    """Who takes part in the next generation."""

    passage: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class StopWanted:
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
    | FaultNoticed
    | FaultFatal
    | ResizeWanted
    | Fenced
    | RecoveryStepPicked
    | MembershipSettled
    | StopWanted
    | TrainingStopped
    | StopTimedOut
)

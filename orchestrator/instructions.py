"""What the machine tells the controller to do. The controller answers each with an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class PlaceWorkers:
    """Reserve resources and start the workers; then WorkersPlaced or FaultFatal."""


@dataclass(frozen=True)
class FormGeneration:
    """Open a store on a live worker and give every member its rank; then GenerationFormed."""

    generation: int
    passage: int


@dataclass(frozen=True)
class DrainGeneration:
    """Unwind the users' functions at the end of a step, nobody being lost; then Fenced."""

    passage: int


@dataclass(frozen=True)
class FenceGeneration:
    """Make sure that the generation can do nothing more, whatever state it is in; then Fenced."""

    passage: int


@dataclass(frozen=True)
class PickRecoveryStep:
    """Find the newest step of which every range is held; then RecoveryStepPicked."""

    passage: int


@dataclass(frozen=True)
class SettleMembership:
    """Survivors plus ready spares and newcomers; then MembershipSettled."""

    passage: int


@dataclass(frozen=True)
class TidyUp:
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
    | TidyUp
    | DrainGeneration
    | FenceGeneration
    | PickRecoveryStep
    | SettleMembership
    | StopTraining
    | ReleaseWorkers
    | WriteSummary
)

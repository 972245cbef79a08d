"""The states of a job as data: which event leads from which state to which, and what to do then.

`apply_event` is pure. A (state, event) pair without a row in `TABLE` is a bug in the controller.

Policies classify each fault before the machine gets it, as FaultRecoverable or FaultFatal.
`control/reconfigure.py` leads the job from one generation to the next, and posts GenerationFormed.
An event with a `generation` is dropped by the controller once a newer generation exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias, get_args

from rayzero.engine.errors import RayzeroError


class State(StrEnum):
    PENDING = "pending"
    """Accepted; nothing was asked of the cluster yet."""
    STARTING = "starting"
    """Waiting for resources, for the workers' processes, and for their first process group."""
    RUNNING = "running"
    """Every member of the generation is in the user's function."""
    RESIZING = "resizing"
    """Between two generations because the membership changes on request."""
    RECOVERING = "recovering"
    """Between two generations because a worker was lost."""
    STOPPING = "stopping"
    """The user's functions are being unwound on request."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({State.SUCCEEDED, State.FAILED, State.STOPPED})


@dataclass(frozen=True)
class Submitted:
    """The job was accepted."""


@dataclass(frozen=True)
class GenerationFound:
    """The job trains already: this controller takes over the generation of a lost controller."""

    generation: int


@dataclass(frozen=True)
class WorkersPlaced:
    """The workers' processes are alive and respond."""


@dataclass(frozen=True)
class GenerationFormed:
    """Every member joined the generation's process group and continues to the user's function."""

    generation: int


@dataclass(frozen=True)
class AllFinished:
    """The user's function returned on every rank, and all pinned steps are stored."""

    generation: int


@dataclass(frozen=True)
class FaultRecoverable:
    """A fault the job survives, by the failure policy."""

    generation: int


@dataclass(frozen=True)
class FaultFatal:
    """A fault that ends the job, by the failure policy; or the job cannot start."""

    error: RayzeroError


@dataclass(frozen=True)
class ResizeRequested:
    """The elasticity policy or a user's command asks for other members, or for other nodes for
    them."""

    generation: int
    reason: str


@dataclass(frozen=True)
class StopRequested:
    """The user wants the job to end: Ctrl-C, SIGTERM, `stop()`."""


@dataclass(frozen=True)
class TrainingStopped:
    """Every user's function was unwound, and a last checkpoint is written if one was due."""


@dataclass(frozen=True)
class StopTimedOut:
    """The time limit of a stop has passed; processes that still run will be killed."""


Event: TypeAlias = (
    Submitted
    | GenerationFound
    | WorkersPlaced
    | GenerationFormed
    | AllFinished
    | FaultRecoverable
    | FaultFatal
    | ResizeRequested
    | StopRequested
    | TrainingStopped
    | StopTimedOut
)
EventType: TypeAlias = type[Event]
EVENTS: Final[tuple[EventType, ...]] = get_args(Event)


class Instruction(StrEnum):
    """A task for the controller, which posts the events named here when the task is done."""

    PLACE_WORKERS = "place workers"
    """Reserve resources and start the workers; then WorkersPlaced or FaultFatal."""
    RESUME_WORKERS = "resume workers"
    """Listen to the workers that were found; FaultRecoverable if some of them are lost."""
    FORM_GENERATION = "form generation"
    """Begin the first generation; then GenerationFormed."""
    RECOVER = "recover"
    """Fence the generation and form the next one; then GenerationFormed."""
    RESIZE = "resize"
    """Drain the generation and form the next one; then GenerationFormed."""
    RELEASE_NOT_CHOSEN = "release not chosen"
    """End the workers that the formed generation does not need."""
    STOP_TRAINING = "stop training"
    """Unwind every worker, write a last checkpoint if checkpoints are on; then TrainingStopped or
    StopTimedOut."""
    RELEASE_WORKERS = "release workers"
    """End the workers' processes and free the resources. Always the last or next to last."""
    WRITE_SUMMARY = "write summary"
    """Compute the summary of the run, which is written once the controller has ended."""


class Transition(NamedTuple):
    """The next state, and the instructions in order. An ignored event leads to the same state."""

    next_state: State
    instructions: tuple[Instruction, ...] = ()


class IllegalEventError(RayzeroError):
    """An event that cannot happen in this state: a bug in the controller, never a user's."""


_SUCCEED = Transition(State.SUCCEEDED, (Instruction.RELEASE_WORKERS, Instruction.WRITE_SUMMARY))
_FAIL = Transition(State.FAILED, (Instruction.RELEASE_WORKERS,))
_STOPPED = Transition(State.STOPPED, (Instruction.RELEASE_WORKERS,))
_STOP = Transition(State.STOPPING, (Instruction.STOP_TRAINING,))
_RECOVER = Transition(State.RECOVERING, (Instruction.RECOVER,))
_RUN = Transition(State.RUNNING, (Instruction.RELEASE_NOT_CHOSEN,))

TABLE: Final[dict[tuple[State, EventType], Transition]] = {
    (State.PENDING, Submitted): Transition(State.STARTING, (Instruction.PLACE_WORKERS,)),
    (State.PENDING, GenerationFound): Transition(State.RUNNING, (Instruction.RESUME_WORKERS,)),
    (State.PENDING, StopRequested): Transition(State.STOPPED),
    (State.PENDING, FaultFatal): Transition(State.FAILED),
    (State.STARTING, WorkersPlaced): Transition(State.STARTING, (Instruction.FORM_GENERATION,)),
    (State.STARTING, GenerationFormed): _RUN,
    (State.STARTING, FaultRecoverable): _RECOVER,
    (State.STARTING, FaultFatal): _FAIL,
    (State.STARTING, StopRequested): _STOPPED,
    (State.RUNNING, AllFinished): _SUCCEED,
    (State.RUNNING, FaultRecoverable): _RECOVER,
    (State.RUNNING, FaultFatal): _FAIL,
    (State.RUNNING, ResizeRequested): Transition(State.RESIZING, (Instruction.RESIZE,)),
    (State.RUNNING, StopRequested): _STOP,
    (State.RESIZING, GenerationFormed): _RUN,
    (State.RESIZING, AllFinished): _SUCCEED,
    (State.RESIZING, FaultRecoverable): _RECOVER,
    (State.RESIZING, FaultFatal): _FAIL,
    (State.RESIZING, StopRequested): _STOP,
    # Ignored, here and below: the event was posted in an earlier state.
    (State.RESIZING, ResizeRequested): Transition(State.RESIZING),  # members are selected later
    (State.RECOVERING, GenerationFormed): _RUN,
    (State.RECOVERING, FaultRecoverable): _RECOVER,  # a further fault: recovery begins again
    (State.RECOVERING, FaultFatal): _FAIL,
    (State.RECOVERING, StopRequested): _STOP,
    (State.RECOVERING, ResizeRequested): Transition(State.RECOVERING),
    (State.RECOVERING, AllFinished): Transition(State.RECOVERING),
    # A fault during a stop changes nothing: the last checkpoint is written from mirrored steps.
    (State.STOPPING, TrainingStopped): _STOPPED,
    (State.STOPPING, StopTimedOut): _STOPPED,
    (State.STOPPING, AllFinished): _SUCCEED,
    (State.STOPPING, FaultFatal): _STOPPED,
    (State.STOPPING, GenerationFormed): Transition(State.STOPPING),
    (State.STOPPING, FaultRecoverable): Transition(State.STOPPING),
    (State.STOPPING, ResizeRequested): Transition(State.STOPPING),
    (State.STOPPING, StopRequested): Transition(State.STOPPING),
    **{(state, event): Transition(state) for state in FINAL_STATES for event in EVENTS},
}


def apply_event(state: State, event: Event) -> Transition:
    """Returns the next state, and the instructions in order. Raises IllegalEventError if the event
    cannot happen in this state."""
    transition = TABLE.get((state, type(event)))
    if transition is None:
        raise IllegalEventError(f"{type(event).__name__} in state {state}: {event!r}")
    return transition

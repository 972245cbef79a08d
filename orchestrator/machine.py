"""The life of a job as data: which event leads from which state to which, and what to do then.

`handle` is pure. Every (state, event) pair has an answer: a row, "ignored" (the event can come
late, and then means nothing), or "illegal" (the controller has a bug).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Final, TypeAlias, get_args

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import events as do
from rayzero.orchestrator import events as ev
from rayzero.orchestrator.events import FINAL_STATES, JobState, State

EventType: TypeAlias = type[ev.Event]
InstructionType: TypeAlias = type[do.Instruction]
StateEventPair: TypeAlias = tuple[State, EventType]


class NoTransition(Enum):
    """What a pair without a row means."""

    IGNORED = "ignored"
    ILLEGAL = "illegal"


@dataclass(frozen=True)
class Transition:
    """One transition.

    Args:
        to: the next state.
        orders: the instructions, in order; what they carry is the new state's.
        opens: whether a new generation begins.
        departs: whether the job sets out for one, on a new passage.
    """

    next_state: State
    instructions: tuple[InstructionType, ...] = ()
    new_generation: bool = False
    starts_attempt: bool = False


class IllegalEventError(RayzeroError):
    """An event that cannot happen in this state: a bug in the controller, never a user's."""


EVENTS: Final[tuple[EventType, ...]] = get_args(ev.Event)

_SUCCEED = Transition(State.SUCCEEDED, (do.ReleaseWorkers, do.WriteSummary))
_FAIL = Transition(State.FAILED, (do.ReleaseWorkers,))
_STOPPED = Transition(State.STOPPED, (do.ReleaseWorkers,))
_STOP = Transition(State.STOPPING, (do.StopTraining,))
_RECOVER = Transition(State.RECOVERING, (do.FenceGeneration,), starts_attempt=True)
_RUN = Transition(State.RUNNING, (do.ReleaseNotChosen,))


def _reconfigure_rows(state: State) -> dict[StateEventPair, Transition]:
    """To the next generation: the same whether it is the first, a worker came, or one was lost."""
    return {
        (state, ev.RecoveryStepSelected): Transition(state, (do.SelectMembers,)),
        (state, ev.MembersSelected): Transition(state, (do.FormGeneration,), new_generation=True),
        (state, ev.GenerationFormed): _RUN,
        (state, ev.FaultRecoverable): _RECOVER,  # a loss on the way begins the way again
        (state, ev.FaultFatal): _FAIL,
    }


TABLE: Final[dict[StateEventPair, Transition]] = {
    (State.PENDING, ev.Submitted): Transition(State.STARTING, (do.PlaceWorkers,)),
    (State.PENDING, ev.StopRequested): Transition(State.STOPPED),
    (State.PENDING, ev.FaultFatal): Transition(State.FAILED),
    # There is nothing to fence yet; the step to begin at may be a checkpoint's.
    **_reconfigure_rows(State.STARTING),
    (State.STARTING, ev.WorkersPlaced): Transition(
        State.STARTING, (do.SelectRecoveryStep,), starts_attempt=True
    ),
    (State.STARTING, ev.StopRequested): _STOPPED,
    (State.RUNNING, ev.AllFinished): _SUCCEED,
    (State.RUNNING, ev.FaultRecoverable): _RECOVER,
    (State.RUNNING, ev.FaultFatal): _FAIL,
    (State.RUNNING, ev.ResizeRequested): Transition(
        State.RESIZING, (do.DrainGeneration,), starts_attempt=True
    ),
    (State.RUNNING, ev.StopRequested): _STOP,
    **_reconfigure_rows(State.RESIZING),
    (State.RESIZING, ev.Fenced): Transition(State.RESIZING, (do.SelectRecoveryStep,)),
    (State.RESIZING, ev.AllFinished): _SUCCEED,
    (State.RESIZING, ev.StopRequested): _STOP,
    **_reconfigure_rows(State.RECOVERING),
    (State.RECOVERING, ev.Fenced): Transition(State.RECOVERING, (do.SelectRecoveryStep,)),
    (State.RECOVERING, ev.StopRequested): _STOP,
    # A fault on the way to the end costs nothing: what is mirrored is what can be kept.
    (State.STOPPING, ev.TrainingStopped): _STOPPED,
    (State.STOPPING, ev.StopTimedOut): _STOPPED,
    (State.STOPPING, ev.AllFinished): _SUCCEED,
    (State.STOPPING, ev.FaultFatal): _STOPPED,
}

# What can still be under way when a state was left, and then comes too late to matter.
_IGNORED_LATE: Final[dict[State, tuple[EventType, ...]]] = {
    State.PENDING: (),
    State.STARTING: (),
    State.RUNNING: (),
    State.RESIZING: (ev.ResizeRequested,),  # membership is settled after the drain anyway
    State.RECOVERING: (ev.ResizeRequested, ev.AllFinished),
    State.STOPPING: (
        ev.GenerationFormed,
        ev.FaultRecoverable,
        ev.ResizeRequested,
        ev.Fenced,
        ev.RecoveryStepSelected,
        ev.MembersSelected,
        ev.StopRequested,
    ),
    **dict.fromkeys(FINAL_STATES, EVENTS),
}


def find_transition(state: State, event: EventType) -> Transition | NoTransition:
    """What the table says about one pair."""
    row = TABLE.get((state, event))
    if row is not None:
        return row
    return NoTransition.IGNORED if event in _IGNORED_LATE[state] else NoTransition.ILLEGAL


def apply_event(job: JobState, event: ev.Event) -> tuple[JobState, tuple[do.Instruction, ...]]:
    """The next state, and what to do, in order.

    An event about an older generation or passage than the job's changes nothing, in any state.

    Raises:
        IllegalEventError: the event cannot happen in this state.
    """
    if any(getattr(event, what, newest) < newest for what, newest in _current_numbers(job).items()):
        return job, ()
    found = find_transition(job.state, type(event))
    if found is NoTransition.IGNORED:
        return job, ()
    if not isinstance(found, Transition):
        raise IllegalEventError(f"{type(event).__name__} in state {job.state}: {event!r}")
    after = JobState(
        found.next_state, job.generation + found.new_generation, job.attempt + found.starts_attempt
    )
    return after, tuple(_instantiate(order, after) for order in found.instructions)


def all_transitions() -> Iterator[tuple[State, EventType, Transition | NoTransition]]:
    """Every pair with its answer: for the tests and the state table of the documentation."""
    for state in State:
        for event in EVENTS:
            yield state, event, find_transition(state, event)


def _current_numbers(job: JobState) -> dict[str, int]:
    return {"generation": job.generation, "attempt": job.attempt}


def _instantiate(order: InstructionType, job: JobState) -> do.Instruction:
    carried = {field.name for field in fields(order)}
    return order(**{what: n for what, n in _current_numbers(job).items() if what in carried})

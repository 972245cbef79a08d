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
from rayzero.orchestrator import events as ev
from rayzero.orchestrator import instructions as do
from rayzero.orchestrator.states import FINAL, JobState, State

EventType: TypeAlias = type[ev.Event]
Order: TypeAlias = type[do.Instruction]
Pair: TypeAlias = tuple[State, EventType]


class Answer(Enum):
    """What a pair without a row means."""

    IGNORED = "ignored"
    ILLEGAL = "illegal"


@dataclass(frozen=True)
class Row:
    """One transition.

    Args:
        to: the next state.
        orders: the instructions, in order; what they carry is the new state's.
        opens: whether a new generation begins.
        departs: whether the job sets out for one, on a new passage.
    """

    to: State
    orders: tuple[Order, ...] = ()
    opens: bool = False
    departs: bool = False


class IllegalEventError(RayzeroError):
    """An event that cannot happen in this state: a bug in the controller, never a user's."""


EVENTS: Final[tuple[EventType, ...]] = get_args(ev.Event)

_SUCCEED = Row(State.SUCCEEDED, (do.ReleaseWorkers, do.WriteSummary))
_FAIL = Row(State.FAILED, (do.ReleaseWorkers,))
_STOPPED = Row(State.STOPPED, (do.ReleaseWorkers,))
_STOP = Row(State.STOPPING, (do.StopTraining,))
_RECOVER = Row(State.RECOVERING, (do.FenceGeneration,), departs=True)
_RUN = Row(State.RUNNING, (do.TidyUp,))


def _way_on(state: State) -> dict[Pair, Row]:
    """To the next generation: the same whether it is the first, a worker came, or one was lost."""
    return {
        (state, ev.RecoveryStepPicked): Row(state, (do.SettleMembership,)),
        (state, ev.MembershipSettled): Row(state, (do.FormGeneration,), opens=True),
        (state, ev.GenerationFormed): _RUN,
        (state, ev.FaultNoticed): _RECOVER,  # a loss on the way begins the way again
        (state, ev.FaultFatal): _FAIL,
    }


TABLE: Final[dict[Pair, Row]] = {
    (State.PENDING, ev.Submitted): Row(State.STARTING, (do.PlaceWorkers,)),
    (State.PENDING, ev.StopWanted): Row(State.STOPPED),
    (State.PENDING, ev.FaultFatal): Row(State.FAILED),
    # There is nothing to fence yet; the step to begin at may be a checkpoint's.
    **_way_on(State.STARTING),
    (State.STARTING, ev.WorkersPlaced): Row(State.STARTING, (do.PickRecoveryStep,), departs=True),
    (State.STARTING, ev.StopWanted): _STOPPED,
    (State.RUNNING, ev.AllFinished): _SUCCEED,
    (State.RUNNING, ev.FaultNoticed): _RECOVER,
    (State.RUNNING, ev.FaultFatal): _FAIL,
    (State.RUNNING, ev.ResizeWanted): Row(State.RESIZING, (do.DrainGeneration,), departs=True),
    (State.RUNNING, ev.StopWanted): _STOP,
    **_way_on(State.RESIZING),
    (State.RESIZING, ev.Fenced): Row(State.RESIZING, (do.PickRecoveryStep,)),
    (State.RESIZING, ev.AllFinished): _SUCCEED,
    (State.RESIZING, ev.StopWanted): _STOP,
    **_way_on(State.RECOVERING),
    (State.RECOVERING, ev.Fenced): Row(State.RECOVERING, (do.PickRecoveryStep,)),
    (State.RECOVERING, ev.StopWanted): _STOP,
    # A fault on the way to the end costs nothing: what is mirrored is what can be kept.
    (State.STOPPING, ev.TrainingStopped): _STOPPED,
    (State.STOPPING, ev.StopTimedOut): _STOPPED,
    (State.STOPPING, ev.AllFinished): _SUCCEED,
    (State.STOPPING, ev.FaultFatal): _STOPPED,
}

# What can still be under way when a state was left, and then comes too late to matter.
_LATE: Final[dict[State, tuple[EventType, ...]]] = {
    State.PENDING: (),
    State.STARTING: (),
    State.RUNNING: (),
    State.RESIZING: (ev.ResizeWanted,),  # membership is settled after the drain anyway
    State.RECOVERING: (ev.ResizeWanted, ev.AllFinished),
    State.STOPPING: (
        ev.GenerationFormed,
        ev.FaultNoticed,
        ev.ResizeWanted,
        ev.Fenced,
        ev.RecoveryStepPicked,
        ev.MembershipSettled,
        ev.StopWanted,
    ),
    **dict.fromkeys(FINAL, EVENTS),
}


def answer(state: State, event: EventType) -> Row | Answer:
    """What the table says about one pair."""
    row = TABLE.get((state, event))
    if row is not None:
        return row
    return Answer.IGNORED if event in _LATE[state] else Answer.ILLEGAL


def handle(job: JobState, event: ev.Event) -> tuple[JobState, tuple[do.Instruction, ...]]:
    """The next state, and what to do, in order.

    An event about an older generation or passage than the job's changes nothing, in any state.

    Raises:
        IllegalEventError: the event cannot happen in this state.
    """
    if any(getattr(event, what, newest) < newest for what, newest in _numbers(job).items()):
        return job, ()
    found = answer(job.state, type(event))
    if found is Answer.IGNORED:
        return job, ()
    if not isinstance(found, Row):
        raise IllegalEventError(f"{type(event).__name__} in state {job.state}: {event!r}")
    after = JobState(found.to, job.generation + found.opens, job.passage + found.departs)
    return after, tuple(_filled(order, after) for order in found.orders)


def rows() -> Iterator[tuple[State, EventType, Row | Answer]]:
    """Every pair with its answer: for the tests and the state table of the documentation."""
    for state in State:
        for event in EVENTS:
            yield state, event, answer(state, event)


def _numbers(job: JobState) -> dict[str, int]:
    return {"generation": job.generation, "passage": job.passage}


def _filled(order: Order, job: JobState) -> do.Instruction:
    carried = {field.name for field in fields(order)}
    return order(**{what: n for what, n in _numbers(job).items() if what in carried})

"""The life of a job as data: which event leads from which state to which, and what to do then.

`handle` is pure. Every (state, event) pair has an answer: a row, "ignored" (the event can come
late, and then means nothing), or "illegal" (the controller has a bug).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
        orders: the instructions, in order; those that carry a generation get the state's new one.
        opens: whether a new generation begins.
    """

    to: State
    orders: tuple[Order, ...] = ()
    opens: bool = False


class IllegalEventError(RayzeroError):
    """An event that cannot happen in this state: a bug in the controller, never a user's."""


EVENTS: Final[tuple[EventType, ...]] = get_args(ev.Event)

_SUCCEED = Row(State.SUCCEEDED, (do.ReleaseWorkers, do.WriteSummary))
_FAIL = Row(State.FAILED, (do.ReleaseWorkers,))
_STOPPED = Row(State.STOPPED, (do.ReleaseWorkers,))
_STOP = Row(State.STOPPING, (do.StopTraining,))
_RECOVER = Row(State.RECOVERING, (do.FenceGeneration,))
_NEW_GENERATION = (do.FormGeneration,)

TABLE: Final[dict[Pair, Row]] = {
    (State.PENDING, ev.Submitted): Row(State.STARTING, (do.PlaceWorkers,)),
    (State.PENDING, ev.StopWanted): Row(State.STOPPED),
    (State.PENDING, ev.FaultFatal): Row(State.FAILED),
    # Nothing is trained yet, so a worker lost now costs a new start and no state.
    (State.STARTING, ev.WorkersPlaced): Row(State.STARTING, _NEW_GENERATION, opens=True),
    (State.STARTING, ev.GenerationFormed): Row(State.RUNNING),
    (State.STARTING, ev.FaultNoticed): Row(State.STARTING, (do.ReleaseWorkers, do.PlaceWorkers)),
    (State.STARTING, ev.FaultFatal): _FAIL,
    (State.STARTING, ev.StopWanted): _STOPPED,
    (State.RUNNING, ev.AllFinished): _SUCCEED,
    (State.RUNNING, ev.FaultNoticed): _RECOVER,
    (State.RUNNING, ev.FaultFatal): _FAIL,
    (State.RUNNING, ev.ResizeWanted): Row(State.RESIZING, (do.DrainGeneration,)),
    (State.RUNNING, ev.StopWanted): _STOP,
    # By wish: drained at the end of a step, so there is no step to pick.
    (State.RESIZING, ev.Fenced): Row(State.RESIZING, (do.SettleMembership,)),
    (State.RESIZING, ev.MembershipSettled): Row(State.RESIZING, _NEW_GENERATION, opens=True),
    (State.RESIZING, ev.GenerationFormed): Row(State.RUNNING),
    (State.RESIZING, ev.AllFinished): _SUCCEED,
    (State.RESIZING, ev.FaultNoticed): _RECOVER,
    (State.RESIZING, ev.FaultFatal): _FAIL,
    (State.RESIZING, ev.StopWanted): _STOP,
    # A second loss on the way back begins the way back again.
    (State.RECOVERING, ev.Fenced): Row(State.RECOVERING, (do.PickRecoveryStep,)),
    (State.RECOVERING, ev.RecoveryStepPicked): Row(State.RECOVERING, (do.SettleMembership,)),
    (State.RECOVERING, ev.MembershipSettled): Row(State.RECOVERING, _NEW_GENERATION, opens=True),
    (State.RECOVERING, ev.GenerationFormed): Row(State.RUNNING),
    (State.RECOVERING, ev.FaultNoticed): _RECOVER,
    (State.RECOVERING, ev.FaultFatal): _FAIL,
    (State.RECOVERING, ev.StopWanted): _STOP,
    (State.STOPPING, ev.TrainingStopped): _STOPPED,
    (State.STOPPING, ev.StopTimedOut): _STOPPED,
    (State.STOPPING, ev.AllFinished): _SUCCEED,
    (State.STOPPING, ev.FaultNoticed): _STOPPED,
    (State.STOPPING, ev.FaultFatal): _STOPPED,
}

# What can still be under way when a state was left, and then comes too late to matter.
_LATE: Final[dict[State, tuple[EventType, ...]]] = {
    State.PENDING: (),
    State.STARTING: (ev.ResizeWanted,),  # placement already takes what there is
    State.RUNNING: (),
    State.RESIZING: (ev.ResizeWanted,),  # membership is settled after the drain anyway
    State.RECOVERING: (ev.ResizeWanted, ev.AllFinished),
    State.STOPPING: (
        ev.GenerationFormed,
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

    An event about an older generation than the job's changes nothing, in any state.

    Raises:
        IllegalEventError: the event cannot happen in this state.
    """
    if getattr(event, "generation", job.generation) < job.generation:
        return job, ()
    found = answer(job.state, type(event))
    if found is Answer.IGNORED:
        return job, ()
    if not isinstance(found, Row):
        raise IllegalEventError(f"{type(event).__name__} in state {job.state}: {event!r}")
    after = JobState(found.to, job.generation + found.opens)
    return after, tuple(_filled(order, after.generation) for order in found.orders)


def rows() -> Iterator[tuple[State, EventType, Row | Answer]]:
    """Every pair with its answer: for the tests and the state table of the documentation."""
    for state in State:
        for event in EVENTS:
            yield state, event, answer(state, event)


def _filled(order: Order, generation: int) -> do.Instruction:
    if order is do.FormGeneration or order is do.DrainGeneration or order is do.FenceGeneration:
        return order(generation)
    return order()  # type: ignore[call-arg]  # the orders left carry nothing

"""The transition table, whole: every (state, event) pair, and what no path may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import events as ev
from rayzero.orchestrator import instructions as do
from rayzero.orchestrator.machine import EVENTS, Answer, IllegalEventError, Row, handle, rows
from rayzero.orchestrator.states import FINAL, JobState, State

EXAMPLES: dict[type[ev.Event], ev.Event] = {
    ev.Submitted: ev.Submitted(),
    ev.WorkersPlaced: ev.WorkersPlaced(),
    ev.GenerationFormed: ev.GenerationFormed(1),
    ev.AllFinished: ev.AllFinished(1),
    ev.FaultNoticed: ev.FaultNoticed(1, (0,)),
    ev.FaultFatal: ev.FaultFatal(RayzeroError("it broke")),
    ev.ResizeWanted: ev.ResizeWanted(3),
    ev.Fenced: ev.Fenced(1),
    ev.RecoveryStepPicked: ev.RecoveryStepPicked(7),
    ev.MembershipSettled: ev.MembershipSettled((0, 1)),
    ev.StopWanted: ev.StopWanted(),
    ev.TrainingStopped: ev.TrainingStopped(),
    ev.StopTimedOut: ev.StopTimedOut(),
}
GENERATIONS_BEFORE = {State.PENDING: 0}

# A column for each event; a row for each state. `-` ignored, `!` illegal, else the next state.
SHORT = {
    "P": State.PENDING,
    "ST": State.STARTING,
    "R": State.RUNNING,
    "RS": State.RESIZING,
    "RC": State.RECOVERING,
    "SP": State.STOPPING,
    "OK": State.SUCCEEDED,
    "F": State.FAILED,
    "X": State.STOPPED,
}
WANTED = """
     Submitted WorkersPlaced GenerationFormed AllFinished FaultNoticed FaultFatal ResizeWanted \
     Fenced RecoveryStepPicked MembershipSettled StopWanted TrainingStopped StopTimedOut
P    ST !  !  !  !  F  !  !  !  !  X  !  !
ST   !  ST R  !  ST F  -  !  !  !  X  !  !
R    !  !  !  OK RC F  RS !  !  !  SP !  !
RS   !  !  R  OK RC F  -  RS !  RS SP !  !
RC   !  !  R  -  RC F  -  RC RC RC SP !  !
SP   !  !  -  OK X  X  -  -  -  -  -  X  X
OK   -  -  -  -  -  -  -  -  -  -  -  -  -
F    -  -  -  -  -  -  -  -  -  -  -  -  -
X    -  -  -  -  -  -  -  -  -  -  -  -  -
"""


def wanted() -> dict[tuple[State, str], str]:
    header, *lines = WANTED.strip().splitlines()
    names = header.split()
    cells = {}
    for line in lines:
        state, *answers = line.split()
        assert len(answers) == len(names)
        for name, answer in zip(names, answers, strict=True):
            cells[SHORT[state], name] = answer
    return cells


def test_every_pair_has_the_answer_of_the_table_above():
    seen = {}
    for state, event, answer in rows():
        if isinstance(answer, Row):
            mark = next(short for short, full in SHORT.items() if full is answer.to)
        else:
            mark = "-" if answer is Answer.IGNORED else "!"
        seen[state, event.__name__] = mark
    assert seen == wanted()


def test_every_event_has_an_example():
    assert set(EXAMPLES) == set(EVENTS)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", EVENTS)
def test_handle_does_what_the_table_says(state: State, event: type[ev.Event]):
    job = JobState(state, generation=0 if state is State.PENDING else 1)
    answer = next(a for s, e, a in rows() if (s, e) == (state, event))
    if answer is Answer.ILLEGAL:
        with pytest.raises(IllegalEventError, match=event.__name__):
            handle(job, EXAMPLES[event])
        return
    after, orders = handle(job, EXAMPLES[event])
    if isinstance(answer, Row):
        assert after == JobState(answer.to, job.generation + answer.opens)
        assert [type(order) for order in orders] == list(answer.orders)
        for order in orders:
            assert getattr(order, "generation", after.generation) == after.generation
    else:
        assert (after, orders) == (job, ())


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize(
    "event", [ev.GenerationFormed(1), ev.AllFinished(1), ev.FaultNoticed(1, (0,)), ev.Fenced(1)]
)
def test_news_of_an_old_generation_changes_nothing(state: State, event: ev.Event):
    job = JobState(state, generation=2)
    assert handle(job, event) == (job, ())


def play(job: JobState, *events: ev.Event) -> tuple[JobState, list[do.Instruction]]:
    orders: list[do.Instruction] = []
    for event in events:
        job, more = handle(job, event)
        orders += more
    return job, orders


def test_a_job_from_submission_to_success():
    job, orders = play(
        JobState(), ev.Submitted(), ev.WorkersPlaced(), ev.GenerationFormed(1), ev.AllFinished(1)
    )
    assert job == JobState(State.SUCCEEDED, 1)
    assert orders == [
        do.PlaceWorkers(),
        do.FormGeneration(1),
        do.ReleaseWorkers(),
        do.WriteSummary(),
    ]


def test_the_way_back_from_a_lost_worker_and_from_a_second_one_on_the_way():
    job, orders = play(
        JobState(State.RUNNING, 1),
        ev.FaultNoticed(1, (1,)),
        ev.Fenced(1),
        ev.FaultNoticed(1, (2,)),
        ev.Fenced(1),
        ev.RecoveryStepPicked(41),
        ev.MembershipSettled((0, 3)),
        ev.GenerationFormed(1),  # late news of the old one
        ev.GenerationFormed(2),
    )
    assert job == JobState(State.RUNNING, 2)
    assert orders == [
        do.FenceGeneration(1),
        do.PickRecoveryStep(),
        do.FenceGeneration(1),
        do.PickRecoveryStep(),
        do.SettleMembership(),
        do.FormGeneration(2),
    ]


def test_a_resize_drains_and_forms_a_new_generation():
    job, orders = play(
        JobState(State.RUNNING, 1),
        ev.ResizeWanted(4),
        ev.Fenced(1),
        ev.MembershipSettled((0, 1, 2, 3)),
        ev.GenerationFormed(2),
    )
    assert job == JobState(State.RUNNING, 2)
    assert orders == [do.DrainGeneration(1), do.SettleMembership(), do.FormGeneration(2)]


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_on_no_path_are_workers_left_behind_or_generations_reused(path: list[type[ev.Event]]):
    """Workers that were placed are released before the end; generations only grow, by one."""
    job, held = JobState(), False
    for event in path:
        example = EXAMPLES[event]
        if hasattr(example, "generation"):
            example = type(example)(**{**vars(example), "generation": job.generation})
        try:
            after, orders = handle(job, example)
        except IllegalEventError:
            continue
        assert after.generation - job.generation in (0, 1)
        assert (after.generation > job.generation) == any(
            isinstance(order, do.FormGeneration) for order in orders
        )
        for order in orders:
            if isinstance(order, do.PlaceWorkers):
                assert not held
                held = True
            held = held and not isinstance(order, do.ReleaseWorkers)
        if job.state in FINAL:
            assert (after, orders) == (job, ())
        job = after
        assert not (held and job.state in FINAL)

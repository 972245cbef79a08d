"""The transition table, whole: every (state, event) pair, and what no path may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import machine
from rayzero.orchestrator.machine import FINAL_STATES, JobState, State
from rayzero.orchestrator.machine import (
    EVENTS,
    IllegalEventError,
    NoTransition,
    Transition,
    all_transitions,
    apply_event,
)

EXAMPLES: dict[type[machine.Event], machine.Event] = {
    machine.Submitted: machine.Submitted(),
    machine.WorkersPlaced: machine.WorkersPlaced(),
    machine.GenerationFormed: machine.GenerationFormed(1, 1),
    machine.AllFinished: machine.AllFinished(1),
    machine.FaultRecoverable: machine.FaultRecoverable(1, (0,)),
    machine.FaultFatal: machine.FaultFatal(RayzeroError("it broke")),
    machine.ResizeRequested: machine.ResizeRequested(1, "more workers"),
    machine.Fenced: machine.Fenced(1),
    machine.RecoveryStepSelected: machine.RecoveryStepSelected(1, 7),
    machine.MembersSelected: machine.MembersSelected(1, (0, 1)),
    machine.StopRequested: machine.StopRequested(),
    machine.TrainingStopped: machine.TrainingStopped(),
    machine.StopTimedOut: machine.StopTimedOut(),
}
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
     Submitted WorkersPlaced GenerationFormed AllFinished FaultRecoverable FaultFatal ResizeRequested \
     Fenced RecoveryStepSelected MembersSelected StopRequested TrainingStopped StopTimedOut
P    ST !  !  !  !  F  !  !  !  !  X  !  !
ST   !  ST R  !  RC F  !  !  ST ST X  !  !
R    !  !  !  OK RC F  RS !  !  !  SP !  !
RS   !  !  R  OK RC F  -  RS RS RS SP !  !
RC   !  !  R  -  RC F  -  RC RC RC SP !  !
SP   !  !  -  OK -  X  -  -  -  -  -  X  X
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
    for state, event, answer in all_transitions():
        if isinstance(answer, Transition):
            mark = next(short for short, full in SHORT.items() if full is answer.next_state)
        else:
            mark = "-" if answer is NoTransition.IGNORED else "!"
        seen[state, event.__name__] = mark
    assert seen == wanted()


def test_every_event_has_an_example():
    assert set(EXAMPLES) == set(EVENTS)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", EVENTS)
def test_handle_does_what_the_table_says(state: State, event: type[machine.Event]):
    begun = state is not State.PENDING
    job = JobState(state, generation=int(begun), attempt=int(begun))
    answer = next(a for s, e, a in all_transitions() if (s, e) == (state, event))
    if answer is NoTransition.ILLEGAL:
        with pytest.raises(IllegalEventError, match=event.__name__):
            apply_event(job, EXAMPLES[event])
        return
    after, orders = apply_event(job, EXAMPLES[event])
    if isinstance(answer, Transition):
        assert after.state is answer.next_state
        assert after.generation == job.generation + answer.new_generation
        assert after.attempt == job.attempt + answer.starts_attempt
        assert [type(order) for order in orders] == list(answer.instructions)
        for order in orders:
            assert getattr(order, "generation", after.generation) == after.generation
            assert getattr(order, "passage", after.attempt) == after.attempt
    else:
        assert (after, orders) == (job, ())


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize(
    "event",
    [
        machine.GenerationFormed(1, 5),
        machine.GenerationFormed(2, 4),
        machine.AllFinished(1),
        machine.FaultRecoverable(1, (0,)),
        machine.ResizeRequested(1, "more workers"),
        machine.Fenced(4),
        machine.RecoveryStepSelected(4, 7),
        machine.MembersSelected(4, (0,)),
    ],
)
def test_news_of_an_old_generation_or_passage_changes_nothing(state: State, event: machine.Event):
    job = JobState(state, generation=2, attempt=5)
    assert apply_event(job, event) == (job, ())


def play(job: JobState, *events: machine.Event) -> tuple[JobState, list[do.Instruction]]:
    orders: list[do.Instruction] = []
    for event in events:
        job, more = apply_event(job, event)
        orders += more
    return job, orders


def test_a_job_from_submission_to_success():
    job, orders = play(
        JobState(),
        machine.Submitted(),
        machine.WorkersPlaced(),
        machine.RecoveryStepSelected(1, 0),
        machine.MembersSelected(1, (0, 1)),
        machine.GenerationFormed(1, 1),
        machine.AllFinished(1),
    )
    assert job == JobState(State.SUCCEEDED, 1, 1)
    assert orders == [
        do.PlaceWorkers(),
        do.SelectRecoveryStep(1),
        do.SelectMembers(1),
        do.FormGeneration(1, 1),
        do.ReleaseNotChosen(),
        do.ReleaseWorkers(),
        do.WriteSummary(),
    ]


def test_the_way_back_from_a_lost_worker_and_from_a_second_one_on_the_way():
    job, orders = play(
        JobState(State.RUNNING, 1, 1),
        machine.FaultRecoverable(1, (1,)),
        machine.Fenced(2),
        machine.FaultRecoverable(1, (2,)),
        machine.RecoveryStepSelected(2, 41),  # of the way that was given up
        machine.Fenced(3),
        machine.RecoveryStepSelected(3, 41),
        machine.MembersSelected(3, (0, 3)),
        machine.GenerationFormed(1, 1),  # late news of the old one
        machine.GenerationFormed(2, 3),
    )
    assert job == JobState(State.RUNNING, 2, 3)
    assert orders == [
        do.FenceGeneration(2),
        do.SelectRecoveryStep(2),
        do.FenceGeneration(3),
        do.SelectRecoveryStep(3),
        do.SelectMembers(3),
        do.FormGeneration(2, 3),
        do.ReleaseNotChosen(),
    ]


def test_a_generation_that_is_fenced_while_it_forms_is_not_taken_for_formed():
    job, orders = play(
        JobState(State.RECOVERING, 2, 3),
        machine.FaultRecoverable(2, (0,)),
        machine.GenerationFormed(2, 3),
    )
    assert job == JobState(State.RECOVERING, 2, 4)
    assert orders == [do.FenceGeneration(4)]


def test_a_resize_drains_and_forms_a_new_generation():
    job, orders = play(
        JobState(State.RUNNING, 1, 1),
        machine.ResizeRequested(1, "more workers"),
        machine.Fenced(2),
        machine.RecoveryStepSelected(2, 9),
        machine.MembersSelected(2, (0, 1, 2, 3)),
        machine.GenerationFormed(2, 2),
    )
    assert job == JobState(State.RUNNING, 2, 2)
    assert orders == [
        do.DrainGeneration(2),
        do.SelectRecoveryStep(2),
        do.SelectMembers(2),
        do.FormGeneration(2, 2),
        do.ReleaseNotChosen(),
    ]


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_on_no_path_are_workers_left_behind_or_generations_reused(path: list[type[machine.Event]]):
    """Workers that were placed are released before the end; generations only grow, by one."""
    job, held = JobState(), False
    for event in path:
        example = EXAMPLES[event]
        numbers = {"generation": job.generation, "passage": job.attempt}
        now = {name: number for name, number in numbers.items() if hasattr(example, name)}
        example = type(example)(**{**vars(example), **now})
        try:
            after, orders = apply_event(job, example)
        except IllegalEventError:
            continue
        assert after.generation - job.generation in (0, 1)
        assert after.attempt - job.attempt in (0, 1)
        assert (after.generation > job.generation) == any(
            isinstance(order, do.FormGeneration) for order in orders
        )
        for order in orders:
            if isinstance(order, do.PlaceWorkers):
                assert not held
                held = True
            held = held and not isinstance(order, do.ReleaseWorkers)
        if job.state in FINAL_STATES:
            assert (after, orders) == (job, ())
        job = after
        assert not (held and job.state in FINAL_STATES)

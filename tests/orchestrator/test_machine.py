"""The transition table: every (state, event) pair, and invariants of random paths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator.machine import (
    EVENTS,
    FINAL_STATES,
    TABLE,
    AllFinished,
    Event,
    EventType,
    FaultFatal,
    FaultRecoverable,
    GenerationFormed,
    IllegalEventError,
    Instruction,
    ResizeRequested,
    State,
    StopRequested,
    StopTimedOut,
    Submitted,
    TrainingStopped,
    WorkersPlaced,
    apply_event,
)

EXAMPLES: dict[EventType, Event] = {
    Submitted: Submitted(),
    WorkersPlaced: WorkersPlaced(),
    GenerationFormed: GenerationFormed(1),
    AllFinished: AllFinished(1),
    FaultRecoverable: FaultRecoverable(1),
    FaultFatal: FaultFatal(RayzeroError("it broke")),
    ResizeRequested: ResizeRequested(1, "more workers"),
    StopRequested: StopRequested(),
    TrainingStopped: TrainingStopped(),
    StopTimedOut: StopTimedOut(),
}
# The table has a row for each state and a column for each event: `-` ignored, `!` illegal, or the
# next state.
ABBREVIATIONS = {
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
EXPECTED = """
     Submitted WorkersPlaced GenerationFormed AllFinished FaultRecoverable FaultFatal \
     ResizeRequested StopRequested TrainingStopped StopTimedOut
P    ST !  !  !  !  F  !  X  !  !
ST   !  ST R  !  RC F  !  X  !  !
R    !  !  !  OK RC F  RS SP !  !
RS   !  !  R  OK RC F  -  SP !  !
RC   !  !  R  -  RC F  -  SP !  !
SP   !  !  -  OK -  X  -  -  X  X
OK   -  -  -  -  -  -  -  -  -  -
F    -  -  -  -  -  -  -  -  -  -
X    -  -  -  -  -  -  -  -  -  -
"""


def expected_cells() -> dict[tuple[State, str], str]:
    header, *lines = EXPECTED.strip().splitlines()
    names = header.split()
    cells = {}
    for line in lines:
        state, *row = line.split()
        for name, cell in zip(names, row, strict=True):
            cells[ABBREVIATIONS[state], name] = cell
    return cells


def test_transition_table():
    actual = {}
    for state in State:
        for event in EVENTS:
            transition = TABLE.get((state, event))
            if transition is None:
                cell = "!"
            elif transition == (state, ()):
                cell = "-"
            else:
                cell = next(
                    abbreviation
                    for abbreviation, next_state in ABBREVIATIONS.items()
                    if next_state is transition.next_state
                )
            actual[state, event.__name__] = cell
    assert actual == expected_cells()


def test_every_event_has_example():
    assert set(EXAMPLES) == set(EVENTS)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", EVENTS)
def test_apply_event_follows_table(state: State, event: EventType):
    if (state, event) in TABLE:
        assert apply_event(state, EXAMPLES[event]) == TABLE[state, event]
    else:
        with pytest.raises(IllegalEventError, match=event.__name__):
            apply_event(state, EXAMPLES[event])


def replay(state: State, *events: Event) -> tuple[State, list[Instruction]]:
    instructions: list[Instruction] = []
    for event in events:
        state, next_instructions = apply_event(state, event)
        instructions += next_instructions
    return state, instructions


def test_job_from_submission_to_success():
    path = (Submitted(), WorkersPlaced(), GenerationFormed(1), AllFinished(1))
    assert replay(State.PENDING, *path) == (
        State.SUCCEEDED,
        [
            Instruction.PLACE_WORKERS,
            Instruction.FORM_GENERATION,
            Instruction.RELEASE_NOT_CHOSEN,
            Instruction.RELEASE_WORKERS,
            Instruction.WRITE_SUMMARY,
        ],
    )


def test_second_fault_restarts_recovery():
    path = (FaultRecoverable(1), FaultRecoverable(1), GenerationFormed(2))
    assert replay(State.RUNNING, *path) == (
        State.RUNNING,
        [Instruction.RECOVER, Instruction.RECOVER, Instruction.RELEASE_NOT_CHOSEN],
    )


def test_fault_during_resize_turns_it_into_recovery():
    path = (ResizeRequested(1, "more workers"), FaultRecoverable(1), GenerationFormed(2))
    assert replay(State.RUNNING, *path) == (
        State.RUNNING,
        [Instruction.RESIZE, Instruction.RECOVER, Instruction.RELEASE_NOT_CHOSEN],
    )


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_workers_are_released_on_every_path(path: list[EventType]):
    """Placed workers are released before a final state, and final states do not change."""
    state, placed = State.PENDING, False
    for event in path:
        try:
            after, instructions = apply_event(state, EXAMPLES[event])
        except IllegalEventError:
            continue
        for instruction in instructions:
            if instruction is Instruction.PLACE_WORKERS:
                assert not placed
                placed = True
            placed = placed and instruction is not Instruction.RELEASE_WORKERS
        if state in FINAL_STATES:
            assert (after, instructions) == (state, ())
        state = after
        assert not (placed and state in FINAL_STATES)

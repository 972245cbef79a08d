"""The transition table: every (state, event) pair, and invariants of random paths."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.engine.errors import RayzeroError
from rayzero.orchestrator import machine
from rayzero.orchestrator.machine import (
    EVENTS,
    FINAL_STATES,
    TABLE,
    Event,
    EventType,
    IllegalEventError,
    Instruction,
    State,
    apply_event,
)

EXAMPLES: dict[EventType, Event] = {
    **{kind: kind() for kind in EVENTS if not dataclasses.fields(kind)},
    **{
        kind: kind(1)
        for kind in (machine.GenerationFormed, machine.GenerationFound, machine.AllFinished)
    },
    machine.FaultRecoverable: machine.FaultRecoverable(1),
    machine.FaultFatal: machine.FaultFatal(RayzeroError("it broke")),
    machine.ResizeRequested: machine.ResizeRequested(1, "more workers"),
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
     Submitted GenerationFound WorkersPlaced GenerationFormed AllFinished FaultRecoverable \
     FaultFatal ResizeRequested StopRequested TrainingStopped StopTimedOut
P    ST R  !  !  !  !  F  !  X  !  !
ST   !  !  ST R  !  RC F  !  X  !  !
R    !  !  !  !  OK RC F  RS SP !  !
RS   !  !  !  R  OK RC F  -  SP !  !
RC   !  !  !  R  -  RC F  -  SP !  !
SP   !  !  !  -  OK -  X  -  -  X  X
OK   -  -  -  -  -  -  -  -  -  -  -
F    -  -  -  -  -  -  -  -  -  -  -
X    -  -  -  -  -  -  -  -  -  -  -
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


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("event", EVENTS)
def test_transition(state: State, event: EventType):
    cell = expected_cells()[state, event.__name__]
    if cell == "!":
        with pytest.raises(IllegalEventError, match=event.__name__):
            apply_event(state, EXAMPLES[event])
        return
    after = apply_event(state, EXAMPLES[event])
    assert after == TABLE[state, event]
    assert (after == (state, ())) == (cell == "-")
    assert after.next_state is ABBREVIATIONS.get(cell, state)


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
            if instruction in (Instruction.PLACE_WORKERS, Instruction.RESUME_WORKERS):
                assert not placed
                placed = True
            placed = placed and instruction is not Instruction.RELEASE_WORKERS
        if state in FINAL_STATES:
            assert (after, instructions) == (state, ())
        state = after
        assert not (placed and state in FINAL_STATES)

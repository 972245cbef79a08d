"""Which state an engine that survives a generation still holds for the next one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayzero.workers.messages import InProcessStateInfo
from rayzero.workers.retained_state import why_not_held
from rayzero.workers.vault.records import Restore, SlotRef
from tests.workers.support import ASSIGN


def restore_of(step: int, *generations: int) -> Restore:
    slots = (SlotRef(generation, rank, step, "") for rank, generation in enumerate(generations))
    return Restore(step, tuple(slots))


LEFT = InProcessStateInfo(7, False, 3, 2)
MADE = replace(ASSIGN, generation=3, restore=restore_of(4, 2, 2))
LOADED_ONLY = replace(ASSIGN, generation=3, restore=restore_of(7, 2, 2))
SELECTIONS = {
    "made": (LEFT, MADE, restore_of(7, 3, 3), False, ""),
    "loaded": (LEFT, LOADED_ONLY, restore_of(7, 2, 2), False, ""),
    "another generation's": (LEFT, MADE, restore_of(7, 2, 2), False, "from another generation"),
    "another step": (LEFT, MADE, restore_of(6, 3, 3), False, "it is of step 7"),
    "within an update": (None, MADE, restore_of(7, 3, 3), False, "within an update"),
    "changed": (LEFT, MADE, restore_of(7, 3, 3), True, "has changed it"),
    "a checkpoint": (LEFT, MADE, Restore(7, checkpoint="/step-7"), False, "a checkpoint"),
    "a checkpoint, too": (LEFT, MADE, None, False, "a checkpoint"),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_engine_holds_the_restored_state_only(name: str):
    left, before, restore, altered, reason = SELECTIONS[name]
    seen = why_not_held(left, before, restore, altered=altered)
    assert reason in seen
    assert bool(seen) == bool(reason)

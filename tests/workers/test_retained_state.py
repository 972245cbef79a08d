"""Which state an engine that survives a generation still holds for the next one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from rayzero.engine.errors import EngineError
from rayzero.workers import retained_state
from rayzero.workers.messages import InProcessStateInfo
from rayzero.workers.retained_state import RetainedState, why_not_held
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


class State:
    """An engine's state of step 8, which may be within an update."""

    consistent, step, complete_on_rank, altered = True, 8, False, False

    def __init__(self) -> None:
        self.device = SimpleNamespace(synchronize=lambda limit_s: None)

    def pack(self, *, whole: bool) -> Any:
        return SimpleNamespace(index="block", copy_to=lambda data: None)

    def metadata(self) -> bytes:
        return b""


class Vault:
    """A client that notes what is reserved."""

    def __init__(self, address: str, worker: int) -> None:
        self.address = address
        self.reserved: list[tuple[int, int, int, str]] = []

    def reserve(self, generation: int, rank: int, world_size: int, index: Any) -> Any:
        self.reserved.append((generation, rank, world_size, index))
        return MagicMock(data=b"")

    def close(self) -> None: ...


def test_state_stays_as_it_was_cut_until_a_generation_has_loaded_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(retained_state, "VaultClient", Vault)
    retained, state = RetainedState(5, 1.0), cast(Any, State())
    copies = cast(Any, {it: SimpleNamespace(index=f"step {it}") for it in (7, 8)})
    assert retained.in_process_state() is None
    retained.begin_generation(replace(ASSIGN, generation=3, rank=1, world_size=2))
    retained.retain(state, lambda: copies)
    of_two = InProcessStateInfo(8, False, 3, 2, (7, 8))
    assert retained.in_process_state() == of_two
    for generation in (4, 5):  # neither has loaded it
        restore = restore_of(8, 3, 3)
        place = {"generation": generation, "rank": 2, "world_size": 3}
        retained.begin_generation(replace(ASSIGN, restore=restore, **place))
        assert retained.holds_state
        assert retained.in_process_state() == of_two
    state.consistent = False
    assert retained.in_process_state() == replace(of_two, step=None)
    saved = [retained.salvage("@new", step) for step in (7, 8)]
    assert [(it.generation, it.rank, it.world_size, it.step) for it in saved] == [
        (3, 1, 2, 7),
        (3, 1, 2, 8),
    ]
    assert retained.vault.reserved == [(3, 1, 2, "step 7"), (3, 1, 2, "step 8")]
    state.consistent = True
    retained.retain(state, dict)
    assert retained.in_process_state() == InProcessStateInfo(8, False, 5, 3)
    assert retained.salvage("@new", 8).rank == 2
    with pytest.raises(EngineError, match="no state of step 7"):
        retained.salvage("@new", 7)


def test_copies_are_dropped_where_their_buffers_may_be_others():
    """A generation that starts from another one's slots: this rank had no part in that."""
    retained = RetainedState(5, 1.0)
    retained.begin_generation(replace(ASSIGN, generation=3))
    retained.retain(cast(Any, State()), lambda: cast(Any, {8: None}))
    retained.begin_generation(replace(ASSIGN, generation=5, restore=restore_of(8, 4)))
    assert retained.in_process_state() == InProcessStateInfo(8, False, 3, 1)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.control.checkpoints import ALL_STEPS, PinnedStep, PinnedSteps
from rayzero.orchestrator.policies.recovery import (
    CheckpointRef,
    Excluded,
    FreshStart,
    FromCheckpoint,
    FromVaults,
    FromWorkers,
    InProcessStates,
    StoredSlot,
    replica_targets,
    select_recovery_step,
)
from rayzero.workers.messages import InProcessStateInfo, Pinned
from rayzero.workers.vault.records import SlotInfo, SlotRef

FINE = Excluded()
NOBODY = InProcessStates()


def held(
    generation: int, rank: int, step: int, node: str = "a", world: int = 2, replica: bool = False
) -> StoredSlot:
    return StoredSlot(SlotInfo(generation, rank, world, step, 64, False, replica), node)


def everyone(generation: int, step: int, world: int = 2) -> list[StoredSlot]:
    return [held(generation, rank, step, world=world) for rank in range(world)]


def refs(generation: int, step: int, *nodes: str) -> tuple[SlotRef, ...]:
    return tuple(SlotRef(generation, rank, step, node) for rank, node in enumerate(nodes))


def test_the_newest_step_of_which_all_ranks_are_held():
    slots = everyone(1, 7) + everyone(1, 8) + [held(1, 0, 9)]
    assert select_recovery_step(slots, NOBODY, None, FINE) == FromVaults(8, refs(1, 8, "a", "a"))


def test_ranks_of_different_generations_do_not_add_up():
    slots = [held(1, 0, 8), held(2, 1, 8), *everyone(1, 5)]
    assert select_recovery_step(slots, NOBODY, None, FINE) == FromVaults(5, refs(1, 5, "a", "a"))


def test_of_the_same_step_the_newest_generation_is_taken():
    slots = everyone(2, 8, world=1) + everyone(1, 8)
    assert select_recovery_step(slots, NOBODY, None, FINE) == FromVaults(8, refs(2, 8, "a"))


def test_originals_before_replicas_and_replicas_count():
    slots = [
        held(1, 0, 8, "b", replica=True),
        held(1, 0, 8, "a"),
        held(1, 1, 8, "a", replica=True),
    ]
    assert select_recovery_step(slots, NOBODY, None, FINE) == FromVaults(8, refs(1, 8, "a", "a"))


def test_a_whole_state_that_was_salvaged_stands_beside_parts():
    slots = [held(1, 2, 9, world=1), held(1, 0, 9, world=3)]
    assert select_recovery_step(slots, NOBODY, None, FINE) == FromVaults(
        9, (SlotRef(1, 2, 9, "a"),)
    )


def test_a_survivor_with_all_of_the_state_is_salvaged_where_it_is_newer():
    one = InProcessStates(2, {1: (5, InProcessStateInfo(9, whole=True))})
    assert select_recovery_step(everyone(1, 8), one, None, FINE) == FromWorkers(9, (5,))
    assert select_recovery_step(everyone(1, 9), one, None, FINE) == FromVaults(
        9, refs(1, 9, "a", "a")
    )


def test_parts_in_memory_help_only_when_all_are_there_at_one_step():
    part = InProcessStateInfo(9, whole=False)
    both = InProcessStates(2, {0: (4, part), 1: (5, part)})
    assert select_recovery_step([], both, None, FINE) == FromWorkers(9, (4, 5))
    assert select_recovery_step([], InProcessStates(2, {0: (4, part)}), None, FINE) == FreshStart()
    torn = InProcessStates(2, {0: (4, part), 1: (5, InProcessStateInfo(8, whole=False))})
    assert select_recovery_step([], torn, None, FINE) == FreshStart()


def test_a_checkpoint_where_it_is_newer_and_nothing_where_there_is_none():
    stored = CheckpointRef(6, "/runs/step-6")
    assert select_recovery_step(everyone(1, 5), NOBODY, stored, FINE) == FromCheckpoint(
        6, "/runs/step-6"
    )
    assert select_recovery_step(everyone(1, 6), NOBODY, stored, FINE) == FromVaults(
        6, refs(1, 6, "a", "a")
    )
    assert select_recovery_step([], NOBODY, None, FINE) == FreshStart()


def test_what_is_damaged_is_left_out():
    stored = CheckpointRef(6, "/runs/step-6")
    slots = everyone(1, 7) + everyone(1, 8)
    damaged = Excluded(frozenset({(1, 8)}), frozenset({6}))
    assert select_recovery_step(slots, NOBODY, stored, damaged) == FromVaults(
        7, refs(1, 7, "a", "a")
    )
    assert select_recovery_step([], NOBODY, stored, damaged) == FreshStart()


def test_a_foreign_checkpoint_has_no_step_yet():
    assert select_recovery_step([], NOBODY, CheckpointRef(0, "/ds"), FINE) == FromCheckpoint(
        0, "/ds"
    )


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 5))))
def test_nothing_complete_and_newer_is_overlooked(slots: list[tuple[int, int, int]]):
    picked = select_recovery_step([held(*one) for one in slots], NOBODY, None, FINE)
    complete = {
        step
        for generation in (1, 2)
        for step in range(1, 6)
        if {(generation, rank, step) for rank in (0, 1)} <= set(slots)
    }
    assert picked.step == max(complete, default=0)


@pytest.mark.parametrize(
    ("nodes", "replicas", "wanted"),
    [
        ("aa", 1, {}),
        ("ab", 1, {"b": [0], "a": [1]}),
        ("ab", 3, {"b": [0], "a": [1]}),
        ("aabbc", 1, {"b": [0, 1], "c": [2, 3], "a": [4]}),
        ("abc", 2, {"b": [0, 2], "c": [0, 1], "a": [1, 2]}),
    ],
)
def test_each_nodes_slots_go_to_the_next_nodes_of_the_ring(
    nodes: str, replicas: int, wanted: dict[str, list[int]]
):
    slots = [SlotRef(1, rank, 5, node) for rank, node in enumerate(nodes)]
    found = replica_targets(slots, replicas)
    assert {node: sorted(one.rank for one in slots) for node, slots in found.items()} == wanted


def pinned(pins: PinnedSteps, generation: int, step: int) -> PinnedStep:
    assert pins.add_rank(Pinned(generation, 0, step, True, 0.1), "a", 2) is None
    pin = pins.add_rank(Pinned(generation, 1, step, True, 0.2), "b", 2)
    assert pin is not None
    return pin


def test_a_pin_is_complete_when_all_ranks_have_it():
    pin = pinned(PinnedSteps(), 1, 5)
    assert pin.slots == refs(1, 5, "a", "b")
    assert (pin.nodes, pin.stopped_s, pin.checkpoint) == (("a", "b"), 0.2, True)


def test_a_pin_that_was_stored_is_freed_at_once():
    pins = PinnedSteps()
    pin = pinned(pins, 1, 5)
    assert list(pins.releasable()) == []
    pins.complete(pin, hold=False)
    assert list(pins.releasable()) == [(1, 5)]
    assert list(pins.releasable()) == []


def test_a_pin_that_is_whole_on_every_level_is_held_until_a_newer_one_is():
    pins = PinnedSteps()
    first, second = pinned(pins, 1, 5), pinned(pins, 1, 8)
    pins.complete(first, hold=True)
    assert [one for one in pins.releasable() if one[1] >= 5] == []
    pins.copy_failed(second)
    third = pinned(pins, 1, 9)
    pins.complete(third, hold=True)
    assert list(pins.releasable()) == [(1, 8)]


def test_what_is_in_work_is_never_freed():
    pins = PinnedSteps()
    first, second = pinned(pins, 1, 5), pinned(pins, 1, 8)
    pins.complete(second, hold=False)
    assert list(pins.releasable()) == [(1, 4)]
    third = pinned(pins, 2, 9)
    pins.complete(third, hold=False)
    assert list(pins.releasable()) == [(2, 4)]  # what frees a generation frees older ones too
    pins.complete(first, hold=False)
    assert list(pins.releasable()) == [(1, 8), (2, 9)]


@pytest.mark.parametrize("remote", [False, True])
def test_older_generations_are_freed_once_the_newest_does_without_them(remote: bool):
    pins = PinnedSteps()
    pins.add_rank(Pinned(1, 0, 5, True, 0.1), "a", 2)  # the other rank died
    pins.add_rank(Pinned(2, 0, 7, True, 0.1), "a", 2)
    pins.generation_started(2, remote=remote)
    assert list(pins.releasable()) == ([] if remote else [(1, ALL_STEPS)])
    pin = pins.add_rank(Pinned(2, 1, 7, True, 0.1), "a", 2)
    assert pin is not None
    pins.complete(pin, hold=True)
    freed = dict(pins.releasable())
    assert (1 in freed) == remote

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.pins import EVERY_STEP, Pin, Pins
from rayzero.orchestrator.policies.recovery import (
    Damaged,
    FromCheckpoint,
    FromMemory,
    FromNothing,
    FromSlots,
    Held,
    Remembered,
    Stored,
    pick,
)
from rayzero.orchestrator.policies.ring import copies
from rayzero.workers.messages import Memory, Pinned, SlotInfo, SlotRef

FINE = Damaged()
NOBODY = Remembered()


def held(
    generation: int, rank: int, step: int, node: str = "a", world: int = 2, replica: bool = False
) -> Held:
    return Held(SlotInfo(generation, rank, world, step, 64, False, replica), node)


def everyone(generation: int, step: int, world: int = 2) -> list[Held]:
    return [held(generation, rank, step, world=world) for rank in range(world)]


def refs(generation: int, step: int, *nodes: str) -> tuple[SlotRef, ...]:
    return tuple(SlotRef(generation, rank, step, node) for rank, node in enumerate(nodes))


def test_the_newest_step_of_which_all_ranks_are_held():
    slots = everyone(1, 7) + everyone(1, 8) + [held(1, 0, 9)]
    assert pick(slots, NOBODY, None, FINE) == FromSlots(8, refs(1, 8, "a", "a"))


def test_ranks_of_different_generations_do_not_add_up():
    slots = [held(1, 0, 8), held(2, 1, 8), *everyone(1, 5)]
    assert pick(slots, NOBODY, None, FINE) == FromSlots(5, refs(1, 5, "a", "a"))


def test_of_the_same_step_the_newest_generation_is_taken():
    slots = everyone(2, 8, world=1) + everyone(1, 8)
    assert pick(slots, NOBODY, None, FINE) == FromSlots(8, refs(2, 8, "a"))


def test_originals_before_replicas_and_replicas_count():
    slots = [
        held(1, 0, 8, "b", replica=True),
        held(1, 0, 8, "a"),
        held(1, 1, 8, "a", replica=True),
    ]
    assert pick(slots, NOBODY, None, FINE) == FromSlots(8, refs(1, 8, "a", "a"))


def test_a_whole_state_that_was_salvaged_stands_beside_parts():
    slots = [held(1, 2, 9, world=1), held(1, 0, 9, world=3)]
    assert pick(slots, NOBODY, None, FINE) == FromSlots(9, (SlotRef(1, 2, 9, "a"),))


def test_a_survivor_with_all_of_the_state_is_salvaged_where_it_is_newer():
    one = Remembered(2, {1: (5, Memory(9, whole=True))})
    assert pick(everyone(1, 8), one, None, FINE) == FromMemory(9, (5,))
    assert pick(everyone(1, 9), one, None, FINE) == FromSlots(9, refs(1, 9, "a", "a"))


def test_parts_in_memory_help_only_when_all_are_there_at_one_step():
    part = Memory(9, whole=False)
    both = Remembered(2, {0: (4, part), 1: (5, part)})
    assert pick([], both, None, FINE) == FromMemory(9, (4, 5))
    assert pick([], Remembered(2, {0: (4, part)}), None, FINE) == FromNothing()
    torn = Remembered(2, {0: (4, part), 1: (5, Memory(8, whole=False))})
    assert pick([], torn, None, FINE) == FromNothing()


def test_a_checkpoint_where_it_is_newer_and_nothing_where_there_is_none():
    stored = Stored(6, "/runs/step-6")
    assert pick(everyone(1, 5), NOBODY, stored, FINE) == FromCheckpoint(6, "/runs/step-6")
    assert pick(everyone(1, 6), NOBODY, stored, FINE) == FromSlots(6, refs(1, 6, "a", "a"))
    assert pick([], NOBODY, None, FINE) == FromNothing()


def test_what_is_damaged_is_left_out():
    stored = Stored(6, "/runs/step-6")
    slots = everyone(1, 7) + everyone(1, 8)
    damaged = Damaged(frozenset({(1, 8)}), frozenset({6}))
    assert pick(slots, NOBODY, stored, damaged) == FromSlots(7, refs(1, 7, "a", "a"))
    assert pick([], NOBODY, stored, damaged) == FromNothing()


def test_a_foreign_checkpoint_has_no_step_yet():
    assert pick([], NOBODY, Stored(0, "/ds"), FINE) == FromCheckpoint(0, "/ds")


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 5))))
def test_nothing_complete_and_newer_is_overlooked(slots: list[tuple[int, int, int]]):
    picked = pick([held(*one) for one in slots], NOBODY, None, FINE)
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
    found = copies(slots, replicas)
    assert {node: sorted(one.rank for one in slots) for node, slots in found.items()} == wanted


def pinned(pins: Pins, generation: int, step: int) -> Pin:
    assert pins.add(Pinned(generation, 0, step, True, 0.1), "a", 2) is None
    pin = pins.add(Pinned(generation, 1, step, True, 0.2), "b", 2)
    assert pin is not None
    return pin


def test_a_pin_is_complete_when_all_ranks_have_it():
    pin = pinned(Pins(), 1, 5)
    assert pin.slots == refs(1, 5, "a", "b")
    assert (pin.nodes, pin.stopped_s, pin.checkpoint) == (("a", "b"), 0.2, True)


def test_a_pin_that_was_stored_is_freed_at_once():
    pins = Pins()
    pin = pinned(pins, 1, 5)
    assert list(pins.freeable()) == []
    pins.done(pin, hold=False)
    assert list(pins.freeable()) == [(1, 5)]
    assert list(pins.freeable()) == []


def test_a_pin_that_is_whole_on_every_level_is_held_until_a_newer_one_is():
    pins = Pins()
    first, second = pinned(pins, 1, 5), pinned(pins, 1, 8)
    pins.done(first, hold=True)
    assert [one for one in pins.freeable() if one[1] >= 5] == []
    pins.failed(second)
    third = pinned(pins, 1, 9)
    pins.done(third, hold=True)
    assert list(pins.freeable()) == [(1, 8)]


def test_what_is_in_work_is_never_freed():
    pins = Pins()
    first, second = pinned(pins, 1, 5), pinned(pins, 1, 8)
    pins.done(second, hold=False)
    assert list(pins.freeable()) == [(1, 4)]
    third = pinned(pins, 2, 9)
    pins.done(third, hold=False)
    assert list(pins.freeable()) == [(2, 4)]  # what frees a generation frees older ones too
    pins.done(first, hold=False)
    assert list(pins.freeable()) == [(1, 8), (2, 9)]


@pytest.mark.parametrize("remote", [False, True])
def test_older_generations_are_freed_once_the_newest_does_without_them(remote: bool):
    pins = Pins()
    pins.add(Pinned(1, 0, 5, True, 0.1), "a", 2)  # the other rank died
    pins.add(Pinned(2, 0, 7, True, 0.1), "a", 2)
    pins.begun(2, remote=remote)
    assert list(pins.freeable()) == ([] if remote else [(1, EVERY_STEP)])
    pin = pins.add(Pinned(2, 1, 7, True, 0.1), "a", 2)
    assert pin is not None
    pins.done(pin, hold=True)
    freed = dict(pins.freeable())
    assert (1 in freed) == remote

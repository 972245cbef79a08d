from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from rayzero.orchestrator.policies.pinned_steps import PinnedStep, PinnedSteps
from rayzero.orchestrator.policies.recovery import (
    CheckpointRef,
    Excluded,
    FromWorkers,
    StoredSlot,
    select_recovery_step,
)
from rayzero.workers.messages import InProcessStateInfo, Pinned
from rayzero.workers.vault.records import Restore, SlotInfo, SlotRef

CHECKPOINT = CheckpointRef(6, "/runs/step-6")


def select(
    slots: Sequence[StoredSlot] = (),
    in_process: Mapping[int, InProcessStateInfo] | None = None,
    stored: CheckpointRef | None = None,
    excluded: Excluded | None = None,
    finished: int = 9,
) -> Restore | FromWorkers | None:
    return select_recovery_step(slots, in_process or {}, stored, excluded or Excluded(), finished)


def left(
    step: int | None, *copies: int, whole: bool = False, generation: int = 1, world: int = 2
) -> InProcessStateInfo:
    """By a worker of a generation of two."""
    return InProcessStateInfo(step, whole, generation, world, copies)


def slot(
    generation: int, rank: int, step: int, node: str = "a", world: int = 2, replica: bool = False
) -> StoredSlot:
    return StoredSlot(SlotInfo(generation, rank, world, step, 64, False, replica), node)


def version(generation: int, step: int, world: int = 2) -> list[StoredSlot]:
    return [slot(generation, rank, step, world=world) for rank in range(world)]


def refs(generation: int, step: int, *nodes: str) -> tuple[SlotRef, ...]:
    return tuple(SlotRef(generation, rank, step, node) for rank, node in enumerate(nodes))


def test_newest_complete_step_of_the_newest_generation_is_selected():
    incomplete = [*version(1, 7), *version(1, 8), slot(1, 0, 9)]
    assert select(incomplete) == Restore(8, refs(1, 8, "a", "a"))
    not_combined = [slot(1, 0, 8), slot(2, 1, 8), *version(1, 5)]
    assert select(not_combined) == Restore(5, refs(1, 5, "a", "a"))
    assert select(version(2, 8, world=1) + version(1, 8)) == Restore(8, refs(2, 8, "a"))
    replicas = [slot(1, 0, 8, "b", replica=True), slot(1, 1, 8, "a", replica=True)]
    assert select([*replicas, slot(1, 0, 8)]) == Restore(8, refs(1, 8, "a", "a"))
    salvaged = [slot(1, 2, 9, world=1), slot(1, 0, 9, world=3)]
    assert select(salvaged) == Restore(9, (SlotRef(1, 2, 9, "a"),))


def test_newer_state_in_memory_is_salvaged():
    whole = {5: left(9, whole=True)}
    assert select(version(1, 8), whole) == FromWorkers(9, (5,), is_of_all=False)
    assert select(version(1, 9), whole) == Restore(9, refs(1, 9, "a", "a"))
    shard = left(9)
    assert select(in_process={4: shard, 5: shard}) == FromWorkers(9, (4, 5))
    assert select(in_process={4: shard}) is None
    assert select(in_process={4: shard, 5: left(8)}) is None


def test_step_that_only_some_ranks_have_ended_is_given_up():
    """The others were interrupted in it: the copies of the step before are in memory."""
    ended = left(9, 8, 9)
    interrupted = left(8, 7, 8)
    assert select(in_process={4: ended, 5: interrupted}) == FromWorkers(8, (4, 5))
    within = left(None, 7, 8)
    assert select(in_process={4: ended, 5: within}) == FromWorkers(8, (4, 5))
    assert select(version(1, 8), {4: ended, 5: within}) == Restore(8, refs(1, 8, "a", "a"))
    assert select(in_process={4: ended}) is None
    without = left(None)
    assert select(in_process={4: ended, 5: without}, stored=CHECKPOINT) == Restore(
        6, checkpoint="/runs/step-6"
    )
    whole = left(9, 8, 9, whole=True)
    of_one = FromWorkers(9, (5,), is_of_all=False)
    assert select(in_process={4: interrupted, 5: whole}) == of_one


def test_step_of_which_one_ranks_own_values_are_left_is_given_up_if_it_is_not_finished():
    """As at stage 0, where each rank has the whole state but for the others' own values."""
    whole = {5: left(9, whole=True)}
    of_one = FromWorkers(9, (5,), is_of_all=False)
    vaults = Restore(8, refs(1, 8, "a", "a"))
    assert select(version(1, 8), whole, finished=8) == vaults
    assert select(version(1, 8), whole, finished=9) == of_one
    assert select(version(1, 7), whole, finished=8) == of_one, "no finished step is done again"
    assert select((), whole, CheckpointRef(8, "/runs/step-8"), finished=8) == of_one
    both = {4: left(None, 8), 5: left(9, 8, 9, whole=True)}
    assert select(in_process=both, finished=8) == FromWorkers(8, (4, 5))
    alone = {5: left(9, whole=True, world=1)}
    assert select(version(1, 8, world=1), alone, finished=8) == FromWorkers(9, (5,))


def test_states_in_memory_are_put_together_by_the_generation_that_they_are_cut_for():
    """The next one, of three, has ended before some of its ranks had loaded their state."""
    assert select(in_process={4: left(9), 5: left(9)}) == FromWorkers(9, (4, 5))
    three = {"generation": 2, "world": 3}
    one_has = {4: left(9), 5: left(9), 6: left(9, **three)}
    assert select(in_process=one_has) == FromWorkers(9, (4, 5))
    assert select(in_process={4: left(9), 5: left(9, **three), 6: left(9, **three)}) is None
    all_have = dict.fromkeys((4, 5, 6), left(9, **three))
    assert select(in_process=all_have) == FromWorkers(9, (4, 5, 6))
    whole = {4: left(9, whole=True), 5: left(9, whole=True, **three)}
    assert select(in_process=whole) == FromWorkers(9, (4,), is_of_all=False)


def test_state_in_memory_is_copied_once():
    """One that cannot be loaded from a copy either would be copied for ever."""
    states, excluded = {4: left(9), 5: left(9)}, Excluded()
    lost = Restore(9, refs(1, 9, "a", "a"))
    excluded.add(lost, "its vault was lost")
    assert select(version(1, 9), states, CHECKPOINT, excluded) == FromWorkers(9, (4, 5))
    excluded.copied_again(lost)
    assert select(version(1, 9), states, CHECKPOINT, excluded) == lost
    excluded.add(lost, "the function has no such engine")
    restore = Restore(6, checkpoint="/runs/step-6")
    assert select(version(1, 9), states, CHECKPOINT, excluded) == restore


def test_newer_checkpoint_is_selected():
    restore = Restore(6, checkpoint="/runs/step-6")
    assert select(version(1, 5), stored=CHECKPOINT) == restore
    assert select(version(1, 6), stored=CHECKPOINT) == Restore(6, refs(1, 6, "a", "a"))
    shard = left(6)
    assert select(in_process={4: shard, 5: shard}, stored=CHECKPOINT) == FromWorkers(6, (4, 5))
    assert select() is None
    imported = CheckpointRef(0, "/ds")
    assert select(stored=imported) == Restore(0, checkpoint="/ds")
    excluded = Excluded({(1, 8)}, {6})
    slots = version(1, 7) + version(1, 8)
    assert select(slots, None, CHECKPOINT, excluded) == Restore(7, refs(1, 7, "a", "a"))
    assert select([], None, CHECKPOINT, excluded) is None


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 5))))
def test_newest_complete_step_is_selected(slots: list[tuple[int, int, int]]):
    selected = select([slot(*key) for key in slots])
    complete = {
        step
        for generation, _, step in slots
        if {(generation, 0, step), (generation, 1, step)} <= set(slots)
    }
    assert (selected.step if selected else 0) == max(complete, default=0)


def pinned(pins: PinnedSteps, generation: int, step: int) -> PinnedStep:
    assert pins.add_rank(Pinned(generation, 0, step, 0.1), "a", 2) is None
    pin = pins.add_rank(Pinned(generation, 1, step, 0.2), "b", 2)
    assert pin is not None
    return pin


def test_pin_is_complete_with_all_ranks():
    pin = pinned(PinnedSteps(), 1, 5)
    assert pin.slots == refs(1, 5, "a", "b")
    assert pin.stopped_s == 0.2


def test_pins_are_released_when_they_are_written():
    pins = PinnedSteps()
    first, second = pinned(pins, 1, 5), pinned(pins, 1, 8)
    assert pins.complete(first) == (1, 5)
    third = pinned(pins, 2, 7)
    assert not pins.release_older(2), "step 8 is being written"
    assert pins.complete(second) == (1, 8)
    assert pins.release_older(2)
    assert not pins.release_older(2)
    assert [*pins.writing] == [third]
    assert pins.complete(third) == (2, 7)


def test_another_controller_writes_the_newest_whole_pin_and_releases_what_ranks_have_passed():
    def held(rank: int, step: int, pinned: bool = True) -> StoredSlot:
        return StoredSlot(SlotInfo(3, rank, 2, step, 64, pinned), "ab"[rank])

    pins = PinnedSteps()
    assert pins.resume([held(0, 4), held(0, 9, False), held(1, 8, False)], 3, 2) == (None, 4)
    rank_1_comes_to_it = [held(0, 10), held(1, 9, False)]
    assert pins.resume(rank_1_comes_to_it, 3, 2) == (None, 0)
    slots = [held(0, 10), held(1, 10), held(0, 12), held(1, 13, False)]
    pin, passed = pins.resume(slots, 3, 2)
    assert pin is not None
    assert (pin.slots, passed) == (refs(3, 10, "a", "b"), 0), "not what is being written"
    assert pins.add_rank(Pinned(3, 0, 10, 0.1), "a", 2) is None
    assert pins.complete(pin) == (3, 12)


def test_pins_of_older_generations_are_released():
    pins = PinnedSteps()
    pins.add_rank(Pinned(1, 0, 5, 0.1), "a", 2)  # the other rank died
    pinned(pins, 2, 7)
    assert pins.release_older(2)

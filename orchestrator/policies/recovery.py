"""Which step a new generation begins from: the newest of which everything is held somewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rayzero.workers.messages import Memory, SlotInfo, SlotRef


@dataclass(frozen=True)
class Held:
    """A version in a vault."""

    slot: SlotInfo
    node_id: str


@dataclass(frozen=True)
class Remembered:
    """What the unwound workers of one generation still have in their own memory.

    Args:
        world_size: of that generation.
        by_rank: for each rank whose process lives, its worker and its memory.
    """

    world_size: int = 0
    by_rank: Mapping[int, tuple[int, Memory]] | None = None


@dataclass(frozen=True)
class Stored:
    """A whole checkpoint: its step and its folder, a path or a URL."""

    step: int
    folder: str


@dataclass(frozen=True)
class FromSlots:
    """Everything of `step` lies in vaults."""

    step: int
    slots: tuple[SlotRef, ...]


@dataclass(frozen=True)
class FromMemory:
    """Everything of `step` is in the memory of these workers, to be copied into their vaults."""

    step: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class FromCheckpoint:
    step: int
    folder: str


@dataclass(frozen=True)
class FromNothing:
    """From the beginning."""

    step: int = 0


Pick: TypeAlias = FromSlots | FromMemory | FromCheckpoint | FromNothing


@dataclass(frozen=True)
class Damaged:
    """What turned out not to be readable.

    Args:
        versions: (generation, step) of slots.
        checkpoints: steps.
    """

    versions: frozenset[tuple[int, int]] = frozenset()
    checkpoints: frozenset[int] = frozenset()


def pick(
    held: Sequence[Held], remembered: Remembered, stored: Stored | None, damaged: Damaged
) -> Pick:
    """The newest step wins; of one step, what is nearest to hand."""
    found: list[Pick] = [FromNothing()]
    if stored is not None and stored.step not in damaged.checkpoints:
        found.append(FromCheckpoint(stored.step, stored.folder))
    found += _in_memory(remembered)
    found += _in_slots(held, damaged)
    # max keeps the first of equals, so the nearest comes first.
    return max(reversed(found), key=lambda one: one.step)


def complete_sets(held: Sequence[Held]) -> list[FromSlots]:
    """Every version of which all ranks are held, the newest last; originals before replicas."""
    versions: defaultdict[tuple[int, int, int], dict[int, Held]] = defaultdict(dict)
    for one in sorted(held, key=lambda one: (one.slot.replica, one.node_id)):
        slot = one.slot
        # A state that was salvaged as a whole stands beside the parts it was cut from.
        versions[slot.step, slot.generation, slot.world_size].setdefault(slot.rank, one)
    return [
        FromSlots(step, refs([ranks[rank] for rank in sorted(ranks)]))
        for (step, _, world_size), ranks in sorted(versions.items())
        if len(ranks) == world_size
    ]


def _in_slots(held: Sequence[Held], damaged: Damaged) -> list[Pick]:
    whole = [one for one in held if (one.slot.generation, one.slot.step) not in damaged.versions]
    return list(complete_sets(whole))


def _in_memory(remembered: Remembered) -> list[Pick]:
    """Every rank, all at the same step; better, a survivor that holds all of the state."""
    there = sorted((remembered.by_rank or {}).items())
    steps = {memory.step for _, (_, memory) in there}
    picks: list[Pick] = []
    if len(steps) == 1 and len(there) == remembered.world_size:
        picks.append(FromMemory(steps.pop(), tuple(worker for _, (worker, _) in there)))
    whole = [(worker, memory.step) for _, (worker, memory) in there if memory.whole]
    return picks + [FromMemory(step, (worker,)) for worker, step in whole]


def refs(held: Sequence[Held]) -> tuple[SlotRef, ...]:
    return tuple(
        SlotRef(one.slot.generation, one.slot.rank, one.slot.step, one.node_id) for one in held
    )

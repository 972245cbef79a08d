"""Recovery point; replica ring.

Which step a new generation begins from: the newest of which everything is held somewhere.

Which node holds copies of which other nodes' slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rayzero.workers.messages import InProcessStateInfo
from rayzero.workers.vault.records import SlotInfo, SlotRef


class StoredSlot(NamedTuple):
    """A version in a vault."""

    slot: SlotInfo
    node_id: str


@dataclass(frozen=True)
class InProcessStates:
    """What the unwound workers of one generation still have in their own memory.

    Args:
        world_size: of that generation.
        by_rank: for each rank whose process lives, its worker and its memory.
    """

    world_size: int = 0
    by_rank: Mapping[int, tuple[int, InProcessStateInfo]] | None = None


@dataclass(frozen=True)
class CheckpointRef:
    """A whole checkpoint: its step and its folder, a path or a URL."""

    step: int
    folder: str


@dataclass(frozen=True)
class FromVaults:
    """Everything of `step` lies in vaults."""

    step: int
    slots: tuple[SlotRef, ...]


@dataclass(frozen=True)
class FromWorkers:
    """Everything of `step` is in the memory of these workers, to be copied into their vaults."""

    step: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class FromCheckpoint:
    step: int
    folder: str


@dataclass(frozen=True)
class FreshStart:
    """From the beginning."""

    step: int = 0


RecoveryPoint: TypeAlias = FromVaults | FromWorkers | FromCheckpoint | FreshStart


@dataclass(frozen=True)
class Excluded:
    """What turned out not to be readable.

    Args:
        versions: (generation, step) of slots.
        checkpoints: steps.
    """

    versions: frozenset[tuple[int, int]] = frozenset()
    checkpoints: frozenset[int] = frozenset()


NOTHING_EXCLUDED = Excluded()


def select_recovery_step(
    held: Sequence[StoredSlot],
    remembered: InProcessStates,
    stored: CheckpointRef | None,
    damaged: Excluded,
) -> RecoveryPoint:
    """The newest step wins; of one step, what is nearest to hand."""
    found: list[RecoveryPoint] = [FreshStart()]
    if stored is not None and stored.step not in damaged.checkpoints:
        found.append(FromCheckpoint(stored.step, stored.folder))
    found += _worker_recovery_points(remembered)
    if (newest := newest_complete_in_vaults(held, damaged)) is not None:
        found.append(newest)
    # max keeps the first of equals, so the nearest comes first.
    return max(reversed(found), key=lambda one: one.step)


def newest_complete_in_vaults(
    held: Iterable[StoredSlot], damaged: Excluded = NOTHING_EXCLUDED
) -> FromVaults | None:
    """The newest version of which all ranks are held; originals before replicas. Counts first:
    only that one's slots are put in order, and there may be thousands of each version."""
    # A state that was salvaged as a whole stands beside the parts it was cut from.
    versions: defaultdict[tuple[int, int, int], list[StoredSlot]] = defaultdict(list)
    for one in held:
        slot = one.slot
        versions[slot.step, slot.generation, slot.world_size].append(one)
    for step, generation, world_size in sorted(versions, reverse=True):
        there = versions[step, generation, world_size]
        if len(there) < world_size or (generation, step) in damaged.versions:
            continue
        if len(there) > world_size:
            there.sort(key=lambda one: (one.slot.replica, one.node_id), reverse=True)
        ranks = {one.slot.rank: one for one in there}  # the last of equals stays
        if len(ranks) == world_size:
            return FromVaults(step, slot_refs([ranks[rank] for rank in sorted(ranks)]))
    return None


def _worker_recovery_points(remembered: InProcessStates) -> list[RecoveryPoint]:
    """Every rank, all at the same step; better, a survivor that holds all of the state."""
    there = sorted((remembered.by_rank or {}).items())
    steps = {memory.step for _, (_, memory) in there}
    picks: list[RecoveryPoint] = []
    if len(steps) == 1 and len(there) == remembered.world_size:
        picks.append(FromWorkers(steps.pop(), tuple(worker for _, (worker, _) in there)))
    whole = [(worker, memory.step) for _, (worker, memory) in there if memory.whole]
    return picks + [FromWorkers(step, (worker,)) for worker, step in whole]


def slot_refs(held: Sequence[StoredSlot]) -> tuple[SlotRef, ...]:
    return tuple(
        SlotRef(one.slot.generation, one.slot.rank, one.slot.step, one.node_id) for one in held
    )


def replica_targets(slots: Sequence[SlotRef], replicas: int) -> dict[str, list[SlotRef]]:
    """What each node is to copy from others: each node's slots go to the next `replicas` nodes
    of the ring, in the order of ranks. Nothing, where there is one node only.

    Args:
        slots: originals, by rank.
    """
    ring = list(dict.fromkeys(slot.node_id for slot in slots))
    homes = {node: place for place, node in enumerate(ring)}
    wanted: defaultdict[str, list[SlotRef]] = defaultdict(list)
    for slot in slots:
        home = homes[slot.node_id]
        for ahead in range(1, min(replicas, len(ring) - 1) + 1):
            wanted[ring[(home + ahead) % len(ring)]].append(slot)
    return dict(wanted)

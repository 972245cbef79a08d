"""Recovery policy: the step a generation resumes from, and the nodes that replicate each slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rayzero.workers.messages import InProcessStateInfo
from rayzero.workers.vault.records import SlotInfo, SlotRef


class StoredSlot(NamedTuple):
    """A complete slot in a vault."""

    slot: SlotInfo
    node_id: str


@dataclass(frozen=True)
class InProcessStates:
    """The states in the memory of one generation's unwound workers.

    Args:
        world_size: of that generation.
        by_rank: the worker and its state, for each rank whose process is alive.
    """

    world_size: int = 0
    by_rank: Mapping[int, tuple[int, InProcessStateInfo]] | None = None


@dataclass(frozen=True)
class CheckpointRef:
    """A complete checkpoint: its step and its folder, a path or a URL."""

    step: int
    folder: str


@dataclass(frozen=True)
class FromVaults:
    """The vaults hold the complete state of `step`."""

    step: int
    slots: tuple[SlotRef, ...]


@dataclass(frozen=True)
class FromWorkers:
    """These workers' memories hold the complete state of `step`, to be copied into their vaults."""

    step: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class FromCheckpoint:
    step: int
    folder: str


@dataclass(frozen=True)
class FreshStart:
    """Start at step 0 without a state."""

    step: int = 0


RecoveryPoint: TypeAlias = FromVaults | FromWorkers | FromCheckpoint | FreshStart


@dataclass(frozen=True)
class Excluded:
    """Sources that turned out to be unreadable.

    Args:
        versions: (generation, step) of slots.
        checkpoints: steps.
    """

    versions: frozenset[tuple[int, int]] = frozenset()
    checkpoints: frozenset[int] = frozenset()


NOTHING_EXCLUDED = Excluded()


def select_recovery_step(
    held: Sequence[StoredSlot],
    in_process: InProcessStates,
    stored: CheckpointRef | None,
    excluded: Excluded,
) -> RecoveryPoint:
    """The newest step; of sources of the same step, the fastest: vaults, workers, checkpoint."""
    points: list[RecoveryPoint] = [FreshStart()]
    if stored is not None and stored.step not in excluded.checkpoints:
        points.append(FromCheckpoint(stored.step, stored.folder))
    points += _worker_recovery_points(in_process)
    if (newest := newest_complete_in_vaults(held, excluded)) is not None:
        points.append(newest)
    # max keeps the first of equals, so the fastest comes first.
    return max(reversed(points), key=lambda point: point.step)


def newest_complete_in_vaults(
    held: Iterable[StoredSlot], excluded: Excluded = NOTHING_EXCLUDED
) -> FromVaults | None:
    """The newest version of which all ranks are held; originals before replicas.

    Counts first and sorts only the slots of the result: there may be thousands per version.
    """
    # By world size too: a state that was salvaged as a whole exists beside the shards of its step.
    versions: defaultdict[tuple[int, int, int], list[StoredSlot]] = defaultdict(list)
    for stored in held:
        slot = stored.slot
        versions[slot.step, slot.generation, slot.world_size].append(stored)
    for step, generation, world_size in sorted(versions, reverse=True):
        slots = versions[step, generation, world_size]
        if len(slots) < world_size or (generation, step) in excluded.versions:
            continue
        if len(slots) > world_size:
            slots.sort(key=lambda stored: (stored.slot.replica, stored.node_id), reverse=True)
        ranks = {stored.slot.rank: stored for stored in slots}  # the last of a rank wins
        if len(ranks) == world_size:
            return FromVaults(step, slot_refs([ranks[rank] for rank in sorted(ranks)]))
    return None


def _worker_recovery_points(in_process: InProcessStates) -> list[RecoveryPoint]:
    """All ranks at the same step; and each worker that holds the complete state (preferred)."""
    states = [worker_state for _, worker_state in sorted((in_process.by_rank or {}).items())]
    steps = {state.step for _, state in states}
    points: list[RecoveryPoint] = []
    if len(steps) == 1 and len(states) == in_process.world_size:
        points.append(FromWorkers(steps.pop(), tuple(worker for worker, _ in states)))
    return points + [FromWorkers(state.step, (worker,)) for worker, state in states if state.whole]


def slot_refs(held: Sequence[StoredSlot]) -> tuple[SlotRef, ...]:
    return tuple(SlotRef(slot.generation, slot.rank, slot.step, node_id) for slot, node_id in held)


def replica_targets(slots: Sequence[SlotRef], replicas: int) -> dict[str, list[SlotRef]]:
    """The slots each node copies from others: a node's slots go to the next `replicas` nodes of
    the ring, which is in rank order. Empty if there is only one node.

    Args:
        slots: originals, by rank.
    """
    ring = list(dict.fromkeys(slot.node_id for slot in slots))
    positions = {node: position for position, node in enumerate(ring)}
    targets: defaultdict[str, list[SlotRef]] = defaultdict(list)
    for slot in slots:
        position = positions[slot.node_id]
        for offset in range(1, min(replicas, len(ring) - 1) + 1):
            targets[ring[(position + offset) % len(ring)]].append(slot)
    return dict(targets)

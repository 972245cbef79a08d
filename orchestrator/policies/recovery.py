"""Recovery policy: the step a generation resumes from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rayzero.workers.messages import InProcessStateInfo
from rayzero.workers.vault.records import Restore, SlotInfo, SlotRef


class StoredSlot(NamedTuple):
    """A complete slot in a vault."""

    slot: SlotInfo
    node_id: str


@dataclass(frozen=True)
class CheckpointRef:
    """A complete checkpoint: its step and its folder, a path or a URL."""

    step: int
    folder: str


@dataclass(frozen=True)
class FromWorkers:
    """The complete state of `step` in these workers' memories: in their engines, or in copies of
    lost vaults. It is to be copied into the workers' vaults.

    Attributes:
        is_of_all: whether it has each rank's own values: random states, and what the function has
            registered. Otherwise they are those of one rank.
    """

    step: int
    workers: tuple[int, ...]
    is_of_all: bool = True


@dataclass
class Excluded:
    """States that could not be loaded: slots by (generation, step), checkpoints by step, with what
    the load reported.

    Args:
        copied: slots that were copied from memory. If they cannot be loaded either, memory has
            nothing better.
    """

    versions: set[tuple[int, int]] = field(default_factory=set)
    checkpoints: dict[int, str] = field(default_factory=dict)
    copied: set[tuple[int, int]] = field(default_factory=set)

    def add(self, restore: Restore, problem: str) -> None:
        self.versions |= {(slot.generation, slot.step) for slot in restore.slots}
        if restore.checkpoint:
            self.checkpoints[restore.step] = problem

    def copied_again(self, restore: Restore) -> None:
        """Allows these slots again: they have been copied from memory, after they may have been
        lost with a vault."""
        versions = {(slot.generation, slot.step) for slot in restore.slots}
        self.versions -= versions
        self.copied |= versions


def select_recovery_step(
    held: Sequence[StoredSlot],
    in_process: Mapping[int, InProcessStateInfo],
    stored: CheckpointRef | None,
    excluded: Excluded,
    finished: int,
) -> Restore | FromWorkers | None:
    """Returns the newest step; of sources of the same step, the fastest: vaults, workers,
    checkpoint. Returns None if there is no state: a fresh start.

    A step that is not finished is given up if only one rank's own values are left of it, but all
    ranks' values of the last finished step.

    Args:
        in_process: the states in the memory of the workers that have left a generation. Those that
            are cut for the same generation belong together.
        finished: the last step that all ranks have finished.
    """
    sources: list[Restore | FromWorkers] = []
    cuts: defaultdict[tuple[int, int], dict[int, InProcessStateInfo]] = defaultdict(dict)
    for worker, state in in_process.items():
        cuts[state.generation, state.world_size][worker] = state
    for (generation, world_size), states in cuts.items():
        found = [
            FromWorkers(state.step, (worker,), is_of_all=world_size == 1)
            for worker, state in states.items()
            if state.step is not None and state.whole
        ]
        if len(states) == world_size:
            # Some ranks may have ended a step that others were interrupted in.
            common = set[int].intersection(*(state.steps for state in states.values()))
            found += [FromWorkers(step, tuple(states)) for step in common]
        useless = excluded.versions & excluded.copied
        sources += [source for source in found if (generation, source.step) not in useless]
    if (restore := newest_stored(held, stored, excluded)) is not None:
        sources.insert(0 if restore.slots else len(sources), restore)

    def worth(source: Restore | FromWorkers) -> tuple[int, bool, int]:
        is_of_all = bool(source.slots) if isinstance(source, Restore) else source.is_of_all
        return min(source.step, finished), is_of_all, source.step

    return max(sources, key=worth, default=None)  # the first of equals


def newest_stored(
    held: Sequence[StoredSlot], stored: CheckpointRef | None, excluded: Excluded
) -> Restore | None:
    """Returns the newest step that the vaults or a checkpoint hold; the vaults win for the same
    step."""
    newest = newest_complete_in_vaults(held, excluded.versions)
    if stored is None or stored.step in excluded.checkpoints:
        return newest
    if newest is not None and newest.step >= stored.step:
        return newest
    return Restore(stored.step, checkpoint=stored.folder)


def newest_complete_in_vaults(
    held: Iterable[StoredSlot], excluded_versions: Collection[tuple[int, int]] = ()
) -> Restore | None:
    """Returns the newest version of which all ranks are held; originals before replicas.

    Counts first and sorts only the slots of the result: there may be thousands per version.
    """
    # By world size too: a state salvaged as a whole exists in addition to the shards of its step.
    versions: defaultdict[tuple[int, int, int], list[StoredSlot]] = defaultdict(list)
    for stored in held:
        slot = stored.slot
        versions[slot.step, slot.generation, slot.world_size].append(stored)
    for step, generation, world_size in sorted(versions, reverse=True):
        slots = versions[step, generation, world_size]
        if len(slots) < world_size or (generation, step) in excluded_versions:
            continue
        if len(slots) > world_size:
            slots.sort(key=lambda stored: (stored.slot.replica, stored.node_id), reverse=True)
        ranks = {stored.slot.rank: stored for stored in slots}  # the last of a rank wins
        if len(ranks) == world_size:
            return Restore(step, slot_refs([ranks[rank] for rank in sorted(ranks)]))
    return None


def slot_refs(held: Sequence[StoredSlot]) -> tuple[SlotRef, ...]:
    return tuple(SlotRef(slot.generation, slot.rank, slot.step, node_id) for slot, node_id in held)

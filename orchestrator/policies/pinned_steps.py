"""Steps pinned in the vaults for checkpoints: which are complete, and which may be released."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rayzero.orchestrator.policies.recovery import StoredSlot
from rayzero.workers.messages import Pinned
from rayzero.workers.vault.records import SlotRef

ALL_STEPS = 2**62


@dataclass(frozen=True, order=True)
class PinnedStep:
    """A step that every rank of a generation has pinned.

    Args:
        slots: one per rank, by rank.
        stopped_s: how long training was blocked for it, on the slowest rank.
        rank_bytes: the size of the largest slot, as far as it is known.
    """

    generation: int
    step: int
    slots: tuple[SlotRef, ...]
    stopped_s: float
    rank_bytes: int = 0


class PinnedSteps:
    """Which steps are pinned in the vaults, and up to which they may be released. Pure.

    A step is never released while it is written.
    """

    def __init__(self) -> None:
        # Keys are (generation, step); values are ranks' messages and nodes.
        self._incomplete: dict[tuple[int, int], dict[int, tuple[Pinned, str]]] = {}
        self._in_progress: set[tuple[int, int]] = set()
        self._limits: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._resumed = (0, 0)

    def add_rank(self, message: Pinned, node_id: str, world_size: int) -> PinnedStep | None:
        """Returns the pinned step that this message completes, if any; it is then in progress."""
        generation, step = key = (message.generation, message.step)
        if key <= self._resumed:
            return None
        self._limits.setdefault(generation, -1)
        ranks = self._incomplete.setdefault(key, {})
        ranks[message.rank] = (message, node_id)
        if len(ranks) < world_size:
            return None
        del self._incomplete[key]
        self._in_progress.add(key)
        return PinnedStep(
            generation,
            step,
            tuple(
                SlotRef(generation, rank, step, node) for rank, (_, node) in sorted(ranks.items())
            ),
            stopped_s=max(message.stopped_s for message, _ in ranks.values()),
            rank_bytes=max(message.nbytes for message, _ in ranks.values()),
        )

    def resume(
        self, held: Iterable[StoredSlot], generation: int, world_size: int
    ) -> PinnedStep | None:
        """The newest step that all ranks of a lost controller's generation have pinned; it is then
        in progress. Messages about it, and about older ones, may still come. Pins that some
        ranks have passed without the others are released."""
        newest: defaultdict[int, int] = defaultdict(int)
        by_step: defaultdict[int, dict[int, StoredSlot]] = defaultdict(dict)
        for stored in held:
            slot = stored.slot
            if slot.generation == generation and not slot.replica:
                newest[slot.rank] = max(newest[slot.rank], slot.step)
                if slot.pinned:
                    by_step[slot.step][slot.rank] = stored
        passed = min(newest.values(), default=0) if len(newest) == world_size else 0
        whole = [step for step, ranks in by_step.items() if len(ranks) == world_size]
        partial = [step for step in by_step if step <= passed and step not in whole]
        self._limits[generation] = max(partial, default=-1)
        if not whole:
            return None
        step = max(whole)
        self._resumed = generation, step
        self._in_progress.add((generation, step))
        ranks = by_step[step]
        slots = tuple(
            SlotRef(generation, rank, step, stored.node_id)
            for rank, stored in sorted(ranks.items())
        )
        largest = max(stored.slot.nbytes for stored in ranks.values())
        return PinnedStep(generation, step, slots, 0.0, largest)

    def complete(self, pin: PinnedStep) -> None:
        """A pin is written, or given up."""
        self._in_progress.discard((pin.generation, pin.step))
        self._limits[pin.generation] = max(self._limits.get(pin.generation, -1), pin.step)

    def releasable(self) -> Iterator[tuple[int, int]]:
        """Yields (generation, step): all pins up to both may be released. Each is yielded once."""
        for generation, limit in sorted(self._limits.items()):
            busy = [step for other, step in self._in_progress if other <= generation]
            limit = min([limit, *(step - 1 for step in busy)])
            if limit > self._released.get(generation, 0):
                self._released[generation] = limit
                yield generation, limit

    def release_older(self, generation: int) -> None:
        """The pins of generations before this one are useless from now on."""
        for older in self._limits:
            if older < generation:
                self._limits[older] = ALL_STEPS
        for key in [key for key in self._incomplete if key[0] < generation]:
            del self._incomplete[key]

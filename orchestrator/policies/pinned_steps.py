"""Steps pinned in the vaults for checkpoints: which are complete, and which may be released."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
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

    They are written one after another, in their order; none is released before.
    """

    def __init__(self) -> None:
        # Keys are (generation, step); values are ranks' messages and nodes.
        self._incomplete: dict[tuple[int, int], dict[int, tuple[Pinned, str]]] = {}
        self.writing: deque[PinnedStep] = deque()
        """Until `complete`, the oldest first."""
        self._resumed = (0, 0)
        self._passed = 0  # of that generation: see `resume`
        self._oldest = 1  # the pins of earlier generations are released

    def add_rank(self, message: Pinned, node_id: str, world_size: int) -> PinnedStep | None:
        """Returns the pinned step that this message completes, if any, which is to be written."""
        generation, step = key = (message.generation, message.step)
        if key <= self._resumed:
            return None
        ranks = self._incomplete.setdefault(key, {})
        ranks[message.rank] = (message, node_id)
        if len(ranks) < world_size:
            return None
        del self._incomplete[key]
        pin = PinnedStep(
            generation,
            step,
            tuple(
                SlotRef(generation, rank, step, node) for rank, (_, node) in sorted(ranks.items())
            ),
            stopped_s=max(message.stopped_s for message, _ in ranks.values()),
            rank_bytes=max(message.nbytes for message, _ in ranks.values()),
        )
        self.writing.append(pin)
        return pin

    def resume(
        self, held: Iterable[StoredSlot], generation: int, world_size: int
    ) -> tuple[PinnedStep | None, int]:
        """The newest step that all ranks of a lost controller's generation have pinned, which is to
        be written; messages about it, and about older ones, may still come. And the step up to
        which pins may be released: those that some ranks have passed without the others. They are
        released with the step that is written, if there is one."""
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
        self._passed = max((it for it in by_step if it <= passed and it not in whole), default=0)
        if not whole:
            return None, self._passed
        step = max(whole)
        self._resumed = generation, step
        ranks = by_step[step]
        slots = tuple(
            SlotRef(generation, rank, step, stored.node_id)
            for rank, stored in sorted(ranks.items())
        )
        largest = max(stored.slot.nbytes for stored in ranks.values())
        self.writing.append(PinnedStep(generation, step, slots, 0.0, largest))
        return self.writing[-1], 0

    def complete(self, pin: PinnedStep) -> tuple[int, int]:
        """A pin is written, or given up. Returns the generation and the step up to which pins may
        be released."""
        self.writing.remove(pin)
        passed = self._passed if pin.generation == self._resumed[0] else 0
        return pin.generation, max(pin.step, passed)

    def release_older(self, generation: int) -> bool:
        """A step of a generation is finished. Returns whether the pins of earlier generations,
        useless from now on, may be released, which they are: once, when none of them is being
        written."""
        for key in [key for key in self._incomplete if key[0] < generation]:
            del self._incomplete[key]
        is_written = not self.writing or self.writing[0].generation >= generation
        if generation <= self._oldest or not is_written:
            return False
        self._oldest = generation
        return True

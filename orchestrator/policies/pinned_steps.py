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
    """The steps that are pinned in the vaults, and the step up to which pins may be released. Pure.

    Pinned steps are written one after another, in their order. No step is released before it is
    written.
    """

    def __init__(self) -> None:
        # Keys are (generation, step); values are ranks' messages and nodes.
        self._incomplete: dict[tuple[int, int], dict[int, tuple[Pinned, str]]] = {}
        self.writing: deque[PinnedStep] = deque()
        """Steps to be written, until `complete`; the oldest first."""
        self._resumed = (0, 0)
        self._passed = 0  # of the resumed generation: see `resume`
        self._oldest = 1  # the pins of earlier generations are released

    def add_rank(self, message: Pinned, node_id: str, world_size: int) -> PinnedStep | None:
        """Adds the pin of one rank. Returns the step that it completes, if any, which is to be
        written."""
        generation, step = message.generation, message.step
        key = (generation, step)
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
        """Returns the newest step that all ranks of a lost controller's generation have pinned,
        which is to be written, and the step up to which pins may be released.

        Messages about this step, and about older ones, may still come. Steps that only some of the
        ranks have pinned, and all ranks have passed, are released together with the step that is
        written, if there is one.
        """
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
        incomplete = [step for step in by_step if step <= passed and step not in whole]
        self._passed = max(incomplete, default=0)
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
        """Records that a pin is written, or given up. Returns the generation and the step up to
        which pins may be released."""
        self.writing.remove(pin)
        passed = self._passed if pin.generation == self._resumed[0] else 0
        return pin.generation, max(pin.step, passed)

    def release_older(self, generation: int) -> bool:
        """Records that a step of a generation is finished, which makes the pins of earlier
        generations useless. Returns True once, when none of these is being written: then they are
        released."""
        for key in [key for key in self._incomplete if key[0] < generation]:
            del self._incomplete[key]
        is_written = not self.writing or self.writing[0].generation >= generation
        if generation <= self._oldest or not is_written:
            return False
        self._oldest = generation
        return True

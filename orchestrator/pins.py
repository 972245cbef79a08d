"""Which steps are pinned in the vaults, and up to which they may be freed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rayzero.workers.messages import Pinned, SlotRef

EVERY_STEP = 2**62


@dataclass(frozen=True, order=True)
class Pin:
    """A step that every rank of a generation has pinned.

    Args:
        slots: one a rank, by rank.
        checkpoint: whether a checkpoint is to be made of it.
        stopped_s: how long training stood still for it, on the slowest rank.
    """

    generation: int
    step: int
    slots: tuple[SlotRef, ...]
    checkpoint: bool
    stopped_s: float

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes it lies on, each once, by rank."""
        return tuple(dict.fromkeys(slot.node_id for slot in self.slots))


class Pins:
    """The life of pinned steps.

    A step in work is never freed. One that was sent to other nodes is held until a newer one was:
    were it freed before, there would be steps that no level of copies has as a whole. One that was
    only made a checkpoint of is free at once, since the vaults hold newer steps anyway.
    """

    def __init__(self) -> None:
        self._open: defaultdict[tuple[int, int], dict[int, tuple[Pinned, str]]] = defaultdict(dict)
        self._busy: set[tuple[int, int]] = set()
        self._limits: dict[int, int] = {}
        self._freed: dict[int, int] = {}

    def add(self, message: Pinned, node_id: str, world_size: int) -> Pin | None:
        """The pin that a rank's message completes, if it does; it is in work from now on."""
        key = (message.generation, message.step)
        self._limits.setdefault(message.generation, -1)
        ranks = self._open[key]
        ranks[message.rank] = (message, node_id)
        if len(ranks) < world_size:
            return None
        del self._open[key]
        self._busy.add(key)
        slots = tuple(SlotRef(*key[:1], rank, key[1], ranks[rank][1]) for rank in sorted(ranks))
        said = [one for one, _ in ranks.values()]
        return Pin(
            *key, slots, any(one.checkpoint for one in said), max(one.stopped_s for one in said)
        )

    def done(self, pin: Pin, *, hold: bool) -> None:
        """Nothing more is done with a pin. `hold`: it is now whole on every level of copies."""
        self._busy.discard((pin.generation, pin.step))
        self._limit(pin.generation, pin.step - hold)
        if hold:
            self._superseded(pin.generation)

    def failed(self, pin: Pin) -> None:
        """A pin did not become whole on every level: it lasts until a newer one has."""
        self._busy.discard((pin.generation, pin.step))

    def begun(self, generation: int, *, remote: bool) -> None:
        """A generation finished a step. Where nothing is sent to other nodes, the pins of those
        before it have no use any more."""
        if not remote:
            self._superseded(generation)

    def freeable(self) -> Iterator[tuple[int, int]]:
        """(generation, step): what was pinned up to both may be freed. Each once."""
        for generation, limit in sorted(self._limits.items()):
            busy = [step for one, step in self._busy if one <= generation]
            limit = min([limit, *(step - 1 for step in busy)])
            if limit > self._freed.get(generation, 0):
                self._freed[generation] = limit
                yield generation, limit

    def _limit(self, generation: int, step: int) -> None:
        self._limits[generation] = max(self._limits.get(generation, -1), step)

    def _superseded(self, generation: int) -> None:
        for older in self._limits:
            if older < generation:
                self._limits[older] = EVERY_STEP
        for key in [key for key in self._open if key[0] < generation]:
            del self._open[key]

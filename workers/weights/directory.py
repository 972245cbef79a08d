"""The place of the newest version of the weights. Free of torch: the controller makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayzero.workers.vault.records import SlotRef


class WeightVersion(NamedTuple):
    """The weights after so many finished steps, mirrored in a generation. Versions of later
    generations are greater, also if they are of an earlier step: a checkpoint's."""

    generation: int
    step: int


@dataclass(frozen=True)
class WeightDirectory:
    """A version, and the slots of all ranks that hold it.

    Args:
        confirmed_in: the generation that has mirrored it, or has begun with it.
    """

    slots: tuple[SlotRef, ...]
    confirmed_in: int = 0

    @property
    def version(self) -> WeightVersion:
        first = self.slots[0]
        return WeightVersion(first.generation, first.step)

    @property
    def progress(self) -> tuple[int, int]:
        """Grows while the job trains, also where it has gone back to an older step."""
        return self.confirmed_in, self.version.step

"""The location of the newest version of the weights. Free of torch: the controller makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayzero.workers.vault.records import SlotRef


class WeightVersion(NamedTuple):
    """The weights after `step` finished steps, mirrored in a generation. The version of a later
    generation is greater, even if the generation began with an earlier step, from a checkpoint."""

    generation: int
    step: int


@dataclass(frozen=True)
class WeightDirectory:
    """A version, and the slots of all ranks that hold it.

    Args:
        slots: one slot for each rank.
        confirmed_in: the generation that mirrored the version, or began with it.
    """

    slots: tuple[SlotRef, ...]
    confirmed_in: int = 0

    @property
    def version(self) -> WeightVersion:
        first = self.slots[0]
        return WeightVersion(first.generation, first.step)

    @property
    def progress(self) -> tuple[int, int]:
        """A value that grows while the job trains, even if the job went back to an older step."""
        return self.confirmed_in, self.version.step

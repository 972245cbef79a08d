"""A micro-batch as a loader yielded it, and those that were yielded for other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.utils.weak import TensorWeakRef

from rayzero.engine.data.sampling import StepSplit, TrainingProgress


@dataclass(frozen=True, eq=False)
class YieldedBatch:
    """One micro-batch of this rank, as the loader yielded it."""

    position: tuple[int, int]  # (sample cursor of its step, number in it): strictly increasing
    weight: float  # of its loss in the mean over the global batch
    own_indices: Sequence[int]  # dataset indices of this rank's samples; empty for a filler
    is_last: bool  # of its step
    progress: TrainingProgress  # of the engine whose loader it is
    split: StepSplit
    skipped: Sequence[int] = ()  # of own_indices, those that are not in it
    tensors: list[TensorWeakRef] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether the script can still train on it."""
        return not self.tensors or any(it() is not None for it in self.tensors)

    def __str__(self) -> str:
        progress = self.progress
        ahead = (self.position[0] - progress.sample_cursor) // progress.global_batch
        return f"micro-batch {self.position[1] + 1} of step {progress.step + 1 + ahead}"


class StaleBatches:
    """Micro-batches that the loop had read before the ranks changed. What it trains on of them
    changes nothing, because all of their samples are read again, split for the present ranks.

    Attributes:
        waiting: those that the loop may still come to, in its order.
        is_next: the model's last forward was of one, and its step() has not ended.
    """

    def __init__(self) -> None:
        self.waiting: deque[YieldedBatch] = deque()
        self.is_next = False

    def end_step(self) -> None:
        """The step() of the oldest has ended, or it has none."""
        if self.is_next and self.waiting:
            self.waiting.popleft()
        self.is_next = False

"""A micro-batch as a loader yielded it, and those that were yielded before the ranks changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.utils.weak import TensorWeakRef

from rayzero.engine.data.sampling import StepSplit, TrainingProgress


@dataclass(frozen=True, eq=False)
class YieldedBatch:
    """One micro-batch of this rank, as the loader yielded it."""

    position: tuple[int, int]  # (sample cursor of its step, number in that): strictly increasing
    weight: float  # of its loss in the mean over the global batch
    own_indices: Sequence[int]  # dataset indices of this rank's samples; empty for a filler
    is_last: bool  # whether its step has no more micro-batches
    progress: TrainingProgress  # of the engine whose loader yielded it
    split: StepSplit
    skipped: Sequence[int] = ()  # those of own_indices that are bad, and left out
    tensors: list[TensorWeakRef] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether the script can still train on it: one of its tensors lives, or it has none."""
        return not self.tensors or any(tensor() is not None for tensor in self.tensors)

    def __str__(self) -> str:
        progress = self.progress
        ahead = (self.position[0] - progress.sample_cursor) // progress.global_batch
        return f"micro-batch {self.position[1] + 1} of step {progress.step + 1 + ahead}"


class StaleBatches:
    """Micro-batches that the loop had read before the ranks changed. If the loop trains on one, it
    changes nothing: all of their samples are read again, split for the present ranks.

    Attributes:
        waiting: the micro-batches that the loop may still train on, in its order.
        is_next: whether the model's last forward was of one of these, and its step() has not ended.
    """

    def __init__(self) -> None:
        self.waiting: deque[YieldedBatch] = deque()
        self.is_next = False

    def end_step(self) -> None:
        """Called when a step() has ended. Removes the oldest micro-batch if the step was of it."""
        if self.is_next and self.waiting:
            self.waiting.popleft()
        self.is_next = False

"""Which samples of a step a rank computes, in which micro-steps, and with what weight. Pure.

The global batch is constant whatever the world size is. A step's samples are split as evenly as
possible over the ranks, in contiguous runs, and a rank's run as evenly as possible over its
micro-steps. Every rank runs the same number of micro-steps, because collectives need every rank; a
micro-step that has no sample of its own runs on a borrowed one with weight zero. Gradients are
averaged by sample count, so nothing need divide anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayzero.engine.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of one micro-step.

    Attributes:
        start: its first sample, counted from the first sample of the step.
        count: its own samples, `start` to `start + count - 1`; 0 when it has none.
        weight: its share of the step's gradient, `count / global_batch`.
    """

    start: int
    count: int
    weight: float

    @property
    def borrowed(self) -> bool:
        """Whether it has no sample of its own and runs on sample `start`, which another owns."""
        return self.count == 0

    @property
    def reads(self) -> int:
        """The samples to read, from `start` on: its own, or the borrowed one."""
        return max(1, self.count)


def micro_steps(global_batch: int, world_size: int, micro_batch: int) -> int:
    """The micro-steps that every rank runs in a step of `global_batch` samples.

    Args:
        micro_batch: the most samples that a rank takes at once.

    Raises:
        ConfigError: an argument is smaller than 1.
    """
    for name, value in (
        ("the global batch", global_batch),
        ("the world size", world_size),
        ("the micro-batch", micro_batch),
    ):
        if value < 1:
            raise ConfigError(
                f"{name} is {value}",
                "1 or more",
                "train_batch_size, train_micro_batch_size_per_gpu or the number of workers",
            )
    largest_share = -(-global_batch // world_size)
    return -(-largest_share // micro_batch)


def split_step(
    global_batch: int, world_size: int, rank: int, micro_batch: int
) -> tuple[MicroBatch, ...]:
    """The micro-batches that `rank` computes in a step, in order: `micro_steps(...)` of them.

    Raises:
        ConfigError: a size is smaller than 1, or `rank` is outside [0, world_size).
    """
    turns = micro_steps(global_batch, world_size, micro_batch)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}", f"0 to {world_size - 1}", "the rank")
    first, mine = _share(global_batch, world_size, rank)
    plan = []
    for turn in range(turns):
        offset, count = _share(mine, turns, turn)
        start = first + offset if count else 0
        plan.append(MicroBatch(start, count, count / global_batch))
    return tuple(plan)


def _share(total: int, parts: int, part: int) -> tuple[int, int]:
    """(start, count) of one of `parts` contiguous runs of `total` things; the first are larger."""
    each, more = divmod(total, parts)
    return part * each + min(part, more), each + (part < more)

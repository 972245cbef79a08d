"""Which samples of a step a rank computes, in which micro-steps, and with what weight. Pure.

The global batch is constant whatever the world size is. A step's samples are split over the ranks
in contiguous runs, as evenly as possible or by given shares, and a rank's run as evenly as possible
over its micro-steps. Every rank runs the same number of micro-steps, because collectives need every
rank; a micro-step that has no sample of its own runs on a borrowed one with weight zero. Gradients
are averaged by sample count, so nothing need divide anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isclose

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
        return 1 if self.borrowed else self.count


def rank_samples(
    global_batch: int, world_size: int, shares: Sequence[float] = ()
) -> tuple[int, ...]:
    """How many samples of a step each rank computes; they add up to `global_batch`.

    Args:
        shares: each rank's share, adding up to 1; empty for even shares. What does not come out
            whole goes to the largest remainders, and among equal ones to the first ranks.

    Raises:
        ConfigError: a size is smaller than 1, or the shares are not those of `world_size` ranks.
    """
    _at_least_1("the global batch", global_batch)
    _at_least_1("the world size", world_size)
    if not shares:
        return tuple(_part(global_batch, world_size, rank)[1] for rank in range(world_size))
    if len(shares) != world_size or min(shares) < 0 or not isclose(sum(shares), 1, rel_tol=1e-6):
        raise ConfigError(
            f"the shares {tuple(shares)} of {world_size} ranks",
            "one share a rank, none negative, together 1",
        )
    # Fractions, because every rank must come to the same counts and these to the same sum.
    total = sum(map(Fraction, shares))
    quotas = [Fraction(share) * global_batch / total for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(world_size), key=lambda rank: counts[rank] - quotas[rank])
    for rank in by_remainder[: global_batch - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def micro_steps(
    global_batch: int, world_size: int, micro_batch: int, shares: Sequence[float] = ()
) -> int:
    """The micro-steps that every rank runs in a step: enough for the rank with the most samples.

    Args:
        micro_batch: the most samples that a rank takes at once.
        shares: as in `rank_samples`.

    Raises:
        ConfigError: a size is smaller than 1, or the shares are not those of `world_size` ranks.
    """
    _at_least_1("the micro-batch", micro_batch)
    return -(-max(rank_samples(global_batch, world_size, shares)) // micro_batch)


def split_step(
    global_batch: int,
    world_size: int,
    rank: int,
    micro_batch: int,
    shares: Sequence[float] = (),
) -> tuple[MicroBatch, ...]:
    """The micro-batches that `rank` computes in a step, in order: `micro_steps(...)` of them.

    Raises:
        ConfigError: as `micro_steps`, or `rank` is outside [0, world_size).
    """
    turns = micro_steps(global_batch, world_size, micro_batch, shares)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}", f"0 to {world_size - 1}", "the rank")
    counts = rank_samples(global_batch, world_size, shares)
    first, mine = sum(counts[:rank]), counts[rank]
    plan = []
    for turn in range(turns):
        offset, count = _part(mine, turns, turn)
        start = first + offset if count else 0
        plan.append(MicroBatch(start, count, count / global_batch))
    return tuple(plan)


def _part(total: int, parts: int, part: int) -> tuple[int, int]:
    """(start, count) of one of `parts` contiguous runs of `total` things; the first are larger."""
    each, more = divmod(total, parts)
    return part * each + min(part, more), each + (part < more)


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(
            f"{name} is {value}",
            "1 or more",
            "train_batch_size, train_micro_batch_size_per_gpu or the number of workers",
        )

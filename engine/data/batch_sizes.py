"""Batch sizes: global batch = micro-batch x ranks x gradient accumulation steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayzero.engine.config.model import EngineConfig
from rayzero.engine.data.sampling import count_micro_steps, samples_per_rank
from rayzero.engine.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """Resolved batch sizes, in samples; `micro_steps` are micro-batches per step."""

    global_batch: int
    micro_batch: int
    micro_steps: int
    shares: tuple[float, ...] = ()  # each rank's fraction of a step's samples; empty: equal ones


def resolve_batch_sizes(
    config: EngineConfig, world_size: int, shares: Sequence[float] = ()
) -> BatchSizes:
    """Resolves the batch sizes for one world size.

    Given a global batch and a micro-batch, any world size is valid: the step's samples are split as
    evenly as possible and every rank runs the same number of micro-steps. If all three sizes are
    given, they must multiply to the global batch, as in DeepSpeed. Raises ConfigError if the three
    sizes disagree, or there are fewer samples than ranks.

    Args:
        shares: each rank's fraction of a step's samples; empty for equal ones. The config is
            checked with equal shares. Unequal ones keep a given micro-batch, which bounds memory,
            and take more micro-steps; without one they keep the micro-steps.
    """
    total = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if total is None:
        micro, steps = micro or 1, steps or 1
        return _make_sizes(micro * steps * world_size, micro, world_size, shares)
    if micro is not None and steps is not None and micro * steps * world_size != total:
        raise ConfigError(
            f"the batch sizes disagree: train_batch_size is {total}, but "
            f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            f"world size {world_size} is {micro * steps * world_size}",
            fix="leave one of the three out: it is computed from the others",
        )
    if total < world_size:
        raise ConfigError(
            f"train_batch_size {total} is less than the world size {world_size}",
            allowed="at least one sample per rank",
            fix="train_batch_size, or workers.max in the job file",
        )
    per_rank = _ceil_div(total, world_size)
    if steps is not None and _ceil_div(per_rank, micro or _ceil_div(per_rank, steps)) != steps:
        raise ConfigError(
            f"train_batch_size {total} on {world_size} ranks is {per_rank} samples per rank, which "
            f"does not make gradient_accumulation_steps {steps} micro-batches of equal size",
            fix="train_batch_size, or leave gradient_accumulation_steps out",
        )
    if micro is None:
        micro = _ceil_div(max(samples_per_rank(total, world_size, shares)), steps or 1)
    return _make_sizes(total, micro, world_size, shares)


def with_shares(sizes: BatchSizes, world_size: int, shares: Sequence[float]) -> BatchSizes:
    """Returns the sizes of the same batch and micro-batch on the same ranks, by other shares."""
    return _make_sizes(sizes.global_batch, sizes.micro_batch, world_size, shares)


def first_refused_size(config: EngineConfig, min_size: int, max_size: int) -> int:
    """Returns a world size from `min_size` to `max_size` that `resolve_batch_sizes` refuses because
    of the number of micro-batches; `min_size` if there is none. `max_size` must not be larger than
    a given global batch.

    Skips ranges of sizes that cannot be refused, so a large range takes no time.
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if total is None or steps is None or (steps == 1 and micro is None):
        return min_size
    if micro is not None:
        return min_size if micro * steps * min_size != total else max_size
    size = min_size
    while size <= max_size:
        per_rank = _ceil_div(total, size)
        micro = _ceil_div(per_rank, steps)
        if _ceil_div(per_rank, micro) != steps:
            return size
        # Ranks with more samples than this product always make `steps` micro-batches.
        size = _ceil_div(total, min(micro, steps - 1) * (steps - 1))
    return min_size


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _make_sizes(total: int, micro: int, world_size: int, shares: Sequence[float]) -> BatchSizes:
    micro_steps = count_micro_steps(total, world_size, micro, shares)
    return BatchSizes(total, micro, micro_steps, tuple(shares))

"""The global order of samples, its split over ranks and micro-steps, and the job's progress. Pure.

The order is a function of (seed, epoch, sample cursor) in O(1) memory. An epoch is a bijection of
[0, n) with a key, computed sample by sample instead of shuffled in memory: a balanced Feistel
network (Luby and Rackoff 1988) over the smallest domain of an even number of bits that holds n,
with cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains") to stay
inside [0, n): values outside are enciphered again, four passes on average in the worst case. Keys
and rounds are mixed by the finaliser of splitmix64 (Steele, Lea and Flood 2014). This is a good
shuffle, not cryptography.

The global batch is constant at every world size. A step's samples are split over the ranks in
contiguous ranges, evenly or by given shares, and a rank's range evenly over its micro-steps. Every
rank runs the same number of micro-steps, because collectives need every rank; a micro-step without
samples of its own runs on a filler sample with weight zero. Gradients are weighted by sample count,
so no size has to be divisible by another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isclose

import numpy as np
from numpy.typing import NDArray

from rayzero.engine.errors import ConfigError, DataError, check_positive

Integers = NDArray[np.int64]

_FEISTEL_ROUNDS = 8  # 4 make a pseudorandom permutation of large domains; small ones need more
_SPLITMIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = np.array([30, 27, 31], dtype=np.uint64)
_FACTORS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_MASK_64 = (1 << 64) - 1


class SampleOrder:
    """The order in which the samples of a dataset are consumed, epoch after epoch.

    A *position* is a sample cursor: the number of samples consumed before this one, over all
    epochs. Its epoch is `position // length`; every epoch has every sample exactly once.

    Args:
        length: samples in the dataset.
        seed: any integer; the low 64 bits are used.
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise DataError(f"a dataset of {length} samples", "at least one sample", "the dataset")
        self.length = length
        self.seed = seed
        self._half_bits = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
        self._half_mask = np.uint64((1 << int(self._half_bits)) - 1)

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Returns the dataset indices at positions `start` to `start + count - 1`, across epochs:
        int64, shape (count,), each in [0, length)."""
        positions = np.arange(start, start + count, dtype=np.uint64)
        epochs, values = np.divmod(positions, np.uint64(self.length))
        return self.permute(epochs, values)

    def permute(self, epochs: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the dataset index at place `values[i]` of epoch `epochs[i]`: int64."""
        seeds = np.full(1, self.seed & _MASK_64, dtype=np.uint64)
        keys = _splitmix64(_splitmix64(seeds) ^ epochs)
        values = self._feistel(values, keys)
        outside = np.flatnonzero(values >= np.uint64(self.length))
        while outside.size:
            again = values[outside] = self._feistel(values[outside], keys[outside])
            outside = outside[again >= np.uint64(self.length)]
        return values.astype(np.int64)

    def _feistel(self, values: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass of the Feistel network: a bijection of the whole domain for every key."""
        left, right = values >> self._half_bits, values & self._half_mask
        keys = keys.copy()
        for _ in range(_FEISTEL_ROUNDS):
            keys += _SPLITMIX_INCREMENT
            mixed = _splitmix64(keys ^ right)
            mixed &= self._half_mask
            left ^= mixed
            left, right = right, left
        left <<= self._half_bits
        left |= right
        return left


def _splitmix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: a bijection of 64-bit words in which every bit moves every other. In
    place, because memory for each operation would take as long as the operation."""
    words += _SPLITMIX_INCREMENT  # uint64 arithmetic wraps, as intended
    shifted = words >> _SHIFTS[0]
    words ^= shifted
    words *= _FACTORS[0]
    words ^= np.right_shift(words, _SHIFTS[1], out=shifted)
    words *= _FACTORS[1]
    words ^= np.right_shift(words, _SHIFTS[2], out=shifted)
    return words


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of one micro-step: samples `start` to `start + count - 1` of the step.

    `weight` is its weight in the step's gradient, `count / global_batch`. A micro-batch of count 0
    is a filler: it runs on sample `start`, which belongs to another one, with weight zero.
    """

    start: int
    count: int
    weight: float

    @property
    def read_count(self) -> int:
        """Number of samples to read from `start`: `count`, or 1 for a filler."""
        return self.count or 1


class StepSplit(tuple[MicroBatch, ...]):
    """This rank's micro-batches of every step. Each change of the ranks makes a new object, even an
    equal one: splits are compared by identity."""

    __slots__ = ()


def samples_per_rank(
    global_batch: int, world_size: int, shares: Sequence[float] = ()
) -> tuple[int, ...]:
    """Returns the number of samples of a step for each rank; the sum is `global_batch`. Raises
    ConfigError if a size is smaller than 1, or the shares do not fit `world_size` ranks.

    Args:
        shares: each rank's share, adding up to 1; empty for even shares. Counts are rounded by the
            largest remainder, ties to the lower rank.
    """
    check_positive("the job", train_batch_size=global_batch, world_size=world_size)
    if not shares:
        return tuple(_even_slice(global_batch, world_size, rank)[1] for rank in range(world_size))
    if len(shares) != world_size or min(shares) < 0 or not isclose(sum(shares), 1, rel_tol=1e-6):
        raise ConfigError(
            f"the shares {tuple(shares)} of {world_size} ranks",
            "one share a rank, none negative, together 1",
        )
    return divide_by_shares(global_batch, shares)


def divide_by_shares(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divides `total` into whole numbers in proportion to the shares, by the largest remainder,
    ties to the lower index. Fractions are exact, so all ranks compute the same."""
    scale = Fraction(total) / sum(map(Fraction, shares))
    quotas = [Fraction(share) * scale for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda number: counts[number] - quotas[number])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return tuple(counts)


def count_micro_steps(
    global_batch: int, world_size: int, micro_batch: int, shares: Sequence[float] = ()
) -> int:
    """Returns the number of micro-steps of a step, the same on every rank: enough for the rank with
    the most samples, at most `micro_batch` in each. Raises as `samples_per_rank`."""
    check_positive("the job", train_micro_batch_size_per_gpu=micro_batch)
    return -(-max(samples_per_rank(global_batch, world_size, shares)) // micro_batch)


def assign_step(
    global_batch: int, world_size: int, rank: int, micro_batch: int, shares: Sequence[float] = ()
) -> tuple[MicroBatch, ...]:
    """Returns the micro-batches of `rank` in a step, in order: `count_micro_steps(...)` of them.
    Raises as `samples_per_rank`, or if `rank` is outside [0, world_size)."""
    micro_steps = count_micro_steps(global_batch, world_size, micro_batch, shares)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}", f"0 to {world_size - 1}", "the rank")
    counts = samples_per_rank(global_batch, world_size, shares)
    first, own = sum(counts[:rank]), counts[rank]
    plan = []
    for micro_step in range(micro_steps):
        offset, count = _even_slice(own, micro_steps, micro_step)
        start = first + offset if count else 0
        plan.append(MicroBatch(start, count, count / global_batch))
    return tuple(plan)


def _even_slice(total: int, parts: int, part: int) -> tuple[int, int]:
    """Returns (start, count) of one of `parts` contiguous ranges of `total`. The first ranges have
    one more, if the division has a remainder."""
    each, more = divmod(total, parts)
    return part * each + min(part, more), each + (part < more)


@dataclass
class TrainingProgress:
    """The engine's position in the job. Owned by the engine; loaders write only `data_wait_s`."""

    step: int = 0  # finished optimizer steps
    micro_step: int = 0  # finished micro-steps of the current step
    # Samples consumed by finished steps, over all ranks and epochs. A loader reads it when an
    # iteration begins.
    sample_cursor: int = 0
    # Weight of the loss of a micro-batch that the script has made, so that the gradients of all
    # ranks and micro-steps sum to the mean over the global batch. A loader's have their own.
    micro_batch_weight: float = 1.0
    global_batch: int = 1  # samples of a step, over all ranks
    micro_batch: int = 1  # maximum samples of a micro-step on one rank
    skipped_steps: int = 0  # finished steps that changed nothing: a gradient was not finite
    bad_samples: int = 0  # bad samples, which were left out of finished steps on all ranks
    bad_in_step: int = 0  # bad samples of this rank in the current step's finished micro-steps
    # Calls of `step()` whose step did not count, because the process group broke.
    lost_steps: int = 0
    # {monitor: its service's identifier of this run}, on rank 0; see `engine.monitors`.
    monitor_runs: dict[str, str] = field(default_factory=dict)
    # The sample cursor of the checkpoint from which the training function took its place in the
    # data; 0: it did not.
    function_cursor: int = 0
    # The step in which a script first asked where it is, or for a checkpoint; None: it did not.
    place_asked_at: int | None = None
    # A launched script was run again, and is at the end of an epoch that was finished before: how
    # far the state is ahead, in samples, steps or epochs. None: the loop is not at such an end.
    script_lag: int | None = None
    data_wait_s: float = 0.0  # total seconds that the training loop waited for loaders
    # Sets the random states of the restored step, until a step is finished.
    restore_rng: Callable[[], None] | None = None

    def leave_epoch_out(self, ahead: int, *, peers_are_ahead: bool) -> None:
        """Called where a script that was run again is at the end of a finished epoch.

        Args:
            ahead: how far the state is ahead, in samples, steps or epochs.
            peers_are_ahead: other ranks are in the script's loop, and have done what follows the
                epoch.
        """
        if not ahead:
            self.reach_place()
        self.script_lag = ahead or int(peers_are_ahead)

    def reach_place(self) -> None:
        """Called when the loop has come to where the state is: restores the random states of the
        step. A script that was run again may have drawn random numbers on its way there, such as in
        the evaluations of finished epochs."""
        restore_rng, self.restore_rng = self.restore_rng, None
        if restore_rng is not None:
            restore_rng()

    def ask_place(self) -> None:
        """Called when the script asks for its place in the data, to continue there by itself."""
        if self.place_asked_at is None:
            self.place_asked_at = self.step

    def finish_step(self, samples: int, *, finite: bool, bad: int) -> None:
        """Counts a finished step. `bad` of its `samples` samples were left out, on all ranks."""
        self.skipped_steps += not finite
        self.bad_samples += bad
        self.micro_step = self.bad_in_step = 0
        self.restore_rng = None
        self.step += 1
        self.sample_cursor += samples

    def lose_step(self, before: TrainingProgress) -> None:
        """Goes back to `before`, the progress when a step began that is lost now. The step may have
        been counted as finished."""
        self.step = before.step
        self.sample_cursor = before.sample_cursor
        self.skipped_steps = before.skipped_steps
        self.bad_samples = before.bad_samples
        self.micro_step = self.bad_in_step = 0
        self.lost_steps += 1

    def check_bad_samples(self, bad: int, limit: int) -> None:
        """Raises DataError if a step with `bad` bad samples on all ranks exceeds the limit."""
        if bad and self.bad_samples + bad > limit:
            raise bad_samples_error(
                f"{self.bad_samples + bad} samples could not be used, {bad} of them in step "
                f"{self.step + 1}; the log of the ranks names each",
                self.bad_samples + bad,
                limit,
            )


def bad_samples_error(seen: str, count: int, limit: int) -> DataError:
    """Returns the error for a sample that cannot be used, and exceeds the limit of such samples."""
    return DataError(
        seen,
        f"{limit} such samples in a job; this is number {count}" if limit else "",
        "correct the data, its dataset or transform, or set rayzero.loader.max_bad_samples",
    )

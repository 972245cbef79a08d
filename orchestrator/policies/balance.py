"""Balance policy: divides a step's samples over the ranks by their measured speed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from rayzero.engine.data.sampling import samples_per_rank

WINDOW_STEPS = 20
"""Number of steps between two looks at the speeds. After a change, so many steps judge it."""

MIN_SHARE, MAX_SHARE = 0.25, 2.0
"""Bounds of a share, relative to an even share: measurements can be wrong, memory is limited."""

MIN_GAIN = 0.05
"""Fraction of a step's compute time that new shares must save to replace the current ones."""

_MAX_NAMED = 8  # ranks in a text
_BISECTIONS = 60  # more than a float has bits


class Balancer:
    """Divides the samples of a generation's steps by the ranks' speed: when it begins, and between
    two steps. If steps take longer after a change (more micro-batches may cost more than equal
    times save), the change is undone, and the next one waits twice as long.

    Args:
        enabled: whether `recovery.balance` is `auto`; otherwise all ranks have even shares.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._members: tuple[int, ...] = ()
        self._shares: tuple[float, ...] = ()  # in effect; empty: even ones
        self._counts: tuple[int, ...] = ()  # samples of each rank by these shares
        self._is_proposed = False  # new shares, which the ranks do not use yet
        self._before: tuple[tuple[float, ...], float] | None = None  # before a change
        self._steps_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._steps_left = self._wait_steps = WINDOW_STEPS

    def start_generation(
        self, members: tuple[int, ...], samples_per_s: Sequence[float | None]
    ) -> tuple[float, ...]:
        """Begins a generation of these workers, by rank. Returns each rank's share of a step's
        samples; empty for even shares."""
        current = self._shares if members == self._members else ()
        self._members = members
        self.on_divided(balance_shares(samples_per_s, current) if self.enabled else ())
        self._before, self._wait_steps = None, WINDOW_STEPS
        return self._shares

    def relative_share(self, rank: int, step_samples: int) -> float:
        """Returns a rank's number of samples in a step of `step_samples`, relative to an even
        share."""
        if not self.enabled or step_samples < len(self._members):
            return 1.0
        if sum(self._counts) != step_samples:
            self._counts = samples_per_rank(step_samples, len(self._members), self._shares)
        # A rank without samples has a filler.
        return max(self._counts[rank], 1) * len(self._members) / step_samples

    def on_step_finished(
        self, step_s: float, step_samples: int, samples_per_s: Callable[[], Sequence[float | None]]
    ) -> tuple[float, ...]:
        """Adds a step that all ranks have finished. Returns new shares for later steps; empty
        without a change."""
        if not self.enabled or self._is_proposed or not step_samples:
            return ()
        self._steps_s.append(step_s)
        self._steps_left -= 1
        if self._steps_left > 0:
            return ()
        usual_s, before = median(self._steps_s), self._before
        self._before = None
        if before is not None and usual_s > before[1]:
            self._wait_steps *= 2
            new = before[0] or (1 / len(self._members),) * len(self._members)
        else:
            if before is not None:
                self._wait_steps = WINDOW_STEPS
            if new := self._better_shares(step_samples, samples_per_s()):
                self._before = self._shares, usual_s
        self._steps_left = self._wait_steps
        self._is_proposed = bool(new)
        return new

    def _better_shares(
        self, step_samples: int, samples_per_s: Sequence[float | None]
    ) -> tuple[float, ...]:
        ranks, new = len(self._members), balance_shares(samples_per_s, self._shares)
        counts = samples_per_rank(step_samples, ranks, self._shares)
        return () if counts == samples_per_rank(step_samples, ranks, new) else new

    def on_divided(self, shares: tuple[float, ...]) -> None:
        """Records that the ranks have begun to use these shares."""
        self._shares, self._counts = shares, ()
        self._is_proposed = False
        self._steps_s.clear()
        self._steps_left = self._wait_steps if self._before is None else WINDOW_STEPS


def balance_shares(
    samples_per_s: Sequence[float | None], current: Sequence[float] = ()
) -> tuple[float, ...]:
    """Returns each rank's share of a step's samples; empty for even shares.

    Args:
        samples_per_s: each rank's measured speed, a median over steps; None if it is unknown, which
            counts as the median speed.
        current: the shares that these ranks have now; empty for even shares, or if the ranks
            changed.
    """
    ranks = len(samples_per_s)
    known = [speed for speed in samples_per_s if speed]
    if not known:
        return tuple(current)
    speeds = [speed or median(known) for speed in samples_per_s]
    now = current or [1 / ranks] * ranks
    best = _clamped_shares(speeds, MIN_SHARE / ranks, MAX_SHARE / ranks)
    gains = _slowest_rank_s(best, speeds) < _slowest_rank_s(now, speeds) * (1 - MIN_GAIN)
    return tuple(best) if gains else tuple(current)


def describe_shares(shares: Sequence[float]) -> str:
    """Says which ranks have fewer samples than an even share, those with the fewest first."""
    ranks = len(shares)
    slow = sorted((share * ranks, rank) for rank, share in enumerate(shares))
    few = [f"rank {rank} has {share:.2f}" for share, rank in slow if share < 1 - MIN_GAIN]
    if not few:
        return "the samples of a step are divided evenly again"
    more = f" and {len(few) - _MAX_NAMED} others less" if len(few) > _MAX_NAMED else ""
    return f"samples follow speed: {', '.join(few[:_MAX_NAMED])}{more} of an even share"


def _slowest_rank_s(shares: Sequence[float], speeds: Sequence[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def _clamped_shares(weights: Sequence[float], min_share: float, max_share: float) -> list[float]:
    """Returns shares proportional to `weights` within the bounds, with sum 1.

    The sum of the clamped products grows with the factor, so bisection finds the factor.
    """
    low, high = 0.0, 1 / min(weights)  # with `high` every share is at its upper bound
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = sum(min(max_share, max(min_share, middle * weight)) for weight in weights)
        low, high = (middle, high) if total < 1 else (low, middle)
    shares = [min(max_share, max(min_share, high * weight)) for weight in weights]
    return [share / sum(shares) for share in shares]

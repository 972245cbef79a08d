"""How a step's samples are shared between ranks that are not equally fast. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

LEAST, MOST = 0.25, 2.0
"""Bounds of a share, in even shares: a measurement may be wrong, and memory is limited."""

GAIN = 0.05
"""The part of a step's compute time that other shares must save, or things stay as they are."""

_HALVINGS = 60  # more than a float has bits


def balanced(
    samples_per_s: Sequence[float | None], current: Sequence[float] = ()
) -> tuple[float, ...]:
    """Each rank's share of a step's samples in the next generation; empty for even shares.

    Args:
        samples_per_s: each rank's measured speed, a median over steps; None where it is not known:
            such a rank counts as one in the middle.
        current: the shares that these ranks have now; empty for even shares, and for other ranks
            than before.
    """
    ranks = len(samples_per_s)
    known = [speed for speed in samples_per_s if speed]
    if not known:
        return tuple(current)
    speeds = [speed or median(known) for speed in samples_per_s]
    now = current or [1 / ranks] * ranks
    best = _clamped(speeds, LEAST / ranks, MOST / ranks)
    gains = _seconds(best, speeds) < _seconds(now, speeds) * (1 - GAIN)
    return tuple(best) if gains else tuple(current)


def _seconds(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """The slowest rank's compute time, in steps of one sample."""
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def _clamped(weights: Sequence[float], least: float, most: float) -> list[float]:
    """Shares in proportion to `weights` where the bounds allow it, adding up to 1.

    The sum of the clamped products grows with the factor, so halving finds the one that gives 1.
    """
    low, high = 0.0, 1 / min(weights)  # with `high` every share is at its upper bound
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        total = sum(min(most, max(least, middle * weight)) for weight in weights)
        low, high = (middle, high) if total < 1 else (low, middle)
    shares = [min(most, max(least, high * weight)) for weight in weights]
    return [share / sum(shares) for share in shares]

"""The progress record of one training thread: step, phase, and when it last moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from rayzero.workers.messages import Heartbeat


@dataclass(frozen=True)
class _Beat:
    step: int
    phase: str
    at_s: float
    collective: int = 0
    waiting: bool = False


class Progress:
    """Written by the training thread, read by the command thread.

    Each write replaces one immutable record, so a reader needs no lock to see a consistent one.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._beat = _Beat(0, "start", clock())

    @property
    def step(self) -> int:
        """The step being worked on, counted from 1; 0 before the user's function is called."""
        return self._beat.step

    def entered(self, phase: str) -> None:
        self._beat = replace(self._beat, phase=phase, at_s=self._clock(), waiting=False)

    def working_on(self, step: int) -> None:
        self._beat = replace(self._beat, step=step, at_s=self._clock(), waiting=False)

    def waits(self, collective: int, entered: bool) -> None:
        """A wait for other ranks begins, or ends."""
        self._beat = replace(self._beat, collective=collective, waiting=entered, at_s=self._clock())

    def heartbeat(self, rank: int) -> Heartbeat:
        beat = self._beat
        silent_s = self._clock() - beat.at_s
        return Heartbeat(rank, beat.step, beat.phase, silent_s, beat.collective, beat.waiting)

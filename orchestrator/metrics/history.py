"""What a job went through, as much of it as a page can show: every list has its bound. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

POINTS = 512
"""The most points of a curve."""
TURNS = 256
"""The most entries of a list; the oldest go."""


class Curve:
    """A curve with a bounded number of points: when there are too many, every other one goes."""

    def __init__(self, most: int = POINTS) -> None:
        self._most = most
        self._points: list[tuple[int, float]] = []
        self._stride = 1
        self._count = 0
        self._last: tuple[int, float] | None = None

    def add(self, x: int, y: float) -> None:
        self._last = (x, y)
        if self._count % self._stride == 0:
            self._points.append(self._last)
            if len(self._points) > self._most:
                self._points = self._points[::2]
                self._stride *= 2
        self._count += 1

    def rewind(self, x: int) -> None:
        """What was at this x and beyond is done again."""
        while self._points and self._points[-1][0] >= x:
            self._points.pop()

    def points(self) -> list[tuple[int, float]]:
        """In the order they came, the newest one always among them."""
        if self._last is None or (self._points and self._points[-1] == self._last):
            return list(self._points)
        return [*self._points, self._last]


def _turns() -> deque[dict[str, Any]]:
    return deque(maxlen=TURNS)


@dataclass
class History:
    """Entries as JSON can hold them; times are Unix seconds.

    Args:
        loss: by step.
        generations: every process group: when it stood, and its size.
        faults: what was seen, by cause, rank and step.
        ways: repairs and resizes, with how long each took.
        checkpoints: those that were written.
    """

    loss: Curve = field(default_factory=Curve)
    generations: deque[dict[str, Any]] = field(default_factory=_turns)
    faults: deque[dict[str, Any]] = field(default_factory=_turns)
    ways: deque[dict[str, Any]] = field(default_factory=_turns)
    checkpoints: deque[dict[str, Any]] = field(default_factory=_turns)

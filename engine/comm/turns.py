"""Sums that take several exchanges, in one order on every rank.

Every rank must launch the same exchanges in the same order, but when a rank waits for a sum depends
on its own timing. So a sum's later exchanges are launched at the latest when the next sum begins,
and never before those of the sums before it: the order is sum by sum, whoever waits when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rayzero.engine.comm.collectives import Pending

MOST_AT_ONCE = 4  # sums under way: each holds buffers for its codes


class Phased:
    """A sum under way: its exchanges, each launched when the one before it has arrived."""

    def __init__(
        self, turns: Turns, launches: Sequence[Callable[[], Pending]], finish: Callable[[], None]
    ) -> None:
        self._turns = turns
        self._later = deque(launches)
        self._current = self._later.popleft()()
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is None:
            return
        self._turns.launch_until(self)
        self._current.wait()
        finish, self._finish = self._finish, None
        finish()

    def release(self) -> None:
        """Other ranks read codes only, and those lie in buffers of their own."""
        self.wait()

    @property
    def over(self) -> bool:
        return self._finish is None

    def launch_all(self) -> None:
        while self._later:
            self._current.wait()
            self._current = self._later.popleft()()


class Turns:
    """The sums under way on this rank, oldest first."""

    def __init__(self) -> None:
        self._under_way: deque[Phased] = deque()

    def start(
        self, launches: Sequence[Callable[[], Pending]], finish: Callable[[], None]
    ) -> Phased:
        """Begins a sum.

        Args:
            launches: start its exchanges; each is called when the one before has arrived.
            finish: makes the result of what the last one brought.
        """
        for one in self._under_way:
            one.launch_all()
        while self._under_way and (self._under_way[0].over or len(self._under_way) >= MOST_AT_ONCE):
            self._under_way.popleft().wait()
        phased = Phased(self, launches, finish)
        self._under_way.append(phased)
        return phased

    def launch_until(self, last: Phased) -> None:
        """Launches all that is left of the sums up to this one."""
        if last not in self._under_way:  # all of it was launched when it left
            return
        for one in self._under_way:
            one.launch_all()
            if one is last:
                return

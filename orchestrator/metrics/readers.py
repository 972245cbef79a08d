"""Who reads the job's endpoint again and again, so that the end can wait to be read. Pure.

A job that fails between two scrapes would never be seen as failed, and no alert could tell of it.
"""

from __future__ import annotations

from collections import defaultdict, deque

REGULAR_S = 60.0
"""Reads further apart than this are nobody's habit."""
MOST_S = 30.0
"""The longest that an end waits."""
_INTERVALS = 4
_SLACK_S = 0.5


class Readers:
    """Reads, by what was read. Times are of one clock."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}
        self._every_s: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_INTERVALS)
        )

    def read(self, what: str, now_s: float) -> None:
        if what in self._last_s:
            self._every_s[what].append(now_s - self._last_s[what])
        self._last_s[what] = now_s

    def wait_until_s(self, ended_s: float) -> float:
        """Until when somebody is expected who has not read the end yet; `ended_s`, if nobody is."""
        return max([ended_s, *(self._due_s(what, ended_s) for what in self._last_s)])

    def _due_s(self, what: str, ended_s: float) -> float:
        last_s, every_s = self._last_s[what], self._every_s[what]
        if last_s > ended_s or len(every_s) < 2 or max(every_s) > REGULAR_S:
            return ended_s
        return min(last_s + 1.5 * max(every_s) + _SLACK_S, ended_s + MOST_S)

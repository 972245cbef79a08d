"""How new the copies of the state are, on the ranks' own nodes and on others. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_LAG = 64
"""Mirrored steps whose time is remembered; a vault pins fewer that wait to be copied."""


@dataclass
class Copies:
    """The newest step of which every rank's share lies there.

    Args:
        step: None before the first.
        at_unix_s: when that step was finished.
        since_unix_s: when the first step was finished that was to be copied there; None while
            nothing is.
    """

    step: int | None = None
    at_unix_s: float = 0.0
    nbytes: float = 0.0
    since_unix_s: float | None = None

    @property
    def owed_unix_s(self) -> float | None:
        """Since when steps are lost with what holds them now; None where no copy is wanted."""
        if self.since_unix_s is None or self.step is None:
            return self.since_unix_s
        return max(self.since_unix_s, self.at_unix_s)

    def owe(self, unix_s: float) -> None:
        """A step was finished that is to be copied there, this one or a later one in its place."""
        if self.since_unix_s is None:
            self.since_unix_s = unix_s


@dataclass
class Replicas:
    """Args:
    node: in the vaults of the ranks' own nodes; outlives a process.
    other: in those of other nodes; outlives a node.
    """

    node: Copies = field(default_factory=Copies)
    other: Copies = field(default_factory=Copies)
    _times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LAG))

    @property
    def places(self) -> dict[str, Copies]:
        return {"node": self.node, "other": self.other}

    def mirrored(self, step: int, nbytes: float, unix_s: float) -> None:
        """As of a step that was just finished."""
        self.node.nbytes = nbytes
        if step != self.node.step:
            self.node.step, self.node.at_unix_s = step, unix_s
            self._times.append((step, unix_s))

    def copied(self, step: int, nbytes: float, unix_s: float) -> None:
        """It lies on other nodes now. A step that nobody has seen finished yet is as new as now."""
        finished = [at_s for number, at_s in self._times if number == step]
        other = self.other
        other.step, other.nbytes = step, nbytes
        other.at_unix_s = finished[-1] if finished else unix_s

    def sends(self, so: bool, unix_s: float) -> None:
        """Whether the step that was just finished is for other nodes, too. Where there are none
        any more, neither are copies on them."""
        if so:
            self.other.owe(unix_s)
        else:
            self.other = Copies()

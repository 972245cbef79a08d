"""How a step's time divides into phases: one clock that is always running for exactly one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import perf_counter

OTHER = "other"
"""Between phases: the user's own code, the host's work around a step, evaluation without us."""


class Phases:
    """Used by the training thread. Seconds are that thread's: on CUDA it enqueues and goes on.

    Args:
        tell: is told every phase that is entered, but `OTHER`.
    """

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self._tell = tell
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._phase = OTHER
        self._since_s = perf_counter()

    def enter(self, phase: str) -> None:
        """A phase begins, and the one before ends. The host may raise here, to end the step."""
        self._change(phase)
        if self._tell is not None:
            self._tell(phase)

    def leave(self) -> None:
        """The phase is over, and nothing of ours begins."""
        self._change(OTHER)

    def end_step(self, data_wait_s: float) -> dict[str, float]:
        """Seconds by phase since the last call, and a fresh beginning.

        Args:
            data_wait_s: spent waiting for the loader meanwhile, outside of all phases.
        """
        self._change(OTHER)
        spent, self._spent = dict(self._spent), defaultdict(float)
        data_s = min(data_wait_s, spent[OTHER])
        return {"data": data_s, **spent, OTHER: spent[OTHER] - data_s}

    def _change(self, phase: str) -> None:
        now = perf_counter()
        self._spent[self._phase] += now - self._since_s
        self._phase, self._since_s = phase, now

"""Collects what a role's function reports, until the controller asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from rayzero.workers.messages import RoleReport
from rayzero.workers.spread import Spread
from rayzero.workers.step_report import COUNTER_NAMES, check_name, to_number


class RoleReporter:
    """Filled by any thread of one worker's function, emptied by a command thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, Spread] = {}
        self._tokens = 0.0
        self._version: int | None = None
        self._weights_wait_s = 0.0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds metrics. Raises EngineError: a value is not a number, or a name is invalid."""
        for name in metrics:
            check_name(name)
        numbers = {name: to_number(name, value) for name, value in metrics.items()}
        with self._lock:
            for name, number in numbers.items():
                if name in COUNTER_NAMES:
                    self._tokens += number
                    continue
                spread = Spread(1, number, number, number)
                earlier = self._values.get(name)
                self._values[name] = spread if earlier is None else earlier + spread

    def add_refresh(self, version: int, wait_s: float) -> None:
        """The function has the weights of that many finished steps, after it waited for them."""
        with self._lock:
            self._version = version
            self._weights_wait_s += wait_s

    def take(self, role: str, number: int) -> list[RoleReport]:
        """A report of what was added since the last one; none if nothing was."""
        with self._lock:
            report = RoleReport(
                role, number, self._values, self._tokens, self._version, self._weights_wait_s
            )
            self._values, self._version = {}, None
            self._tokens = self._weights_wait_s = 0.0
        return [] if report == RoleReport(role, number) else [report]

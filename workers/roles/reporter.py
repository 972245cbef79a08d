"""Collects the metrics that a role's function reports, until the controller asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from rayzero.workers.messages import RoleReport
from rayzero.workers.spread import Spread
from rayzero.workers.step_report import COUNTER_NAMES, check_name, to_number


class RoleReporter:
    """The metrics of one worker. Any thread of its function adds to them; the thread that sends
    messages takes them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: dict[str, Spread] = {}
        self._tokens = 0.0
        self._version: int | None = None
        self._weights_wait_s = 0.0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds metrics. Raises EngineError if a value is not a number, or a name is invalid."""
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
        """Notes that the function now has the weights of `version` finished steps, and how long it
        waited for them."""
        with self._lock:
            self._version = version
            self._weights_wait_s += wait_s

    def take(self, role: str, number: int) -> list[RoleReport]:
        """Returns a report of what was added since the last report; none if nothing was."""
        with self._lock:
            report = RoleReport(
                role, number, self._values, self._tokens, self._version, self._weights_wait_s
            )
            self._values, self._version = {}, None
            self._tokens = self._weights_wait_s = 0.0
        return [] if report == RoleReport(role, number) else [report]

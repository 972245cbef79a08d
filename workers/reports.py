"""What a rank tells of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from time import monotonic, time
from typing import Any

from rayzero.engine.errors import EngineError
from rayzero.workers.messages import Assign, Report
from rayzero.workers.wire import Wire

COUNTERS = frozenset({"tokens"})
"""What is added up over micro-steps and ranks; everything else is a gauge of the rank."""
_TAKEN = ("phases/", "bytes/", "collectives/")
"""What names that the engine reports begin with."""
_NAME_CHARACTERS = 128


class Reports:
    """Collects numbers until their step is finished. Used by the training thread."""

    def __init__(self, assign: Assign, wire: Wire) -> None:
        self._assign = assign
        self._wire = wire
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._last_step = 0
        self._last_at_s = monotonic()
        self._named: set[str] = set()

    def begin_at(self, step: int) -> float:
        """So many steps are finished already. The seconds since the generation began."""
        took_s = monotonic() - self._last_at_s
        self._last_step, self._last_at_s = step, monotonic()
        self._wire.progress.working_on(step + 1)
        return took_s

    def own(self, metrics: Mapping[str, Any]) -> None:
        """Adds what the training function reports.

        Raises:
            EngineError: as `add`, or a name cannot be one.
        """
        for name in metrics:
            if name not in self._named:
                _check_name(name)
                self._named.add(name)
        self.add(metrics)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds to the step at hand; `step` is left out.

        Raises:
            EngineError: a value is not a number.
        """
        for name, value in metrics.items():
            number = _number(name, value)
            if name in COUNTERS:
                self._counters[name] += number
            elif name != "step":
                self._gauges[name] = number

    def finish(self, step: int) -> Report:
        """The step is finished; its report, to be posted once the step cannot be lost.

        Raises:
            EngineError: steps do not count up.
        """
        if step <= self._last_step:
            raise EngineError(
                f"ctx.report(step={step}) after step {self._last_step}",
                allowed="each finished step once, counting from 1",
            )
        now_s = monotonic()
        self._gauges.setdefault("step_s", now_s - self._last_at_s)
        generation, rank = self._assign.generation, self._assign.rank
        counters, gauges = dict(self._counters), dict(self._gauges)
        report = Report(generation, rank, step, counters, gauges, at_s=time())
        self._counters.clear()
        self._gauges.clear()
        self._last_step, self._last_at_s = step, now_s
        self._wire.progress.working_on(step + 1)
        return report

    def unreported(self) -> dict[str, float]:
        """What was counted after the last finished step."""
        return dict(self._counters)


def _check_name(name: str) -> None:
    if not name or len(name) > _NAME_CHARACTERS or not name.isprintable():
        allowed = f"1 to {_NAME_CHARACTERS} characters that can be printed"
        raise EngineError(f"ctx.report was given the name {name[:80]!r}", allowed=allowed)
    if name.startswith(_TAKEN):
        allowed = f"names that do not begin with {', '.join(_TAKEN)}: those are the engine's"
        raise EngineError(f"ctx.report was given the name {name!r}", allowed=allowed)


def _number(name: str, value: Any) -> float:
    """Accepts whatever has one number in it, tensors of one element too."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise EngineError(
            f"ctx.report({name}=...) was given {type(value).__name__}: {str(value)[:80]!r}",
            allowed="a number, or a tensor with one element",
        ) from None

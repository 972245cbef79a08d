"""Numbers of a step.

What a rank tells of its steps.

What a worker knows of a step beside the engine: its mirror, its process's memory.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import torch

from rayzero.engine.errors import EngineError
from rayzero.workers.messages import Assignment, StepReport
from rayzero.workers.mirror import Mirror
from rayzero.workers.training_thread import GenerationChannel

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine

COUNTER_NAMES = frozenset({"tokens"})
"""What is added up over micro-steps and ranks; everything else is a gauge of the rank."""


_RESERVED_PREFIXES = ("phases/", "bytes/", "collectives/")
"""What names that the engine reports begin with."""


_MAX_NAME_CHARACTERS = 128


class StepReporter:
    """Collects numbers until their step is finished. Used by the training thread."""

    def __init__(self, assign: Assignment, wire: GenerationChannel) -> None:
        self._assignment = assign
        self._channel = wire
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._last_step = 0
        self._last_at_s = monotonic()
        self._checked_names: set[str] = set()

    def start_at(self, step: int) -> float:
        """So many steps are finished already. The seconds since the generation began."""
        took_s = monotonic() - self._last_at_s
        self._last_step, self._last_at_s = step, monotonic()
        self._channel.progress.begin_step(step + 1)
        return took_s

    def add_user_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Adds what the training function reports.

        Raises:
            EngineError: as `add`, or a name cannot be one.
        """
        for name in metrics:
            if name not in self._checked_names:
                _check_name(name)
                self._checked_names.add(name)
        self.add(metrics)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Adds to the step at hand; `step` is left out.

        Raises:
            EngineError: a value is not a number.
        """
        for name, value in metrics.items():
            number = _to_number(name, value)
            if name in COUNTER_NAMES:
                self._counters[name] += number
            elif name != "step":
                self._gauges[name] = number

    def build(self, step: int) -> StepReport:
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
        generation, rank = self._assignment.generation, self._assignment.rank
        counters, gauges = dict(self._counters), dict(self._gauges)
        report = StepReport(generation, rank, step, counters, gauges, at_s=time())
        self._counters.clear()
        self._gauges.clear()
        self._last_step, self._last_at_s = step, now_s
        self._channel.progress.begin_step(step + 1)
        return report

    def leftover_counters(self) -> dict[str, float]:
        """What was counted after the last finished step."""
        return dict(self._counters)


def _check_name(name: str) -> None:
    if not name or len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
        allowed = f"1 to {_MAX_NAME_CHARACTERS} characters that can be printed"
        raise EngineError(f"ctx.report was given the name {name[:80]!r}", allowed=allowed)
    if name.startswith(_RESERVED_PREFIXES):
        allowed = (
            f"names that do not begin with {', '.join(_RESERVED_PREFIXES)}: those are the engine's"
        )
        raise EngineError(f"ctx.report was given the name {name!r}", allowed=allowed)


def _to_number(name: str, value: Any) -> float:
    """Accepts whatever has one number in it, tensors of one element too."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise EngineError(
            f"ctx.report({name}=...) was given {type(value).__name__}: {str(value)[:80]!r}",
            allowed="a number, or a tensor with one element",
        ) from None


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class WorkerStats:
    """One generation's. Used from the training thread only. Everything here takes microseconds.

    Args:
        mirror: what of the state lies in the vault.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._skipped_steps = 0
        self._mirror_s = 0.0
        self._for_checkpoint = False

    def start_counting(self, engine: Engine) -> None:
        """The engine that the steps to come are counted from."""
        self._skipped_steps = engine.progress.skipped_steps

    def mirror_finished(self, seconds: float, step: int) -> dict[str, float]:
        """The mirror of a step is over. It belongs to the time of the next one.

        Where there is a vault: replica_step, the newest step in it, and replica_bytes, what it
        holds of this rank.
        """
        self._mirror_s = seconds
        self._for_checkpoint = self._mirror.checkpointed_step == step
        held = float(self._mirror.held_bytes)
        return (
            {"replica_step": float(self._mirror.newest_step), "replica_bytes": held} if held else {}
        )

    def for_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The numbers of a finished step, to be reported beside the engine's `metrics`:

        phases/mirror: out of phases/other. checkpoint_s: that, if it was for a checkpoint.
        skipped: 1 if the step changed nothing. resident_bytes, device_peak_bytes: this process's.
        """
        other_s = metrics.get("phases/other", 0.0)
        mirror_s = min(self._mirror_s, other_s)
        found = {
            "phases/mirror": mirror_s,
            "phases/other": other_s - mirror_s,
            "checkpoint_s": mirror_s if self._for_checkpoint else 0.0,
            "resident_bytes": float(resident_bytes()),
        }
        self._mirror_s, self._for_checkpoint = 0.0, False
        skipped = int(metrics.get("skipped_steps", self._skipped_steps))
        found["skipped"], self._skipped_steps = float(skipped - self._skipped_steps), skipped
        if torch.cuda.is_initialized():
            found["device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        return found


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0

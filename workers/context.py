"""`ctx`, what the user's training function is called with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.factory import initialize
from rayzero.workers.heartbeat import Progress
from rayzero.workers.interrupt import Interrupt
from rayzero.workers.messages import Assign, Message, Report, Setup

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine

COUNTERS = frozenset({"tokens"})
"""What `report` adds up over micro-steps and ranks; everything else is a gauge of the rank."""


@dataclass(frozen=True)
class Wire:
    """The context's line to the controller: messages, the progress record, and the way out."""

    post: Callable[[Message], None]
    progress: Progress = field(default_factory=Progress)
    interrupt: Interrupt = field(default_factory=Interrupt)


class Context:
    """One rank's view of the job in one generation. Used from the training thread only.

    It is the engine's session as well: `rayzero.initialize` finds it there.
    """

    def __init__(self, setup: Setup, assign: Assign, device: torch.device, wire: Wire) -> None:
        self.args: dict[str, Any] = setup.args
        self.name: str = setup.name
        self.device = device
        self.output_dir = Path(setup.output_dir)
        self._setup = setup
        self._assign = assign
        self._wire = wire
        self._engine_counts = False
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._last_step = 0
        self._last_step_at_s = monotonic()

    @property
    def rank(self) -> int:
        return self._assign.rank

    @property
    def world_size(self) -> int:
        return self._assign.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this node."""
        return self._assign.local_rank

    @property
    def generation(self) -> int:
        """The number of the current process group; the first is 1."""
        return self._assign.generation

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def seed(self) -> int:
        return self._setup.seed

    @property
    def steps(self) -> int:
        """Optimizer steps the job asks for.

        Raises:
            ConfigError: the job file does not say.
        """
        if self._setup.steps is None:
            raise ConfigError(
                "the training function asks for ctx.steps, but the job does not say how many",
                fix="`steps:` in the job file",
            )
        return self._setup.steps

    @property
    def engine_config(self) -> dict[str, Any] | None:
        return self._setup.engine_config

    def initialize(self, **kwargs: Any) -> tuple[Any, ...]:
        """`rayzero.initialize` with the job's config: (engine, optimizer, loader, scheduler)."""
        return initialize(**kwargs)

    def report(self, **metrics: float) -> None:
        """Adds numbers to the report of the current step.

        `tokens` is a counter: it is summed over micro-steps and ranks. Everything else is a gauge
        of this rank, of which the last value of a step counts. The engine finishes the step; where
        no engine is used, `step=k`, with k counting from 1, says that step k is finished. With an
        engine its own count stands, and `step` is left out of the report.

        Raises:
            EngineError: a value is not a number, or `step` did not grow.
        """
        self._wire.interrupt.check()
        for name, value in metrics.items():
            number = _number(name, value)
            if name in COUNTERS:
                self._counters[name] += number
            elif name != "step":
                self._gauges[name] = number
        if "step" in metrics and not self._engine_counts:
            self._finish_step(int(metrics["step"]))

    def engine_ready(self, engine: Engine) -> None:
        self._engine_counts = True
        self._last_step_at_s = monotonic()

    def phase(self, name: str) -> None:
        self._wire.interrupt.check()
        self._wire.progress.entered(name)

    def step_done(self, metrics: dict[str, float]) -> None:
        self._gauges |= {name: float(value) for name, value in metrics.items() if name != "step"}
        self._finish_step(int(metrics["step"]))

    def unreported(self) -> dict[str, float]:
        """What was counted after the last finished step."""
        return dict(self._counters)

    def _finish_step(self, step: int) -> None:
        if step <= self._last_step:
            raise EngineError(
                f"ctx.report(step={step}) after step {self._last_step}",
                allowed="each finished step once, counting from 1",
            )
        now_s = monotonic()
        self._gauges.setdefault("step_s", (now_s - self._last_step_at_s))
        self._wire.post(
            Report(self.generation, self.rank, step, dict(self._counters), dict(self._gauges))
        )
        self._counters.clear()
        self._gauges.clear()
        self._last_step, self._last_step_at_s = step, now_s
        self._wire.progress.working_on(step + 1)
        self._wire.interrupt.check()


def _number(name: str, value: Any) -> float:
    """Accepts whatever has one number in it, tensors of one element too."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise EngineError(
            f"ctx.report({name}=...) was given {type(value).__name__}: {str(value)[:80]!r}",
            allowed="a number, or a tensor with one element",
        ) from None

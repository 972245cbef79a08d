"""`ctx`, what the user's training function is called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rayzero.engine.api.entry import initialize
from rayzero.engine.errors import ConfigError
from rayzero.workers.job_session import JobSession
from rayzero.workers.messages import Assign, Setup


class Context:
    """One rank's view of the job in one generation. Used from the training thread only."""

    def __init__(
        self, setup: Setup, assign: Assign, device: torch.device, session: JobSession
    ) -> None:
        self.args: dict[str, Any] = setup.args
        self.name: str = setup.name
        self.device = device
        self.output_dir = Path(setup.output_dir)
        self._setup = setup
        self._assign = assign
        self._session = session

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

        Gauges are in /metrics as `rayzero_user_value{name=...}`, the mean over ranks, up to 100 of
        them; in metrics.jsonl; and in TensorBoard under user/.

        Raises:
            EngineError: a value is not a number, a name is empty, longer than 128 characters or the
                engine's (`phases/...`, `bytes/...`, `collectives/...`), or `step` did not grow.
        """
        self._session.check()
        self._session.reports.own(metrics)
        if "step" in metrics and self._session.engine is None:
            self._session.post(self._session.reports.finish(int(metrics["step"])))
            self._session.check()

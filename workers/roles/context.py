"""`ctx` of a role's function."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import torch

from rayzero.workers.messages import RoleWorkerSpec
from rayzero.workers.roles.reporter import RoleReporter


class RoleContext:
    """The argument of a role's function: one worker's view of its role.

    Attributes:
        name: of the job.
        role: of the worker; `number`: in its role, from 0. A replacement has that of the lost one.
        args: the role's `args`.
        seed: the job's.
        device: the worker's own.
        output_dir: the folder of the job's local files.
    """

    def __init__(
        self,
        spec: RoleWorkerSpec,
        number: int,
        device: torch.device,
        ending: Event,
        reporter: RoleReporter,
    ) -> None:
        self.name = spec.name
        self.role = spec.role
        self.number = number
        self.args = spec.args
        self.seed = spec.seed
        self.device = device
        self.output_dir = Path(spec.output_dir)
        self._ending = ending
        self._reporter = reporter

    @property
    def is_ending(self) -> bool:
        """Whether the job ends."""
        return self._ending.is_set()

    def check(self) -> None:
        """Raises SystemExit if the job ends."""
        if self._ending.is_set():
            raise SystemExit("the job ends")

    def wait(self, seconds: float) -> None:
        """Sleeps for so long, in seconds. Raises SystemExit at once if the job ends."""
        self._ending.wait(seconds)
        self.check()

    def report(self, **metrics: float) -> None:
        """Adds metrics of this worker: `ctx.report(reward=1.0, tokens=312)`. By any thread.

        `tokens` is a counter. Of all others the page shows, for each step of the job, the mean of
        what the role's workers have reported, and the least and the greatest; /metrics has the mean
        as `rayzero_role_value{role=..., name=...}`, for up to 100 names a role.

        Raises:
            EngineError: a value is not a number; or a name is empty, longer than 128 characters, or
                has a prefix of the engine's metrics (`phases/`, `bytes/`, `collectives/`).
        """
        self._reporter.add(metrics)

"""`ctx` of a role's function."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Protocol

import torch

from rayzero.engine.errors import EngineError
from rayzero.workers.messages import RoleWorkerSpec
from rayzero.workers.roles.reporter import RoleReporter
from rayzero.workers.roles.view import TASKS_PHASE, RoleView
from rayzero.workers.roles.weights import RoleWeights
from rayzero.workers.rollouts.tasks import Tasks
from rayzero.workers.training_thread import ProgressRecord
from rayzero.workers.vault.client import VaultClient
from rayzero.workers.weights.reader import WeightReader


class RoleHost(Protocol):
    """The process that a role's function runs in.

    Attributes:
        index: of the worker, in the job. No other one has it, also none that replaces it.
        ending: whether the job ends.
        view: the newest one.
        vault: the connection to its node's vault; None: there is none at the moment.
    """

    index: int
    ending: Event
    view: RoleView
    vault: VaultClient | None
    progress: ProgressRecord
    reporter: RoleReporter


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
        self, spec: RoleWorkerSpec, number: int, device: torch.device, host: RoleHost
    ) -> None:
        self.name = spec.name
        self.role = spec.role
        self.number = number
        self.args = spec.args
        self.seed = spec.seed
        self.device = device
        self.output_dir = Path(spec.output_dir)
        self._spec = spec
        self._tasks: Tasks | None = None
        self._host = host

    @property
    def is_ending(self) -> bool:
        """Whether the job ends."""
        return self._host.ending.is_set()

    def check(self) -> None:
        """Raises SystemExit if the job ends. Also a sign of life: see `tasks`."""
        if self._host.ending.is_set():
            raise SystemExit("the job ends")
        self._host.progress.renew()

    def wait(self, seconds: float) -> None:
        """Sleeps for so long, in seconds. Raises SystemExit at once if the job ends."""
        self._host.ending.wait(seconds)
        self.check()

    def tasks(self, prompts: int = 1) -> Tasks:
        """The tasks of this worker, without end: `for task in ctx.tasks(): task.done(...)`. At the
        end of the job the loop raises SystemExit.

        From the first on, a worker that gives no sign of life for `recovery.hang_timeout_s` of its
        role is started again: it takes, ends or extends a task, refreshes weights, or calls `check`
        or `wait`.

        Args:
            prompts: of a task, at most.

        Raises:
            EngineError: the role has no tasks.
        """
        stage = self._spec.stage
        if stage is None:
            raise EngineError(
                f"ctx.tasks() of role {self.role}, which takes nothing",
                allowed="`takes: prompts`, or `takes:` with the name of another role",
                fix=f"roles.{self.role}.takes in the job file",
            )
        self._host.progress.enter_phase(TASKS_PHASE)
        self._tasks = Tasks(
            lambda: self._host.view.buffer,
            self._host.index,
            stage,
            self._spec.group,
            self._spec.patience_s,
            self.check,
            prompts,
        )
        return self._tasks

    @cached_property
    def weights(self) -> RoleWeights:
        """The weights of the trainer: `ctx.weights.refresh(model)`."""
        host = self._host
        reader = WeightReader(
            lambda: host.view.weights, lambda: host.vault, self.check, self._spec.start_timeout_s
        )
        return RoleWeights(
            reader, host.reporter, lambda: (0, 0) if self._tasks is None else self._tasks.version
        )

    def report(self, **metrics: float) -> None:
        """Adds metrics of this worker: `ctx.report(reward=1.0, tokens=312)`. By any thread.

        `tokens` is a counter. Of all others the page shows, for each step of the job, the mean of
        what the role's workers have reported, and the least and the greatest; /metrics has the mean
        as `rayzero_role_value{role=..., name=...}`, for up to 100 names a role.

        Raises:
            EngineError: a value is not a number; or a name is empty, longer than 128 characters, or
                has a prefix of the engine's metrics (`phases/`, `bytes/`, `collectives/`,
                `streams/`).
        """
        self._host.reporter.add(metrics)

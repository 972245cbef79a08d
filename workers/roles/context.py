"""`ctx`, the argument of a role's function."""

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
        index: the worker's index in the job. No other worker has it, not even a replacement.
        ending: set when the job ends.
        view: the newest view of the job.
        vault: the connection to the node's vault; None: there is none at the moment.
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
        name: the job's name.
        role: the role's name.
        number: the worker's number in its role, from 0. A replacement has the lost worker's number.
        args: the role's `args`.
        seed: the job's seed.
        device: the worker's device.
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
        """Raises SystemExit if the job ends. A call is also a sign of life: see `tasks`."""
        if self._host.ending.is_set():
            raise SystemExit("the job ends")
        self._host.progress.renew()

    def wait(self, seconds: float) -> None:
        """Sleeps for `seconds`. Raises SystemExit as soon as the job ends."""
        self._host.ending.wait(seconds)
        self.check()

    def tasks(self, prompts: int = 1) -> Tasks:
        """Returns an endless iterator over this worker's tasks:
        `for task in ctx.tasks(): task.done(...)`. At the end of the job the loop raises SystemExit.

        From this call on, a worker that gives no sign of life for its role's
        `recovery.hang_timeout_s` is restarted. Signs of life are: taking, ending or extending a
        task, refreshing weights, and calling `check` or `wait`.

        Args:
            prompts: the most prompts of a task.

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
        """Adds metrics of this worker, from any thread: `ctx.report(reward=1.0, tokens=312)`.

        `tokens` is a counter. For each other metric and each step of the job, the page shows the
        mean, the least and the greatest of the values that the role's workers have reported;
        /metrics has the mean as `rayzero_role_value{role=..., name=...}`, up to 100 names a role.

        Raises:
            EngineError: a value is not a number; or a name is empty, longer than 128 characters, or
                has a prefix of the engine's metrics (`phases/`, `bytes/`, `collectives/`,
                `streams/`).
        """
        self._host.reporter.add(metrics)

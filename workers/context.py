"""`ctx`: the user's side of a training run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rayzero.engine.builder import make_loader
from rayzero.engine.data.consumed import OUTSIDE_PHASE
from rayzero.engine.data.consumption import LogSource
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.data.sample_source import MapDataset
from rayzero.engine.errors import ConfigError
from rayzero.workers.messages import WorkerSpec
from rayzero.workers.rollouts.buffer_client import RolloutLog

if TYPE_CHECKING:
    from rayzero.workers.session import JobSession

# Imported by name, since rayzero.deepspeed is above this layer; and here, so that no generation
# waits for the import.
_initialize: Callable[..., tuple[Any, ...]] = import_module("rayzero").initialize


class Context:
    """`ctx`, the training function's argument: one rank's present view of the job. The rank of a
    function that stays in its loop changes when the job has too few workers for the former rank.

    Used by the training thread only.
    """

    def __init__(self, spec: WorkerSpec, device: torch.device, session: JobSession) -> None:
        self.name = spec.name
        self.args = spec.args
        self.seed = spec.seed
        self.engine_config = spec.engine_config
        self.output_dir = Path(spec.output_dir)
        self.device = device
        self._spec = spec
        self._session = session

    @property
    def rank(self) -> int:
        return self._session.assignment.rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def world_size(self) -> int:
        return self._session.assignment.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this node."""
        return self._session.assignment.local_rank

    @property
    def generation(self) -> int:
        """The number of the job's current membership and process group, from 1."""
        return self._session.assignment.generation

    @property
    def steps(self) -> int:
        """The number of optimizer steps of the job.

        Raises:
            ConfigError: the job file does not set `steps`.
        """
        if self._spec.steps is None:
            raise ConfigError(
                "the training function reads ctx.steps, but the job does not set `steps`",
                allowed="a number of optimizer steps",
                fix="set `steps:` in the job file",
            )
        return self._spec.steps

    def initialize(self, **kwargs: Any) -> tuple[Any, ...]:
        """Calls `rayzero.initialize` with the job's config; returns what that returns."""
        return _initialize(**kwargs)

    def state(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], object],  # noqa: A002
    ) -> None:
        """Stores a value of the training function, such as EMA weights or a counter, with the
        training state, and sets it on a new worker. A function that stays in its loop keeps its
        value, unless the job goes back to an older step. Call this before the first step, before
        or after `initialize`. See `TrainingState.register`, and docs/jobs.md.

        Raises:
            EngineError: the name is registered already, or an argument has another type.
        """
        self._session.registry.register(name, get, set)

    def rollouts(
        self,
        prompts: MapDataset,
        engine: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> StepLoader:
        """Returns a loader of the samples that the job's roles make of these prompts. Each step has
        `train_batch_size` samples, `rollouts.group` of each prompt. Each prompt is trained on
        exactly once an epoch, even when workers or rollouts are lost. Call this before the first
        step.

        Args:
            prompts: a map-style dataset of values that can be pickled, the same on every rank.
            engine: an engine that trains; its state includes the position in the data.
            collate_fn: makes a batch of a list of samples; default: as in torch's DataLoader.

        Raises:
            ConfigError: the job has no rollouts, or `prompts` is not a map-style dataset.
        """
        group = self._session.assignment.rollout_group
        if not group:
            raise ConfigError(
                "ctx.rollouts() in a job without rollouts",
                allowed="a job with roles that make rollouts",
                fix="set `rollouts: {group: ...}` and `roles:` in the job file",
            )
        log = RolloutLog(
            prompts,
            self.seed,
            group,
            lambda: (self.generation, self._session.assignment.rollouts),
            self._spec.patience_s,
        )
        source = LogSource(log, engine.progress, engine.state.register)
        return make_loader(engine.internals, source, collate_fn)

    def report(self, **metrics: float) -> None:
        """Adds metrics to the report of the current step.

        `tokens` is a counter: it is summed over micro-steps and ranks. All others are gauges of
        this rank; the last value in a step is used. The engine finishes the step. Without an
        engine, `step=k`, counted from 1, finishes step k; with an engine, `step` is ignored.

        Gauges are exported in /metrics as `rayzero_user_value{name=...}`, the mean over ranks, for
        up to 100 names; in metrics.jsonl; and in TensorBoard under user/.

        Raises:
            EngineError: a value is not a number; a name is empty, longer than 128 characters, or
                has a prefix of the engine's metrics (`phases/`, `bytes/`, `collectives/`,
                `streams/`); or `step` did not increase.
        """
        self._session.check()
        self._session.reporter.add_user_metrics(metrics)
        if "step" in metrics and self._session.engine is None:
            self._session.begin()
            self._session.post(self._session.reporter.build(int(metrics["step"])))
            self._session.check()
            self._session.on_phase(OUTSIDE_PHASE)

"""HostSession of a job; ctx.

The engine's session in a worker: where it begins from, and what happens around its steps.

`ctx`, what the user's training function is called with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.api.initialize import initialize
from rayzero.engine.data.sample_ledger import SampleLedger
from rayzero.engine.errors import ConfigError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.session import StepRequests
from rayzero.workers.chaos.inject import WorkerFaultInjector
from rayzero.workers.messages import Assignment, Restored, WorkerMessage, WorkerSpec
from rayzero.workers.mirror import Mirror
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.step_report import StepReporter, WorkerStats
from rayzero.workers.training_thread import GenerationChannel, Interrupted

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


class JobSession:
    """One generation's. Used from the training thread only.

    Attributes:
        engine: None until `initialize` has made it.
        reports: what is told of steps, by the engine and by the user.
    """

    def __init__(
        self,
        setup: WorkerSpec,
        assign: Assignment,
        wire: GenerationChannel,
        keeper: RetainedState,
        injector: WorkerFaultInjector,
    ) -> None:
        self.engine: Engine | None = None
        self.reporter = StepReporter(assign, wire)
        self._spec = setup
        self._assignment = assign
        self._channel = wire
        self._retained = keeper
        self._injector = injector
        self._mirror = Mirror(setup.mirror, assign, setup.steps, keeper.vault, wire.post)
        self._stats = WorkerStats(self._mirror)
        self._ledger = _make_ledger(setup, assign)
        self._hooks: list[RemovableHandle] = []

    @property
    def engine_config(self) -> dict[str, Any] | None:
        return self._spec.engine_config

    @property
    def seed(self) -> int:
        return self._spec.seed

    @property
    def shares(self) -> Sequence[float]:
        return self._assignment.shares

    def resume_from(self) -> AbstractContextManager[StateSource | None]:
        self.on_phase("load")
        return self._retained.open_source(self._assignment.restore)

    def on_engine_ready(self, engine: Engine) -> None:
        self.engine = engine
        self._retained.retain(engine)
        self._stats.start_counting(engine)
        self._register_stop_hooks(engine)
        step = engine.progress.step
        took_s = {"load": self.reporter.start_at(step)}
        self._channel.post(
            Restored(self._assignment.generation, self._assignment.rank, step, took_s)
        )

    def on_phase(self, name: str) -> None:
        self._enter_phase(name)
        self.check()

    def post(self, message: WorkerMessage) -> None:
        self._channel.post(message)

    def check(self) -> None:
        """Raises Interrupted once the generation is over."""
        self._channel.interrupt.check()

    def on_collective_wait(self, collective: int, entered: bool) -> None:
        self._channel.progress.set_waiting(collective, entered)
        self.check()

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        if self._ledger is not None:
            self._ledger.add_samples(samples)

    def step_requests(self) -> StepRequests:
        """Asked for just before the vote. The ledger is written then: whoever goes on from this
        step has passed the vote, and then every rank has written its line."""
        step = self._channel.progress.step
        if self._ledger is not None:
            self._ledger.write_step(step)
        return replace(self._mirror.step_requests(step), drain=self._channel.drain.requested)

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        """Mirrored, and only then reported: a reported step is never lost. An interrupt waits
        for both."""
        step = int(metrics["step"])
        self._enter_phase("mirror")
        self.reporter.add(metrics | self._stats.for_step(metrics))
        if self.engine is not None:
            begun_s = perf_counter()
            self._mirror.step_done(step, agreed, self.engine.state)
            self.reporter.add(self._stats.mirror_finished(perf_counter() - begun_s, step))
        self.post(self.reporter.build(step))
        self._retained.collect_garbage()
        self.check()
        if agreed.drain:
            raise Interrupted

    def close(self) -> None:
        """The function is over, by whatever way."""
        for hook in self._hooks:
            hook.remove()

    def _register_stop_hooks(self, engine: Engine) -> None:
        """A long forward is left at its next block once the generation is over; backward looks
        whenever a sum is launched. The hooks go when the session is closed."""

        def look(*_: object) -> None:
            self.check()

        for module in engine.module.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                self._hooks += [child.register_forward_pre_hook(look) for child in module]

    def _enter_phase(self, phase: str) -> None:
        self._channel.progress.enter_phase(phase)
        self._injector.on_phase(phase, self._channel.progress.step)


def _make_ledger(setup: WorkerSpec, assign: Assignment) -> SampleLedger | None:
    if not setup.ledger:
        return None
    folder = Path(setup.output_dir, "ledger", setup.run)
    return SampleLedger(folder, assign.generation, assign.rank, assign.world_size)


class Context:
    """One rank's view of the job in one generation. Used from the training thread only."""

    def __init__(
        self, setup: WorkerSpec, assign: Assignment, device: torch.device, session: JobSession
    ) -> None:
        self.args: dict[str, Any] = setup.args
        self.name: str = setup.name
        self.device = device
        self.output_dir = Path(setup.output_dir)
        self._spec = setup
        self._assignment = assign
        self._session = session

    @property
    def rank(self) -> int:
        return self._assignment.rank

    @property
    def world_size(self) -> int:
        return self._assignment.world_size

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this node."""
        return self._assignment.local_rank

    @property
    def generation(self) -> int:
        """The number of the current process group; the first is 1."""
        return self._assignment.generation

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def seed(self) -> int:
        return self._spec.seed

    @property
    def steps(self) -> int:
        """Optimizer steps the job asks for.

        Raises:
            ConfigError: the job file does not say.
        """
        if self._spec.steps is None:
            raise ConfigError(
                "the training function asks for ctx.steps, but the job does not say how many",
                fix="`steps:` in the job file",
            )
        return self._spec.steps

    @property
    def engine_config(self) -> dict[str, Any] | None:
        return self._spec.engine_config

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
        self._session.reporter.add_user_metrics(metrics)
        if "step" in metrics and self._session.engine is None:
            self._session.post(self._session.reporter.build(int(metrics["step"])))
            self._session.check()

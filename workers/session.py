"""The worker's side of a training run: the engine's `HostSession`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.data.sample_ledger import SampleLedger
from rayzero.engine.errors import ConfigError, DataError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.session import StepRequests
from rayzero.workers.chaos.inject import WorkerFaultInjector
from rayzero.workers.messages import (
    SCRIPT_ENTRYPOINT,
    Assignment,
    Restored,
    StepDivided,
    WentBack,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.mirror import Mirror
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.step_report import StepReporter, worker_metrics
from rayzero.workers.training_thread import GenerationChannel

if TYPE_CHECKING:
    from rayzero.engine.config.parse import ConfigSource
    from rayzero.engine.engine import Engine
    from rayzero.workers.launch.tries import ScriptSettings


log = logging.getLogger("rayzero.workers")

LEDGER_RETRY_S = 1.0
"""Between two attempts to write the ledger."""

T = TypeVar("T")


class JobSession:
    """The engine's `HostSession` for one generation. Used by the training thread only.

    Attributes:
        engine: None until `initialize` has built it.
        script_settings: those of a launched script; None before it runs, and without one.
        reporter: collects the metrics of the engine and of the user.
        await_group: returns when the process group has formed; a thread joins it beside the build.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        assignment: Assignment,
        channel: GenerationChannel,
        retained: RetainedState,
        injector: WorkerFaultInjector,
        await_group: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_config = spec.engine_config
        self.script_settings: ScriptSettings | None = None
        self.shares = assignment.shares
        self.engine: Engine | None = None
        self.reporter = StepReporter(channel)
        self.await_group = await_group
        self._assignment = assignment
        self._channel = channel
        self._retained = retained
        self._injector = injector
        self._mirror = Mirror(
            *(spec.mirror, assignment, spec.steps),
            *(retained.vault, channel.post, channel.interrupt),
        )
        self._divides_steps = False
        self._spec = spec
        self._ledger = None
        if spec.ledger:
            self._ledger = self._retry_ledger(lambda: _open_ledger(spec, assignment))
        self._hooks: list[RemovableHandle] = []

    @property
    def seed(self) -> int:
        return self._spec.seed

    def adapt_config(self, config: ConfigSource | None) -> ConfigSource | None:
        settings = self.script_settings
        return config if settings is None else settings.adapt_config(config)

    def on_model(self, model: nn.Module) -> None:
        if self.script_settings is not None:
            self.script_settings.on_model(model)

    def admits_engine(self, *, trains: bool) -> bool:
        """The first that trains; in a function, also one that does not, which is refused."""
        if trains and self.engine is not None:
            self._check_second_engine()
        return self.engine is None and (trains or not self.replays_epochs)

    def _check_second_engine(self) -> None:
        """Its state is in no mirror and no checkpoint: a job goes on with it as long as nothing
        happens."""
        fix = "one model that holds both, with parameter groups"
        checkpoints = self._spec.mirror.checkpoint_every_steps is not None
        if checkpoints and not self.reporter.has_steps:  # what is trained is not thrown away
            raise ConfigError(
                "a second engine that trains, in a job with checkpoint.every_steps: a checkpoint "
                "has the state of the first only, and no job can resume from it",
                allowed="one engine, for a job that writes checkpoints",
                fix=f"{fix}; or checkpoint.every_steps: leave it out, and call save_checkpoint of "
                "both engines",
            )
        if self.restored_step:
            raise ConfigError(
                f"a second engine that trains, in a job that continues at step "
                f"{self.restored_step}: the state of the first only is preserved",
                allowed="one engine, for a job that is to survive faults",
                fix=fix,
            )
        if self._assignment.rank == 0:
            text = "the state of a second engine that trains is not preserved: this job ends with "
            log.warning(text + "an error at its first fault or resize\n  to change it: %s", fix)

    def resume_from(self) -> AbstractContextManager[StateSource | None]:
        self.on_phase("load")
        return self._retained.open_source(self._assignment.restore)

    @property
    def replays_epochs(self) -> bool:
        """The function is a script, which begins each of its loops again: a loader's first
        iteration is the first epoch, also when that is finished."""
        return self._spec.entrypoint == SCRIPT_ENTRYPOINT

    def divide_step(self, parts: int) -> None:
        """Posts `StepDivided`, by rank 0."""
        self._divides_steps = True
        if self._assignment.rank == 0:
            self._channel.post(StepDivided(self._assignment.generation, 0, parts))

    @property
    def restored_step(self) -> int:
        """Finished steps of the state that this generation starts from; 0 for a fresh start."""
        return self._assignment.restore.step if self._assignment.restore else 0

    def admits_load(self, step: int, engine_step: int, client_keys: Sequence[str]) -> bool:
        """Before its first step a function that was entered again may go back to a checkpoint that
        tells its place: its loop can then not go on from memory. Any other one stays. After its
        last step it may load any, such as the best model, to evaluate or to save it."""
        if self._is_trained:
            self.finish()  # what is loaded takes the place of the trained state
            return True
        if step >= engine_step:
            return True
        if client_keys and self._divides_steps:
            raise ConfigError(
                f"load_checkpoint of step {step}, with the client state {list(client_keys)}, in a "
                f"job whose data and schedule continue after {engine_step} finished steps",
                allowed="with Accelerate and Trainer: to go on from engine.global_steps",
                fix="load_checkpoint only `if engine.global_steps == 0`",
            )
        return bool(client_keys)

    @property
    def _is_trained(self) -> bool:
        """Whether the function has finished a step, or has come to where its last one was."""
        lag = None if self.engine is None else self.engine.progress.script_lag
        return self.reporter.has_steps or lag == 0

    def on_state_loaded(self, step: int) -> None:
        if self.engine is None or step >= self.reporter.start_step or self._is_trained:
            return
        self._mirror.go_back(step)
        self.reporter.start_at(step, self.engine.progress.skipped_steps)
        if self._assignment.rank == 0:
            self.post(WentBack(self._channel.generation, 0, step))

    def on_engine_ready(self, engine: Engine) -> None:
        self.engine = engine
        self._retained.retain(engine)
        self._register_stop_hooks(engine)
        step = engine.progress.step
        self.await_group()  # a rank that has loaded its state has joined: the controller's order
        self.reporter.start_at(step, engine.progress.skipped_steps)
        self.post(Restored(self._channel.generation, self._channel.rank, step))

    def reform(self) -> None:
        """A failed collective ends the training function, which is entered again."""

    def on_phase(self, name: str) -> None:
        """After a drain, raises Interrupted where the next step begins: what the function does
        after its last step (notes, a schedule, an evaluation, a file) is done, on all ranks."""
        self._enter_phase(name)
        if self._channel.drained and self._begins_step(name):
            self._channel.interrupt.leave()
        self.check()

    def _begins_step(self, phase: str) -> bool:
        if phase not in ("data", "forward") or self.engine is None:
            return True
        return self.engine.module.training and torch.is_grad_enabled()

    def post(self, message: WorkerMessage) -> None:
        self._channel.post(message)

    def check(self) -> None:
        """Raises Interrupted if the generation was stopped."""
        self._channel.interrupt.check()

    def on_collective_wait(self, collective: int, entered: bool) -> None:
        self._channel.progress.set_waiting(collective, entered)
        self.check()

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        if self._ledger is not None:
            self._ledger.add_samples(samples)

    def step_requests(self) -> StepRequests:
        """Called just before the step's vote. The ledger is written here: a rank that continues
        from this step has passed the vote, so every rank has written its line."""
        step = self._channel.progress.step
        if self.engine is not None and self.engine.progress.step < self.reporter.last_step:
            raise ConfigError(
                f"a step after load_checkpoint of step {self.engine.progress.step}, in a job that "
                f"has finished {self.reporter.last_step} steps",
                allowed="to go back, a new job, which loads it before its first step",
            )
        if (ledger := self._ledger) is not None:
            self._retry_ledger(lambda: ledger.write_step(step))
        return replace(self._mirror.step_requests(step), drain=self._channel.drain.is_set())

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        """Mirrors the step before reporting it: a reported step is never lost. An interrupt takes
        effect after both; before, if an abort may have changed the state."""
        step = int(metrics["step"])
        self._enter_phase("mirror")
        self.reporter.add(metrics | worker_metrics(metrics, self._mirror))
        self.reporter.add_skipped(metrics.get("skipped_steps"))
        if self.engine is not None:
            self._mirror.step_done(step, agreed, self.engine.state)
            self.reporter.add(self._mirror.gauges())
        self._mirror.post(self.reporter.build(step))
        self._retained.collect_garbage()
        self.check()
        if self.script_settings is not None:
            self.script_settings.on_step_end(metrics)
        if agreed.drain:
            self._mirror.settle()
            self._channel.drained = True

    def finish(self) -> None:
        """The function has trained its last step: returns when that is reported, and in the vault
        if the job writes checkpoints."""
        engine, step = self.engine, self.reporter.last_step
        if engine is not None and self.reporter.has_steps and engine.progress.step == step:
            self._channel.progress.enter_phase("mirror")
            self._mirror.finish(step, engine.state)
        self._mirror.settle()

    def check_loop(self) -> None:
        """Raises EngineError if the function, which has returned, did not train on all that its
        loader yielded."""
        if self.engine is not None:
            self.engine.check_loop()

    def close(self) -> None:
        """Removes the hooks, once the training function has returned or raised, and ends the
        mirror of its last step."""
        self._mirror.close()
        for hook in self._hooks:
            hook.remove()

    def _register_stop_hooks(self, engine: Engine) -> None:
        """Makes a long forward stop at its next block; a backward checks at each reduction."""

        def check_stop(*_: object) -> None:
            self.check()

        for module in engine.module.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                self._hooks += [child.register_forward_pre_hook(check_stop) for child in module]

    def _retry_ledger(self, write: Callable[[], T]) -> T:
        """Waits while the ledger cannot be written, for half as long as a rank may make no
        progress: an outage of its storage is shorter than that, and steps without lines are no
        ledger."""
        limit_s, is_reported = self._spec.hang_timeout_s / 2, False
        until_s = monotonic() + limit_s
        while True:
            try:
                return write()
            except DataError as error:
                if isinstance(error.__cause__, FileExistsError) or monotonic() > until_s:
                    raise
                if not is_reported:
                    log.warning("%s\n  training waits for it, up to %g s", error.seen, limit_s)
                is_reported = True
                self._channel.interrupt.wait(LEDGER_RETRY_S)
                self.check()

    def _enter_phase(self, phase: str) -> None:
        self._channel.progress.enter_phase(phase)
        self._injector.on_phase(phase, self._channel.progress.step)


def _open_ledger(spec: WorkerSpec, assignment: Assignment) -> SampleLedger:
    folder = Path(spec.output_dir, "ledger", spec.run)
    return SampleLedger(folder, assignment.generation, assignment.rank, assignment.world_size)

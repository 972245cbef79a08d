"""The worker's side of a training run: the engine's `HostSession`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from rayzero.engine.errors import CollectiveError, ConfigError, EngineError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.session import HostSession, StepRequests
from rayzero.engine.state.registry import StateRegistry
from rayzero.workers.function_collectives import FunctionCollectives
from rayzero.workers.ledger_writer import LedgerWriter
from rayzero.workers.membership import Membership, ScriptLoop, SessionHost
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
from rayzero.workers.process_group import is_collective_failure
from rayzero.workers.retained_state import RetainedState, check_second_engine
from rayzero.workers.step_report import StepReporter, worker_metrics
from rayzero.workers.training_thread import GenerationChannel

if TYPE_CHECKING:
    from rayzero.engine.config.parse import ConfigSource
    from rayzero.engine.engine import Engine
    from rayzero.workers.launch.tries import ScriptSettings


_FIRST_PHASES = ("data", "forward")
"""Of a step; also of an evaluation."""


class JobSession(HostSession):
    """The engine's `HostSession` for one call of the training function, through its generations.
    Used by the training thread only.

    A function whose engine is ready outlives its generation: where that ends, it waits in `reform`
    for the next one, and its engine is re-cut. Not a script whose loader yields nothing again; nor
    a function with a second engine, whose state is in no vault.

    Attributes:
        membership: of the current generation.
        engine: None until `initialize` has built it.
        script_settings: those of a launched script; None before it runs, and without one.
        loop: of a launched script.
        reporter: collects the metrics of the engine and of the user.
        registry: what the function has registered by `ctx.state`; the engine's, once there is one.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        membership: Membership,
        retained: RetainedState,
        host: SessionHost | None = None,
        collectives: FunctionCollectives | None = None,
    ) -> None:
        self.engine_config = spec.engine_config
        self.seed = spec.seed
        self.script_settings: ScriptSettings | None = None
        self.engine: Engine | None = None
        self.loop = ScriptLoop()
        self._spec = spec
        self._retained = retained
        self._host = host
        self._own_collectives = collectives
        self.reporter = StepReporter(membership.channel)
        self.registry = StateRegistry()
        self._enter(membership)

    def _enter(self, membership: Membership) -> None:
        """Takes part in a generation from now on."""
        spec, channel = self._spec, membership.channel
        self.membership = membership
        self.shares = self.assignment.shares
        self.reporter.begin_generation(channel)
        self._mirror = Mirror(
            spec.mirror,
            self.assignment,
            spec.steps,
            self._retained.vault,
            channel.post,
            channel.interrupt,
        )
        self._ledger: LedgerWriter | None = None
        if spec.ledger and not self.assignment.is_ahead:
            self._ledger = LedgerWriter(spec, self.assignment, channel.interrupt)

    def begin(self) -> None:
        """Waits for the generation, and joins it, if the function was called ahead of it."""
        if self._host is not None and self.assignment.is_ahead:
            self._enter(self._host.await_begin())
            try:
                self.membership.join()
            except RuntimeError:
                self.check()  # no exception of an ended generation is raised in the function
                raise

    @property
    def assignment(self) -> Assignment:
        return self.membership.assignment

    @property
    def _channel(self) -> GenerationChannel:
        return self.membership.channel

    @property
    def outlives_generation(self) -> bool:
        """Whether the function stays in its loop where its generation ends. By any thread."""
        return self.engine is not None and self.engine.survival.is_enabled

    def break_group(self, reason: str) -> None:
        """Ends the generation of a function that outlives it. By any thread."""
        if self.engine is not None:
            self.engine.survival.break_group(reason)

    def reform(self) -> None:
        """Leaves the generation, waits for the next one, and re-cuts the engine for it. Raises
        CollectiveError, with a group that is broken, if that is ended meanwhile."""
        engine = self.engine
        if self._host is None or engine is None:
            raise EngineError("a session without a host has one generation")
        drained = self._channel.drained
        continues = engine.survival.can_continue(replays_epochs=self.replays_epochs)
        if self._channel.ending or not continues:
            engine.survival.enable(None)
            self._channel.reforming = False
            self._channel.leave()
        self._mirror.close()
        self._enter(self._host.await_next(drained=drained, keeps_rank=self.loop.keeps_rank))
        try:
            self.membership.join()
            with self.resume_from() as source:
                if source is None:
                    raise EngineError("a generation of survivors starts from a state")
                keep = self._retained.holds_state
                engine.survival.recut(source, keep=keep, shares=self.shares)
            engine.survival.begin_step()
        except (CollectiveError, RuntimeError) as error:
            if not (self._channel.interrupt.is_set() or is_collective_failure(error)):
                raise
            reason = str(error) or "the generation was ended while it formed"
            engine.survival.break_group(reason)
            raise CollectiveError(reason) from error
        self._retained.retain(engine)
        self._report_restored(engine)

    def adapt_config(self, config: ConfigSource | None) -> ConfigSource | None:
        settings = self.script_settings
        return config if settings is None else settings.adapt_config(config)

    def on_model(self, model: nn.Module) -> None:
        if self.script_settings is not None:
            self.script_settings.on_model(model)

    def admits_engine(self, *, trains: bool) -> bool:
        """The first that trains; in a function, also one that does not, which is refused."""
        if trains and self.engine is not None:
            check_second_engine(self._spec, self.assignment, has_steps=self.reporter.has_steps)
            self.engine.survival.enable(None)
        return self.engine is None and (trains or not self.replays_epochs)

    def resume_from(self) -> AbstractContextManager[StateSource | None]:
        self.begin()
        self.on_phase("load")
        return self._retained.open_source(self.assignment.restore)

    @property
    def replays_epochs(self) -> bool:
        """The function is a script, which begins each of its loops again: a loader's first
        iteration is the first epoch, also when that is finished."""
        return self._spec.entrypoint == SCRIPT_ENTRYPOINT

    def divide_step(self, parts: int) -> None:
        """Posts `StepDivided`, by rank 0."""
        self.loop.divides_steps = True
        if self.assignment.rank == 0:
            self._channel.post(StepDivided(self.assignment.generation, 0, parts))

    def follow_loop(self, engine: Engine) -> None:
        """The loader of the script's loop yields the batches of a lost step again from now on."""
        self.loop.yields_again = True
        engine.survival.follow_host_loader()

    @property
    def steps_to_go_back(self) -> int:
        """Finished steps, at most, that a repair from memory does again."""
        return self._mirror.interval_steps

    @property
    def is_resumed(self) -> bool:
        """Whether the function begins with finished steps."""
        return self.assignment.is_ahead or bool(self.restored_step)

    @property
    def restored_step(self) -> int:
        """Finished steps of the state that this generation starts from; 0 for a fresh start."""
        self.begin()
        return self.assignment.restore.step if self.assignment.restore else 0

    def admits_load(self, step: int, engine_step: int, client_keys: Sequence[str]) -> bool:
        """Before its first step a function that was run again may go back to a checkpoint that
        tells its place: its loop cannot continue from memory then. Any other one stays; so do the
        others where this rank is new. After its last step a function may load any checkpoint, such
        as that of the best model, to evaluate or to save it."""
        self.loop.asked_step = step
        if self._is_trained:
            self.finish()  # what is loaded takes the place of the trained state
            return True
        if step >= engine_step:
            return True
        if client_keys and (self.loop.divides_steps or self.assignment.survivors_stay):
            raise ConfigError(
                f"load_checkpoint of step {step}, with the client state {list(client_keys)}, in a "
                f"job whose data and schedule continue after {engine_step} finished steps",
                allowed="to continue from engine.global_steps, with Accelerate and Trainer and "
                "where other ranks stay in their loops",
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
        if self.assignment.rank == 0:
            self.post(WentBack(self._channel.generation, 0, step))

    def on_engine_ready(self, engine: Engine) -> None:
        self.engine = engine
        engine.state.adopt(self.registry)
        self._retained.retain(engine)
        self._report_restored(engine)
        if self._own_collectives is not None:
            self._own_collectives.engine_is_ready(engine.survival)

    def _report_restored(self, engine: Engine) -> None:
        step = engine.progress.step
        self.reporter.start_at(step, engine.progress.skipped_steps)
        self.post(Restored(self._channel.generation, self._channel.rank, step))

    def _begin_step(self, *, reads_loader: bool) -> None:
        """Lets a function outlive its generations from its first step on, where new members join:
        unless its engine gathered weights before that, for which new members would find no peers.
        A script does if the loader that it trains on yields the samples of a lost step again."""
        own = self._own_collectives
        if own is None or (survival := own.begin_step()) is None:
            return
        is_own_loop = self.replays_epochs and (self.loop.divides_steps or not reads_loader)
        if self.loop.yields_again or not is_own_loop:
            survival.enable(self._on_broken)
            own.outlive(survival, self.registry)
            is_first = self.assignment.restore is None and not self.loop.yields_again
            if self.engine is not None and is_first:
                with suppress(CollectiveError):  # the generation was ended: the step is lost
                    self._mirror.begin(self.engine.state)

    def _on_broken(self, reason: str) -> None:
        if self._host is not None:
            self._host.end_group(self._channel, reason)

    def on_phase(self, name: str) -> None:
        """After a drain, leaves the generation where the next step begins: what the function does
        after its last step (notes, a schedule, an evaluation, a file) is done, on all ranks."""
        self._enter_phase(name)
        if self._begins_step(name):
            if self._channel.drained:
                self._leave_drained()
            if self.engine is not None and name in _FIRST_PHASES:
                self._begin_step(reads_loader=name == "data")
        self.check()

    def _leave_drained(self) -> None:
        if not self.outlives_generation:
            self._channel.leave()
        while True:
            with suppress(CollectiveError):  # the next one ended while it formed
                self.reform()
                return

    def _begins_step(self, phase: str) -> bool:
        if phase not in _FIRST_PHASES or self.engine is None:
            return True
        return self.engine.module.training and torch.is_grad_enabled()

    def post(self, message: WorkerMessage) -> None:
        self._channel.post(message)

    def check(self) -> None:
        """Leaves the generation if it was ended, and the function does not outlive it."""
        if not self._channel.reforming:
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
        if self._ledger is not None:
            self._ledger.write_step(step)
        requests = self._mirror.step_requests(step)
        return replace(requests, drain=self._channel.drain.is_set())

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        """Mirrors the step before reporting it: a reported step is never lost. An interrupt takes
        effect after both; before, if an abort may have changed the state."""
        with suppress(CollectiveError):
            self._end_step(metrics, agreed)

    def _end_step(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        step = int(metrics["step"])
        self._enter_phase("mirror")
        self.reporter.add(metrics | worker_metrics(metrics, self._mirror))
        self.reporter.add_skipped(metrics.get("skipped_steps"))
        if self.engine is not None:
            self._mirror.step_done(step, agreed, self.engine.state)
            self.reporter.add(self._mirror.gauges())
        self._mirror.post(self.reporter.build(step))
        self.check()
        if self.script_settings is not None:
            self.script_settings.on_step_end(metrics)
        if agreed.drain:
            self._mirror.settle()
            self._channel.drained = True

    def finish(self) -> None:
        """The function has trained its last step: returns when that is reported, and in the vault
        if the job writes checkpoints. Leaves the generation if it has ended before."""
        if self.engine is not None:
            self.engine.survival.enable(None)  # its loop has ended
        self._channel.interrupt.check()
        engine, step = self.engine, self.reporter.last_step
        if engine is not None and self.reporter.has_steps and engine.progress.step == step:
            self._channel.progress.enter_phase("mirror")
            self._mirror.finish(step, engine.state)
        self._mirror.settle()

    def check_loop(self) -> None:
        """Raises EngineError if the function, which has returned, did not train on all that its
        loader yielded; CollectiveError if it has counted a step that was lost: it is called again,
        and trains the rest."""
        if self.engine is None:
            return
        self.engine.internals.micro_batches.check_end()
        step, steps = self.engine.progress.step, self._spec.steps
        if steps is not None and step < steps <= step + self.engine.progress.lost_steps:
            raise CollectiveError(
                f"the training function returned after {step} of {steps} steps: its loop counts "
                "the steps that are lost with a rank",
                fix="loader.until(ctx.steps), or while engine.global_steps < ctx.steps",
            )

    def close(self) -> None:
        """Ends the mirror of the last step, once the training function has returned or raised."""
        self._mirror.close()

    def _enter_phase(self, phase: str) -> None:
        self._channel.progress.enter_phase(phase)
        self.membership.injector.on_phase(phase, self._channel.progress.step)

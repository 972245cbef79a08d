"""The worker's `HostSession`: the job's services to its engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rayzero.engine.data.consumed import OUTSIDE_PHASE
from rayzero.engine.errors import CollectiveError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.session import OTHER_LOADER, BesideSession, HostSession, StepRequests
from rayzero.workers.function_collectives import FunctionCollectives, checksum_of_model
from rayzero.workers.generation_session import GenerationSession
from rayzero.workers.membership import Membership, SessionHost
from rayzero.workers.messages import SCRIPT_ENTRYPOINT, Divided, StepDivided, WorkerSpec
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.step_report import MetricsMerger, worker_metrics

if TYPE_CHECKING:
    from rayzero.engine.config.parse import ConfigSource
    from rayzero.engine.engine import Engine
    from rayzero.workers.launch.tries import ScriptSettings


_FIRST_PHASES = ("data", "forward")
"""The phases in which a step begins, or an evaluation."""


class JobSession(GenerationSession):
    """The engine's `HostSession` for one call of the training function, through its generations.
    Used by the training thread only.

    This is the session of the first engine that trains. The others have an `EngineSession`, which
    passes the engine's name in `engines` with each call.

    Attributes:
        script_settings: settings of a launched script; None before it runs, and without one.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        membership: Membership,
        retained: RetainedState,
        host: SessionHost,
        collectives: FunctionCollectives,
    ) -> None:
        self.script_settings: ScriptSettings | None = None
        self._own_collectives = collectives
        self._merger = MetricsMerger()
        self._sampled: str | None = None  # the engine whose loader's samples the ledger lists
        super().__init__(spec, membership, retained, host)
        self.loop.epochs = collectives.follow_epochs(
            self.registry, lambda: self.restored_step > 0, lambda: self.assignment.notes
        )
        self.epochs = self.loop.epochs if spec.entrypoint == SCRIPT_ENTRYPOINT else None

    def adapt_config(self, config: ConfigSource | None) -> ConfigSource | None:
        settings = self.script_settings
        return config if settings is None else settings.adapt_config(config)

    def on_model(self, model: nn.Module) -> None:
        if self.script_settings is not None:
            self.script_settings.on_model(model)

    def session_for(self, name: str | None, *, trains: bool) -> HostSession:
        if not trains:
            alone = self._own_collectives.is_ahead_of_peers
            return BesideSession(self, self._on_evaluating_engine, alone=alone)
        chosen = self.engines.choose_name(name)
        if not chosen:
            return self
        if self._own_collectives.has_begun:
            self.engines.enable(None)  # a new rank would build it while others are in their loops
        return EngineSession(self, chosen)

    def _on_evaluating_engine(self, engine: Engine) -> None:
        """Called when an engine that only evaluates is ready. It has no state, so a new rank builds
        it alone, from the same weights. If these are sharded, the function does not outlive its
        generation."""
        collectives = self._own_collectives
        if collectives.has_begun:
            self.engines.enable(None)  # as in `session_for`
        self.engines.add_evaluating(engine)
        if engine.internals.runtime.stage.shards_weights:
            collectives.makes_group()
        else:
            collectives.check_model(checksum_of_model(engine.module))

    @contextmanager
    def resume_from(self) -> Iterator[StateSource | None]:
        with self.open_source() as source:
            self.engines.expect(source)
            yield self.engines.open_part(source, "")

    def divide_step(self, parts: int) -> None:
        """Posts `StepDivided` on rank 0."""
        self.loop.divides_steps = True
        if self.assignment.rank == 0:
            self._channel.post(StepDivided(self.assignment.generation, 0, parts))

    def follow_loop(self, engine: Engine) -> None:
        """Called when the loop's loader yields the batches of a lost step again from now on."""
        self.loop.yields_again = True
        engine.survival.follow_host_loader()

    def on_engine_ready(self, engine: Engine, name: str = "") -> None:
        if not name:
            self.engine = engine
            engine.state.adopt(self.registry)
        self.engines.add(name, engine)
        self._retained.retain(self.engines.state, self._mirror.copies)
        if self.engines.are_built and self._restored_in != self.assignment.generation:
            self._report_restored()
        self._own_collectives.engine_is_ready(self.engines, engine.survival)

    def _begin_step(self, *, reads_loader: bool) -> None:
        """Lets the function outlive its generations from its first step on, where new members join;
        but not if an engine gathered weights before, for which new members would find no peers.
        A script outlives them only if its loader yields the samples of a lost step again."""
        if not self.engines.are_built:
            self.engines.drop_unread(self.assignment.rank)
            self._report_restored()
        lacks_version = self._mirror.lacks_version
        # Before the copy: it includes the collectives that the function has called.
        begins_to_outlive = self._own_collectives.begin_step() and self._let_outlive(reads_loader)
        is_first = self.assignment.restore is None and not self.loop.yields_again
        if lacks_version or (begins_to_outlive and is_first):
            self._begin_mirror()

    def _let_outlive(self, reads_loader: bool) -> bool:
        """Lets the function outlive its generations, if it can. Returns whether it can."""
        is_own_loop = self.epochs is not None and (self.loop.divides_steps or not reads_loader)
        if is_own_loop and not self.loop.yields_again:
            return False
        self.engines.enable(lambda reason: self._host.end_group(self._channel, reason))
        self._own_collectives.outlive(self.registry)
        return True

    def _begin_mirror(self) -> None:
        with suppress(CollectiveError):  # the generation was ended: the step is lost
            self._mirror.begin(self.engines.state)

    def begins_step(self, loader: object | None, *, within: bool) -> bool:
        return self.engines.step.begins(loader, within=within)

    @property
    def undoes_step(self) -> bool:
        return self.engines.state.step is None

    def on_step_lost(self, engine: str = "") -> None:
        """Leaves the generation for good if the loop will not reach a place to meet the others."""
        step = self.engines.step
        if not step.count(engine, lost=True) and step.is_astray:
            self._leave_for_good()

    def on_engine_closed(self, engine: str = "") -> None:
        self.engines.close(engine)

    def on_phase(self, name: str, engine: Engine | None = None) -> None:
        """Records the phase. After a drain, leaves the generation where the next step begins: by
        then all ranks have done what the function does after a step, such as a schedule, an
        evaluation, or writing a file."""
        if name == OUTSIDE_PHASE:
            self._channel.progress.enter_phase(name)
            return
        self._enter_phase(name)
        if self._is_training(name, engine or self.engine):
            if self._channel.drained:
                self.engines.step.begins(None if name == "forward" else OTHER_LOADER, within=False)
                self._leave_drained()
            if self._channel.divides:
                self._divide()
            if self.engine is not None and name in _FIRST_PHASES:
                self._begin_step(reads_loader=name == "data")
                if self.loop.own_loaders is not None:
                    self.loop.own_loaders.stepwise.follow(self.engine)
        self.check()

    def _divide(self) -> None:
        """Divides later steps by the newest shares. Called between the same two steps on all
        ranks."""
        self._channel.divides = False
        self.shares, self._channel.new_shares = self._channel.new_shares, ()
        self.engines.divide(self.shares)
        if self.assignment.rank == 0:
            generation = self.assignment.generation
            self._channel.post(Divided(generation, 0, tuple(self.shares)))

    def _leave_drained(self) -> None:
        if not self.outlives_generation:
            self._channel.leave()
        while True:
            with suppress(CollectiveError):  # the next generation ended while it formed
                self.reform()
                return

    def _is_training(self, phase: str, engine: Engine | None) -> bool:
        """Returns False for the first phases of an evaluation, where no step begins."""
        if phase not in _FIRST_PHASES or engine is None:
            return True
        return engine.module.training and torch.is_grad_enabled()

    def on_collective_wait(self, collective: int, entered: bool, engine: object = None) -> None:
        self._channel.progress.set_waiting(collective, entered, engine)
        self.check()

    def on_samples_consumed(self, samples: Sequence[int], engine: str = "") -> None:
        """Adds the samples of one loader to the ledger: of the first engine that has a loader."""
        self._sampled = engine if self._sampled is None else self._sampled
        if self._ledger is not None and engine == self._sampled:
            self._ledger.add_samples(samples)

    def on_samples_skipped(self, samples: Sequence[int], engine: str = "") -> None:
        if self._ledger is not None and engine == self._sampled:
            self._ledger.add_skipped(samples)

    def step_requests(self, engine: str = "") -> StepRequests:
        """Returns the requests for the vote of an engine's step, just before it. Only the vote with
        which the job's step ends carries drain and pin. The ledger is written before that vote: a
        rank that continues from this step has passed the vote, so every rank has written its line.
        """
        step = self._channel.progress.step
        self.engines.check_step(engine, self.reporter.last_step)
        number = self.engines.number_of(engine)
        if not self.engines.step.completes(engine):
            self._mirror.settle()  # this engine's step changes what it copies
            return StepRequests(engine=number)
        if self._ledger is not None:
            phase = self._channel.progress.phase
            self._channel.progress.enter_phase("ledger")  # it may wait for its disk
            self._ledger.write_step(step)
            self._channel.progress.enter_phase(phase)
        requests = self._mirror.step_requests(step)
        divide = bool(self._channel.new_shares) and self.engines.can_divide_anew
        drain = self._channel.drain.is_set()
        return replace(requests, drain=drain, divide=divide, engine=number)

    def on_step_end(
        self, metrics: dict[str, float], agreed: StepRequests, engine: str = ""
    ) -> None:
        """Mirrors the step before reporting it, so that a reported step is never lost. An interrupt
        takes effect after both, or before both if an abort may have changed the state."""
        several = len(self.engines) > 1
        if several:
            self._merger.add(engine, metrics)
        if not self.engines.step.count(engine, lost=False):
            self.engines.warn_of_idle(self.assignment.rank)
            self.on_phase(OUTSIDE_PHASE)
            return
        step = int(metrics["step"])
        if several:
            step = max(self.reporter.last_step + 1, self.engines.fewest_steps)
            metrics = self._merger.take(step, self.reporter.elapsed_s)
        self.engines.state.finish(step)
        with suppress(CollectiveError):
            self._end_step(step, metrics, agreed)
        self.on_phase(OUTSIDE_PHASE)

    def _end_step(self, step: int, metrics: dict[str, float], agreed: StepRequests) -> None:
        self._enter_phase("mirror")
        self.reporter.add(metrics | worker_metrics(metrics, self._mirror))
        self.reporter.add_skipped(metrics.get("skipped_steps"))
        if self.engine is not None:
            self._mirror.step_done(step, agreed, self.engines.state)
            self.reporter.add(self._mirror.gauges())
        self._mirror.post(self.reporter.build(step))
        self.check()
        if self.script_settings is not None:
            self.script_settings.on_step_end(metrics)
        if agreed.drain:
            self._mirror.settle()
            self._channel.drained = True
        elif agreed.divide:
            self._channel.divides = True

    def check_loop(self) -> None:
        """Called when the function has returned. Raises EngineError if it did not train on all that
        its loader yielded. Raises CollectiveError if it counted a step that was lost: the function
        is then called again, and trains the rest."""
        if self.engine is None:
            return
        self.engines.check_end()
        step, steps = self.engine.progress.step, self._spec.steps
        if steps is not None and step < steps <= step + self.engine.progress.lost_steps:
            raise CollectiveError(
                f"the training function returned after {step} of {steps} steps: its loop counts "
                "the steps that are lost with a rank",
                fix="loop over loader.until(ctx.steps), or while engine.global_steps < ctx.steps",
            )

    def _enter_phase(self, phase: str) -> None:
        self._channel.progress.enter_phase(phase)
        self.membership.injector.on_phase(phase, self._channel.progress.step)


class EngineSession(HostSession):
    """The session of an engine after the first one: passes each call to the job's session, with the
    engine's name. Used by the training thread only.

    Args:
        name: of the engine, as in `JobSession.engines`.
    """

    def __init__(self, job: JobSession, name: str) -> None:
        self.engine_config = job.engine_config
        self.seed = job.seed
        self.shares = job.shares
        self.epochs = job.epochs
        self._job = job
        self._name = name
        self._engine: Engine | None = None

    @contextmanager
    def resume_from(self) -> Iterator[StateSource | None]:
        with self._job.open_source() as source:
            self.shares = self._job.shares
            yield self._job.engines.open_part(source, self._name)

    def admits_load(self, step: int, engine_step: int, client_keys: Sequence[str]) -> bool:
        return self._job.admits_load(step, engine_step, client_keys)

    def on_state_loaded(self, step: int) -> None:
        self._job.on_state_loaded(step, self._name)

    def on_engine_ready(self, engine: Any) -> None:
        self._engine = engine
        self._job.on_engine_ready(engine, self._name)

    def reform(self) -> None:
        self._job.reform()

    def begins_step(self, loader: object | None, *, within: bool) -> bool:
        return self._job.begins_step(loader, within=within)

    @property
    def undoes_step(self) -> bool:
        return self._job.undoes_step

    def on_step_lost(self) -> None:
        self._job.on_step_lost(self._name)

    def on_engine_closed(self) -> None:
        self._job.on_engine_closed(self._name)

    def on_phase(self, name: str) -> None:
        self._job.on_phase(name, self._engine)

    def on_collective_wait(self, collective: int, entered: bool, engine: object = None) -> None:
        self._job.on_collective_wait(collective, entered, self)

    def on_samples_consumed(self, samples: Sequence[int]) -> None:
        self._job.on_samples_consumed(samples, self._name)

    def on_samples_skipped(self, samples: Sequence[int]) -> None:
        self._job.on_samples_skipped(samples, self._name)

    def step_requests(self) -> StepRequests:
        return self._job.step_requests(self._name)

    def on_step_end(self, metrics: dict[str, float], agreed: StepRequests) -> None:
        self._job.on_step_end(metrics, agreed, self._name)

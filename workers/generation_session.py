"""Lets a training function enter, leave and outlive the generations of its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from rayzero.engine.errors import CollectiveError, ConfigError, EngineError
from rayzero.engine.layout.state_index import StateSource
from rayzero.engine.session import HostSession
from rayzero.engine.state.registry import StateRegistry
from rayzero.workers.job_engines import JobEngines
from rayzero.workers.ledger_writer import LedgerWriter
from rayzero.workers.membership import Membership, ScriptLoop, SessionHost
from rayzero.workers.messages import (
    Assignment,
    Notes,
    Restored,
    WentBack,
    WorkerMessage,
    WorkerSpec,
)
from rayzero.workers.mirror import Mirror
from rayzero.workers.process_group import is_collective_failure
from rayzero.workers.retained_state import RetainedState
from rayzero.workers.step_report import StepReporter
from rayzero.workers.training_thread import GenerationChannel

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


class GenerationSession(HostSession):
    """The part of `JobSession` that knows generations. Used by the training thread only.

    A function whose engines are ready outlives its generation: when the generation ends, the
    function waits in `reform` for the next one, and its engines are re-cut. A script outlives its
    generation only if its loader yields the batches of a lost step again.

    Attributes:
        membership: this rank's part in the current generation.
        engine: the first engine that trains; None until `initialize` has built it.
        engines: all engines that train.
        loop: the loop of a launched script.
        reporter: collects the metrics of the engines and of the user.
        registry: the values registered by `ctx.state`; the first engine adopts it.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        membership: Membership,
        retained: RetainedState,
        host: SessionHost,
    ) -> None:
        self.engine_config = spec.engine_config
        self.seed = spec.seed
        self.engine: Engine | None = None
        self.engines = JobEngines()
        self.loop = ScriptLoop()
        self.reporter = StepReporter(membership.channel)
        self.registry = StateRegistry()
        self._spec = spec
        self._retained = retained
        self._host = host
        self._restored_in = 0  # the newest generation to which `Restored` was posted
        self._enter(membership)

    def _enter(self, membership: Membership) -> None:
        """Takes part in this generation from now on."""
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
        """Waits for the generation and joins it, if the function was called ahead of it."""
        if self.assignment.is_ahead:
            self._enter(self._host.await_begin())
            try:
                self.membership.join()
            except RuntimeError:
                self.check()  # leaves: the function gets no exception of an ended generation
                raise

    @property
    def assignment(self) -> Assignment:
        return self.membership.assignment

    @property
    def _channel(self) -> GenerationChannel:
        return self.membership.channel

    @property
    def outlives_generation(self) -> bool:
        """Whether the function stays in its loop when its generation ends. Any thread may ask."""
        return self.engines.is_enabled

    def break_group(self, reason: str) -> None:
        """Ends the generation of a function that outlives it. Any thread may call this."""
        self.engines.break_group(reason)

    def reform(self) -> None:
        """Leaves the generation, waits for the next one, and re-cuts the engines for it. If the
        next generation ends meanwhile, breaks its group and raises CollectiveError."""
        drained, engines = self._channel.drained, self.engines
        has_batch, step = engines.step.begins_in_forward, engines.state.step
        continues = engines.can_continue(replays_epochs=self.epochs is not None)
        if self._channel.ending or not continues or (has_batch and step is None):
            self._leave_for_good()
        self._mirror.close()
        notes = self.loop.epochs.notes()
        following = self._host.await_next(
            drained=drained,
            keeps_rank=self.loop.keeps_rank or has_batch,
            notes=Notes(self.reporter.last_step, notes) if notes else None,
        )
        self._enter(following)
        if has_batch and step != self.restored_step:
            self._channel.interrupt.fail(f"a batch was made after step {step}, which is lost")
            self._leave_for_good()
        try:
            self.membership.join()
            with self.open_source() as source:
                if source is None:
                    raise EngineError("a generation of survivors starts from a state")
                engines.recut(source, keep=self._retained.holds_state, shares=self.shares)
                self._retained.retain(engines.state, self._mirror.copies)
        except (CollectiveError, RuntimeError) as error:
            if not (self._channel.interrupt.is_set() or is_collective_failure(error)):
                raise
            reason = str(error) or "the generation was ended while it formed"
            engines.break_group(reason)
            raise CollectiveError(reason) from error
        self._report_restored()

    def _leave_for_good(self) -> NoReturn:
        """Leaves the generation. The function continues in no other one."""
        self.engines.enable(None)
        self._channel.reforming = False
        self._channel.leave()

    @property
    def restored_step(self) -> int:
        """The finished steps of the state that this generation starts from; 0: a fresh start."""
        self.begin()
        return self.assignment.restore.step if self.assignment.restore else 0

    @contextmanager
    def open_source(self) -> Iterator[StateSource | None]:
        """Yields the state of all engines to start from; None for a fresh start."""
        self.begin()
        self.on_phase("load")
        with self._retained.open_source(self.assignment.restore) as source:
            yield source

    def _report_restored(self) -> None:
        """Reports that all engines have the state that the generation starts from."""
        if (engine := self.engine) is None:
            return
        several = len(self.engines) > 1
        step = self.restored_step if several else engine.progress.step
        self._restored_in = self.assignment.generation
        self.engines.state.finish(step)
        self.reporter.start_at(step, engine.progress.skipped_steps)
        self.post(Restored(self._channel.generation, self._channel.rank, step))

    def post(self, message: WorkerMessage) -> None:
        self._channel.post(message)

    def check(self) -> None:
        """Leaves the generation if it was ended and the function does not outlive it."""
        if not self._channel.reforming:
            self._channel.interrupt.check()

    @property
    def steps_to_go_back(self) -> int:
        """The largest number of finished steps that a repair from memory repeats."""
        return self._mirror.interval_steps

    @property
    def is_resumed(self) -> bool:
        """Whether the job has finished steps when the function is called."""
        return self.assignment.is_ahead or bool(self.restored_step)

    def admits_load(self, step: int, engine_step: int, client_keys: Sequence[str]) -> bool:
        """Returns whether a checkpoint of `step` replaces the state of an engine at `engine_step`.

        It does if it is not older. After its last step a function may load any checkpoint, such as
        that of the best model, to evaluate or to save it. Before its first step a function that was
        called again may go back to an older checkpoint if that has a client state, which tells
        where its loop continues; otherwise the restored state stays. Raises ConfigError for such a
        checkpoint where data and schedule, or other ranks, continue from the restored state."""
        self.loop.asked_step = step
        if self._is_trained:
            self.finish()  # the loaded state replaces the trained one
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
        """Whether the function has finished a step, or has caught up with the job's last one."""
        lag = None if self.engine is None else self.engine.progress.script_lag
        return self.reporter.has_steps or lag == 0

    def on_state_loaded(self, step: int, engine: str = "") -> None:
        """Takes the job back to an older step that was loaded before the function's first step.
        Several engines have a checkpoint each: the job goes back with the first engine that was
        at the job's step."""
        if self.engine is None:
            return
        was_at = self.engines.state.rebase(engine)
        if len(self.engines) > 1 and was_at != self.reporter.last_step:
            return
        if step >= self.reporter.start_step or self._is_trained:
            return
        self._mirror.go_back(step)
        self.reporter.start_at(step, self.engine.progress.skipped_steps)
        if self.assignment.rank == 0:
            self.post(WentBack(self._channel.generation, 0, step))

    def finish(self) -> None:
        """Called after the function's last step. Returns when that step is reported, and is in the
        vault if the job writes checkpoints. Leaves the generation if it has ended before."""
        self.engines.enable(None)  # the training loop has ended
        self._channel.interrupt.check()
        step = self.reporter.last_step
        if self.engine is not None and self.reporter.has_steps and self.engines.state.step == step:
            self._channel.progress.enter_phase("mirror")
            self._mirror.finish(step, self.engines.state)
        self._mirror.settle()

    def close(self) -> None:
        """Closes the mirror, once the training function has returned or raised."""
        self._mirror.close()

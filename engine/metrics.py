"""The engine's metrics of a step: loss, times by phase, bytes, traffic, throughput."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

from rayzero.engine.accounting import StepWork, bytes_by_class
from rayzero.engine.config import EngineConfig
from rayzero.engine.data.consumed import OUTSIDE_PHASE
from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.monitors import make_monitors
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.session import HostSession, StepRequests
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.step_vote import StepVote

log = logging.getLogger("rayzero.engine")

OTHER_PHASE = "other"
"""The time outside all phases: the script, the host's work around a step, evaluation without the
engine."""


class PhaseTimer:
    """Attributes wall time to exactly one phase at a time. Used by the training thread.

    On CUDA, the seconds are the host's, since kernels run asynchronously. The session receives
    every phase that begins; `OTHER_PHASE` is reported as `OUTSIDE_PHASE`.
    """

    def __init__(self, session: HostSession) -> None:
        self._session = session
        self._phase_s: defaultdict[str, float] = defaultdict(float)
        self._phase = OTHER_PHASE
        self._since_s = perf_counter()

    def enter(self, phase: str) -> None:
        """Starts a phase and ends the previous one. The host may raise here, to end the step."""
        self._switch_to(phase)
        self._session.on_phase(phase)

    def leave(self) -> None:
        self._switch_to(OTHER_PHASE)
        self._session.on_phase(OUTSIDE_PHASE)

    def end_step(self, data_wait_s: float, now_s: float) -> dict[str, float]:
        """Returns the seconds by phase since the last call, and resets them.

        Args:
            data_wait_s: the seconds outside all phases in which the thread waited for the loader.
            now_s: the present time of `perf_counter`.
        """
        self._switch_to(OTHER_PHASE, now_s)
        spent, self._phase_s = dict(self._phase_s), defaultdict(float)
        data_s = min(data_wait_s, spent[OTHER_PHASE])
        return {"data": data_s, **spent, OTHER_PHASE: spent[OTHER_PHASE] - data_s}

    def _switch_to(self, phase: str, now_s: float | None = None) -> None:
        now_s = perf_counter() if now_s is None else now_s
        self._phase_s[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s


_COMPARED_STEPS = 3
_WARMUP_STEPS = 3
_RECOUNT_STEPS = 50
"""Steps between two counts of persistent bytes after a run's first steps. The bytes rarely change
then, and counting them takes longer than the rest of a report."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics after a step. Seconds, bytes and counts; None where a value is not known."""

    step: int = 0  # finished steps, skipped ones included
    samples: int = 0  # consumed so far, over all ranks
    # Mean over the global batch of the last step. If the script ran backward() itself, it is known
    # only if the loss was given to engine.scale.
    loss: float | None = None
    grad_norm: float | None = None  # L2 norm of the last step's gradient, before clipping
    lr: float = 0.0  # of the first parameter group in the last step
    step_s: float = 0.0  # from the end of the previous step to the end of this one
    # The part of step_s in which the training thread waited for other ranks; on CUDA, only the
    # waits of the host.
    exposed_comm_s: float = 0.0
    # step_s by phase: data (waiting for the loader), forward (until backward), backward, reduce,
    # update, publish, other.
    phases: dict[str, float] = field(default_factory=dict)
    step_samples: int = 0  # of a step, over all ranks
    step_tokens: float | None = None  # of the last step, over all ranks, if inputs are tokens
    flops_per_s: float | None = None  # this rank's forward and backward
    mfu: float | None = None  # model flops utilization, relative to the device's peak
    skipped_steps: int = 0  # steps that changed nothing: their gradient was not finite
    loss_scale: float = 1.0  # of the next step in fp16
    bytes: dict[str, int] = field(default_factory=dict)  # `accounting.bytes_by_class`
    # Calls and bytes by collective, since the engine was built.
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float | None:
        """step_tokens / step_s; None if the model's inputs are not tokens."""
        return None if self.step_tokens is None else self.step_tokens / self.step_s

    def to_flat_dict(self) -> dict[str, float]:
        """Returns the known numbers by name: `bytes/optimizer_state`, `collectives/vote/calls`."""
        return dict(_flatten("", {**asdict(self), "tokens_per_s": self.tokens_per_s}))


def _flatten(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(f"{prefix}{key}/", value)
        elif value is not None:
            yield prefix + key, value


class SkippedRun:
    """Counts steps in a row whose gradient is not finite. The first, second, fourth, eighth and so
    on are reported, not every one."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, step: int, finite: bool) -> str:
        """Counts this step; returns the text to report about it, or an empty one."""
        self._count = 0 if finite else self._count + 1
        count = self._count
        if not count or count & (count - 1):
            return ""
        if count == 1:
            return f"step {step} skipped on every rank"
        return f"steps {step - count + 1} to {step} skipped on every rank, {count} in a row"


class StepMeter:
    """Collects the metrics of a step; reports phases and steps to the host's session."""

    def __init__(
        self,
        runtime: ZeroRuntime,
        optimizer: ShardedOptimizer,
        progress: TrainingProgress,
        session: HostSession,
        config: EngineConfig,
        work: StepWork,
    ) -> None:
        self.step_work = work
        self.phases = PhaseTimer(session)
        self.last_step: dict[str, Any] = {}  # fields of StepMetrics; empty before the first step
        self._runtime = runtime
        self._optimizer = optimizer
        self._progress = progress
        self.session = session
        self._config = config
        self.monitors = make_monitors(config, progress.monitor_runs, runtime.collectives.rank)
        self._step_end_s = perf_counter()
        self._exposed_comm_s = 0.0
        self._data_wait_s = progress.data_wait_s
        self._bytes_by_class: dict[str, int] = {}
        self._applied_steps = 0
        self._skipped = SkippedRun()

    def restart_step(self) -> None:
        """Restarts the measurement of a step because the ranks have changed: the work and waits of
        the lost step do not count for the next step."""
        now = perf_counter()
        self.phases.end_step(0.0, now)
        self.step_work.end_step(now - self._step_end_s)
        self._step_end_s = now
        self._exposed_comm_s = self._runtime.collectives.counters.exposed_s
        self._data_wait_s = self._progress.data_wait_s

    def open_monitors(self) -> None:
        """Reopens the monitors if this process's rank has changed: only rank 0 writes."""
        rank = self._runtime.collectives.rank
        if rank != self.monitors.rank:
            self.monitors.close()
            self.monitors = make_monitors(self._config, self._progress.monitor_runs, rank)

    def step_requests(self) -> StepRequests:
        """Returns the host's requests for the vote of this step, with this rank's bad samples."""
        return replace(self.session.step_requests(), bad_samples=self._progress.bad_in_step)

    def admits_load(self, step: int, client_keys: Sequence[str]) -> bool:
        """See `HostSession.admits_load`."""
        return self.session.admits_load(step, self._progress.step, client_keys)

    def on_state_loaded(self, *, tells_place: bool) -> None:
        """Called when the training function has loaded a checkpoint; `tells_place`: with a client
        state, which tells the function its place in the data."""
        if tells_place:
            self._progress.function_cursor = self._progress.sample_cursor
        self.session.on_state_loaded(self._progress.step)

    @property
    def compares_rank_losses(self) -> bool:
        """Whether the host should see this rank's own loss: in a job's first steps, in which equal
        losses show that the ranks train on the same samples."""
        return self.session.in_job and self._progress.step < _COMPARED_STEPS

    def end_step(
        self, vote: StepVote, lr: float, loss: float | None, rank_loss: float | None = None
    ) -> None:
        """Called when a step has finished or was skipped. `loss` is None if it is not known;
        `rank_loss` is this rank's share of the loss, if it was read."""
        now, exposed_s = perf_counter(), self._runtime.collectives.counters.exposed_s
        data_wait_s = self._progress.data_wait_s
        self.last_step = {
            "loss": loss,
            "grad_norm": vote.grad_norm,
            "lr": lr,
            "step_s": now - self._step_end_s,
            "exposed_comm_s": exposed_s - self._exposed_comm_s,
            "phases": self.phases.end_step(data_wait_s - self._data_wait_s, now),
        } | self.step_work.end_step(now - self._step_end_s)
        self._step_end_s = now
        self._exposed_comm_s = exposed_s
        self._data_wait_s = data_wait_s
        scale = self._runtime.precision.scaler.value if self._config.fp16.enabled else None
        if loss is not None:
            self.monitors.write_step(self._progress.sample_cursor, loss, lr, scale)
        if self.session.in_job:
            self._applied_steps += vote.finite
            metrics = self._collect(self._cached_bytes()).to_flat_dict()
            metrics.update(_flatten("streams/", self.step_work.take_stream_counts()))
            metrics["bad_samples"] = self._progress.bad_samples
            if rank_loss is not None:
                metrics["rank_loss"] = rank_loss
            self.session.on_step_end(metrics, vote.agreed)
        self._log_step(vote)

    @property
    def metrics(self) -> StepMetrics:
        return self._collect(bytes_by_class(self._runtime, self._optimizer))

    def _cached_bytes(self) -> dict[str, int]:
        if self._applied_steps <= _WARMUP_STEPS or self._applied_steps % _RECOUNT_STEPS == 0:
            self._bytes_by_class = bytes_by_class(self._runtime, self._optimizer)
        return self._bytes_by_class

    def _collect(self, held_bytes: dict[str, int]) -> StepMetrics:
        counters = self._runtime.collectives.counters
        return StepMetrics(
            step=self._progress.step,
            samples=self._progress.sample_cursor,
            skipped_steps=self._progress.skipped_steps,
            loss_scale=self._runtime.precision.scaler.value,
            step_samples=self._progress.global_batch,
            bytes=held_bytes,
            collectives={name: asdict(stats) for name, stats in counters.by_name.items()},
            **self.last_step,
        )

    def _log_step(self, vote: StepVote) -> None:
        step = self._progress.step
        if self._runtime.collectives.rank:
            return
        if text := self._skipped.add(step, vote.finite):
            log.warning(
                "%s: the gradient norm is %s; the loss scale is now %g",
                text,
                vote.grad_norm,
                self._runtime.precision.scaler.value,
            )
        elif vote.finite and (every := self._config.steps_per_print) and step % every == 0:
            loss, lr = self.last_step["loss"], self.last_step["lr"]
            text = "not known" if loss is None else f"{loss:.4f}"
            log.info("step %d: loss %s, lr %.3g", step, text, lr)

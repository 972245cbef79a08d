"""What the engine tells of itself: where the time and the bytes went."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from rayzero.engine.data.progress import Progress
from rayzero.engine.memory import resting_bytes
from rayzero.engine.optim.local import LocalOptimizer
from rayzero.engine.phases import Phases
from rayzero.engine.session import NO_WISHES, Session, Wishes
from rayzero.engine.work import Work
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.vote import Verdict

log = logging.getLogger("rayzero.engine")

_FRESH_STEPS = 3
_STALE_STEPS = 50
"""Resting bytes change in a run's first steps and hardly ever later: then a host is told what they
were at the last multiple of this, because counting them takes longer than the rest of a report."""


@dataclass(frozen=True)
class Metrics:
    """A reading after a step. Seconds, bytes and counts.

    Attributes:
        step: finished steps, skipped ones included.
        samples: samples consumed so far, over all ranks.
        loss: mean over the global batch of the last step; None before the first.
        grad_norm: L2 norm of the last step's gradient, before clipping.
        lr: the first group's learning rate in the last step.
        step_s: wall time from the end of the step before to the end of the last one.
        exposed_comm_s: of that, how long the training thread stood waiting for other ranks. On
            CUDA the host's wait only: it enqueues and goes on.
        phases: of it, seconds by phase: data (waiting for the loader), forward (until backward),
            backward, reduce, update, publish, other. Together they are step_s.
        skipped_steps: steps whose gradient was not finite, and which changed nothing.
        step_samples: samples of a step, over all ranks.
        step_tokens: tokens of the last step, over all ranks; None when the model's inputs are no
            tokens.
        tokens_per_s: that over the step's wall time.
        flops_per_s: this rank's forward and backward, as `rayzero.engine.work` counts them; None
            where the device's peak is not known.
        mfu: model flops utilisation: of what this rank's device could do at its peak.
        loss_scale: what the next step's loss is multiplied by: fp16's; 1 elsewhere.
        bytes: resting memory of this rank, by class (see `rayzero.engine.memory`).
        collectives: calls and bytes by collective, since the engine was made.
    """

    step: int = 0
    samples: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    lr: float = 0.0
    step_s: float = 0.0
    exposed_comm_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    step_samples: int = 0
    step_tokens: float | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    skipped_steps: int = 0
    loss_scale: float = 1.0
    bytes: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """Numbers under one name each: `bytes/optimizer_state`, `collectives/vote/calls`."""
        found: dict[str, float] = {}
        _flatten("", asdict(self), found)
        return found


def _flatten(prefix: str, value: Any, found: dict[str, float]) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            _flatten(f"{prefix}/{key}" if prefix else key, one, found)
    elif value is not None:
        found[prefix] = value


class Meter:
    """Takes readings, and passes phases and steps on to the host's session, if there is one.

    Attributes:
        last: loss, grad_norm, lr and times of the last finished step; empty before the first.
        work: what the step at hand is made of.
        phases: where its time goes.
    """

    def __init__(
        self,
        runtime: ZeroRuntime,
        optimizer: LocalOptimizer,
        progress: Progress,
        session: Session | None,
        log_every_steps: int | None,
        work: Work,
    ) -> None:
        self.work = work
        self.phases = Phases(session.phase if session else None)
        self.enter = self.phases.enter
        self.wishes: Callable[[], Wishes] = session.wishes if session else _none
        self._runtime = runtime
        self._optimizer = optimizer
        self._progress = progress
        self._session = session
        self._log_every_steps = log_every_steps
        self._step_end_s = perf_counter()
        self._exposed_s = 0.0
        self._data_wait_s = progress.data_wait_s
        self._bytes: dict[str, int] = {}
        self._seen_steps = 0
        self.last: dict[str, Any] = {}

    def step_done(self, verdict: Verdict, lr: float) -> None:
        """A step was finished, or skipped if its gradient was not finite."""
        now, exposed_s = perf_counter(), self._runtime.collectives.counters.exposed_s
        data_wait_s = self._progress.data_wait_s
        self.last = {
            "loss": verdict.loss,
            "grad_norm": verdict.grad_norm,
            "lr": lr,
            "step_s": now - self._step_end_s,
            "exposed_comm_s": exposed_s - self._exposed_s,
            "phases": self.phases.end_step(data_wait_s - self._data_wait_s),
        } | self.work.step_done(now - self._step_end_s)
        self._step_end_s, self._exposed_s, self._data_wait_s = now, exposed_s, data_wait_s
        if self._session is not None:
            self._seen_steps += verdict.finite
            self._session.step_done(self._read(self._settled_bytes()).flat(), verdict.agreed)
        self._log(verdict)

    @property
    def reading(self) -> Metrics:
        return self._read(resting_bytes(self._runtime, self._optimizer))

    def _settled_bytes(self) -> dict[str, int]:
        if self._seen_steps <= _FRESH_STEPS or self._seen_steps % _STALE_STEPS == 0:
            self._bytes = resting_bytes(self._runtime, self._optimizer)
        return self._bytes

    def _read(self, held: dict[str, int]) -> Metrics:
        counters = self._runtime.collectives.counters
        return Metrics(
            step=self._progress.step,
            samples=self._progress.sample_cursor,
            skipped_steps=self._progress.skipped_steps,
            loss_scale=self._runtime.precision.scaler.value,
            step_samples=self._progress.global_batch,
            bytes=held,
            collectives={name: asdict(traffic) for name, traffic in counters.by_name.items()},
            **self.last,
        )

    def _log(self, verdict: Verdict) -> None:
        if self._runtime.collectives.rank:
            return
        step = self._progress.step
        if not verdict.finite:
            log.warning(
                "step %d skipped on every rank: the gradient norm is %s; the loss scale is now %g",
                step,
                verdict.grad_norm,
                self._runtime.precision.scaler.value,
            )
        elif self._log_every_steps and step % self._log_every_steps == 0:
            log.info("step %d: loss %.4f, lr %.3g", step, verdict.loss, self.last["lr"])


def _none() -> Wishes:
    return NO_WISHES

"""One optimizer step: its phases, and the work of each.

One step is any number of micro-steps (forward, backward, `step()`), the last of which updates the
weights:

    EMPTY -> BACKWARD -> STEP_PENDING -> ACCUMULATING -> BACKWARD -> STEP_PENDING -> UPDATING ->
    EMPTY

Inside `no_sync()`, and where the script declared that a micro-step is not the last one, backward
leads to ACCUMULATING directly, because no `step()` is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.curriculum import ScheduledInputs
from rayzero.engine.errors import EngineError
from rayzero.engine.metrics import StepMeter
from rayzero.engine.optim.build import NoOptimizer, no_optimizer_error
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.precision.policy import clamp_to_dtype
from rayzero.engine.settings import Settings
from rayzero.engine.state.training import TrainingState
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.step_vote import StepVote


class StepPhase(Enum):
    """State of the main gradients between and within calls of the script."""

    EMPTY = "no gradients of this step yet"
    BACKWARD = "backward() is running"
    STEP_PENDING = "backward() has run, step() is due"
    ACCUMULATING = "gradients of earlier micro-steps are held, backward() is due"
    UPDATING = "step() is updating the weights"


_NEXT = {
    StepPhase.EMPTY: {StepPhase.BACKWARD, StepPhase.EMPTY},
    StepPhase.BACKWARD: {StepPhase.STEP_PENDING, StepPhase.ACCUMULATING, StepPhase.EMPTY},
    StepPhase.STEP_PENDING: {StepPhase.ACCUMULATING, StepPhase.UPDATING, StepPhase.EMPTY},
    StepPhase.ACCUMULATING: {StepPhase.BACKWARD, StepPhase.EMPTY},
    StepPhase.UPDATING: {StepPhase.EMPTY, StepPhase.ACCUMULATING},
}
"""EMPTY follows every phase: loading a checkpoint discards gradients. A failed backward or update
returns to the phase in which the script may call backward again."""


class Boundary(Enum):
    """Who decides whether a micro-step is the last of its step."""

    COUNTED = "the engine counts gradient_accumulation_steps"
    LAST = "the script declared the next micro-step the last"
    NOT_LAST = "the script declared that more micro-steps follow"


class StepTracker:
    """Follows one engine through its steps. Used by the training thread."""

    def __init__(self) -> None:
        self._phase = StepPhase.EMPTY
        self.boundary = Boundary.COUNTED
        self.no_sync = False  # inside `Engine.no_sync()`
        self.applied = False  # whether the last `step()` changed the weights

    @property
    def phase(self) -> StepPhase:
        return self._phase

    @phase.setter
    def phase(self, phase: StepPhase) -> None:
        if phase not in _NEXT[self._phase]:  # an error in the engine: the script's are refused
            raise RuntimeError(f"the step cannot go from {self._phase.name} to {phase.name}")
        self._phase = phase

    @property
    def has_gradients(self) -> bool:
        """Whether a backward of this step has run."""
        return self.phase in (StepPhase.STEP_PENDING, StepPhase.ACCUMULATING, StepPhase.UPDATING)

    @property
    def step_pending(self) -> bool:
        return self.phase is StepPhase.STEP_PENDING

    @property
    def skips_step(self) -> bool:
        """Whether `step()` has nothing to do, because the script declared that more follows."""
        return self.boundary is Boundary.NOT_LAST and not self.no_sync

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around one backward. If it fails, the script may call it again."""
        before = self.phase
        self.phase = StepPhase.BACKWARD
        try:
            yield
        except BaseException:
            self.phase = before
            raise
        deferred = self.no_sync or self.boundary is Boundary.NOT_LAST
        self.phase = StepPhase.ACCUMULATING if deferred else StepPhase.STEP_PENDING

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around the update at the end of a step. If it fails, its gradients are still held."""
        self.phase = StepPhase.UPDATING
        try:
            yield
        except BaseException:
            self.phase = StepPhase.ACCUMULATING
            raise
        self.phase = StepPhase.EMPTY


@dataclass
class TrainingStep:
    """The parts of one engine, and the training step over them: backward, and the update of the
    weights at the end of a step. Batch sizes in the settings may be replaced between two steps."""

    runtime: ZeroRuntime
    optimizer: ShardedOptimizer
    scheduler: Scheduler | None
    state: TrainingState
    settings: Settings
    meter: StepMeter
    tracker: StepTracker = field(default_factory=StepTracker)

    def __post_init__(self) -> None:
        self._progress = self.state.progress
        self.scheduled_inputs = ScheduledInputs(self.settings.config, self._progress)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.settings.device)

    @property
    def loss_scale(self) -> float:
        return self.runtime.precision.scaler.value

    def forward_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's inputs, as the config's schedules and its precision change them."""
        args, kwargs = self.scheduled_inputs.apply(model, args, kwargs)
        cast = self.runtime.precision.cast_inputs
        return cast(args), cast(kwargs)

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-step is the last of its step."""
        if self.tracker.boundary is Boundary.COUNTED:
            return self._progress.micro_step == self.settings.batches.micro_steps - 1
        return self.tracker.boundary is Boundary.LAST

    def backward(self, loss: Tensor, *, retain_graph: bool, weight: float) -> None:
        """See `Engine.backward`; `weight` is that of this micro-batch's loss in the mean over the
        global batch."""
        self._check_backward(loss)
        tracker = self.tracker
        first, last = not tracker.has_gradients, not tracker.no_sync and self.is_boundary
        self.meter.enter_phase("backward")
        with tracker.backward():
            running = self.runtime.backward_pass(first=first, last=last)
            with self.meter.step_work.track_backward(weight), running:
                # Infinite if a 16-bit loss cannot represent it. A tensor as the initial gradient
                # makes torch import sympy, half a second.
                settings = self.settings
                weighted = weight * settings.gradient_factor / settings.post_reduce_scale
                scale = weighted * self.loss_scale
                scaled = loss * clamp_to_dtype(scale, loss.dtype)
                scaled.backward(retain_graph=retain_graph)
            self._loss_sum.add_(loss.detach(), alpha=weight)
            self.meter.phases.leave()

    def step(self) -> None:
        """See `Engine.step`."""
        tracker = self.tracker
        tracker.applied = False
        if tracker.skips_step:
            return
        if not tracker.step_pending:
            if isinstance(self.optimizer, NoOptimizer):
                raise no_optimizer_error("step")
            raise EngineError(
                "step() was called without a backward() before it",
                allowed="one backward(), then one step(); inside no_sync() no step()",
            )
        if not self.is_boundary:
            tracker.phase = StepPhase.ACCUMULATING
            self._progress.micro_step += 1
            return
        with tracker.update():
            vote, lr = self._update()
        if vote.finite:  # the state is complete without it: weights can be gathered again
            self.meter.enter_phase("publish")
            self.runtime.sync_model_weights(lazy=True)
        self.meter.end_step(vote, lr)

    def close(self) -> None:
        """Removes the model's hooks, ends threads and closes files."""
        self.runtime.close()
        self.meter.monitors.close()

    def discard_gradients(self) -> None:
        """Forgets the gradients and losses of unfinished micro-steps."""
        self._loss_sum.zero_()
        self.tracker.phase = StepPhase.EMPTY

    def _update(self) -> tuple[StepVote, float]:
        """Agrees on the step with all ranks, and applies it; the learning rate that it used."""
        self.meter.enter_phase("reduce")
        factor = self.settings.post_reduce_scale / self.loss_scale
        vote = self.runtime.vote(self._loss_sum, factor, self.meter.step_requests())
        lr = self.optimizer.lr
        if vote.finite:
            self.meter.enter_phase("update")
        with self.state.updating():
            self._apply_vote(vote, factor)
        self.tracker.applied = vote.finite
        self._loss_sum.zero_()
        return vote, lr

    def _apply_vote(self, vote: StepVote, factor: float) -> None:
        """Changes the state from one step to the next. No collectives except LAMB's and Muon's."""
        if vote.finite:
            clip = vote.clip_factor(self.settings.config.gradient_clipping)
            self.optimizer.step(factor * clip)
            if self.scheduler is not None:
                self.scheduler.step()
        else:
            self.runtime.grad_reduction.discard_residuals()
        self.runtime.update_loss_scale(overflow=not vote.finite)
        self._progress.skipped_steps += not vote.finite
        self._progress.micro_step = 0
        self._progress.step += 1
        self._progress.sample_cursor += self._progress.global_batch

    def _check_backward(self, loss: Tensor) -> None:
        if isinstance(self.optimizer, NoOptimizer):
            raise no_optimizer_error("backward")
        if self.tracker.step_pending:
            raise EngineError(
                "backward() was called twice without step()",
                allowed="one backward() a micro-batch, then step()",
                fix="add the losses before backward(), or accumulate inside no_sync()",
            )
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            return
        seen = type(loss).__name__
        if isinstance(loss, Tensor):
            graph = "with" if loss.requires_grad else "without"
            seen = f"tensor of shape {tuple(loss.shape)} {graph} a graph"
        raise EngineError(
            f"backward() got a {seen}",
            allowed="a scalar loss computed by engine(...) with gradients enabled",
        )

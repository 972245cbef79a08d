"""One optimizer step: the work of its phases (`step_tracker`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rayzero.engine.curriculum import ScheduledInputs
from rayzero.engine.data.micro_batches import MicroBatches
from rayzero.engine.data.sampling import StepSplit, TrainingProgress
from rayzero.engine.device import get_device
from rayzero.engine.errors import CollectiveError, EngineError
from rayzero.engine.metrics import StepMeter
from rayzero.engine.optim.build import NoOptimizer, no_optimizer_error
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.own_backward import OwnBackward, check_loss, factor_of_other, scaled_by
from rayzero.engine.precision.loss_scale import NO_SCALER
from rayzero.engine.precision.policy import clamp_to_dtype
from rayzero.engine.session import Reforming
from rayzero.engine.settings import Settings
from rayzero.engine.state.training import TrainingState
from rayzero.engine.step_tracker import Boundary, StepPhase, StepTracker
from rayzero.engine.zero.placement import Collective
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.step_vote import StepVote
from rayzero.engine.zero.unused_params import UnusedRanges

_CHECK_STEPS = 50
"""Steps between two checks for parameters that the model got after `initialize`, which take a
millisecond per thousand parameters."""


@dataclass
class TrainingStep:
    """The parts of one engine, and the training step over them: backward, and the update of the
    weights at the end of a step. Batch sizes in the settings may be replaced between two steps."""

    runtime: ZeroRuntime
    optimizer: ShardedOptimizer
    state: TrainingState
    settings: Settings
    meter: StepMeter
    micro_batches: MicroBatches
    tracker: StepTracker = field(default_factory=StepTracker)

    def __post_init__(self) -> None:
        self._progress = self.state.progress
        self.scheduled_inputs = ScheduledInputs(self.settings.config, self._progress)
        self._loss_sum = torch.zeros(
            (), dtype=torch.float64, device=self.runtime.collectives.device
        )
        self._scaled: list[Tensor] = []  # losses given to `scale` since the last own backward
        self._loss_known = True  # whether every backward of this step reported its loss
        self._check_at_step = 0  # when the model's parameters are checked next
        self._rank_loss: float | None = None  # of this step, between its vote and its end
        self._own_weight = 1.0  # of the micro-batch of the backward that the script runs itself
        self.own_backward = OwnBackward(self.runtime, self)
        self.reforming = Reforming(self.runtime.collectives, self.meter.session)
        self._step_hook: RemovableHandle | None = None
        if not isinstance(self.optimizer, NoOptimizer):
            self._step_hook = refuse_own_steps(self.optimizer.torch_optimizer, self.tracker)
        if not self.settings.config.managed_gradient_accumulation:
            self.tracker.boundary = Boundary.STEP

    @property
    def loss_scale(self) -> float:
        return self.runtime.precision.scaler.value

    def forward_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's inputs, as the config's schedules and precision change them."""
        args, kwargs = self.scheduled_inputs.apply(model, args, kwargs)
        cast = self.runtime.precision.cast_inputs
        return cast(args), cast(kwargs)

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-step is the last of its step."""
        if self.tracker.boundary is Boundary.COUNTED:
            return self._progress.micro_step == self.settings.batches.micro_steps - 1
        return self.tracker.boundary is not Boundary.NOT_LAST

    @property
    def _reduces(self) -> bool:
        """Whether a backward reduces gradients that every rank holds in full."""
        tracker = self.tracker
        return self.is_boundary and not tracker.no_sync and tracker.boundary is not Boundary.STEP

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Engine.__call__`."""
        self.own_backward.abandon_failed()
        self.meter.phases.enter("forward")
        if not torch.is_grad_enabled():
            return self.reforming.with_peers(lambda: self._forward(module, args, kwargs))
        self._begin_step()
        self.runtime.collectives.in_step = True
        return self._forward(module, args, kwargs)

    def _begin_step(self) -> None:
        """Called before a forward, which may be the first of a step. In a broken group, asks for
        another one here, unless this thread does so when it reads the loader."""
        begins = self.meter.session.begins_step(None, within=self.tracker.has_gradients)
        is_read_now = self.reforming.by_host or self.micro_batches.is_read_where_steps_begin
        if begins and not is_read_now:
            self.reforming.reform_if_broken()

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._progress.step >= self._check_at_step:
            self.runtime.check_params(module)
            self._check_at_step = self._progress.step + _CHECK_STEPS
        if torch.is_grad_enabled():
            self.micro_batches.on_forward((args, kwargs))
            self.runtime.collectives.detached = self.micro_batches.stale.is_next
        args, kwargs = self.forward_inputs(module, args, kwargs)
        counted = self.meter.step_work.track_forward(module, (args, kwargs))
        checked = self.runtime.unshard_scheduler.checking_reads(module)
        with counted, self.runtime.precision.forward_context(), checked:
            output = module(*args, **kwargs)
        self.own_backward.watch(output)
        return output

    def scale(self, loss: Tensor) -> Tensor:
        """See `Engine.scale`."""
        self._check_backward(loss, "scale")
        self._scaled.append(loss.detach())
        scale = self.loss_scale
        return loss if scale == 1.0 else loss * clamp_to_dtype(scale, loss.dtype)

    def backward(self, loss: Tensor, *, retain_graph: bool, factor: float = 1.0) -> None:
        """See `Engine.backward`; the loss is multiplied by `factor`, and by the weight of its
        micro-batch in the mean over the global batch."""
        self._check_backward(loss, "backward")
        tracker = self.tracker
        weight = factor * self._begin_micro_batch()
        first, again = self._prepare_backward()
        with tracker.backward():
            running = self.runtime.backward_pass(first=first, last=self._reduces)
            share = 0.0 if again else weight
            with self.meter.step_work.track_backward(share), running:
                # The scaled loss is infinite if its 16-bit dtype cannot represent it. Scaling by an
                # initial gradient instead makes torch import sympy, which takes half a second.
                settings = self.settings
                factor = settings.gradient_factor / settings.post_reduce_scale * self.loss_scale
                scaled = loss * clamp_to_dtype(weight * factor, loss.dtype)
                with scaled_by(factor):
                    scaled.backward(retain_graph=retain_graph)
            self._loss_sum.add_(loss.detach(), alpha=weight)
            self.meter.phases.leave()

    def begin_own(self) -> None:
        """Called at the first gradient of a backward that the script runs itself. The gradients get
        the weight of the micro-batch, unless another engine has already weighted the loss."""
        scaler, tracker = self.runtime.precision.scaler, self.tracker
        other_factor = factor_of_other()
        if other_factor is None and scaler is not NO_SCALER and not self._scaled:
            raise EngineError(
                f"a loss that was not scaled began backward(), and the loss scale is "
                f"{scaler.value:g}",
                allowed="engine.scale(loss).backward(), or engine.backward(loss)",
            )
        self._own_weight = weight = self._begin_micro_batch() if other_factor is None else 1.0
        first, again = self._prepare_backward()
        tracker.begin_backward()
        self.meter.step_work.count_backward(0.0 if again or other_factor else weight)
        factor = weight / self.settings.post_reduce_scale
        factor = factor if other_factor is None else factor * self.loss_scale / other_factor
        self.runtime.reducer.begin_backward(first=first, last=self._reduces, factor=factor)

    def finish_own(self) -> None:
        """Called at the end of a backward that the script runs itself."""
        self.runtime.finish_backward()
        for loss in self._scaled:
            self._loss_sum.add_(loss, alpha=self._own_weight)
        self._loss_known = self._loss_known and bool(self._scaled)
        self._scaled.clear()
        self.tracker.finish_backward()
        self.meter.phases.leave()

    def abandon_own(self) -> None:
        """Called when a backward of the script has failed: the script may call it again."""
        self._scaled.clear()
        self.tracker.abandon_backward()

    def _begin_micro_batch(self) -> float:
        """Returns the weight of the micro-batch whose backward begins."""
        tracker = self.tracker
        step_due = tracker.step_pending and tracker.boundary is not Boundary.STEP
        return self.micro_batches.begin_backward(step_due=step_due)

    def _prepare_backward(self) -> tuple[bool, bool]:
        """Returns whether the backward that follows is the first of its step, and whether its
        micro-step had a backward before."""
        self.meter.phases.enter("backward")
        if self.tracker.zeroed:
            self.discard_gradients()
            self.tracker.zeroed = False
        return not self.tracker.has_gradients, self.tracker.step_pending

    def step(self) -> None:
        """See `Engine.step`."""
        collectives = self.runtime.collectives
        collectives.in_step = True
        try:
            self._step()
        finally:
            collectives.in_step = False

    def _step(self) -> None:
        self.own_backward.abandon_failed()
        if self.reforming.is_due() or self.runtime.collectives.detached:
            self._lose_step(self._progress)
            return
        tracker = self.tracker
        follows_no_sync = tracker.follows_no_sync and not self.is_boundary
        tracker.zeroed = tracker.unstepped = False
        tracker.applied = tracker.lost = False
        if tracker.skips_step:
            tracker.uncounted_micro_steps += 1
            return
        if not tracker.step_pending and not follows_no_sync:
            if isinstance(self.optimizer, NoOptimizer):
                raise no_optimizer_error("step")
            raise EngineError(
                "step() was called without a backward() before it",
                allowed="one backward(), then one step(); inside no_sync() no step(), and the last "
                "backward() of a step outside",
            )
        self.micro_batches.begin_step(ends_step=self.is_boundary)
        if not self.is_boundary:
            if not follows_no_sync:
                tracker.phase = StepPhase.ACCUMULATING
            self._progress.micro_step += 1
            self.micro_batches.end_step()
            return
        before = replace(self._progress)
        try:
            with tracker.update():
                if tracker.boundary is Boundary.STEP:
                    self.runtime.reduce_accumulated()
                vote, lr = self._update()
            if vote.finite:
                self._publish()
        except CollectiveError:
            if not self.reforming.is_due():
                raise
            self._lose_step(before)  # nothing was committed, or not all of it
            return
        self.micro_batches.end_step()
        loss = vote.loss if self._loss_known else None
        rank_loss, self._rank_loss = self._rank_loss, None
        self._loss_known = True
        self.meter.end_step(vote, lr, loss, rank_loss)

    def _lose_step(self, before: TrainingProgress) -> None:
        """Forgets a step whose group broke, or whose samples were read before the ranks changed.
        The loader reads again from the last finished step; for a loop that will not read, another
        group is asked for here. The rank stays `detached` until its next forward, because until
        then it does not make the same calls as the others."""
        self.runtime.discard_gradients()
        self.abandon()
        self._progress.lose_step(before)
        self.runtime.unshard_scheduler.abandon()  # its gathered weights are undefined
        self.micro_batches.stale.end_step()
        if not self.reforming.lose_step():
            return
        if self.micro_batches.can_read_again:
            self.micro_batches.recut(StepSplit(self.micro_batches.split))
        else:
            self.reforming.reform_if_broken()

    def _publish(self) -> None:
        """Starts to gather the updated weights. In a group that breaks meanwhile, the script would
        read undefined weights: revokes the state, and raises CollectiveError."""
        self.meter.phases.enter("publish")
        self.runtime.sync_model_weights()
        gathers = self.runtime.stage.weight_collective is Collective.ALL_GATHER
        if gathers and self.reforming.is_due():
            self.state.revoke()
            raise CollectiveError(self.runtime.collectives.broken)

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Encloses the backwards of a step, whose gradients only add up: at stages 0 and 1, which
        hold gradients in full, the sum is reduced once, at the end."""
        tracker = self.tracker
        if tracker.boundary is Boundary.STEP or not self.is_boundary:
            raise EngineError(
                "coalesce_grad_reduction() was called where it does not hold a whole step",
                allowed="one for each step: gradient_accumulation_steps 1, or after "
                "set_gradient_accumulation_boundary(True)",
                fix="leave the call out where managed_gradient_accumulation is false",
            )
        with tracker.without_sync():
            yield
        if tracker.phase is StepPhase.ACCUMULATING:
            with tracker.backward():
                self.runtime.reduce_accumulated()

    def close(self) -> None:
        """Removes the hooks of model and optimizer, ends threads and closes files."""
        if self._step_hook is not None:
            self._step_hook.remove()
        self.runtime.close()
        self.meter.monitors.close()

    def abandon(self) -> None:
        """Forgets the step in progress, whose process group is gone, without waiting for any of its
        work. The device has finished all kernels that were queued."""
        self.own_backward.abandon()
        self.tracker.abandon_step()
        self._loss_sum.zero_()
        self._scaled.clear()
        self._loss_known = True
        self._rank_loss = None

    def discard_gradients(self) -> None:
        """Forgets the gradients and losses of unfinished micro-steps."""
        self._loss_sum.zero_()
        self._loss_known = True
        self.runtime.discard_gradients()
        self.tracker.phase = StepPhase.EMPTY

    def _update(self) -> tuple[StepVote, float]:
        """Agrees on the step with all ranks, and applies it. Returns the vote and the lr used."""
        self.meter.phases.enter("reduce")
        factor = self.settings.post_reduce_scale / self.loss_scale
        vote = self.runtime.vote(self._loss_sum, factor, self.meter.step_requests())
        limit = self.settings.config.rayzero.loader.max_bad_samples
        self._progress.check_bad_samples(vote.agreed.bad_samples, limit)
        if self.meter.compares_rank_losses and self._loss_known:
            # Does not wait: the vote has waited for the device, and the update is not queued yet.
            (self._rank_loss,) = get_device(self._loss_sum.device).read(self._loss_sum.reshape(1))
        unused = self.runtime.take_unused(vote)
        lr = self.optimizer.lr
        if vote.finite:
            self.meter.phases.enter("update")
        with self.state.updating():
            self._apply_vote(vote, factor, unused)
        if self.runtime.collectives.broken and self.state.update_is_collective:
            raise CollectiveError(self.runtime.collectives.broken)
        self.tracker.applied = vote.finite
        self._loss_sum.zero_()
        return vote, lr

    def _apply_vote(self, vote: StepVote, factor: float, unused: UnusedRanges) -> None:
        """Changes the state from one step to the next. No collectives except LAMB's and Muon's."""
        if vote.finite:
            limit = self.settings.config.gradient_clipping
            clip = vote.clip_factor(self.runtime.grad_reduction.clip_limit(limit))
            self.optimizer.step(factor * clip, unused)
            if self.state.scheduler is not None:
                self.state.scheduler.step()
        else:
            self.runtime.grad_reduction.discard_residuals()
        self.runtime.update_loss_scale(overflow=not vote.finite)
        left_out = self.settings.batches.micro_steps - 1 - self._progress.micro_step
        self.tracker.uncounted_micro_steps -= left_out
        bad = vote.agreed.bad_samples
        self._progress.finish_step(self._step_samples, finite=vote.finite, bad=bad)

    @property
    def _step_samples(self) -> int:
        """Number of samples of the step that ends. Where every `step()` ends a step of the script's
        own batches, it has as many micro-batches as backwards."""
        global_batch = self._progress.global_batch
        if self.tracker.boundary is not Boundary.STEP or self.micro_batches.from_loader:
            return global_batch
        return global_batch // self.settings.batches.micro_steps * self.tracker.backwards

    def _check_backward(self, loss: Tensor, call: str) -> None:
        self.own_backward.abandon_failed()
        if isinstance(self.optimizer, NoOptimizer):
            raise no_optimizer_error(call)
        check_loss(loss, call)


def refuse_own_steps(optimizer: torch.optim.Optimizer, tracker: StepTracker) -> RemovableHandle:
    """Makes optimizer steps that the script calls itself raise EngineError: they would change
    weights without gradients, and count nowhere."""
    reference = ref(tracker)

    def refuse(*_: object) -> None:
        own = reference()
        if own is not None and not own.updating:
            raise EngineError(
                "optimizer.step() was called on the engine's optimizer",
                allowed="engine.step(), which also reduces, clips and counts",
                fix="call engine.step() in place of optimizer.step()",
            )

    return optimizer.register_step_pre_hook(refuse)

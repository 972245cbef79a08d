"""The engine: wires only. What moves is in `zero`, what is chosen is chosen in `factory`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine import engine_properties
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.engine_accumulation import GradientAccumulation
from rayzero.engine.engine_checkpointing import EngineCheckpointing
from rayzero.engine.engine_properties import EngineProperties
from rayzero.engine.errors import EngineError
from rayzero.engine.metrics import StepMeter, StepMetrics
from rayzero.engine.optim.build import NoOptimizer, no_optimizer_error
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.optim.sharded_optimizer import ShardedOptimizer
from rayzero.engine.precision.policy import clamp_to_dtype
from rayzero.engine.settings import Settings
from rayzero.engine.state.save import full_state_dict
from rayzero.engine.state.training import TrainingState
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.step_vote import StepVote


class Engine(EngineProperties, GradientAccumulation, EngineCheckpointing):
    """Trains one model on all ranks. Made by `rayzero.initialize`.

    Every rank must make the same calls in the same order: any of them may hold collectives.

    Example:
        >>> for batch in loader:
        ...     loss = engine(batch)
        ...     engine.backward(loss)
        ...     engine.step()

    Attributes:
        module: the model. Its parameters are views of the engine's buffers.
        progress: finished steps, micro-steps, samples.
        state: all that has to outlive this process, as named ranges.
        training_dataloader: the loader of `initialize(training_data=...)`.

    What is not here is looked for in the model: `engine.generate` is `engine.module.generate`.
    """

    training_dataloader: StepLoader | None = None

    def __init__(
        self,
        module: nn.Module,
        runtime: ZeroRuntime,
        optimizer: ShardedOptimizer,
        scheduler: Scheduler | None,
        state: TrainingState,
        settings: Settings,
        meter: StepMeter,
    ) -> None:
        self.module = module
        self.progress = state.progress
        self.state = state
        self._runtime = runtime
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._settings = settings
        self._meter = meter
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=settings.device)
        self._has_gradients = False  # main grads hold something of the step at hand
        self._awaiting_step = False  # backward was called, step was not
        self._sync_gradients = True  # outside `no_sync`
        self._boundary_override: bool | None = (
            None  # what the script says of the micro-step at hand
        )
        self._step_applied = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; its inputs are cast to the precision of the weights."""
        self._meter.enter_phase("forward")
        precision = self._runtime.precision
        cast = precision.cast_inputs
        with self._meter.step_work.track_forward((args, kwargs)), precision.forward_context():
            return self.module(*cast(args), **cast(kwargs))

    forward = __call__

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Computes gradients, and starts to sum them over the ranks.

        Args:
            loss: a scalar, the mean over this rank's micro-batch, or a model's output that has one
                as `loss`. Gradients are averaged over the global batch by sample count; do not
                divide by ranks or accumulation steps.
            retain_graph: as torch's.
            scale_wrt_gas: False if the loss was divided by the accumulation steps already.

        Returns:
            The loss as it was given.

        Raises:
            EngineError: not a scalar with a graph, `step` was not called since the last one, or
                there is no optimizer.
        """
        loss = getattr(loss, "loss", loss)
        self._check_backward(loss)
        last = self._sync_gradients and self.is_gradient_accumulation_boundary()
        weight = self.progress.micro_batch_weight
        if not scale_wrt_gas:
            weight *= self._settings.batches.micro_steps
        self._meter.enter_phase("backward")
        passing = self._runtime.backward_pass(first=not self._has_gradients, last=last)
        with self._meter.step_work.track_backward(weight), passing:
            seed = torch.full_like(loss, self._initial_grad(weight, loss.dtype))
            torch.autograd.backward(loss, seed, retain_graph=retain_graph)
        self._loss_sum.add_(loss.detach(), alpha=weight)
        self._meter.phases.leave()
        self._has_gradients = True
        self._awaiting_step = self._sync_gradients and self._boundary_override is not False
        return loss

    def step(self, lr_kwargs: None = None) -> None:
        """Ends a micro-step; at the end of a step, updates the weights on every rank.

        A step whose gradient is not finite on any rank changes nothing on all of them but the
        loss scale, and is counted in `metrics.skipped_steps`.

        Args:
            lr_kwargs: DeepSpeed's place for something that it does not use; None.

        Raises:
            EngineError: no `backward` since the last `step`, or inside `no_sync`; or a gradient is
                not finite at the lowest loss scale.
        """
        self._step_applied = False
        if self._boundary_override is False and self._sync_gradients:
            return
        if not self._awaiting_step:
            if self.optimizer is None:
                raise no_optimizer_error("step")
            raise EngineError(
                "step() was called without a backward() before it",
                allowed="one backward(), then one step(); inside no_sync() no step()",
            )
        self._awaiting_step = False
        if not self.is_gradient_accumulation_boundary():
            self.progress.micro_step += 1
            return
        self._meter.enter_phase("reduce")
        factor = self._settings.post_reduce_scale / self.loss_scale
        verdict = self._runtime.vote(self._loss_sum, factor, self._meter.step_requests())
        lr = self._optimizer.lr
        if verdict.finite:
            self._meter.enter_phase("update")
        with self.state.updating():
            self._apply_update(verdict, factor)
        self._step_applied = verdict.finite
        self._loss_sum.zero_()
        self._has_gradients = False
        if verdict.finite:  # the state is whole without it: weights can be published again
            self._meter.enter_phase("publish")
            self._runtime.sync_model_weights()
        self._meter.end_step(verdict, lr)

    def _apply_update(self, verdict: StepVote, factor: float) -> None:
        """From one step's state to the next one's. No collectives, but LAMB's and Muon's."""
        if verdict.finite:
            clip = verdict.clip_factor(self._settings.clip_norm)
            self._optimizer.step(factor * clip)
            if self._scheduler is not None:
                self._scheduler.step()
        else:
            self._runtime.grad_reduction.discard_residuals()
        self._runtime.update_loss_scale(overflow=not verdict.finite)
        self.progress.skipped_steps += not verdict.finite
        self.progress.micro_step = 0
        self.progress.step += 1
        self.progress.sample_cursor += self.progress.global_batch

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model in CPU memory on rank 0, an empty dict on the others. Collective."""
        self._meter.enter_phase("gather")
        return full_state_dict(self.module, self._runtime)

    def train(self, mode: bool = True) -> Engine:
        """Sets the model to training mode, or to evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Sets the model to evaluation mode."""
        return self.train(False)

    def to(self, device: torch.device | str | int) -> Engine:
        """Nothing: the model is on its device. Another one is refused."""
        if torch.device(device).type != self.device.type:
            raise EngineError(
                f"engine.to({device!r}) was called, and the model is on {self.device}",
                allowed="the device that initialize chose: this rank's GPU, or the CPU",
            )
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the first backward of a step replaces the gradients of the one before."""

    def close(self) -> None:
        """Takes the hooks off the model and closes files. The engine cannot be used afterwards."""
        self._runtime.close()

    destroy = close

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if (
            module is not None
            and name not in engine_properties.NOT_DELEGATED
            and hasattr(module, name)
        ):
            return getattr(module, name)
        raise engine_properties.unsupported_attribute(name, dir(type(self)))

    @property
    def metrics(self) -> StepMetrics:
        """Loss, norm, times, bytes and traffic, as of the last finished step."""
        return self._meter.metrics

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer, which `step()` steps: do not step it yourself. None where
        `initialize` was given none."""
        return None if isinstance(self._optimizer, NoOptimizer) else self._optimizer.torch_optimizer

    @property
    def device(self) -> torch.device:
        return self._settings.device

    def _initial_grad(self, weight: float, dtype: torch.dtype) -> float:
        """What backward starts from; infinite where a 16-bit loss has no such number."""
        return clamp_to_dtype(self._settings.initial_grad(weight) * self.loss_scale, dtype)

    def _discard_gradients(self) -> None:
        self._loss_sum.zero_()
        self._has_gradients = self._awaiting_step = False

    def _check_backward(self, loss: Tensor) -> None:
        if self.optimizer is None:
            raise no_optimizer_error("backward")
        if self._awaiting_step:
            raise EngineError(
                "backward() was called twice without step()",
                allowed="one backward() a micro-batch, then step()",
                fix="add the losses before backward(), or accumulate inside no_sync()",
            )
        if not isinstance(loss, Tensor):
            raise EngineError(
                f"backward() got a {type(loss).__name__}",
                allowed="a scalar loss computed by engine(...) with gradients enabled",
            )
        if loss.numel() != 1 or not loss.requires_grad:
            graph = "with" if loss.requires_grad else "without"
            raise EngineError(
                f"backward() got a tensor of shape {tuple(loss.shape)} {graph} a graph",
                allowed="a scalar loss computed by engine(...) with gradients enabled",
            )

"""The engine: wires only. What moves is in `zero`, what is chosen is chosen in `factory`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayzero.engine.api import absent
from rayzero.engine.api.boundaries import Boundaries
from rayzero.engine.api.readings import Readings
from rayzero.engine.api.saving import Saving
from rayzero.engine.data.loader import StepLoader
from rayzero.engine.errors import EngineError
from rayzero.engine.meter import Meter, Metrics
from rayzero.engine.optim.local import LocalOptimizer
from rayzero.engine.optim.nothing import NoOptimizer, no_optimizer
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.precision.casting import within
from rayzero.engine.settings import Settings
from rayzero.engine.state.gather import full_state_dict
from rayzero.engine.state.training import TrainingState
from rayzero.engine.zero.runtime import ZeroRuntime
from rayzero.engine.zero.vote import Verdict


class Engine(Readings, Boundaries, Saving):
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
        optimizer: LocalOptimizer,
        scheduler: Scheduler | None,
        state: TrainingState,
        settings: Settings,
        meter: Meter,
    ) -> None:
        self.module = module
        self.progress = state.progress
        self.state = state
        self._runtime = runtime
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._settings = settings
        self._meter = meter
        self._loss = torch.zeros((), dtype=torch.float64, device=settings.device)
        self._accumulated = False  # main grads hold something of the step at hand
        self._awaiting_step = False  # backward was called, step was not
        self._synced = True  # outside `no_sync`
        self._boundary: bool | None = None  # what the script says of the micro-step at hand
        self._applied = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; its inputs are cast to the precision of the weights."""
        self._meter.enter("forward")
        precision = self._runtime.precision
        cast = precision.cast_inputs
        with self._meter.work.forward((args, kwargs)), precision.around_forward():
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
        last = self._synced and self.is_gradient_accumulation_boundary()
        weight = self.progress.weight
        if not scale_wrt_gas:
            weight *= self._settings.batches.micro_steps
        self._meter.enter("backward")
        passing = self._runtime.backward_pass(first=not self._accumulated, last=last)
        with self._meter.work.backward(weight), passing:
            seed = torch.full_like(loss, self._seed(weight, loss.dtype))
            torch.autograd.backward(loss, seed, retain_graph=retain_graph)
        self._loss.add_(loss.detach(), alpha=weight)
        self._meter.phases.leave()
        self._accumulated = True
        self._awaiting_step = self._synced and self._boundary is not False
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
        self._applied = False
        if self._boundary is False and self._synced:
            return
        if not self._awaiting_step:
            if self.optimizer is None:
                raise no_optimizer("step")
            raise EngineError(
                "step() was called without a backward() before it",
                allowed="one backward(), then one step(); inside no_sync() no step()",
            )
        self._awaiting_step = False
        if not self.is_gradient_accumulation_boundary():
            self.progress.micro_step += 1
            return
        self._meter.enter("reduce")
        factor = self._settings.factor / self.loss_scale
        verdict = self._runtime.vote(self._loss, factor, self._meter.wishes())
        lr = self._optimizer.lr
        if verdict.finite:
            self._meter.enter("update")
        with self.state.changing():
            self._update(verdict, factor)
        self._applied = verdict.finite
        self._loss.zero_()
        self._accumulated = False
        if verdict.finite:  # the state is whole without it: weights can be published again
            self._meter.enter("publish")
            self._runtime.publish()
        self._meter.step_done(verdict, lr)

    def _update(self, verdict: Verdict, factor: float) -> None:
        """From one step's state to the next one's. No collectives, but LAMB's and Muon's."""
        if verdict.finite:
            clip = verdict.clip_factor(self._settings.clip_norm)
            self._optimizer.step(factor * clip)
            if self._scheduler is not None:
                self._scheduler.step()
        else:
            self._runtime.way.forget()
        self._runtime.scale_after(overflow=not verdict.finite)
        self.progress.skipped_steps += not verdict.finite
        self.progress.micro_step = 0
        self.progress.step += 1
        self.progress.sample_cursor += self.progress.global_batch

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model in CPU memory on rank 0, an empty dict on the others. Collective."""
        self._meter.enter("gather")
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
        if module is not None and name not in absent.NOT_THE_MODELS and hasattr(module, name):
            return getattr(module, name)
        raise absent.no_such(name, dir(type(self)))

    @property
    def metrics(self) -> Metrics:
        """Loss, norm, times, bytes and traffic, as of the last finished step."""
        return self._meter.reading

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer, which `step()` steps: do not step it yourself. None where
        `initialize` was given none."""
        return None if isinstance(self._optimizer, NoOptimizer) else self._optimizer.torch

    @property
    def device(self) -> torch.device:
        return self._settings.device

    def _seed(self, weight: float, dtype: torch.dtype) -> float:
        """What backward starts from; infinite where a 16-bit loss has no such number."""
        return within(self._settings.seed(weight) * self.loss_scale, dtype)

    def _forget_gradients(self) -> None:
        self._loss.zero_()
        self._accumulated = self._awaiting_step = False

    def _check_backward(self, loss: Tensor) -> None:
        if self.optimizer is None:
            raise no_optimizer("backward")
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

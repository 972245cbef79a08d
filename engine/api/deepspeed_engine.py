"""`DeepSpeedEngine`: the names of DeepSpeed's engine, over rayzero's `Engine`.

Accumulation boundaries and checkpoints are here; the config's getters, compilation and export are
classes of their own. What neither engine has is looked up in the model: `engine.generate` is
`engine.module.generate`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from rayzero.engine.api.alternatives import NOT_DELEGATED, unsupported_attribute
from rayzero.engine.api.config_getters import ConfigGetters, getter
from rayzero.engine.api.fixed_names import FixedNames
from rayzero.engine.api.model_export import ModelExport
from rayzero.engine.api.module_methods import CompileMethods
from rayzero.engine.api.optimizer_view import view_optimizer
from rayzero.engine.api.scheduled import ScheduleMethods
from rayzero.engine.config import BatchSizes
from rayzero.engine.engine import Engine
from rayzero.engine.errors import ConfigError, EngineError
from rayzero.engine.state.load import LoadOptions
from rayzero.engine.step_tracker import Boundary


class DeepSpeedEngine(ConfigGetters, FixedNames, ModelExport, CompileMethods, ScheduleMethods):
    """The engine that `rayzero.initialize` returns."""

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is not None and name not in NOT_DELEGATED and hasattr(module, name):
            return getattr(module, name)
        raise unsupported_attribute(name, dir(type(self)))

    # Progress

    skipped_steps = property(lambda engine: engine.progress.skipped_steps)

    @property
    def global_steps(self) -> int:
        """Finished steps, skipped ones included."""
        self.progress.ask_place()
        return self.progress.step

    @property
    def global_samples(self) -> int:
        """Samples of the finished steps, over all ranks."""
        self.progress.ask_place()
        return self.progress.sample_cursor

    cur_scale = property(lambda engine: engine.loss_scale)  # DeepSpeed's optimizers' name for it

    @property
    def micro_steps(self) -> int:
        """Calls of `step()`; before the state was loaded, at the present number of micro-steps per
        step."""
        counted = self.progress.step * self.gradient_accumulation_steps() + self.progress.micro_step
        return counted + self._step.tracker.uncounted_micro_steps

    def get_global_grad_norm(self) -> float | None:
        """The L2 norm of the last step's gradient before clipping; None before the first."""
        return self._step.meter.last_step.get("grad_norm")

    # Batch sizes

    train_batch_size = getter(lambda engine: engine.settings.batches.global_batch)
    train_micro_batch_size_per_gpu = getter(lambda engine: engine.settings.batches.micro_batch)
    gradient_accumulation_steps = getter(lambda engine: engine.settings.batches.micro_steps)

    def get_batch_info(self) -> tuple[int, int, int]:
        batches = self.settings.batches
        return batches.global_batch, batches.micro_batch, batches.micro_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per step from the next step on; the micro-batch stays the same.
        Raises ConfigError if it is not a multiple of micro-batch times ranks; EngineError in the
        middle of a step, or if the engine has a loader, whose sample order depends on it."""
        micro, world_size = self.settings.batches.micro_batch, self.world_size
        if train_batch_size < 1 or train_batch_size % (micro * world_size):
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): not a multiple of the micro-batch "
                f"{micro} x {world_size} ranks",
                fix="another train_batch_size, or set_train_micro_batch_size first",
            )
        self._set_batch_sizes(micro, train_batch_size // (micro * world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples per micro-batch; the micro-steps stay. Raises as the method above."""
        if micro_batch_size < 1:
            raise ConfigError(f"set_train_micro_batch_size({micro_batch_size})", allowed=">= 1")
        self._set_batch_sizes(micro_batch_size, self.settings.batches.micro_steps)

    def _set_batch_sizes(self, micro_batch: int, micro_steps: int) -> None:
        mid_step = self._step.tracker.has_gradients
        if mid_step or self.training_dataloader is not None:
            seen = "in the middle of a step" if mid_step else "with a loader"
            raise EngineError(
                f"the batch size cannot be changed {seen}",
                allowed="between two steps, with batches that the script makes itself",
                fix="train_batch_size in the config",
            )
        global_batch = micro_batch * micro_steps * self.world_size
        batches = BatchSizes(global_batch, micro_batch, micro_steps)
        self._step.settings = replace(self.settings, batches=batches)
        self.progress.global_batch = global_batch
        self.progress.micro_batch = micro_batch
        self.progress.micro_batch_weight = micro_batch / global_batch

    # Accumulation boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-step is the last of its step."""
        step = self._step
        return step.is_boundary and step.tracker.boundary is not Boundary.STEP

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Declares whether the next forward and backward are the last of their step.

        From then on the script decides, by calling it again. Where it was False, `step` does
        nothing and need not be called. Raises EngineError where every `step` ends a step
        (`managed_gradient_accumulation: false`).
        """
        if self._step.tracker.boundary is Boundary.STEP:
            raise EngineError(
                "set_gradient_accumulation_boundary() was called, and every step() ends a step",
                fix="managed_gradient_accumulation: true",
            )
        self._step.tracker.boundary = Boundary.LAST if is_boundary else Boundary.NOT_LAST

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Engine.no_sync`. Raises EngineError at stages 2 and 3, as DeepSpeed does: there each
        backward reduces."""
        stage = self.settings.config.zero_optimization.stage
        if stage > 1:
            raise EngineError(
                f"no_sync() was called at stage {stage}, where gradients are sharded and each "
                "backward reduces",
                allowed="stages 0 and 1",
                fix="set_gradient_accumulation_boundary(False) before the backwards that are not "
                "the last, or gradient_accumulation_steps in the config: at every stage",
            )
        return super().no_sync()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Around all backwards of one step, whose `step()` follows: their gradients add up and are
        reduced once. At stages 2 and 3 each backward reduces into this rank's shard, with the same
        sum. Raises EngineError inside `no_sync` or itself, or where more micro-steps follow."""
        return self._step.coalesced()

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights: not inside a step, nor if skipped."""
        return self._step.tracker.applied

    # Ranks: all of them are data parallel

    @property
    def local_rank(self) -> int:
        """This rank's index on its node, which is also its GPU's."""
        return int(os.environ.get("LOCAL_RANK", self.device.index or 0))

    global_rank = property(lambda engine: engine.rank)

    # Optimizer and schedule

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer with DeepSpeed's attributes, such as `loss_scale`; its `optimizer` is
        the torch optimizer itself. `step()` steps it. None where the engine only evaluates."""
        torch_optimizer = super().optimizer
        return None if torch_optimizer is None else view_optimizer(torch_optimizer, self)

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_lr(self) -> list[float]:
        """Each parameter group's current learning rate."""
        return [float(group["lr"]) for group in self._param_groups]

    def set_lr(self, lr: float) -> None:
        """Sets every parameter group's learning rate; a schedule overwrites it."""
        for group in self._param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Each parameter group's momentum, or betas where it has those."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Between two backwards without a `step`, forgets the gradients of the first. Elsewhere
        does nothing: the first backward of a step replaces the previous step's gradients."""
        self._step.tracker.zero_grad()

    def to(self, device: torch.device | str | int) -> Self:
        """Does nothing: the model is on its device already. Raises EngineError for another one."""
        if torch.device(device).type != self.device.type:
            raise EngineError(
                f"engine.to({device!r}) was called, and the model is on {self.device}",
                allowed="the device that initialize chose: this rank's GPU, or the CPU",
            )
        return self

    destroy = Engine.close

    # Checkpoints. Every method is collective.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """See `Engine.save`. Raises ConfigError without a folder."""
        if save_dir is None or not str(save_dir):
            raise ConfigError(
                f"save_checkpoint({save_dir!r}) was called", allowed="a folder, or a store's URL"
            )
        return self.save(
            save_dir,
            None if tag is None else str(tag),
            client_state=client_state,
            latest=save_latest,
            include_frozen=not exclude_frozen_parameters,
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """See `Engine.load`.

        Args:
            load_module_strict: checkpoint and model must have the same weights; otherwise those
                that both have are loaded.
            load_optimizer_states: also the optimizer's state, which must have the parts of this
                optimizer's, and its options, such as lr.
            load_lr_scheduler_states: also the schedule's position.
            load_module_only: weights and buffers only.
            custom_load_fn: refused.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) was given: no rank holds a full state dict",
                fix="load_module_strict=False, or engine.load_module_state_dict(...)",
            )
        options = LoadOptions(
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
            optimizer_options=True,
        )
        return self.load(load_dir, None if tag is None else str(tag), options)

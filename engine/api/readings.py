"""What an engine tells of itself, by the names that DeepSpeed's engine has for it."""

from __future__ import annotations

import os
from typing import Any

import torch

from rayzero.engine.config import EngineConfig
from rayzero.engine.data.progress import Progress
from rayzero.engine.meter import Meter
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.settings import Settings
from rayzero.engine.zero.placement import STAGES, Placement
from rayzero.engine.zero.runtime import ZeroRuntime


class Readings:
    """The part of `Engine` that only reads. No collectives."""

    progress: Progress
    _runtime: ZeroRuntime
    _settings: Settings
    _meter: Meter
    _scheduler: Scheduler | None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        raise NotImplementedError

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; none without an optimizer."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def settings(self) -> Settings:
        """The sizes and limits this run goes by."""
        return self._settings

    @property
    def _config(self) -> EngineConfig:
        return self._settings.config

    # Where the job stands

    @property
    def global_steps(self) -> int:
        """Finished optimizer steps, skipped ones included."""
        return self.progress.step

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradient was not finite, and which changed nothing."""
        return self.progress.skipped_steps

    @property
    def loss_scale(self) -> float:
        """What the loss of the step at hand is multiplied by, in fp16; 1 elsewhere."""
        return self._runtime.precision.scaler.value

    @property
    def cur_scale(self) -> float:
        """`loss_scale`, under the name that DeepSpeed's optimizers give it."""
        return self.loss_scale

    @property
    def global_samples(self) -> int:
        """Samples consumed by finished steps, over all ranks."""
        return self.progress.sample_cursor

    @property
    def micro_steps(self) -> int:
        """Finished micro-steps, as many as there would be had every step been cut as now."""
        return self.progress.step * self.gradient_accumulation_steps() + self.progress.micro_step

    def get_global_grad_norm(self) -> float | None:
        """The L2 norm of the last step's gradient before clipping; None before the first."""
        norm: float | None = self._meter.last.get("grad_norm")
        return norm

    # Sizes

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self._settings.batches.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """The most samples that a rank takes at once."""
        return self._settings.batches.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of a step."""
        return self._settings.batches.micro_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Global batch, micro-batch, micro-steps."""
        batches = self._settings.batches
        return batches.global_batch, batches.micro_batch, batches.micro_steps

    # Ranks: all of them are data parallel

    @property
    def rank(self) -> int:
        return self._runtime.collectives.rank

    @property
    def world_size(self) -> int:
        return self._runtime.collectives.world_size

    @property
    def global_rank(self) -> int:
        return self.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, which is also that of its GPU."""
        return int(os.environ.get("LOCAL_RANK", self._settings.device.index or 0))

    @property
    def dp_world_size(self) -> int:
        return self.world_size

    @property
    def mp_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_rank(self) -> int:
        return 0

    # Optimizer and schedule

    @property
    def lr_scheduler(self) -> Scheduler | None:
        """The schedule, which `step()` steps."""
        return self._scheduler

    def get_lr(self) -> list[float]:
        """Each parameter group's learning rate now."""
        return [float(group["lr"]) for group in self._groups]

    def set_lr(self, lr: float) -> None:
        """Gives every parameter group this learning rate; a schedule overwrites it."""
        for group in self._groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Each parameter group's momentum, or betas where it has them."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._groups]

    def optimizer_name(self) -> str | None:
        """As the config calls it; None where the script brought its own."""
        return self._config.optimizer.type if self._config.optimizer else None

    def optimizer_params(self) -> dict[str, Any] | None:
        return dict(self._config.optimizer.params) if self._config.optimizer else None

    def scheduler_name(self) -> str | None:
        return self._config.scheduler.type if self._config.scheduler else None

    def scheduler_params(self) -> dict[str, Any] | None:
        return dict(self._config.scheduler.params) if self._config.scheduler else None

    # Settings

    def zero_optimization_stage(self) -> int:
        return self._settings.stage

    def zero_optimization(self) -> bool:
        """Whether the stage shards anything; on one rank nothing is."""
        return STAGES[self._settings.stage].optimizer_state is Placement.SHARDED

    def zero_optimization_partition_gradients(self) -> bool:
        return STAGES[self._settings.stage].main_grads is Placement.SHARDED

    def zero_optimization_partition_weights(self) -> bool:
        return STAGES[self._settings.stage].model_weights is Placement.SHARDED

    def gradient_clipping(self) -> float:
        """Gradients are clipped to this L2 norm; 0 for never."""
        return self._settings.clip_norm

    def steps_per_print(self) -> int | None:
        return self._settings.log_every_steps

    def bfloat16_enabled(self) -> bool:
        return self._config.bf16.enabled

"""EngineProperties: DeepSpeed getters; names not supported.

What an engine tells of itself, by the names that DeepSpeed's engine has for it.

Names that DeepSpeed's engine has and ours has not, and what to use instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from rayzero.engine.config import EngineConfig
from rayzero.engine.data.sampling import TrainingProgress
from rayzero.engine.errors import did_you_mean
from rayzero.engine.metrics import StepMeter
from rayzero.engine.optim.schedule import Scheduler
from rayzero.engine.settings import Settings
from rayzero.engine.zero.placement import STAGES, Placement
from rayzero.engine.zero.runtime import ZeroRuntime


class EngineProperties:
    """The part of `Engine` that only reads. No collectives."""

    progress: TrainingProgress
    _runtime: ZeroRuntime
    _settings: Settings
    _meter: StepMeter
    _scheduler: Scheduler | None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        raise NotImplementedError

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
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
        norm: float | None = self._meter.last_step.get("grad_norm")
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
        return [float(group["lr"]) for group in self._param_groups]

    def set_lr(self, lr: float) -> None:
        """Gives every parameter group this learning rate; a schedule overwrites it."""
        for group in self._param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Each parameter group's momentum, or betas where it has them."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._param_groups]

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


_USE_BACKWARD = "nothing: backward() sums gradients over the ranks, and step() waits for them"


_USE_TORCH_COMPILE = "torch.compile on the model's blocks, before initialize"


_USE_METRICS = "engine.metrics: loss, norm, seconds, bytes and traffic of the last step"


_USE_PRECISION_CONFIG = "nothing: the config's precision section decides dtypes, e.g. bf16.enabled"


_USE_OFFLOAD_CONFIG = "zero_optimization.offload_optimizer in the config"


_USE_TRAINING_DATA = "rayzero.initialize(training_data=...), or a torch DataLoader of your own"


_USE_SETTINGS = "engine.settings.config, the checked config"

ALTERNATIVES: Mapping[str, str] = {
    "allreduce_gradients": _USE_BACKWARD,
    "allreduce_bucket": _USE_BACKWARD,
    "buffered_allreduce_fallback": _USE_BACKWARD,
    "coalesce_grad_reduction": "engine.no_sync()",
    "enable_backward_allreduce": "engine.no_sync()",
    "inside_no_sync_ctxt": "engine.no_sync()",
    "scale": "engine.backward(loss), which scales the loss",
    "clip_fp32_gradients": "gradient_clipping in the config",
    "compile": _USE_TORCH_COMPILE,
    "is_compiled": _USE_TORCH_COMPILE,
    "get_compile_time": _USE_TORCH_COMPILE,
    "register_compile_pass": _USE_TORCH_COMPILE,
    "timers": _USE_METRICS,
    "tput_timer": _USE_METRICS,
    "wall_clock_breakdown": _USE_METRICS,
    "get_wall_clock_timers": _USE_METRICS,
    "monitor": _USE_METRICS,
    "summary_events": _USE_METRICS,
    "flops_profiler": _USE_METRICS,
    "losses": "engine.metrics.loss",
    "half": _USE_PRECISION_CONFIG,
    "bfloat16": _USE_PRECISION_CONFIG,
    "float": _USE_PRECISION_CONFIG,
    "double": _USE_PRECISION_CONFIG,
    "type": _USE_PRECISION_CONFIG,
    "cpu": "nothing: the model stays on engine.device",
    "to_empty": "rayzero.zero_init() around the model's construction",
    "offload_states": _USE_OFFLOAD_CONFIG,
    "reload_states": _USE_OFFLOAD_CONFIG,
    "empty_partition_cache": "nothing: weights are gathered into slots that are used again",
    "deepspeed_io": _USE_TRAINING_DATA,
    "set_data_post_process_func": "initialize(collate_fn=...)",
    "set_dataloader": _USE_TRAINING_DATA,
    "checkpoint_engine": "engine.save_checkpoint and engine.load_checkpoint",
    "get_data_types": "the dtypes of engine.module's parameters",
    "data_parallel_group": "torch.distributed.group.WORLD: all ranks are data parallel",
    "seq_data_parallel_group": "torch.distributed.group.WORLD: all ranks are data parallel",
    "seq_dp_world_size": "engine.world_size",
    "mpu": "nothing: there is no model parallelism",
    "has_moe_layers": "nothing: there is no expert parallelism",
    "curriculum_learning_enabled": "a dataset that orders its samples",
    "client_optimizer": "engine.optimizer",
    "basic_optimizer": "engine.optimizer",
    "client_lr_scheduler": "engine.lr_scheduler",
    "dump_state": _USE_SETTINGS,
    "zero_overlap_comm": _USE_SETTINGS,
    "zero_reduce_bucket_size": _USE_SETTINGS,
    "zero_offload_optimizer": _USE_SETTINGS,
    "zero_offload_param": _USE_SETTINGS,
    "communication_data_type": _USE_SETTINGS,
}

# The model has them too, and they would pull its parameters or its forward from under the engine.
NOT_DELEGATED = frozenset(
    {"half", "bfloat16", "float", "double", "type", "cpu", "to_empty", "compile"}
)


def unsupported_attribute(name: str, known: list[str]) -> AttributeError:
    """What to raise for a name that neither the engine nor its model has."""
    if name in ALTERNATIVES:
        hint = f"; use {ALTERNATIVES[name]}"
    else:
        hint = did_you_mean(name, [one for one in known if not one.startswith("_")])
    return AttributeError(f"the engine has no {name!r}, and its model neither{hint}")

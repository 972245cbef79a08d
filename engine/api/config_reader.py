"""`DeepSpeedConfig`: a config's values under the attribute names of DeepSpeed's config object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rayzero.engine.config import BatchSizes, EngineConfig, parse_config, resolve_batch_sizes
from rayzero.engine.config.monitors import MonitorConfig
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.errors import ConfigError, did_you_mean

PATHS: Mapping[str, str] = {
    **{name: name for name in ("communication_data_type", "dataloader_drop_last", "dump_state")},
    **{name: name for name in ("disable_allgather", "gradient_allreduce_op", "gradient_clipping")},
    **{name: name for name in ("gradient_predivide_factor", "managed_gradient_accumulation")},
    **{name: name for name in ("log_level", "memory_breakdown", "pipeline", "prescale_gradients")},
    **{name: name for name in ("steps_per_print", "wall_clock_breakdown")},
    **{name: name for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")},
    "activation_checkpointing_config": "activation_checkpointing",
    "aio_config": "aio",
    "autotuning_config": "autotuning",
    "bfloat16_config": "bf16",
    "bfloat16_enabled": "bf16.enabled",
    "buffer_dtype": "data_types.buffer_dtype",
    "checkpoint_config": "checkpoint",
    "compile_config": "compile",
    "data_efficiency_config": "data_efficiency",
    "dynamic_loss_scale": "fp16.loss_scale",
    "flops_profiler_config": "flops_profiler",
    "float16_config": "fp16",
    "fp16_enabled": "fp16.enabled",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "initial_dynamic_scale": "fp16.initial_scale_power",
    "keep_in_fp32_modules": "data_types.keep_in_fp32_modules",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "loss_scale": "fp16.loss_scale",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "param_dtype": "data_types.param_dtype",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "timers_config": "timers",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "zero_config": "zero_optimization",
    "zero_optimization_stage": "zero_optimization.stage",
}
"""{DeepSpeed's attribute: path in the config}."""

_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "dynamic_loss_scale": lambda scale: scale == 0,
    "initial_dynamic_scale": lambda power: 2**power,
    "optimizer_name": lambda name: name and name.lower(),
}

ZERO_PATHS: Mapping[str, str] = {
    f"zero_{field.removeprefix('stage3_').removeprefix('use_').removeprefix('zero_')}": (
        f"zero_optimization.{field}"
    )
    for field in ZeroConfig.model_fields
}
"""{getter of DeepSpeed's engine: path in the config}."""


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def read_path(config: EngineConfig, path: str) -> Any:
    """The value at a dotted path; None below a section that is not given."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def is_enabled(config: EngineConfig, section: str) -> bool:
    """Whether a section is given with `enabled`."""
    return bool(read_path(config, f"{section}.enabled"))


class DeepSpeedConfig:
    """DeepSpeed's config object: what `engine._config` is. Read-only.

    Attributes are those of DeepSpeed's; a size that is None is chosen by the engine. Batch sizes
    are those in effect.

    Args:
        config: a path, a dict, or an `EngineConfig`.
        mpu, mesh_device: refused.

    Raises:
        ConfigError: the config is invalid, or its batch sizes do not fit the number of ranks, which
            is that of the process group, else the environment's.
    """

    def __init__(
        self, config: str | Path | dict[str, Any] | EngineConfig, mpu: Any = None, **more: Any
    ) -> None:
        if mpu is not None or more.get("mesh_device") is not None:
            raise ConfigError(
                "DeepSpeedConfig(mpu=..., mesh_device=...) was given",
                allowed="None: all ranks are data parallel",
            )
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.global_rank = int(os.environ.get("RANK", "0"))
        self._config = parse_config(config)
        self._batches = resolve_batch_sizes(self._config, self.world_size)

    @classmethod
    def in_effect(
        cls, config: EngineConfig, batches: BatchSizes, rank: int, world_size: int
    ) -> DeepSpeedConfig:
        """The config of an engine."""
        new = object.__new__(cls)
        new._config, new._batches = config, batches
        new.global_rank, new.world_size = rank, world_size
        return new

    train_batch_size = property(lambda self: self._batches.global_batch)
    train_micro_batch_size_per_gpu = property(lambda self: self._batches.micro_batch)
    gradient_accumulation_steps = property(lambda self: self._batches.micro_steps)
    zero_enabled = property(lambda self: self.zero_optimization_stage > 0)
    data_efficiency_enabled = property(lambda self: is_enabled(self._config, "data_efficiency"))
    checkpoint_tag_validation_enabled = property(lambda self: self._tag_validation() != "ignore")
    checkpoint_tag_validation_fail = property(lambda self: self._tag_validation() == "fail")

    @property
    def _param_dict(self) -> dict[str, Any]:
        """The config as nested dicts: the keys that were given, and always the batch sizes in
        effect and `zero_optimization.stage`."""
        given = self._config.model_dump(mode="json", exclude_unset=True)
        stage = {"stage": self._config.zero_optimization.stage}
        given["zero_optimization"] = stage | given.get("zero_optimization", {})
        return given | {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }

    @property
    def monitor_config(self) -> MonitorConfig:
        """The sections of monitors."""
        return MonitorConfig(
            **{name: getattr(self._config, name) for name in MonitorConfig.model_fields}
        )

    @property
    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None where it is off."""
        section = self._config.torch_autocast
        return DTYPES[section.dtype] if section.enabled else None

    def _tag_validation(self) -> str:
        return str(read_path(self._config, "checkpoint.tag_validation")).lower()

    def __getattr__(self, name: str) -> Any:
        if name not in PATHS or "_config" not in self.__dict__:
            raise AttributeError(
                f"rayzero's DeepSpeedConfig has no {name!r}{did_you_mean(name, list(PATHS))}"
            )
        value = read_path(self._config, PATHS[name])
        return _CONVERTED[name](value) if name in _CONVERTED else value

    def print_user_config(self) -> None:
        """Prints the keys that were given."""
        print(self._config.model_dump_json(exclude_unset=True, indent=2))

    def print(self, name: str) -> None:
        """Prints the config under a title."""
        print(f"{name}:")
        self.print_user_config()

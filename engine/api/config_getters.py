"""`ConfigGetters`: an engine's config, read under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rayzero.engine.api.config_reader import (
    DTYPES,
    ZERO_PATHS,
    DeepSpeedConfig,
    is_enabled,
    read_path,
)
from rayzero.engine.config import EngineConfig
from rayzero.engine.engine import Engine
from rayzero.engine.zero.placement import STAGES, Placement, Stage

T = TypeVar("T")


def getter(read: Callable[[Engine], T]) -> Callable[[Engine], T]:
    """A method without arguments, as DeepSpeed spells most of its getters."""
    return read


def _config(engine: Engine) -> EngineConfig:
    return engine.settings.config


def _at(path: str) -> Callable[[Engine], Any]:
    """A method that reads the config at a dotted path."""
    return lambda engine: read_path(_config(engine), path)


def _enabled(section: str) -> Callable[[Engine], bool]:
    return lambda engine: is_enabled(_config(engine), section)


def _stage(engine: Engine) -> Stage:
    """The configured stage, also on one rank."""
    return STAGES[_config(engine).zero_optimization.stage]


def _offload(engine: Engine, name: str) -> Any:
    """A section of offloading; None where it is not given."""
    zero = _config(engine).zero_optimization
    return getattr(zero, name) if name in zero.model_fields_set else None


GETTERS: dict[str, Callable[[Any], Any]] = {
    "zero_optimization_stage": lambda engine: _config(engine).zero_optimization.stage,
    "zero_optimization": lambda engine: _stage(engine).optimizer_state is Placement.SHARDED,
    "zero_optimization_partition_gradients": lambda engine: (
        _stage(engine).main_grads is Placement.SHARDED
    ),
    "zero_optimization_partition_weights": lambda engine: (
        _stage(engine).model_weights is Placement.SHARDED
    ),
    "is_first_weights_partition_group": lambda engine: (
        _stage(engine).model_weights is Placement.SHARDED
    ),
    "zero_multi_rank_bucket_allreduce": _at("zero_optimization.use_multi_rank_bucket_allreduce"),
    "zero_hpz_partition_size": _at("zero_optimization.zero_hpz_partition_size"),
    "zero_offload_optimizer": lambda engine: _offload(engine, "offload_optimizer"),
    "zero_offload_param": lambda engine: _offload(engine, "offload_param"),
    "zero_use_cpu_optimizer": lambda engine: (
        _config(engine).zero_optimization.offload_optimizer.device != "none"
    ),
    "zero_cpu_offload": lambda engine: (
        _config(engine).zero_optimization.offload_optimizer.device == "cpu"
    ),
    "zero_nvme_offload_optimizer": lambda engine: (
        _config(engine).zero_optimization.offload_optimizer.device == "nvme"
    ),
    "zero_partial_offload": _at("zero_optimization.offload_optimizer.ratio"),
    "super_offload": _at("zero_optimization.offload_optimizer.super_offload"),
    "cpuadam_cores_perc": _at("zero_optimization.offload_optimizer.cpuadam_cores_perc"),
    "zenflow_config": _at("zero_optimization.zenflow"),
    "is_sanity_checks_enabled": _at("zero_optimization.enable_sanity_checks"),
    "zero_allow_untested_optimizer": _at("zero_allow_untested_optimizer"),
    "zero_force_ds_cpu_optimizer": _at("zero_force_ds_cpu_optimizer"),
    "gradient_clipping": lambda engine: _config(engine).gradient_clipping,
    "gradient_predivide_factor": _at("gradient_predivide_factor"),
    "postscale_gradients": lambda engine: not _config(engine).prescale_gradients,
    "managed_gradient_accumulation": _at("managed_gradient_accumulation"),
    "steps_per_print": lambda engine: _config(engine).steps_per_print,
    "dump_state": _at("dump_state"),
    "wall_clock_breakdown": _at("wall_clock_breakdown"),
    "memory_breakdown": _at("memory_breakdown"),
    "log_level": _at("log_level"),
    "dataloader_drop_last": _at("dataloader_drop_last"),
    "fp16_enabled": lambda engine: _config(engine).fp16.enabled,
    "fp16_auto_cast": _at("fp16.auto_cast"),
    "fp16_master_weights_and_gradients": _at("fp16.fp16_master_weights_and_grads"),
    "bfloat16_enabled": lambda engine: _config(engine).bf16.enabled,
    "bf16_master_weights_and_gradients": _at("bf16.bf16_master_weights_and_grads"),
    "bf16_optimizer_states": _at("bf16.bf16_optimizer_states"),
    "dynamic_loss_scale": lambda engine: _config(engine).fp16.loss_scale == 0,
    "dynamic_loss_scale_args": lambda engine: _config(engine).fp16.dynamic_loss_scale_args(),
    "initial_dynamic_scale": lambda engine: _config(engine).fp16.initial_dynamic_scale(),
    "torch_autocast_enabled": lambda engine: _config(engine).torch_autocast.enabled,
    "torch_autocast_lower_precision_safe_modules": _at(
        "torch_autocast.lower_precision_safe_modules"
    ),
    "optimizer_name": lambda engine: getattr(_config(engine).optimizer, "type", None),
    "optimizer_params": lambda engine: getattr(_config(engine).optimizer, "params", None),
    "scheduler_name": lambda engine: getattr(_config(engine).scheduler, "type", None),
    "scheduler_params": lambda engine: getattr(_config(engine).scheduler, "params", None),
    "aio_config": _at("aio"),
    "load_universal_checkpoint": _at("checkpoint.load_universal"),
    "use_node_local_storage": _at("checkpoint.use_node_local_storage"),
    "checkpoint_serialization_enabled": _at("checkpoint.checkpoint_serialization"),
    "checkpoint_tag_validation_enabled": lambda engine: (
        engine._config.checkpoint_tag_validation_enabled
    ),
    "checkpoint_tag_validation_fail": lambda engine: engine._config.checkpoint_tag_validation_fail,
    "autotuning_enabled": _enabled("autotuning"),
    "data_efficiency_enabled": _enabled("data_efficiency"),
    "data_efficiency_config": _at("data_efficiency"),
    "flops_profiler_enabled": _enabled("flops_profiler"),
    "data_sampling_enabled": _enabled("data_efficiency.data_sampling"),
    "data_sampling_config": _at("data_efficiency.data_sampling"),
    "curriculum_learning_enabled": _enabled("data_efficiency.data_sampling.curriculum_learning"),
    "curriculum_learning_config": _at("data_efficiency.data_sampling.curriculum_learning"),
    "random_ltd_enabled": _enabled("data_efficiency.data_routing.random_ltd"),
    "random_ltd_config": _at("data_efficiency.data_routing.random_ltd"),
}
"""{method of DeepSpeed's engine: its result}."""


class ConfigGetters(Engine):
    """Part of `DeepSpeedEngine`. A size that is None is chosen by the engine."""

    @property
    def _config(self) -> DeepSpeedConfig:
        """DeepSpeed's config object, with the batch sizes in effect."""
        return DeepSpeedConfig.in_effect(
            self.settings.config, self.settings.batches, self.rank, self.world_size
        )

    @property
    def config(self) -> dict[str, Any]:
        """The config as nested dicts: the keys that were given, and always the batch sizes in
        effect and `zero_optimization.stage`."""
        return self._config._param_dict

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are reduced, by default that of the weights."""
        given = self.settings.config.communication_data_type
        return DTYPES[given] if given else self.get_data_types()[0]

    def torch_autocast_dtype(self) -> torch.dtype:
        """The dtype of autocast."""
        return DTYPES[self.settings.config.torch_autocast.dtype]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the model's weights, and of accumulated gradients."""
        config = self.settings.config
        low = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
        weights = DTYPES[low]
        return weights, DTYPES.get(config.data_types.grad_accum_dtype or "", weights)


for _path_name, _path in ZERO_PATHS.items():
    GETTERS.setdefault(_path_name, _at(_path))
for _name, _read in GETTERS.items():
    if not hasattr(ConfigGetters, _name):
        setattr(ConfigGetters, _name, _read)

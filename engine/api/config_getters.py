"""`ConfigGetters`: an engine's config, read under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rayzero.engine.config import EngineConfig
from rayzero.engine.engine import Engine
from rayzero.engine.zero.placement import STAGES, Placement, Stage

T = TypeVar("T")


def getter(read: Callable[[Engine], T]) -> Callable[[Engine], T]:
    """A method without arguments, as DeepSpeed spells most of its getters."""
    return read


def _config(engine: Engine) -> EngineConfig:
    return engine.settings.config


def _stage(engine: Engine) -> Stage:
    """As configured, also on one rank."""
    return STAGES[_config(engine).zero_optimization.stage]


class ConfigGetters(Engine):
    """Part of `DeepSpeedEngine`."""

    @property
    def config(self) -> dict[str, Any]:
        """The config as nested dicts: the keys that were given, and always the batch sizes in
        effect and `zero_optimization.stage`."""
        config, batches = self.settings.config, self.settings.batches
        given = config.model_dump(mode="json", exclude_unset=True)
        given["zero_optimization"] = {
            "stage": config.zero_optimization.stage,
            **given.get("zero_optimization", {}),
        }
        return given | {
            "train_batch_size": batches.global_batch,
            "train_micro_batch_size_per_gpu": batches.micro_batch,
            "gradient_accumulation_steps": batches.micro_steps,
        }

    zero_optimization_stage = getter(lambda engine: _config(engine).zero_optimization.stage)
    zero_optimization = getter(lambda engine: _stage(engine).optimizer_state is Placement.SHARDED)
    zero_optimization_partition_gradients = getter(
        lambda engine: _stage(engine).main_grads is Placement.SHARDED
    )
    zero_optimization_partition_weights = getter(
        lambda engine: _stage(engine).model_weights is Placement.SHARDED
    )
    gradient_clipping = getter(lambda engine: _config(engine).gradient_clipping)
    steps_per_print = getter(lambda engine: _config(engine).steps_per_print)
    fp16_enabled = getter(lambda engine: _config(engine).fp16.enabled)
    bfloat16_enabled = getter(lambda engine: _config(engine).bf16.enabled)
    dynamic_loss_scale = getter(lambda engine: _config(engine).fp16.loss_scale == 0)
    torch_autocast_enabled = getter(lambda engine: _config(engine).torch_autocast.enabled)
    zero_cpu_offload = getter(
        lambda engine: _config(engine).zero_optimization.offload_optimizer.device != "none"
    )
    optimizer_name = getter(lambda engine: getattr(_config(engine).optimizer, "type", None))
    optimizer_params = getter(lambda engine: getattr(_config(engine).optimizer, "params", None))
    scheduler_name = getter(lambda engine: getattr(_config(engine).scheduler, "type", None))
    scheduler_params = getter(lambda engine: getattr(_config(engine).scheduler, "params", None))

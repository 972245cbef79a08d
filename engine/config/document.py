"""A whole engine config: DeepSpeed's keys, and a section of our own."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayzero.engine.config.activations import ActivationCheckpointingConfig
from rayzero.engine.config.compression import CompressionConfig
from rayzero.engine.config.fields import Count, Dtype, Number, Positive, Section, Size
from rayzero.engine.config.optim import OptimizerConfig, SchedulerConfig
from rayzero.engine.config.precision import (
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    TorchAutocastConfig,
)
from rayzero.engine.config.rest import AioConfig, CheckpointConfig, TimersConfig
from rayzero.engine.config.zero import ZeroConfig


class RayzeroConfig(Section):
    """Keys of our own, which DeepSpeed does not have."""

    unit_classes: tuple[str, ...] = ()
    slots: Annotated[Count, Field(ge=2)] = 2
    compression: CompressionConfig = CompressionConfig()
    peak_flops: Positive | None = None


class EngineConfig(Section):
    """A whole config file."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    communication_data_type: Dtype | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: Number = 1.0
    zero_optimization: ZeroConfig = ZeroConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    gradient_clipping: Number = 1.0
    steps_per_print: Size | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: str | None = None
    timers: TimersConfig = TimersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    aio: AioConfig = AioConfig()
    rayzero: RayzeroConfig = RayzeroConfig()

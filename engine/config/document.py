"""A whole engine config: DeepSpeed's keys, and a section of our own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rayzero.engine.config.activations import ActivationCheckpointingConfig
from rayzero.engine.config.fields import Count, Dtype, Number, Section, switch
from rayzero.engine.config.optim import OptimizerConfig, SchedulerConfig
from rayzero.engine.config.precision import (
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    TorchAutocastConfig,
)
from rayzero.engine.config.zero import ZeroConfig


def _zero(value: Any) -> Any:
    """`true` is stage 1, as in DeepSpeed's first version; `false` and `null` are stage 0."""
    if value is None or isinstance(value, bool):
        return {"stage": 1 if value else 0}
    return value


def _section(value: Any) -> Any:
    return {} if value is None else value


class RayzeroConfig(Section):
    """Keys of our own, which DeepSpeed does not have."""

    unit_classes: tuple[str, ...] = Field(
        default=(),
        description="class names of the modules gathered as one unit at stage 3; "
        "empty: the elements of every ModuleList and Sequential",
    )
    slots: int = Field(
        default=2, ge=2, description="units of weights that may be live at once at stage 3"
    )


class EngineConfig(Section):
    """A whole config file."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Annotated[Fp16Config, BeforeValidator(switch)] = Fp16Config()
    bf16: Annotated[Bf16Config, BeforeValidator(switch)] = Bf16Config()
    torch_autocast: Annotated[TorchAutocastConfig, BeforeValidator(switch)] = TorchAutocastConfig()
    data_types: Annotated[DataTypesConfig, BeforeValidator(_section)] = DataTypesConfig()
    communication_data_type: Dtype | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: Number = 1.0
    zero_optimization: Annotated[ZeroConfig, BeforeValidator(_zero)] = ZeroConfig()
    activation_checkpointing: Annotated[
        ActivationCheckpointingConfig, BeforeValidator(_section)
    ] = ActivationCheckpointingConfig()
    gradient_clipping: Number = 0.0
    steps_per_print: Count | None = None
    rayzero: RayzeroConfig = RayzeroConfig()

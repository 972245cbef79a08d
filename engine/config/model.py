"""EngineConfig and its small sections.

A whole engine config: DeepSpeed's keys, and a section of our own.

The section `activation_checkpointing`: what is kept for backward.

The section `rayzero.compression`: what DeepSpeed has no key for.

The sections about dtypes: what weights, gradients and sums are kept in, and what travels.

Sections that are read and checked, and change nothing here: the table of keys says why.

The sections `optimizer` and `scheduler`. What their params mean is told in `engine/optim`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, create_model

from rayzero.engine.config.fields import (
    ConfigSection,
    DtypeName,
    Integer,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeSize,
    PositiveFloat,
    PositiveInt,
    PositiveSize,
    name_validator,
    parse_number,
)
from rayzero.engine.config.optimizers import OPTIMIZER_PARAMS, OPTIMIZERS, REFUSED_OPTIMIZERS
from rayzero.engine.config.schedules import SCHEDULE_PARAMS, SCHEDULES
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.validation import raise_config_error, validate_model


class ActivationCheckpointingConfig(ConfigSection):
    """Options of `checkpointing.checkpoint`; they change nothing where it is not called."""

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: NonNegativeInt | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


class CompressionConfig(ConfigSection):
    """How gradients travel between ranks."""

    gradients: Literal["none", "fp16", "bf16", "int8", "sign", "lowrank"] = Field(
        default="none",
        description="fp16, bf16: rounded; int8: eight bits a value, a scale a block; sign: one bit "
        "a value; lowrank: factors of every matrix (PowerSGD)",
    )
    block_size: PositiveInt | None = Field(
        default=None,
        multiple_of=32,
        description="values that share a scale; by default 256 with int8, 64 with sign",
    )
    rank: PositiveInt = Field(default=4, description="of lowrank's factors")
    error_feedback: bool | None = Field(
        default=None,
        description="add what was lost to the next gradients; always with sign and lowrank, by "
        "default not with the others",
    )


class Fp16Config(ConfigSection):
    """float16 model weights with fp32 main weights and a scaled loss."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: NonNegativeFloat = 0.0  # 0: dynamic
    initial_scale_power: Integer = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: NonNegativeFloat = 1.0
    fp16_master_weights_and_grads: bool = False


class Bf16Config(ConfigSection):
    """bfloat16 model weights with fp32 main weights, gradients and optimizer state."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class TorchAutocastConfig(ConfigSection):
    """`torch.autocast` around the model's forward; weights stay as they are."""

    enabled: bool = False
    dtype: DtypeName = "bf16"
    lower_precision_safe_modules: tuple[str, ...] | None = None


class DataTypesConfig(ConfigSection):
    """Dtypes of what is not a model weight; None for what the precision brings with it."""

    grad_accum_dtype: DtypeName | None = None
    param_dtype: DtypeName | None = None
    buffer_dtype: DtypeName | None = None
    keep_in_fp32_modules: str | tuple[str, ...] = "auto"


_TAG_VALIDATIONS = {name.lower(): name for name in ("Ignore", "Warn", "Fail")}


class ThroughputConfig(ConfigSection):
    """The timer of samples a second."""

    enabled: bool = True
    synchronized: bool = True


class TimersConfig(ConfigSection):
    """What is timed."""

    throughput: ThroughputConfig = ThroughputConfig()


class ParallelWriteConfig(ConfigSection):
    """Who writes a checkpoint at the same time."""

    pipeline_stage: bool = False


class CheckpointConfig(ConfigSection):
    """How DeepSpeed writes checkpoints."""

    tag_validation: Annotated[
        str, BeforeValidator(name_validator(_TAG_VALIDATIONS, "a validation of tags"))
    ] = "Warn"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    checkpoint_serialization: bool = True


class AioConfig(ConfigSection):
    """How DeepSpeed reads and writes NVMe."""

    block_size: NonNegativeSize = 1_048_576
    queue_depth: Integer = 8
    intra_op_parallelism: Integer = 1
    thread_count: Integer = 1
    single_submit: bool = False
    overlap_events: bool = True


S = TypeVar("S", bound=ConfigSection)


_REFUSED_OPTIMIZER_NAMES = {name.lower(): name for name in REFUSED_OPTIMIZERS}


def _name_field(names: tuple[str, ...], what: str) -> BeforeValidator:
    return BeforeValidator(name_validator({name.lower(): name for name in names}, what))


def _validate_optimizer_type(value: Any) -> Any:
    if isinstance(value, str) and "." in value:
        return value
    if isinstance(value, str) and (name := _REFUSED_OPTIMIZER_NAMES.get(value.lower())):
        raise ValueError(f"refused: {REFUSED_OPTIMIZERS[name]}")
    return name_validator({name.lower(): name for name in OPTIMIZERS}, "an optimizer")(value)


class OptimizerConfig(ConfigSection):
    """`{"type": "AdamW", "params": {"lr": 1e-3, ...}}`; params go to the optimizer's class.

    Besides names of DeepSpeed's and torch's, `type` may be a class's dotted name, one that works
    element by element: `my_package.optimizers.Sophia`.
    """

    type: Annotated[str, BeforeValidator(_validate_optimizer_type)]
    params: dict[str, Any] = Field(default_factory=dict)
    legacy_fusion: bool = False


class SchedulerConfig(ConfigSection):
    """`{"type": "WarmupLR", "params": {...}}`: DeepSpeed's schedules, and torch's by name."""

    type: Annotated[str, _name_field(SCHEDULES, "a schedule")]
    params: dict[str, Any] = Field(default_factory=dict)


def find_param_errors(
    optimizer: OptimizerConfig | None, scheduler: SchedulerConfig | None
) -> list[str]:
    """A line for every mistake in what `params` hold, as far as that can be told without torch."""
    found = []
    if optimizer is not None and optimizer.type in OPTIMIZER_PARAMS:
        found += _validate_params("optimizer", OPTIMIZER_PARAMS[optimizer.type], optimizer.params)[
            1
        ]
    if scheduler is not None and scheduler.type in SCHEDULE_PARAMS:
        found += _validate_params("scheduler", SCHEDULE_PARAMS[scheduler.type], scheduler.params)[1]
    return found


def parse_params(section: str, model: type[S], params: dict[str, Any]) -> S:
    """A section's params as their model.

    Raises:
        ConfigError: naming every wrong key by its whole path.
    """
    typed, mistakes = _validate_params(section, model, params)
    if typed is None:
        raise_config_error("engine config", mistakes)
    return typed


def _validate_params(
    section: str, model: type[S], params: dict[str, Any]
) -> tuple[S | None, list[str]]:
    """Inside its section, so that messages name the whole path."""
    inner = create_model("Inner", __base__=ConfigSection, params=(model, ...))
    fields: dict[str, Any] = {section: (inner, ...)}
    outer = create_model("Outer", __base__=ConfigSection, **fields)
    found, mistakes = validate_model(outer, {section: {"params": params}})
    return (None if found is None else getattr(found, section).params), mistakes


def coerce_numbers(params: dict[str, Any]) -> dict[str, Any]:
    """Params of a class that is not ours: text that is a number as that number."""
    return {key: parse_number(one) if isinstance(one, str) else one for key, one in params.items()}


class RayzeroConfig(ConfigSection):
    """Keys of our own, which DeepSpeed does not have."""

    unit_classes: tuple[str, ...] = ()
    slots: Annotated[PositiveInt, Field(ge=2)] = 2
    compression: CompressionConfig = CompressionConfig()
    peak_flops: PositiveFloat | None = None


class EngineConfig(ConfigSection):
    """A whole config file."""

    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    communication_data_type: DtypeName | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: NonNegativeFloat = 1.0
    zero_optimization: ZeroConfig = ZeroConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    gradient_clipping: NonNegativeFloat = 1.0
    steps_per_print: PositiveSize | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: str | None = None
    timers: TimersConfig = TimersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    aio: AioConfig = AioConfig()
    rayzero: RayzeroConfig = RayzeroConfig()

"""`EngineConfig`, the whole document, its sections `optimizer` and `scheduler`, and `KEYS`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator

from rayzero.engine.config.autotuning import AutotuningConfig
from rayzero.engine.config.data_efficiency import (
    CurriculumConfig,
    DataEfficiencyConfig,
    LayerDropConfig,
)
from rayzero.engine.config.fields import (
    ConfigSection,
    DtypeName,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveSize,
    StrictModel,
    name_validator,
    parse_number,
)
from rayzero.engine.config.keys import Auto, Key, implemented
from rayzero.engine.config.monitors import (
    CometConfig,
    CsvMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from rayzero.engine.config.optimizers import (
    OPTIMIZER_PARAMS,
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    OptimizerParams,
)
from rayzero.engine.config.schedules import LR_CURVES, SCHEDULES
from rayzero.engine.config.sections import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    CheckpointConfig,
    CompileConfig,
    DataTypesConfig,
    Fp16Config,
    RayzeroConfig,
    TimersConfig,
    TorchAutocastConfig,
)
from rayzero.engine.config.zero import ZeroConfig
from rayzero.engine.validation import nested_section, raise_config_error, validate_model

_FROM_BATCH_SIZES = "left out: computed from the other two batch sizes"

P = TypeVar("P", bound=StrictModel)

_find_optimizer = name_validator({name.lower(): name for name in OPTIMIZERS}, "an optimizer")
_find_schedule = name_validator({name.lower(): name for name in SCHEDULES}, "a schedule")


def _validate_optimizer_type(value: Any) -> Any:
    if not isinstance(value, str):
        return _find_optimizer(value)
    for name, reason in REFUSED_OPTIMIZERS.items():
        if value.lower() == name.lower():
            raise ValueError(f"refused: {reason}")
    return value if "." in value else _find_optimizer(value)


class OptimizerConfig(ConfigSection, path="optimizer"):
    """`{"type": "AdamW", "params": {"lr": 1e-3, ...}}`; params go to the optimizer's class.

    `type` is a name of DeepSpeed's or torch's, or the dotted name of an elementwise optimizer's
    class: `my_package.optimizers.Sophia`.
    """

    type: Annotated[str, BeforeValidator(_validate_optimizer_type)] = implemented(
        ..., "the optimizer's name, in any case"
    )
    params: dict[str, Any] = implemented({}, "the optimizer's arguments")


class SchedulerConfig(ConfigSection):
    """`{"type": "WarmupLR", "params": {...}}`: DeepSpeed's schedules, and torch's by name."""

    type: Annotated[str, BeforeValidator(_find_schedule)] = implemented(
        ..., "the schedule's name, in any case"
    )
    params: dict[str, Any] = implemented({}, "the schedule's arguments")


def parse_params(section: str, model: type[P], params: dict[str, Any]) -> P:
    """Returns the params of the section `optimizer` or `scheduler` as an instance of `model`.
    Raises ConfigError, which names every wrong key by its whole path."""
    typed, mistakes = validate_model(model, params, f"{section}.params.")
    if typed is None:
        raise_config_error("engine config", mistakes)
    return typed


def coerce_numbers(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the params of torch's or the user's class, with numeric text converted to numbers."""
    return {
        key: parse_number(value) if isinstance(value, str) else value
        for key, value in params.items()
        if key != "max_grad_norm"  # refused, unless it requests nothing
    }


class EngineConfig(ConfigSection, path=""):
    """A whole config file."""

    train_batch_size: PositiveInt | None = implemented(
        None,
        "samples per step, over all ranks",
        group="batch sizes",
        auto=Auto(None, _FROM_BATCH_SIZES),
    )
    train_micro_batch_size_per_gpu: PositiveInt | None = implemented(
        None,
        "samples per micro-batch and rank",
        auto=Auto(None, f"{_FROM_BATCH_SIZES}; 1 without them"),
    )
    gradient_accumulation_steps: PositiveInt | None = implemented(
        None,
        "micro-batches per step and rank",
        auto=Auto(None, f"{_FROM_BATCH_SIZES}; 1 without them"),
    )
    managed_gradient_accumulation: bool = implemented(
        True,
        "false: a step ends whenever step() is called, and gradients are averaged over "
        "gradient_accumulation_steps, however often backward() was called",
    )
    optimizer: OptimizerConfig | None = implemented(
        None, "the optimizer, unless `initialize` has one", group="optimizer, schedule, gradients"
    )
    scheduler: SchedulerConfig | None = implemented(None, "the learning-rate schedule")
    gradient_clipping: NonNegativeFloat = implemented(
        1.0,
        "gradients are clipped to this L2 norm, 1.0 by default; 0: never",
        auto=Auto(1.0, "the default of transformers' TrainingArguments"),
    )
    prescale_gradients: bool = implemented(
        False, "gradients are divided before they are reduced over ranks"
    )
    gradient_predivide_factor: PositiveFloat = implemented(
        1.0, "the divisor before the reduction; gradients are divided by the rest after it"
    )
    communication_data_type: DtypeName | None = implemented(
        None,
        "the dtype in which gradients are communicated, by default that of the main grads; sums "
        "are always in the dtype of the main grads",
        old_names=("fp32_allreduce",),
        old_true="fp32",
    )
    gradient_allreduce_op: Annotated[
        str, BeforeValidator(name_validator({"mean": "mean", "sum": "sum"}, "an operation"))
    ] = implemented(
        "mean",
        "whether gradients are averaged or summed over the ranks, mean or sum; a sum grows with "
        "the number of ranks, also in an elastic job; not at stage 3, as in DeepSpeed",
    )
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    data_types: DataTypesConfig = DataTypesConfig()
    zero_optimization: ZeroConfig = ZeroConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    compile: CompileConfig = CompileConfig()
    steps_per_print: PositiveSize | None = implemented(
        None, "rank 0 logs loss and lr every this many steps", group="logs and timers"
    )
    timers: TimersConfig = TimersConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    wandb: WandbConfig = WandbConfig()
    comet: CometConfig = CometConfig()
    curriculum_learning: CurriculumConfig = CurriculumConfig()
    progressive_layer_drop: LayerDropConfig = LayerDropConfig()
    data_efficiency: DataEfficiencyConfig = DataEfficiencyConfig()
    autotuning: AutotuningConfig = AutotuningConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    aio: AioConfig = AioConfig()
    rayzero: RayzeroConfig = RayzeroConfig()


def find_param_errors(config: EngineConfig) -> Iterator[str]:
    """Yields a line for every mistake in `params` that can be detected without torch."""
    for name, models in (("optimizer", OPTIMIZER_PARAMS), ("scheduler", LR_CURVES)):
        section: OptimizerConfig | SchedulerConfig | None = getattr(config, name)
        if section is not None and section.type in models:
            yield from validate_model(models[section.type], section.params, f"{name}.params.")[1]


FREE_FORM_SECTIONS = ("optimizer.params", "scheduler.params", "compile.kwargs")
"""Sections whose keys are those of the optimizer, the schedule, or torch.compile."""


def _field_keys(
    model: type[BaseModel], prefix: str = "", group: str = ""
) -> Iterator[tuple[str, Key]]:
    """Yields (group, key) for every field, those of nested sections included."""
    for name, field in model.model_fields.items():
        path = prefix + name
        if isinstance(key := field.json_schema_extra, Key):
            group = key.group or group
            old_names = key.old_names
            if name.startswith("stage3_"):  # DeepSpeed accepts such a key without the prefix, too
                old_names += (prefix + name.removeprefix("stage3_"),)
            yield group, replace(key, path=path, old_names=old_names)
        if path == "optimizer.params":
            yield from _field_keys(OptimizerParams, f"{path}.", group)
        elif (section := nested_section(field.annotation)) is not None:
            yield from _field_keys(section, f"{path}.", group)


KEY_GROUPS: dict[str, list[Key]] = {}
"""Every key of DeepSpeed 0.19 and of rayzero, by subject."""
for _group, _key in _field_keys(EngineConfig):
    KEY_GROUPS.setdefault(_group, []).append(_key)

KEYS: dict[str, Key] = {key.path: key for keys in KEY_GROUPS.values() for key in keys}

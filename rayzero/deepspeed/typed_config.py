"""DeepSpeed's typed config readers: enums, `DeepSpeedConfigModel`, and functions of a dict."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from enum import IntEnum, StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from rayzero.engine.config.monitors import MonitorConfig
from rayzero.engine.config.normalize import normalize
from rayzero.engine.config.parse import to_plain
from rayzero.engine.config.sections import Bf16Config, Fp16Config
from rayzero.engine.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from rayzero.engine.errors import ConfigError

ParamDict = Mapping[str, Any]


class ZeroStageEnum(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Its members are text, and may stand in configs."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """States that DeepSpeed's `offload_states` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ValidationMode:
    """Values of `checkpoint.tag_validation`."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class DeepSpeedConfigModel(BaseModel):
    """Base of DeepSpeed's typed sections: unknown keys are errors, assignments are checked, and
    "auto" means the default, unless `strict`."""

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(
            **{name: value for name, value in data.items() if strict or value != "auto"}
        )


def get_scalar_param(param_dict: ParamDict, param_name: str, param_default_value: Any) -> Any:
    """The value of a key, or a default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs as a dict, for `json.load(object_pairs_hook=...)`. Raises ValueError if a
    key is given twice."""
    counts = Counter(key for key, _ in ordered_pairs)
    if twice := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}")
    return dict(ordered_pairs)


def load_ds_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A config as a dict, from a dict or a JSON file."""
    if isinstance(config, dict):
        return config
    try:
        text = Path(config).read_text()
        read: dict[str, Any] = json.loads(
            text, object_pairs_hook=dict_raise_error_on_duplicate_keys
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config} cannot be read: {error}", allowed="a JSON file") from None
    return read


class DeepSpeedZeroConfig(ZeroConfig):
    """The section `zero_optimization`, also with old names; a section of offloading that is not
    given is None, and `overlap_comm` is DeepSpeed's default."""

    offload_optimizer: OffloadOptimizerConfig | None = None  # type: ignore[assignment]
    offload_param: OffloadParamConfig | None = None  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _convert(cls, section: Any) -> Any:
        mistakes = list[str]()
        document = {"zero_optimization": to_plain(section, "zero_optimization")}
        normalize(document, mistakes)
        if mistakes:
            raise ValueError("; ".join(mistakes))
        current = document["zero_optimization"]
        return {"overlap_comm": current.get("stage") == 3, **current}


def get_zero_config(param_dict: ParamDict) -> DeepSpeedZeroConfig:
    """The section `zero_optimization`, checked."""
    return DeepSpeedZeroConfig.model_validate(param_dict.get("zero_optimization", {}))


def get_monitor_config(param_dict: ParamDict) -> MonitorConfig:
    """The sections of monitors, checked."""
    names = MonitorConfig.model_fields
    return MonitorConfig.model_validate({name: param_dict.get(name, {}) for name in names})


def get_bfloat16_config(param_dict: ParamDict) -> Bf16Config:
    """The section `bf16`, by its old name `bfloat16` too, checked."""
    section = param_dict.get("bf16")
    return Bf16Config.model_validate(param_dict.get("bfloat16", {}) if section is None else section)


def get_float16_config(param_dict: ParamDict) -> Fp16Config:
    """The section `fp16`, checked."""
    return Fp16Config.model_validate(param_dict.get("fp16", {}))


def _read(path: str, default: Any, param_dict: ParamDict) -> Any:
    *sections, name = path.split(".")
    for section in sections:
        param_dict = param_dict.get(section) or {}
    return param_dict.get(name, default)


_READERS: Mapping[str, tuple[str, Any]] = {
    "communication_data_type": ("communication_data_type", None),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "disable_allgather": ("disable_allgather", False),
    "dump_state": ("dump_state", False),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", None),
    "gradient_allreduce_op": ("gradient_allreduce_op", "mean"),
    "gradient_clipping": ("gradient_clipping", 1.0),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "log_level": ("log_level", None),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "memory_breakdown": ("memory_breakdown", False),
    "optimizer_name": ("optimizer.type", None),
    "optimizer_params": ("optimizer.params", None),
    "prescale_gradients": ("prescale_gradients", False),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "steps_per_print": ("steps_per_print", None),
    "train_batch_size": ("train_batch_size", None),
    "train_micro_batch_size_per_gpu": ("train_micro_batch_size_per_gpu", None),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
}


def __getattr__(name: str) -> Callable[[ParamDict], Any]:
    """`get_<key>`, a function of a config's dict."""
    if (key := name.removeprefix("get_")) != name and key in _READERS:
        return partial(_read, *_READERS[key])
    raise AttributeError(name)

"""DeepSpeed's config object: the config's values under DeepSpeed's names.

Most names follow from the config's keys (`PATHS`); the others are in `names.toml`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator

from rayzero.deepspeed.lookup import NAMES
from rayzero.engine.config import EngineConfig, parse_config
from rayzero.engine.config.keys import is_enabled
from rayzero.engine.config.model import KEYS
from rayzero.engine.config.monitors import MonitorConfig
from rayzero.engine.config.normalize import normalize
from rayzero.engine.config.parse import to_plain
from rayzero.engine.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from rayzero.engine.data.batch_sizes import BatchSizes, resolve_batch_sizes
from rayzero.engine.errors import ConfigError, did_you_mean
from rayzero.engine.precision.policy import CONFIG_DTYPES

ZERO_PATHS = {
    f"zero_{field.removeprefix('stage3_').removeprefix('use_').removeprefix('zero_')}": (
        f"zero_optimization.{field}"
    )
    for field in ZeroConfig.model_fields
}
PATHS: Mapping[str, str] = {
    **ZERO_PATHS,
    **{key: key for key in KEYS if "." not in key},
    **{f"{name}_config": name for name in EngineConfig.model_fields},
    **{key.rpartition(".")[2]: key for key in KEYS if key.startswith("data_types.")},
    **NAMES["config_paths"],
}
"""{DeepSpeed's attribute of its config object: path in the config}."""


class DeepSpeedConfig:
    """DeepSpeed's config object, the type of `engine._config`. Read-only.

    It has the attributes of DeepSpeed's class. A size that is None is chosen by the engine. Batch
    sizes are those in effect.

    Args:
        config: a path, a dict, or an `EngineConfig`.
        mpu, mesh_device: refused.
        batches: batch sizes in effect; by default those for the config and the number of ranks.

    Raises:
        ConfigError: the config is invalid, or its batch sizes do not fit the number of ranks, which
            is that of the process group, else the environment's.
    """

    def __init__(
        self,
        config: str | Path | dict[str, Any] | EngineConfig,
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        batches: BatchSizes | None = None,
    ) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError(
                "DeepSpeedConfig(mpu=..., mesh_device=...) was given",
                allowed="None: all ranks are data parallel",
            )
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.global_rank = int(os.environ.get("RANK", "0"))
        self._config = parse_config(config)
        self._batches = batches or resolve_batch_sizes(self._config, self.world_size)

    train_batch_size = property(lambda self: self._batches.global_batch)
    train_micro_batch_size_per_gpu = property(lambda self: self._batches.micro_batch)
    gradient_accumulation_steps = property(lambda self: self._batches.micro_steps)
    zero_enabled = property(lambda self: self.zero_optimization_stage > 0)
    dynamic_loss_scale = property(lambda self: self.loss_scale == 0)
    initial_dynamic_scale = property(lambda self: self._config.fp16.initial_dynamic_scale())
    checkpoint_tag_validation_enabled = property(lambda self: self._tag_validation != "Ignore")
    checkpoint_tag_validation_fail = property(lambda self: self._tag_validation == "Fail")
    _tag_validation = property(lambda self: self._config.checkpoint.tag_validation)

    @property
    def optimizer_name(self) -> str | None:
        """The optimizer's name in lower case."""
        section = self._config.optimizer
        return None if section is None else section.type.lower()

    @property
    def _param_dict(self) -> dict[str, Any]:
        """The config as nested dicts: the given keys, and always the batch sizes in effect and
        `zero_optimization.stage`."""
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
        """The config's sections of monitors."""
        return MonitorConfig(
            **{name: getattr(self._config, name) for name in MonitorConfig.model_fields}
        )

    @property
    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast; None if autocast is off."""
        section = self._config.torch_autocast
        return CONFIG_DTYPES[section.dtype] if section.enabled else None

    def __getattr__(self, name: str) -> Any:
        """Returns the value at the path of `name`, None below a section that is not given; or the
        value of `<section>_enabled`."""
        is_switch = name.endswith("_enabled") and name not in PATHS
        path = PATHS.get(name.replace("_enabled", "_config") if is_switch else name)
        if path is None or "_config" not in self.__dict__:
            raise AttributeError(
                f"rayzero's DeepSpeedConfig has no {name!r}{did_you_mean(name, list(PATHS))}"
            )
        value: Any = self._config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if not is_switch:
            return value
        return is_enabled(value) if isinstance(value, dict) else getattr(value, "enabled", False)


class ZeroStageEnum(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Devices of offloading. The members are strings, and may be used in configs."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


OffloadStateTypeEnum = StrEnum(
    "OffloadStateTypeEnum", "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
)
"""States that DeepSpeed's `offload_states` moves."""


class DeepSpeedZeroConfig(ZeroConfig):
    """The section `zero_optimization`, which accepts old names, too. A section of offloading that
    is not given is None. `overlap_comm` has DeepSpeed's default."""

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

"""The settings worth trying, and the first of them that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayzero.engine.compression import compression_of
from rayzero.engine.config import EngineConfig, parse_config
from rayzero.engine.errors import ConfigError
from rayzero.engine.planning.estimate import Estimate, Planner

RESERVED = 0.1
"""The share of a GPU's memory that is left for its context, NCCL, and an allocator's gaps."""


@dataclass(frozen=True)
class Setting:
    """One way to run: a stage, what is offloaded, and whether blocks are computed again."""

    stage: int
    recomputed: bool = False
    offload_optimizer: bool = False
    offload_param: bool = False

    @property
    def name(self) -> str:
        parts = [f"stage {self.stage}"]
        parts += ["activation checkpointing"] * self.recomputed
        parts += ["optimizer on the CPU"] * self.offload_optimizer
        parts += ["parameters on the CPU"] * self.offload_param
        return ", ".join(parts)

    def applied(self, document: dict[str, Any]) -> EngineConfig:
        """A config with this setting in the place of its own."""
        zero = document.get("zero_optimization")
        zero = dict(zero) if isinstance(zero, dict) else {}
        zero["stage"] = self.stage
        for key, wanted in (
            ("offload_optimizer", self.offload_optimizer),
            ("offload_param", self.offload_param),
        ):
            zero.pop(key, None)
            if wanted:
                zero[key] = {"device": "cpu"}
        if self.stage < 3 or self.offload_param:  # ways to gather weights on the device
            for key in ("zero_hpz_partition_size", "zero_quantized_weights"):
                zero.pop(key, None)
        config = parse_config({**document, "zero_optimization": zero})
        compression_of(config)
        return config


SETTINGS = (
    Setting(0),
    Setting(1),
    Setting(2),
    Setting(3),
    Setting(2, recomputed=True),
    Setting(3, recomputed=True),
    Setting(2, recomputed=True, offload_optimizer=True),
    Setting(3, recomputed=True, offload_optimizer=True),
    Setting(3, recomputed=True, offload_optimizer=True, offload_param=True),
)
"""In the order of what they cost a step: the first that fits is the one to take."""


@dataclass(frozen=True)
class Choice:
    """A setting, what it needs, and whether that fits; `fits` is None when no limit was given."""

    setting: Setting
    estimate: Estimate
    fits: bool | None


def choices(
    planner: Planner, document: dict[str, Any], world_size: int, gpu_bytes: int | None = None
) -> list[Choice]:
    """Every setting that the config can be had with, cheapest step first.

    Args:
        document: an engine config; its stage and offload are replaced.
        gpu_bytes: the memory of one GPU; of which `RESERVED` is kept free.

    Raises:
        ConfigError: the config is wrong, does not fit the world, or the model cannot be traced.
    """
    found: list[Choice] = []
    for setting in SETTINGS:
        try:
            config = setting.applied(document)
        except ConfigError:
            if setting is SETTINGS[-1] and not found:
                raise
            continue  # 1-bit Adam, for one, is of stage 0
        estimate = planner.estimate(config, world_size, recomputed=setting.recomputed)
        fits = None
        if gpu_bytes is not None:
            fits = estimate.device_total_bytes <= (1 - RESERVED) * gpu_bytes
        found.append(Choice(setting, estimate, fits))
    return found


def first_fit(found: list[Choice]) -> Choice | None:
    """The one to take; None when nothing fits, or no limit was given."""
    return next((one for one in found if one.fits), None)

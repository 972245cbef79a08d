"""Sections `offload_optimizer` and `offload_param` of zero_optimization."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from rayzero.engine.config.fields import (
    ConfigSection,
    NonNegativeInt,
    NonNegativeSize,
    PositiveInt,
    UnitFraction,
)
from rayzero.engine.config.keys import implemented, no_op, refused

OffloadDevice = Annotated[
    Literal["none", "cpu", "nvme"], BeforeValidator(lambda value: value or "none")
]
_NO_NVME_WEIGHTS = "weights are offloaded to CPU memory, not to files"
_PINNED = "always so where there is a GPU"


class OffloadOptimizerConfig(ConfigSection):
    """Where main weights and optimizer state are kept and updated."""

    device: OffloadDevice = implemented(
        "none",
        "where main weights and optimizer state are kept: none, cpu or nvme",
        group="offloaded optimizer",
        old_names=("zero_optimization.cpu_offload",),
        old_true="cpu",
    )
    nvme_path: str | None = implemented(None, "the folder for device nvme")
    buffer_count: PositiveInt = implemented(
        4, "buffers in CPU memory for device nvme, one per chunk of state being updated"
    )
    pin_memory: bool = no_op(True, "CPU memory is page-locked, so that copies overlap", _PINNED)
    pipeline_read: bool = no_op(False, "the next chunk is read while one is updated", "always done")
    pipeline_write: bool = no_op(
        False, "the last chunk is written while one is updated", "always done"
    )
    fast_init: bool = no_op(False, "files are created without writing zeros", "always done")
    ratio: UnitFraction = implemented(1.0, "fraction of the elements that is offloaded")
    super_offload: bool = refused(
        False,
        "an offload engine for superchips",
        "it is for one kind of machine",
        alternative="device: cpu",
    )
    cpuadam_cores_perc: UnitFraction = no_op(
        0.8, "fraction of the cores for super_offload", "it only applies to super_offload"
    )


class OffloadParamConfig(ConfigSection):
    """Where the shards of the model weights are kept between uses; stage 3 only."""

    device: OffloadDevice = implemented(
        "none",
        "where shards of the weights are kept at stage 3: none or cpu",
        group="offloaded parameters",
        old_names=("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"),
        old_true="cpu",
    )
    nvme_path: str | None = no_op(None, "the folder for device nvme", _NO_NVME_WEIGHTS)
    buffer_count: NonNegativeInt = no_op(
        5, "buffers in CPU memory for device nvme", _NO_NVME_WEIGHTS
    )
    buffer_size: NonNegativeSize = no_op(100_000_000, "elements of such a buffer", _NO_NVME_WEIGHTS)
    max_in_cpu: NonNegativeSize = no_op(
        1_000_000_000, "elements kept in CPU memory with device nvme", _NO_NVME_WEIGHTS
    )
    pin_memory: bool = no_op(True, "CPU memory is page-locked, so that copies overlap", _PINNED)

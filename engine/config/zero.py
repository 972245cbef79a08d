"""The section `zero_optimization`: what is sharded, the sizes of collectives, and offload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from rayzero.engine.config.fields import (
    ConfigSection,
    NonNegativeInt,
    NonNegativeSize,
    PositiveInt,
    PositiveSize,
    UnitFraction,
    parse_integer,
    reject_bool,
)
from rayzero.engine.config.keys import implemented

NameList = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class LeafModuleConfig(ConfigSection):
    """Modules that are gathered as a whole at stage 3."""

    classes: NameList = implemented(
        (), "classes of modules gathered as a whole: a class's name, alone or with its module"
    )
    names: NameList = implemented((), "names of modules gathered as a whole")
    name_suffixes: NameList = implemented((), "suffixes of names of modules gathered as a whole")


OffloadDevice = Annotated[
    Literal["none", "cpu", "nvme"], BeforeValidator(lambda value: value or "none")
]


class OffloadOptimizerConfig(ConfigSection, path="zero_optimization.offload_optimizer"):
    """The memory in which main weights and optimizer state are kept and updated."""

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
    ratio: UnitFraction = implemented(1.0, "fraction of the elements that is offloaded")

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes are pipelined, under DeepSpeed's name."""
        return any(getattr(self, f"pipeline_{part}") for part in ("read", "write"))


class OffloadParamConfig(ConfigSection, path="zero_optimization.offload_param"):
    """The memory in which shards of the model weights are kept between uses; stage 3 only."""

    device: OffloadDevice = implemented(
        "none",
        "where shards of the weights are kept at stage 3: none, cpu, or nvme: in a mapped file, "
        "from which a unit is read for forward and for backward, as far as the page cache does "
        "not hold it; no effect where the device is the CPU",
        group="offloaded parameters",
        old_names=("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"),
        old_true="cpu",
    )
    nvme_path: str | None = implemented(None, "the folder for device nvme")


class ZeroConfig(ConfigSection, path="zero_optimization"):
    """The sharding (the stage), and the sizes of collectives in elements."""

    stage: Annotated[
        Literal[0, 1, 2, 3], BeforeValidator(parse_integer), BeforeValidator(reject_bool)
    ] = implemented(0, "what is sharded over the ranks", group="sharding")
    overlap_comm: bool = implemented(True, "gradients are reduced while backward runs")
    reduce_bucket_size: PositiveSize | None = implemented(
        None,
        "elements reduced together. At stages 0 to 2 it is the size of a bucket, by default an "
        "eighth of the model: 250 thousand to 4 million on CPUs, 25 to 64 million on GPUs. Stages "
        "2 and 3 reduce a longer parameter or block in parts of this size, by default 64 million",
    )
    allgather_bucket_size: NonNegativeSize | None = implemented(
        None,
        "elements of weights gathered together at stages 1 and 2; a bucket is both reduced and "
        "gathered, so the smaller of the two sizes applies",
        old_names=("allgather_size",),
    )
    ignore_unused_parameters: bool = implemented(
        True, "parameters that no rank used in a step are no error; see rayzero.unused_gradients"
    )
    sub_group_size: PositiveSize = implemented(
        1_000_000_000, "the most elements that the optimizer updates at once, with offload to nvme"
    )
    stage3_gather_16bit_weights_on_model_save: bool = implemented(
        False,
        "at stage 3, transformers' Trainer and Accelerate save the whole model only if this is "
        "true; otherwise Trainer saves a checkpoint. save_16bit_model always saves the whole model",
        group="stage 3",
        old_names=(
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.gather_fp16_weights_on_model_save",
        ),
    )
    zero_hpz_partition_size: NonNegativeInt = implemented(
        1,
        "consecutive ranks that share a secondary partition of the gathered weights (ZeRO++ hpZ), "
        "so that further gathers of a step stay among them; stage 3. It divides the world size; "
        "in an elastic job the next smaller size that does is used, and logged",
    )
    zero_quantized_weights: bool = implemented(
        False, "weights are gathered in int8 blocks; stage 3"
    )
    zero_quantized_gradients: bool = implemented(
        False, "gradients are reduced in int8 blocks, at any stage"
    )
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    enable_sanity_checks: bool = implemented(
        False,
        "a write to a parameter inside GatheredParameters without modifier_rank is an error on all "
        "ranks at stage 3; otherwise it is lost, as in DeepSpeed; all other checks are always on",
        group="the rest of zero_optimization",
    )
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()

    if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts misspelled attributes

        def __getattr__(self, name: str) -> Any:
            """Returns the value of a `stage3_` key under DeepSpeed's name, which has no prefix."""
            if f"stage3_{name}" in type(self).model_fields:
                return getattr(self, f"stage3_{name}")
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

"""The section `zero_optimization`: what is sharded, the sizes of collectives, and offload."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from rayzero.engine.config.fields import (
    NO_LIMIT,
    ConfigSection,
    NonNegativeInt,
    NonNegativeSize,
    PositiveInt,
    PositiveSize,
    UnitFraction,
    parse_integer,
    reject_bool,
)
from rayzero.engine.config.keys import implemented, no_op, refused

_FIXED_MEMORY = "units share a fixed number of buffers: rayzero.gather_buffers bounds live weights"
_REMOVED = "removed from DeepSpeed 0.19 too"
_SAME_RESULT = "the backend chooses the collective; the result is the same"

NameList = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class LeafModuleConfig(ConfigSection):
    """Modules that are gathered as a whole at stage 3."""

    classes: NameList = implemented(
        (), "classes of modules gathered as a whole: a class's name, alone or with its module"
    )
    names: NameList = implemented((), "names of modules gathered as a whole")
    name_suffixes: NameList = implemented((), "suffixes of such names")


OffloadDevice = Annotated[
    Literal["none", "cpu", "nvme"], BeforeValidator(lambda value: value or "none")
]
_page_cache = partial(no_op, reason="files are mapped: the kernel's page cache holds what fits")
_PINNED = "always so where there is a GPU"


class OffloadOptimizerConfig(ConfigSection):
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

    @property
    def pipeline(self) -> bool:
        """DeepSpeed's name for either of the two."""
        return self.pipeline_read or self.pipeline_write


class OffloadParamConfig(ConfigSection):
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
    buffer_count: NonNegativeInt = _page_cache(5, "buffers in CPU memory for device nvme")
    buffer_size: NonNegativeSize = _page_cache(100_000_000, "elements of such a buffer")
    max_in_cpu: NonNegativeSize = _page_cache(
        1_000_000_000, "elements kept in CPU memory with device nvme"
    )
    pin_memory: bool = no_op(True, "CPU memory is page-locked, so that copies overlap", _PINNED)


_mics = partial(refused, reason=_REMOVED, alternative="zero_optimization.zero_hpz_partition_size")


class ZeroConfig(ConfigSection):
    """The sharding (the stage), and the sizes of collectives in elements."""

    stage: Annotated[
        Literal[0, 1, 2, 3], BeforeValidator(parse_integer), BeforeValidator(reject_bool)
    ] = implemented(0, "what is sharded over the ranks", group="sharding")
    overlap_comm: bool = implemented(True, "gradients are reduced while backward runs")
    reduce_bucket_size: PositiveSize | None = implemented(
        None,
        "elements reduced together. At stages 0 to 2 it is the size of a bucket, by default an "
        "eighth of the model: 250 thousand to 4 million on CPUs, 25 to 64 million on GPUs. What is "
        "longer, a large parameter or a block of stage 3, is reduced in parts of that size at "
        "stages 2 and 3, by default of at most 4 or 64 million",
    )
    allgather_bucket_size: NonNegativeSize | None = implemented(
        None,
        "elements of weights gathered together at stages 1 and 2; a bucket is both reduced and "
        "gathered, so the smaller of the two sizes applies",
        old_names=("allgather_size",),
    )
    contiguous_gradients: bool = no_op(
        True, "gradients are copied to one buffer", "always so: gradients are in flat buffers"
    )
    reduce_scatter: bool = no_op(
        True, "a rank receives only its shard of a sum", "always so at stages 1 to 3"
    )
    use_multi_rank_bucket_allreduce: bool = no_op(
        True, "shards of several ranks are reduced in one collective", "always so"
    )
    allgather_partitions: bool = no_op(
        True, "updated weights are gathered in one collective, not by broadcasts", _SAME_RESULT
    )
    round_robin_gradients: bool = no_op(
        False,
        "gradients of a bucket are assigned to the ranks in turn",
        "every rank owns an equal shard of every bucket, so the load is even",
    )
    parameter_alignment: bool = no_op(
        False, "parameters start at aligned addresses", "always so: at multiples of 32 elements"
    )
    ignore_unused_parameters: bool = implemented(
        True, "parameters that no rank used in a step are no error; see rayzero.unused_gradients"
    )
    compute_grad_norm: bool = no_op(
        True, "the gradient norm is computed every step", "always so: the overflow check needs it"
    )
    sub_group_size: PositiveSize = implemented(
        1_000_000_000, "the most elements that the optimizer updates at once, with offload to nvme"
    )
    stage3_prefetch_bucket_size: NonNegativeSize | None = no_op(
        None,
        "elements gathered ahead of their use",
        "the next unit is gathered while one computes, whatever its size",
        group="stage 3",
    )
    stage3_param_persistence_threshold: NonNegativeSize | None = no_op(
        None,
        "smaller parameters are not sharded",
        "all parameters of a unit are gathered in one collective, so small ones cost nothing",
    )
    stage3_model_persistence_threshold: NonNegativeSize = no_op(
        NO_LIMIT, "elements that may stay unsharded that way", "all parameters are sharded"
    )
    stage3_max_live_parameters: NonNegativeSize | None = no_op(
        None, "elements that may be gathered at once", _FIXED_MEMORY
    )
    stage3_max_reuse_distance: NonNegativeSize | None = no_op(
        None, "parameters that are reused within this many elements are kept", _FIXED_MEMORY
    )
    stage3_gather_16bit_weights_on_model_save: bool = implemented(
        False,
        "at stage 3, transformers' Trainer and Accelerate save the whole model only if this is "
        "true; otherwise Trainer saves a checkpoint. save_16bit_model always saves the whole model",
        old_names=(
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.gather_fp16_weights_on_model_save",
        ),
    )
    stage3_module_granularity_threshold: NonNegativeSize = no_op(
        0,
        "small modules are gathered with their parents",
        "units are whole blocks: rayzero.unshard_modules selects them",
    )
    stage3_use_all_reduce_for_fetch_params: bool = no_op(
        False, "weights are gathered by an all-reduce", _SAME_RESULT
    )
    stage3_allgather_sequential: bool = no_op(
        False,
        "weights are gathered one by one, without an intermediate bucket",
        "there is no intermediate copy: a unit is gathered in place",
    )
    memory_efficient_linear: bool = no_op(
        True,
        "a linear layer that does not save its weight for backward",
        "a unit is gathered to the same address for backward: nothing is saved",
    )
    override_module_apply: bool = no_op(
        True, "module.apply gathers sharded weights", "apply works before the model is sharded"
    )
    log_trace_cache_warnings: bool = no_op(
        False, "a change of the order of modules is logged", "the order is recorded again"
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
    zero_quantized_nontrainable_weights: bool = refused(
        False, "frozen weights are kept in int8 blocks", alternative="zero_quantized_weights"
    )
    zero_quantized_gradients: bool = implemented(
        False, "gradients are reduced in int8 blocks, at any stage"
    )
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    load_from_fp32_weights: bool = no_op(
        True,
        "main weights are loaded from fp32 copies, not from 16-bit weights",
        "checkpoints contain the main weights",
        group="the rest of zero_optimization",
    )
    elastic_checkpoint: bool = no_op(
        False, "a checkpoint can be loaded by another number of ranks", "every checkpoint can"
    )
    pipeline_loading_checkpoint: bool = no_op(
        False, "ranks load a checkpoint in turn", "a rank reads only the ranges that it needs"
    )
    legacy_stage1: bool = no_op(
        False, "an older implementation of stage 1", "there is one; the result is the same"
    )
    enable_sanity_checks: bool = implemented(
        False,
        "a write to a parameter inside GatheredParameters without modifier_rank is an error on all "
        "ranks at stage 3; otherwise it is lost, as in DeepSpeed; all other checks are always on",
    )
    save_muon_momentum_buffer_in_memory: bool = no_op(
        False, "Muon's momentum is not offloaded to NVMe", "it is kept with the optimizer state"
    )
    cpu_offload_use_pin_memory: Any = no_op(
        None,
        "CPU memory of offloaded tensors is page-locked",
        "DeepSpeed ignores this old name too: use pin_memory of offload_optimizer and "
        "offload_param",
    )
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    offload_param: OffloadParamConfig = OffloadParamConfig()
    mics_shard_size: Any = _mics(
        -1, "shards are spread over groups of ranks", group="the rest of zero_optimization"
    )
    mics_hierarchical_params_gather: Any = _mics(False, "weights are gathered in two levels")
    zeropp_loco_param: Any = refused(
        None,
        "error feedback for quantized gradients",
        _REMOVED,
        alternative="zero_optimization.zero_quantized_gradients",
    )
    zenflow: Any = refused(
        None,
        "important gradients are applied at once, the others later",
        "it changes the training result: updates would be stale",
        alternative="zero_optimization.offload_optimizer",
    )

    if not TYPE_CHECKING:  # which would then know of no misspelled attribute

        def __getattr__(self, name: str) -> Any:
            """DeepSpeed's attributes have no `stage3_` before their names."""
            if f"stage3_{name}" in type(self).model_fields:
                return getattr(self, f"stage3_{name}")
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

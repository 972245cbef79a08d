"""The section `zero_optimization`: what is sharded, what is offloaded, how much travels at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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

OffloadDevice = Literal["none", "cpu", "nvme"]


def _validate_stage(value: Any) -> Any:
    return parse_integer(reject_bool(value))


class OffloadOptimizerConfig(ConfigSection):
    """Where main weights and optimizer state rest, and where the optimizer steps."""

    device: Annotated[OffloadDevice, BeforeValidator(lambda value: value or "none")] = "none"
    nvme_path: str | None = None
    buffer_count: PositiveInt = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: UnitFraction = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: UnitFraction = 0.8


class OffloadParamConfig(ConfigSection):
    """Where the shards of the model weights rest between their uses; stage 3 only."""

    device: Annotated[OffloadDevice, BeforeValidator(lambda value: value or "none")] = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 5
    buffer_size: NonNegativeSize = 100_000_000
    max_in_cpu: NonNegativeSize = 1_000_000_000
    pin_memory: bool = True


class LeafModuleConfig(ConfigSection):
    """Modules that are gathered as a whole at stage 3."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


class ZeroConfig(ConfigSection):
    """What is sharded (the stage), and how much travels at once. Sizes are in elements."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_validate_stage)] = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: PositiveSize | None = None
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: NonNegativeSize | None = None
    overlap_comm: Annotated[bool, BeforeValidator(lambda v: True if v is None else v)] = True
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParamConfig = OffloadParamConfig()
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    sub_group_size: PositiveSize = 1_000_000_000
    stage3_prefetch_bucket_size: NonNegativeSize | None = None
    stage3_param_persistence_threshold: NonNegativeSize | None = None
    stage3_model_persistence_threshold: NonNegativeSize = NO_LIMIT
    stage3_max_live_parameters: NonNegativeSize | None = None
    stage3_max_reuse_distance: NonNegativeSize | None = None
    stage3_gather_16bit_weights_on_model_save: bool = False
    stage3_module_granularity_threshold: NonNegativeSize = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: NonNegativeInt = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModuleConfig = LeafModuleConfig()

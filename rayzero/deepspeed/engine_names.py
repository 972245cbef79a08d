"""Names of DeepSpeed's engine that are one value or one expression, for `DeepSpeedEngine`'s lookup.

All ranks are data parallel; no module is DeepSpeed's MoE layer; nothing needs to be reduced,
released or moved by hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from rayzero.deepspeed.config import ZERO_PATHS, DeepSpeedConfig
from rayzero.deepspeed.lookup import NAMES
from rayzero.engine.builder import make_loader
from rayzero.engine.comm.process_group import one_rank_group
from rayzero.engine.device import device_count
from rayzero.engine.errors import ConfigError
from rayzero.engine.precision.policy import CONFIG_DTYPES
from rayzero.engine.step_tracker import Boundary
from rayzero.engine.torch_private import is_compiled
from rayzero.engine.zero.placement import STAGES, Placement, Stage

CONSTANTS: Mapping[str, Any] = {
    "mpu": None,
    "mp_world_size": 1,
    "has_moe_layers": False,
    "moe_layers": (),
    "num_experts": (),
    "expert_parallel_group": MappingProxyType({}),
    "expert_data_parallel_group": MappingProxyType({}),
    "pipeline_parallelism": False,
    "sequence_parallel_size": 1,
    "enable_backward_allreduce": True,
}


def _read_config(engine: Any) -> DeepSpeedConfig:
    """Returns DeepSpeed's config object, with the batch sizes in effect."""
    config = DeepSpeedConfig(engine.settings.config, batches=engine.settings.batches)
    config.global_rank = engine.rank
    config.world_size = engine.world_size
    return config


def _read_progress(engine: Any) -> Any:
    """Returns the engine's progress. `ask_place` records that the script has read it between two
    steps: such a script may skip by itself the samples that were used."""
    step = engine.internals
    if not (step.runtime.collectives.in_step or step.tracker.has_gradients):
        engine.progress.ask_place()
    return engine.progress


def _count_micro_steps(engine: Any) -> int:
    """Counts the calls of `step()`. Those before the state was loaded are estimated from the
    present number of micro-steps per step."""
    progress = engine.progress
    counted = progress.step * engine.settings.batches.micro_steps + progress.micro_step
    return int(counted + engine.internals.tracker.uncounted_micro_steps)


def _get_data_types(engine: Any) -> tuple[Any, Any]:
    """Returns the dtypes of the model's weights, and of accumulated gradients."""
    config = engine.settings.config
    weights = CONFIG_DTYPES[
        "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    ]
    return weights, CONFIG_DTYPES.get(config.data_types.grad_accum_dtype or "", weights)


def _get_communication_dtype(engine: Any) -> Any:
    """Returns the dtype in which gradients are reduced, by default that of the weights."""
    given = engine.settings.config.communication_data_type
    return CONFIG_DTYPES[given] if given else _get_data_types(engine)[0]


PROPERTIES: Mapping[str, Callable[[Any], Any]] = {
    # Progress. Finished steps include skipped ones.
    "global_steps": lambda engine: _read_progress(engine).step,
    "global_samples": lambda engine: _read_progress(engine).sample_cursor,
    "micro_steps": _count_micro_steps,
    "skipped_steps": lambda engine: engine.progress.skipped_steps,
    "losses": lambda engine: engine.metrics.loss,  # the mean over the last step's global batch
    "cur_scale": lambda engine: engine.loss_scale,  # DeepSpeed's optimizers' name for it
    "inside_no_sync_ctxt": lambda engine: engine.internals.tracker.no_sync,
    # Config
    "_config": _read_config,
    "config": lambda engine: _read_config(engine)._param_dict,
    "communication_data_type": _get_communication_dtype,
    # Ranks
    "local_rank": lambda engine: int(os.environ.get("LOCAL_RANK", engine.device.index or 0)),
    "global_rank": lambda engine: engine.rank,
    "dp_world_size": lambda engine: engine.world_size,
    "seq_dp_world_size": lambda engine: engine.world_size,
    "data_parallel_group": lambda engine: dist.group.WORLD,
    "seq_data_parallel_group": lambda engine: dist.group.WORLD,
    "seq_parallel_group": lambda engine: one_rank_group(),  # None without a process group
    # Parts
    "_param_groups": lambda engine: engine.optimizer.param_groups if engine.optimizer else [],
    "basic_optimizer": lambda engine: getattr(engine.optimizer, "optimizer", engine.optimizer),
    "client_optimizer": lambda engine: engine.basic_optimizer,
    "client_lr_scheduler": lambda engine: engine.lr_scheduler,
    "monitor": lambda engine: engine.internals.meter.monitors,  # has `write_events`
    "is_compiled": lambda engine: any(map(is_compiled, engine.module.modules())),
}


def _of_config(name: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(_read_config(engine), name)


def _of_batches(name: str) -> Callable[[Any], Any]:
    return lambda engine: getattr(engine.settings.batches, name)


def _zero(engine: Any) -> Any:
    return engine.settings.config.zero_optimization


def _stage(engine: Any) -> Stage:
    """Returns the configured stage, even on one rank."""
    return STAGES[_zero(engine).stage]


def _offload(name: str) -> Callable[[Any], Any]:
    """Returns a getter of a section of offloading; it returns None if the section is not given."""
    return lambda engine: (
        getattr(_zero(engine), name) if name in _zero(engine).model_fields_set else None
    )


def _make_loader(
    engine: Any,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> Any:
    """Makes a loader of this rank's samples.

    Args:
        dataset: a map-style dataset.
        batch_size: samples of a micro-batch; by default, and always for training, the config's.
        route: "train": the loader of `initialize(training_data=...)`, which continues at the job's
            step; "eval" and "predict": torch's DataLoader, in order, over all ranks.
        data_sampler: for torch's DataLoader, which is then used for training, too.

    Raises:
        ConfigError: training has another batch size than the config.
        DataError: the dataset is not map-style, or empty.
    """
    micro_batch = engine.settings.batches.micro_batch
    if route == "train" and data_sampler is None:
        if batch_size not in (None, micro_batch):
            raise ConfigError(
                f"engine.deepspeed_io(batch_size={batch_size}) was called",
                allowed=f"None, or the micro-batch of {micro_batch}",
                fix="set train_micro_batch_size_per_gpu in the config, or use your own DataLoader",
            )
        return make_loader(engine.internals, dataset, collate_fn)
    if data_sampler is None:
        data_sampler = DistributedSampler(
            dataset, num_replicas=engine.world_size, rank=engine.rank, shuffle=False
        )
    return DataLoader(
        dataset,
        batch_size=batch_size or micro_batch,
        sampler=data_sampler,
        collate_fn=collate_fn,
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory and device_count() > 0,
    )


METHODS: Mapping[str, Callable[..., Any]] = {
    **{name: _of_config(name) for name in (*ZERO_PATHS, *NAMES["config_methods"].split())},
    "optimizer_name": lambda engine: getattr(engine.settings.config.optimizer, "type", None),
    "torch_autocast_dtype": lambda engine: CONFIG_DTYPES[
        engine.settings.config.torch_autocast.dtype
    ],
    "get_data_types": _get_data_types,
    "dynamic_loss_scale_args": lambda engine: engine.settings.config.fp16.dynamic_loss_scale_args(),
    "postscale_gradients": lambda engine: not engine.settings.config.prescale_gradients,
    "zero_optimization": lambda engine: _stage(engine).optimizer_state is Placement.SHARDED,
    "zero_optimization_partition_gradients": lambda engine: (
        _stage(engine).main_grads is Placement.SHARDED
    ),
    **{
        name: lambda engine: _stage(engine).model_weights is Placement.SHARDED
        for name in ("zero_optimization_partition_weights", "is_first_weights_partition_group")
    },
    "zero_offload_optimizer": _offload("offload_optimizer"),
    "zero_offload_param": _offload("offload_param"),
    "zero_use_cpu_optimizer": lambda engine: _zero(engine).offload_optimizer.device != "none",
    "zero_cpu_offload": lambda engine: _zero(engine).offload_optimizer.device == "cpu",
    "zero_nvme_offload_optimizer": lambda engine: _zero(engine).offload_optimizer.device == "nvme",
    # Read by scripts, such as transformers' Trainer; `save_16bit_model` does not depend on it.
    "zero_gather_16bit_weights_on_model_save": lambda engine: (
        _zero(engine).stage3_gather_16bit_weights_on_model_save
    ),
    "train_batch_size": _of_batches("global_batch"),
    "train_micro_batch_size_per_gpu": _of_batches("micro_batch"),
    "gradient_accumulation_steps": _of_batches("micro_steps"),
    "get_batch_info": lambda engine: (
        engine.settings.batches.global_batch,
        engine.settings.batches.micro_batch,
        engine.settings.batches.micro_steps,
    ),
    # The L2 norm of the last step's gradient before clipping; None before the first
    "get_global_grad_norm": lambda engine: engine.internals.meter.last_step.get("grad_norm"),
    # Whether the current micro-step is the last of its step
    "is_gradient_accumulation_boundary": lambda engine: (
        engine.internals.is_boundary and engine.internals.tracker.boundary is not Boundary.STEP
    ),
    # Encloses all backwards of one step, whose `step()` follows. Their gradients add up and are
    # reduced once. At stages 2 and 3 each backward reduces into this rank's shard, with the same
    # sum. Raises EngineError if nested, inside `no_sync`, or if more micro-steps follow.
    "coalesce_grad_reduction": lambda engine: engine.internals.coalesced(),
    # Whether the last `step()` changed the weights. False inside a step, and after a skipped step.
    "was_step_applied": lambda engine: engine.internals.tracker.applied,
    # The present learning rate, and the momentum or betas, of each parameter group
    "get_lr": lambda engine: [float(group["lr"]) for group in engine._param_groups],
    "get_mom": lambda engine: [
        group.get("momentum", group.get("betas", 0.0)) for group in engine._param_groups
    ],
    "curriculum_enabled_legacy": lambda engine: engine.settings.config.curriculum_learning.enabled,
    "pld_enabled": lambda engine: engine.settings.config.progressive_layer_drop.enabled,
    # The present probability of keeping a layer
    **{
        name: lambda engine: engine.internals.scheduled_inputs.keep_probability
        for name in ("pld_theta", "get_pld_theta")
    },
    "get_sequence_parallel_group": lambda engine: one_rank_group(),
    "get_data_parallel_rank": lambda engine: engine.rank,
    "get_model_parallel_rank": lambda engine: 0,
    "get_tensor_parallel_rank": lambda engine: 0,
    "is_deepcompile_enabled": lambda engine: False,  # `compile` uses torch.compile
    "is_deepcompile_active": lambda engine: False,
    # These do nothing: `backward` reduces gradients, and `step` waits for that; weights are
    # gathered into buffers that are reused; `offload_states` moves nothing.
    "allreduce_gradients": lambda engine, bucket_size=None: None,
    "empty_partition_cache": lambda engine: None,
    "reload_states": lambda engine, non_blocking=False: None,
    "deepspeed_io": _make_loader,
    "destroy": lambda engine: engine.close(),
}

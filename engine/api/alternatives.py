"""Names of DeepSpeed's engine that rayzero's does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.engine.errors import did_you_mean

_USE_BACKWARD = "nothing: backward() sums gradients over the ranks, and step() waits for them"
_USE_TORCH_COMPILE = "torch.compile on the model's blocks, before initialize"
_USE_METRICS = "engine.metrics: loss, norm, seconds, bytes and traffic of the last step"
_USE_PRECISION_CONFIG = "nothing: the config's precision section decides dtypes, e.g. bf16.enabled"
_USE_OFFLOAD_CONFIG = "zero_optimization.offload_optimizer in the config"
_USE_TRAINING_DATA = "rayzero.initialize(training_data=...), or your own torch DataLoader"
_USE_SETTINGS = "engine.settings.config, the checked config"

ALTERNATIVES: Mapping[str, str] = {
    "allreduce_gradients": _USE_BACKWARD,
    "allreduce_bucket": _USE_BACKWARD,
    "buffered_allreduce_fallback": _USE_BACKWARD,
    "coalesce_grad_reduction": "engine.no_sync()",
    "enable_backward_allreduce": "engine.no_sync()",
    "inside_no_sync_ctxt": "engine.no_sync()",
    "scale": "engine.backward(loss), which scales the loss",
    "clip_fp32_gradients": "gradient_clipping in the config",
    "compile": _USE_TORCH_COMPILE,
    "is_compiled": _USE_TORCH_COMPILE,
    "get_compile_time": _USE_TORCH_COMPILE,
    "register_compile_pass": _USE_TORCH_COMPILE,
    "timers": _USE_METRICS,
    "tput_timer": _USE_METRICS,
    "wall_clock_breakdown": _USE_METRICS,
    "get_wall_clock_timers": _USE_METRICS,
    "monitor": _USE_METRICS,
    "summary_events": _USE_METRICS,
    "flops_profiler": _USE_METRICS,
    "losses": "engine.metrics.loss",
    "half": _USE_PRECISION_CONFIG,
    "bfloat16": _USE_PRECISION_CONFIG,
    "float": _USE_PRECISION_CONFIG,
    "double": _USE_PRECISION_CONFIG,
    "type": _USE_PRECISION_CONFIG,
    "cpu": "nothing: the model stays on engine.device",
    "to_empty": "rayzero.zero_init() around the model's construction",
    "offload_states": _USE_OFFLOAD_CONFIG,
    "reload_states": _USE_OFFLOAD_CONFIG,
    "empty_partition_cache": "nothing: weights are gathered into buffers that are reused",
    "deepspeed_io": _USE_TRAINING_DATA,
    "set_data_post_process_func": "initialize(collate_fn=...)",
    "set_dataloader": _USE_TRAINING_DATA,
    "checkpoint_engine": "engine.save_checkpoint and engine.load_checkpoint",
    "get_data_types": "the dtypes of engine.module's parameters",
    "data_parallel_group": "torch.distributed.group.WORLD: all ranks are data parallel",
    "seq_data_parallel_group": "torch.distributed.group.WORLD: all ranks are data parallel",
    "seq_dp_world_size": "engine.world_size",
    "mpu": "nothing: there is no model parallelism",
    "has_moe_layers": "nothing: there is no expert parallelism",
    "curriculum_learning_enabled": "a dataset that orders its samples",
    "client_optimizer": "engine.optimizer",
    "basic_optimizer": "engine.optimizer",
    "client_lr_scheduler": "engine.lr_scheduler",
    "dump_state": _USE_SETTINGS,
    "zero_overlap_comm": _USE_SETTINGS,
    "zero_reduce_bucket_size": _USE_SETTINGS,
    "zero_offload_optimizer": _USE_SETTINGS,
    "zero_offload_param": _USE_SETTINGS,
    "communication_data_type": _USE_SETTINGS,
}

# The model has these methods too, but calling them would replace the engine's parameters or
# forward.
NOT_DELEGATED = frozenset(
    {"half", "bfloat16", "float", "double", "type", "cpu", "to_empty", "compile"}
)


def unsupported_attribute(name: str, names: list[str]) -> AttributeError:
    """The error for a name that neither the engine nor its model has.

    Args:
        names: the engine's attributes, to suggest the nearest one.
    """
    if name in ALTERNATIVES:
        hint = f"; use {ALTERNATIVES[name]}"
    else:
        hint = did_you_mean(name, [other for other in names if not other.startswith("_")])
    return AttributeError(f"the engine has no {name!r}, and its model neither{hint}")

"""Names that DeepSpeed's engine has and ours has not, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.engine.errors import nearest

_REDUCTION = "nothing: backward() sums gradients over the ranks, and step() waits for them"
_COMPILE = "torch.compile on the model's blocks, before initialize"
_METRICS = "engine.metrics: loss, norm, seconds, bytes and traffic of the last step"
_DTYPE = "nothing: the config's precision section decides dtypes, e.g. bf16.enabled"
_OFFLOAD = "zero_optimization.offload_optimizer in the config"
_DATA = "rayzero.initialize(training_data=...), or a torch DataLoader of your own"
_CONFIG = "engine.settings.config, the checked config"

INSTEAD: Mapping[str, str] = {
    "allreduce_gradients": _REDUCTION,
    "allreduce_bucket": _REDUCTION,
    "buffered_allreduce_fallback": _REDUCTION,
    "coalesce_grad_reduction": "engine.no_sync()",
    "enable_backward_allreduce": "engine.no_sync()",
    "inside_no_sync_ctxt": "engine.no_sync()",
    "scale": "engine.backward(loss), which scales the loss",
    "clip_fp32_gradients": "gradient_clipping in the config",
    "compile": _COMPILE,
    "is_compiled": _COMPILE,
    "get_compile_time": _COMPILE,
    "register_compile_pass": _COMPILE,
    "timers": _METRICS,
    "tput_timer": _METRICS,
    "wall_clock_breakdown": _METRICS,
    "get_wall_clock_timers": _METRICS,
    "monitor": _METRICS,
    "summary_events": _METRICS,
    "flops_profiler": _METRICS,
    "losses": "engine.metrics.loss",
    "half": _DTYPE,
    "bfloat16": _DTYPE,
    "float": _DTYPE,
    "double": _DTYPE,
    "type": _DTYPE,
    "cpu": "nothing: the model stays on engine.device",
    "to_empty": "rayzero.zero_init() around the model's construction",
    "offload_states": _OFFLOAD,
    "reload_states": _OFFLOAD,
    "empty_partition_cache": "nothing: weights are gathered into slots that are used again",
    "deepspeed_io": _DATA,
    "set_data_post_process_func": "initialize(collate_fn=...)",
    "set_dataloader": _DATA,
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
    "dump_state": _CONFIG,
    "zero_overlap_comm": _CONFIG,
    "zero_reduce_bucket_size": _CONFIG,
    "zero_offload_optimizer": _CONFIG,
    "zero_offload_param": _CONFIG,
    "communication_data_type": _CONFIG,
}

# The model has them too, and they would pull its parameters or its forward from under the engine.
NOT_THE_MODELS = frozenset(
    {"half", "bfloat16", "float", "double", "type", "cpu", "to_empty", "compile"}
)


def no_such(name: str, known: list[str]) -> AttributeError:
    """What to raise for a name that neither the engine nor its model has."""
    if name in INSTEAD:
        hint = f"; use {INSTEAD[name]}"
    else:
        hint = nearest(name, [one for one in known if not one.startswith("_")])
    return AttributeError(f"the engine has no {name!r}, and its model neither{hint}")

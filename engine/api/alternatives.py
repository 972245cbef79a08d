"""Names of DeepSpeed that rayzero does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable

from rayzero.engine.errors import did_you_mean

_ENGINE_NAMES = {
    "nothing: backward() sums gradients over the ranks, and step() waits for them": (
        "allreduce_gradients allreduce_bucket buffered_allreduce_fallback"
    ),
    "engine.no_sync()": "coalesce_grad_reduction enable_backward_allreduce inside_no_sync_ctxt",
    "engine.backward(loss), which scales the loss": "scale",
    "gradient_clipping in the config": "clip_fp32_gradients",
    "engine.compile(): there are no passes of DeepCompile": (
        "get_compile_time register_compile_pass"
    ),
    "engine.metrics: loss, norm, seconds, bytes and traffic of the last step": (
        "timers tput_timer wall_clock_breakdown get_wall_clock_timers monitor summary_events "
        "flops_profiler"
    ),
    "engine.metrics.loss": "losses",
    "nothing: the config's precision section decides dtypes, e.g. bf16.enabled": (
        "half bfloat16 float double type"
    ),
    "nothing: the model stays on engine.device": "cpu",
    "rayzero.zero_init() around the model's construction": "to_empty",
    "zero_optimization.offload_optimizer in the config": "offload_states reload_states",
    "nothing: weights are gathered into buffers that are reused": "empty_partition_cache",
    "rayzero.initialize(training_data=...), or your own torch DataLoader": (
        "deepspeed_io set_dataloader"
    ),
    "initialize(collate_fn=...)": "set_data_post_process_func",
    "engine.save_checkpoint and engine.load_checkpoint": "checkpoint_engine",
    "the dtypes of engine.module's parameters": "get_data_types",
    "torch.distributed.group.WORLD: all ranks are data parallel": (
        "data_parallel_group seq_data_parallel_group"
    ),
    "engine.world_size": "seq_dp_world_size",
    "nothing: there is no model parallelism": "mpu",
    "nothing: there is no expert parallelism": "has_moe_layers",
    "a dataset that orders its samples": "curriculum_learning_enabled",
    "engine.optimizer": "client_optimizer basic_optimizer",
    "engine.lr_scheduler": "client_lr_scheduler",
    "engine.settings.config, the checked config": (
        "dump_state zero_overlap_comm zero_reduce_bucket_size zero_offload_optimizer "
        "zero_offload_param communication_data_type"
    ),
}
"""{what to use: names of DeepSpeed's engine}"""

ENGINE_ALTERNATIVES = {name: use for use, names in _ENGINE_NAMES.items() for name in names.split()}

# The model has these methods too, but calling them would replace the engine's parameters or
# forward.
NOT_DELEGATED = frozenset(
    {"half", "bfloat16", "float", "double", "type", "cpu", "to_empty", "compile"}
)


def unsupported_attribute(name: str, names: Iterable[str]) -> AttributeError:
    """The error for a name that neither the engine nor its model has. `names` are the engine's
    attributes, of which it suggests the nearest."""
    if name in ENGINE_ALTERNATIVES:
        hint = f"; use {ENGINE_ALTERNATIVES[name]}"
    else:
        hint = did_you_mean(name, [other for other in names if not other.startswith("_")])
    return AttributeError(f"the engine has no {name!r}, and its model neither{hint}")

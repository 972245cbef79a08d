"""Names of DeepSpeed that rayzero does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Iterable

from rayzero.engine.errors import ConfigError, did_you_mean

_ENGINE_NAMES = {
    "nothing: backward() sums gradients over the ranks, and step() waits for them": (
        "allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback "
        "sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain"
    ),
    "gradient_clipping in the config": "clip_fp32_gradients",
    "engine.compile(): there are no passes of DeepCompile": (
        "compile_autosp compile_autotp compile_zero_optimization_stage get_autosp_backend "
        "get_autotp_backend get_compile_time get_deepcompile_backend "
        "get_deepspeed_compile_backend register_compile_pass uses_parallelization_pass_only"
    ),
    "engine.metrics: loss, norm, seconds, bytes and traffic of the last step": (
        "timers tput_timer engine_timers get_wall_clock_timers summary_events "
        "flops_profiler print_forward_breakdown flops_profiler_detailed "
        "flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step "
        "flops_profiler_recompute_fwd_factor flops_profiler_top_modules"
    ),
    "rayzero launch --autotuning tune": (
        "autotuning_end_profile_step autotuning_metric autotuning_metric_path "
        "autotuning_model_info autotuning_model_info_path autotuning_profile_model_info "
        "autotuning_start_profile_step"
    ),
    "nothing: the config's precision section decides dtypes, e.g. bf16.enabled": (
        "half bfloat16 float double type"
    ),
    "nothing: the model stays on engine.device": "cpu",
    "rayzero.zero_init() around the model's construction": "to_empty",
    "initialize(collate_fn=...)": "set_data_post_process_func",
    "engine.save_checkpoint and engine.load_checkpoint": (
        "checkpoint_engine checkpoint_writer_enabled load_moe_state_dict"
    ),
    "rayzero.engine.api.scheduled.convert_to_random_ltd": "random_ltd_initialize",
    "nothing: all ranks are data parallel": "autotp_size tensor_parallel_config",
    "engine.optimizer_name() and engine.optimizer_params()": (
        "get_optimizer_configuration get_type optimizer_legacy_fusion"
    ),
    "zero_optimization.offload_optimizer in the config": "swap_tensor_config",
    "torch.distributed.all_gather_object": "all_gather_scalar",
    "gc.collect()": "collect_python_gc",
    "nothing: an internal of DeepSpeed's engine": (
        "all_to_all_group checkpoint_mp_rank collate_fn dist_backend dont_change_device "
        "engine_timers_cache first_dataloader_check flatten flops fwd_duration gate_modules "
        "gradient_average loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size "
        "local_all_to_all_group mesh_device module_forward_post_hook module_forward_pre_hook "
        "optimized_linear_base_weight_sharding optimized_linear_lora_enabled param_names "
        "random_ltd_scheduler save_non_zero_checkpoint save_zero_checkpoint scale_wrt_gas "
        "torch_autocast_z0_gradscaler training_data unflatten update_interval use_ds_comm "
        "warn_unscaled_loss"
    ),
    "isinstance": "is_iterable_style_dataset is_map_style_dataset",
}
"""{what to use: names of DeepSpeed's engine}"""

ENGINE_ALTERNATIVES = {name: use for use, names in _ENGINE_NAMES.items() for name in names.split()}

# The model has these methods too, but calling them would replace the engine's parameters or
# forward.
NOT_DELEGATED = frozenset(
    {"half", "bfloat16", "float", "double", "type", "cpu", "to_empty", "compile"}
)


class RefusedNameError(ConfigError, AttributeError):
    """A name of DeepSpeed that rayzero refuses; an AttributeError for `hasattr`."""


def unsupported_attribute(name: str, names: Iterable[str]) -> RefusedNameError:
    """The error for a name that neither the engine nor its model has. `names` are the engine's
    attributes, of which it suggests the nearest."""
    if name in ENGINE_ALTERNATIVES:
        hint = f"; use {ENGINE_ALTERNATIVES[name]}"
    else:
        hint = did_you_mean(name, [other for other in names if not other.startswith("_")])
    return RefusedNameError(f"the engine has no {name!r}, and its model neither{hint}")

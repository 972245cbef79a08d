"""The table of DeepSpeed's names that work: modules, what is in them, and where that is defined.

{module below `deepspeed`: {where its names are defined: names}}; `name=other` is called `other`
there. `refused_names.json` has the others. `python -m tools.deepspeed_names` writes
docs/deepspeed-names.md from both; tests hold them to what they say.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayzero.deepspeed.config_constants import CONSTANTS

_HERE = "rayzero.deepspeed"
_API = "rayzero.engine.api"

_CHECKPOINTING = {
    f"{_API}.activation_checkpointing": (
        "checkpoint configure is_configured non_reentrant_checkpoint reset"
    ),
}
_COMM = {
    f"{_HERE}.comm": (
        "P2POp ProcessGroup ReduceOp all_gather all_gather_coalesced all_gather_into_tensor "
        "all_gather_object all_reduce all_reduce_coalesced all_to_all all_to_all_single "
        "allgather_fn barrier batch_isend_irecv broadcast broadcast_object_list cdb "
        "destroy_process_group gather get_all_ranks_from_group get_global_rank get_local_rank "
        "get_rank get_world_group get_world_size has_all_gather_into_tensor "
        "has_all_reduce_coalesced has_coalescing_manager has_reduce_scatter_tensor "
        "inference_all_reduce init_distributed irecv is_available is_initialized isend "
        "monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_fn "
        "reduce_scatter_tensor scatter send"
    ),
}
_GROUPS = {
    f"{_HERE}.groups": (
        "initialize get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
        "get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size "
        "get_tensor_model_parallel_group get_tensor_model_parallel_rank "
        "get_tensor_model_parallel_world_size get_tensor_model_parallel_src_rank "
        "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_data_parallel_group_ranks _get_broadcast_src_rank _get_model_parallel_world_size "
        "_get_sequence_parallel_group _get_sequence_parallel_rank "
        "_get_sequence_parallel_world_size _get_sequence_data_parallel_group "
        "_get_sequence_data_parallel_rank _get_sequence_data_parallel_world_size "
        "_get_expert_parallel_group _get_expert_parallel_rank _get_expert_parallel_world_size "
        "_get_expert_data_parallel_group _get_expert_data_parallel_rank "
        "_get_expert_data_parallel_world_size _get_expert_parallel_group_dict "
        "_get_expert_data_parallel_group_dict _get_max_expert_size _clone_world_group"
    ),
}
_ZERO = {
    f"{_API}.params": "GatheredParameters Init",
    f"{_API}.sharded_params": (
        "ZeroParamStatus is_zero_param register_external_parameter unregister_external_parameter"
    ),
    f"{_HERE}.tiling": "TiledLinear TiledLinearReturnBias",
    f"{_HERE}.generation": "unwrap_model_for_generation",
}
_FRAGMENTS = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized"
)

_CALLABLES = {
    "collections.abc": "DeepSpeedOptimizerCallable=Callable DeepSpeedSchedulerCallable=Callable",
}
_LEAVES = {
    "rayzero.engine.layout.leaf_modules": (
        "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module"
    ),
}

_OFFLOAD_CONFIG = {
    "rayzero.engine.config.zero": (
        "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizerConfig "
        "DeepSpeedZeroOffloadParamConfig=OffloadParamConfig"
    ),
}

WORKS: Mapping[str, Mapping[str, str]] = {
    "": {
        _HERE: (
            "DeepSpeedConfigError DeepSpeedEngine __version__ __version_major__ "
            "__version_minor__ __version_patch__ add_config_arguments comm get_accelerator "
            "init_distributed initialize log_dist logger ops utils checkpointing runtime zero "
            "dist=comm git_branch git_hash version=__version__"
        ),
        **_CALLABLES,
        f"{_API}.config_reader": "DeepSpeedConfig",
        f"{_API}.sharded_params": "OnDevice",
        f"{_API}.optimizer_view": "DeepSpeedOptimizer",
        "rayzero.engine.data.loader": "DeepSpeedDataLoader=StepLoader",
        f"{_HERE}.constant_values": "MUON_OPTIMIZER TORCH_DISTRIBUTED_DEFAULT_PORT",
        f"{_HERE}.typed_config": "load_ds_config",
    },
    "accelerator": {
        f"{_HERE}.accelerator": "DeepSpeedAccelerator=Accelerator get_accelerator",
    },
    "accelerator.abstract_accelerator": {
        f"{_HERE}.accelerator": "DeepSpeedAccelerator=Accelerator",
    },
    "accelerator.real_accelerator": {f"{_HERE}.accelerator": "get_accelerator"},
    "checkpoint": {},
    "checkpoint.utils": {f"{_HERE}.utils": "clone_tensors_for_torch_save"},
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "comm.constants": {
        f"{_HERE}.constant_values": (
            "CCL_BACKEND GLOO_BACKEND HCCL_BACKEND MPI_BACKEND NCCL_BACKEND SCCL_BACKEND"
        ),
    },
    "comm.reduce_op": {f"{_HERE}.comm": "ReduceOp"},
    "comm.torch": {},
    "compression": {},
    "compression.helper": {f"{_HERE}.runtime_utils": "recursive_getattr recursive_setattr"},
    "launcher": {},
    "launcher.runner": {
        f"{_HERE}.launch_names": (
            "DEEPSPEED_ENVIRONMENT_NAME DEEPSPEED_ENVIRONMENT_PATHS DLTS_HOSTFILE EXPORT_ENVS"
        ),
    },
    "monitor": {},
    "monitor.config": {
        "rayzero.engine.config.monitors": (
            "CSVConfig=CsvMonitorConfig CometConfig DeepSpeedMonitorConfig=MonitorConfig "
            "TensorBoardConfig WandbConfig"
        ),
        f"{_HERE}.typed_config": "DeepSpeedConfigModel get_monitor_config",
    },
    "monitor.csv_monitor": {f"{_HERE}.monitor_classes": "csvMonitor"},
    "monitor.monitor": {f"{_HERE}.monitor_classes": "MonitorMaster csvMonitor"},
    "moe": {},
    "moe.layer": {},
    "moe.utils": {
        f"{_HERE}.expert_groups": (
            "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
            "split_params_grads_into_shared_and_expert_params "
            "split_params_into_different_moe_groups_for_optimizer "
            "split_params_into_shared_and_expert_params"
        ),
    },
    "constants": {
        f"{_HERE}.constant_values": (
            "CROSS_RANK CROSS_SIZE LOCAL_RANK TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout"
        ),
    },
    "git_version_info": {_HERE: "git_branch git_hash version=__version__"},
    "ops": {},
    "ops.adagrad": {f"{_HERE}.ops": "DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {f"{_HERE}.ops": "DeepSpeedCPUAdagrad"},
    "ops.adam": {f"{_HERE}.ops": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {f"{_HERE}.ops": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {f"{_HERE}.ops": "FusedAdam"},
    "ops.lamb": {f"{_HERE}.ops": "FusedLamb"},
    "ops.lamb.fused_lamb": {f"{_HERE}.ops": "FusedLamb"},
    "ops.lion": {f"{_HERE}.ops": "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {f"{_HERE}.ops": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {f"{_HERE}.ops": "FusedLion"},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": {
        f"{_API}.optimizer_view": "DeepSpeedOptimizer ZeROOptimizer",
    },
    "runtime.bf16_optimizer": {f"{_API}.optimizer_view": "BF16_Optimizer=DeepSpeedOptimizer"},
    "runtime.config": {
        f"{_API}.config_reader": "DeepSpeedConfig",
        _HERE: "DeepSpeedConfigError",
        f"{_HERE}.constant_values": (
            "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER ADAM_W_MODE ADAM_W_MODE_DEFAULT "
            "DEEPSPEED_OPTIMIZERS LAMB_OPTIMIZER LION_OPTIMIZER MUADAMW_OPTIMIZER "
            "MUADAM_OPTIMIZER MUON_OPTIMIZER MUSGD_OPTIMIZER TORCH_ADAM_PARAM"
        ),
        f"{_HERE}.typed_config": (
            "get_communication_data_type get_dataloader_drop_last get_disable_allgather "
            "get_dump_state get_gradient_accumulation_steps get_gradient_allreduce_op "
            "get_gradient_clipping get_gradient_predivide_factor get_log_level "
            "get_managed_gradient_accumulation get_memory_breakdown get_optimizer_name "
            "get_optimizer_params get_prescale_gradients get_scheduler_name "
            "get_scheduler_params get_steps_per_print get_train_batch_size "
            "get_train_micro_batch_size_per_gpu get_wall_clock_breakdown "
            "get_zero_allow_untested_optimizer get_zero_force_ds_cpu_optimizer"
        ),
    },
    "runtime.config_utils": {
        f"{_HERE}.typed_config": (
            "DeepSpeedConfigModel dict_raise_error_on_duplicate_keys get_dict_param "
            "get_list_param get_scalar_param"
        ),
    },
    "runtime.constants": {
        f"{_HERE}.config_constants": " ".join(CONSTANTS),
        f"{_HERE}.typed_config": "ValidationMode",
    },
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.data_routing": {},
    "runtime.data_pipeline.data_routing.helper": {f"{_API}.scheduled": "convert_to_random_ltd"},
    "runtime.dataloader": {
        f"{_HERE}.utils": "RepeatingLoader",
        "rayzero.engine.data.loader": "DeepSpeedDataLoader=StepLoader",
    },
    "runtime.engine": {_HERE: "DeepSpeedEngine", **_CALLABLES},
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {
        f"{_API}.optimizer_view": "FP16_Optimizer=DeepSpeedOptimizer",
    },
    "runtime.fp16.loss_scaler": {f"{_API}.optimizer_view": "DynamicLossScaler LossScaler"},
    "runtime.fp16.unfused_optimizer": {
        f"{_API}.optimizer_view": "FP16_UnfusedOptimizer=DeepSpeedOptimizer",
    },
    "runtime.lr_schedules": {
        "rayzero.engine.optim.deepspeed_schedules": (
            "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR"
        ),
        f"{_HERE}.constant_values": (
            "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR "
            "CYCLE_MAX_MOM CYCLE_MIN_LR CYCLE_MIN_MOM CYCLE_SECOND_STAIR_COUNT "
            "CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE DECAY_STEP_SIZE LR_RANGE_TEST "
            "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE "
            "LR_RANGE_TEST_STEP_SIZE LR_SCHEDULE ONE_CYCLE TOTAL_NUM_STEPS WARMUP_COSINE_LR "
            "WARMUP_DECAY_LR WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR WARMUP_MAX_LR "
            "WARMUP_MIN_LR WARMUP_MIN_RATIO WARMUP_NUM_STEPS WARMUP_TYPE"
        ),
        f"{_HERE}.schedule_arguments": (
            "add_tuning_arguments get_config_from_args get_lr_from_config parse_arguments"
        ),
    },
    "runtime.precision_config": {
        "rayzero.engine.config.sections": (
            "DeepSpeedBF16Config=Bf16Config DeepSpeedFP16Config=Fp16Config"
        ),
        f"{_HERE}.typed_config": "get_bfloat16_config get_float16_config",
    },
    "runtime.utils": {
        "contextlib": "noop_context=nullcontext",
        f"{_HERE}.partitioned_tensor": "PartitionedTensor",
        f"{_HERE}.runtime_utils": (
            "DummyOptim call_to_str clip_grad_norm_ copy_to_device empty_cache "
            "ensure_directory_exists get_global_norm get_only_unique_item move_to_device "
            "noop_decorator partition_balanced partition_uniform prefix_sum_inc "
            "required_torch_version see_memory_usage set_random_seed"
        ),
    },
    "runtime.zero": _ZERO,
    "runtime.zero.config": {
        **_OFFLOAD_CONFIG,
        f"{_HERE}.typed_config": (
            "DeepSpeedZeroConfig OffloadDeviceEnum ZeroStageEnum get_zero_config"
        ),
    },
    "runtime.zero.offload_config": {
        **_OFFLOAD_CONFIG,
        f"{_HERE}.typed_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    },
    "runtime.zero.partition_parameters": {
        **_ZERO,
        f"{_HERE}.accelerator": "get_accelerator",
        f"{_HERE}.constructors": "_orig_torch_arange zero_wrapper_for_fp_tensor_constructor",
    },
    "runtime.zero.tiling": {
        f"{_HERE}.tiling": "TiledLinear TiledLinearReturnBias split_tensor_along_last_dim",
    },
    "runtime.zero.utils": {f"{_API}.sharded_params": "is_zero_param"},
    "runtime.zero.stage3": {
        f"{_API}.optimizer_view": "DeepSpeedZeroOptimizer_Stage3",
        f"{_HERE}.generation": "unwrap_model_for_generation",
        f"{_HERE}.estimates": (
            "estimate_zero3_model_states_mem_needs "
            "estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live"
        ),
    },
    "runtime.zero.stage_1_and_2": {
        f"{_API}.optimizer_view": "DeepSpeedZeroOptimizer",
        f"{_HERE}.estimates": (
            "estimate_zero2_model_states_mem_needs "
            "estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live"
        ),
    },
    "utils": {
        f"{_HERE}.comm": "is_initialized",
        f"{_HERE}.utils": (
            "RepeatingLoader instrument_w_nvtx log_dist log_dist_once logger "
            "set_log_level_from_string"
        ),
        f"{_HERE}.runtime_utils": "recursive_getattr recursive_setattr",
        f"{_API}.sharded_params": "OnDevice",
        f"{_API}.tensor_fragments": _FRAGMENTS,
        **_LEAVES,
        **_GROUPS,
    },
    "utils.groups": _GROUPS,
    "utils.init_on_device": {f"{_API}.sharded_params": "OnDevice"},
    "utils.nvtx": {f"{_HERE}.utils": "instrument_w_nvtx"},
    "utils.z3_leaf_module": _LEAVES,
    "utils.logging": {
        f"{_HERE}.utils": (
            "get_current_level log_dist log_dist_once logger print_json_dist "
            "set_log_level_from_string should_log_le warning_once"
        ),
    },
    "utils.module_utils": {f"{_HERE}.runtime_utils": "recursive_getattr recursive_setattr"},
    "utils.torch": {f"{_HERE}.runtime_utils": "required_torch_version"},
    "utils.tensor_fragment": {f"{_API}.tensor_fragments": _FRAGMENTS},
    "utils.zero_to_fp32": {
        f"{_HERE}.zero_to_fp32": (
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint"
        ),
    },
    "zero": _ZERO,
}

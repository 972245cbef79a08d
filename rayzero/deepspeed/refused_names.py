"""The table of DeepSpeed's names that rayzero refuses, and what to use instead.

`REFUSED` has {module below `deepspeed`: {what to use: names}}: such a name can be imported, and
raises ConfigError when it is called. Modules in `REFUSED_PACKAGES`, and all below them, have only
such names.
"""

from __future__ import annotations

from collections.abc import Mapping

_INFERENCE = "a server for inference; rayzero trains"
_PIPELINE = "stage 3 (zero_optimization.stage), which shards models that do not fit"
_EXPERTS = "experts as ordinary modules, on every rank"
_DATA_PARALLEL = "stage 3 (zero_optimization.stage): all ranks are data parallel"
_TRANSFORMER = "torch.nn.TransformerEncoderLayer, or the model's own"

_ACCELERATOR = "deepspeed.get_accelerator()"
_METRICS = "engine.metrics, and torch.profiler"
_OFFLOAD = "zero_optimization.offload_optimizer in the config"
_KERNELS = "torch's own operators: there are no kernels to compile"
_READ_CHECKPOINT = "engine.load_checkpoint, which reads any stage and world size"
_FRAGMENTS = "deepspeed.utils.safe_get_full_fp32_param and its relatives"
_LEAF_MODULES = "set_z3_leaf_modules, or zero_optimization.leaf_module in the config"
_SCHEDULE = "scheduler in the config, or the classes of this module"
_PARAMS = "param.shape and param.numel(), which are those of the full parameter at every stage"
_ZERO = {
    _PARAMS: "ZeroParamType",
    "deepspeed.zero.Init()": "DeepSpeedTensorOverride",
    "deepspeed.zero.GatheredParameters": "DeepSpeedZeRoOffload",
}
_CHECKPOINTING = {
    _DATA_PARALLEL: (
        "get_cuda_rng_tracker model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed"
    ),
    "deepspeed.checkpointing.checkpoint": "CheckpointFunction",
}
_COMM = {
    "engine.metrics: traffic of the last step": (
        "configure get_comm_operation_count get_logged_comm_ops has_comm_data log_summary "
        "reset_log timed_op"
    ),
    "torch.distributed.device_mesh.init_device_mesh": "initialize_mesh_device",
    "torch.distributed._symmetric_memory": "enable_symm_mem_for_group",
    "deepspeed.init_distributed": "TorchBackend init_deepspeed_backend set_backend",
    "torchrun, which sets the variables that init_distributed reads": (
        "in_aml in_aws_sm in_dlts mpi_discovery patch_aml_env_for_torch_nccl_backend "
        "patch_aws_sm_env_for_torch_nccl_backend"
    ),
}

REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        _INFERENCE: (
            "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine "
            "default_inference_config init_inference"
        ),
        _PIPELINE: "DualPipeVEngine DualPipeVModule PipelineEngine PipelineModule",
        _DATA_PARALLEL: (
            "AutoTPMeta merge_tp_model_init_into_config record_tp_model_init_args "
            "replace_transformer_layer set_autotp_mode tp_model_init"
        ),
        _TRANSFORMER: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        _KERNELS: "is_triton_available",
    },
    "checkpoint": {
        _READ_CHECKPOINT: (
            "DeepSpeedCheckpoint SubparamShape ZeROCheckpoint enable_universal_checkpoint "
            "get_layer_ckpt_name_for_rank get_model_3d_descriptor get_model_ckpt_name_for_rank "
            "get_zero_ckpt_name_for_rank merge_state model_3d_desc reshape_meg_2d_parallel"
        ),
    },
    "accelerator": {_ACCELERATOR: "is_current_accelerator_supported set_accelerator"},
    "accelerator.real_accelerator": {
        _ACCELERATOR: "is_current_accelerator_supported set_accelerator",
    },
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "comm.torch": {"deepspeed.init_distributed": "TorchBackend"},
    "git_version_info": {_KERNELS: "accelerator_name installed_ops torch_info"},
    "moe.layer": {_EXPERTS: "MoE"},
    "ops": {
        _TRANSFORMER: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        _KERNELS: "ALL_OPS probe_is_compatible",
    },
    "ops.adam": {
        _OFFLOAD: ("ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3"),
    },
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.config_utils": {
        "Python's json, and pydantic": (
            "DeepSpeedConfigObject ScientificNotationEncoder get_config_default pp_int"
        ),
    },
    "runtime.fp16.loss_scaler": {
        "fp16 in the config": "CreateLossScaler LossScaleConfig LossScalerBase to_python_float",
    },
    "runtime.lr_schedules": {
        _SCHEDULE: (
            "get_torch_optimizer override_1cycle_params override_lr_range_test_params "
            "override_params override_warmupCosineLR_params override_warmupLR_params update_lr"
        ),
    },
    "runtime.utils": {
        _DATA_PARALLEL: (
            "bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_rank "
            "bwc_tensor_model_parallel_world_size"
        ),
        "engine.get_global_grad_norm()": (
            "CheckOverflow combine_grad_norm_groups get_flattened_grad_norm "
            "get_global_norm_of_tensors get_grad_norm get_weight_norm has_inf_or_nan "
            "is_invalid_grad_norm"
        ),
        "gradient_clipping in the config": "clip_tensors_by_global_norm",
        _OFFLOAD: "offload_adam_states reload_adam_states",
        "see_memory_usage, of this module": "get_ma_status memory_status",
    },
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "utils.tensor_fragment": {
        _FRAGMENTS: (
            "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping "
            "map_to_flat_opt_states set_full_hp_grad set_full_hp_param tensor_fragment"
        ),
    },
    "utils": {
        _LEAF_MODULES: "z3_leaf_parameter",
        _FRAGMENTS: (
            "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping "
            "lazy_init_hp_params_optimizer_state link_hp_params map_to_flat_opt_states "
            "set_full_hp_grad set_full_hp_param"
        ),
        "torchrun, or a job's workers.cpus": "get_numactl_cmd",
        "inspect.stack()": "get_caller_func",
    },
    "utils.torch": {"Tensor.register_hook": "register_grad_hook"},
    "utils.zero_to_fp32": {
        "get_fp32_state_dict_from_zero_checkpoint, or rayzero ckpt export": (
            "get_model_state_file get_optim_files"
        ),
    },
    "zero": _ZERO,
}
"""Names that can be imported and raise ConfigError when they are called."""

_PACKAGES: Mapping[str, str] = {
    _ACCELERATOR: " ".join(
        f"accelerator.{kind}_accelerator"
        for kind in ["cpu", "cuda", "hpu", "klxpu", "mlu", "mps", "npu", "sdaa", "supa", "xpu"]
    ),
    "rayzero launch --autotuning tune": "autotuning",
    _READ_CHECKPOINT: (
        "checkpoint.affine checkpoint.affine_transfer checkpoint.autoep_affine "
        "checkpoint.autoep_universal checkpoint.autoep_zero3_metadata checkpoint.constants "
        "checkpoint.deepspeed_checkpoint checkpoint.ds_to_universal checkpoint.reshape_3d_utils "
        "checkpoint.reshape_meg_2d checkpoint.reshape_utils checkpoint.universal_checkpoint "
        "checkpoint.zero_checkpoint runtime.state_dict_factory"
    ),
    "engine.save_checkpoint": (
        "datastates io nebula runtime.checkpoint_engine runtime.model_checkpointing"
    ),
    "deepspeed.init_distributed, and torch.distributed": (
        "comm.backend comm.ccl comm.config comm.mori comm.pg_utils comm.utils runtime.comm"
    ),
    "inspect.get_annotations": "compat",
    "engine.compile(), or torch.compile": "compile runtime.compiler",
    "torchao": "compression.basic_layer compression.compress runtime.quantize",
    "rayzero's jobs, whose worker count may change while they run": "elasticity",
    "rayzero doctor": "env_report",
    "rayzero launch": (
        "launcher.constants launcher.launch launcher.launcher_helper launcher.multinode_runner"
    ),
    "PEFT's LoRA: engine.module's frozen weights are sharded at stage 3": "linear",
    _INFERENCE: (
        "inference model_implementations runtime.hybrid_engine runtime.hybrid_engine_graph "
        "runtime.rollout runtime.weight_quantizer utils.static_cache utils.types"
    ),
    _EXPERTS: (
        "moe.ep_count moe.ep_experts moe.ep_kernels moe.ep_repack moe.ep_router "
        "moe.ep_tp_dispatch moe.experts moe.fused_expert_layout moe.mappings moe.sharded_moe"
    ),
    "the config's sections tensorboard, csv_monitor, wandb, comet; engine.monitor": (
        "monitor.comet monitor.tensorboard monitor.utils monitor.wandb"
    ),
    _KERNELS: (
        "git_version_info_installed ops.adam.multi_tensor_apply ops.aio ops.compile "
        "ops.deepspeed4science ops.fp_quantizer ops.gds ops.lion.multi_tensor_apply "
        "ops.op_builder ops.quantizer ops.random_ltd ops.triton_ops"
    ),
    "torch.nn.functional.scaled_dot_product_attention with a mask": "ops.sparse_attention",
    _TRANSFORMER: "ops.transformer",
    "torch.Tensor.pin_memory": "ops.pin_memory utils.pin_memory utils.pin_memory_tracker",
    _PIPELINE: "pipe runtime.pipe",
    _METRICS: "profiling utils.comms_logging utils.timer",
    "activation_checkpointing in the config": "runtime.activation_checkpointing.config",
    "activation_checkpointing.cpu_checkpointing in the config, or "
    "torch.autograd.graph.save_on_cpu": "runtime.activation_checkpointing.offload_activations",
    "torch.nn.functional.cross_entropy": "runtime.chunked_cross_entropy",
    "data_efficiency in the config": (
        "runtime.data_pipeline.config runtime.data_pipeline.constants "
        "runtime.data_pipeline.curriculum_scheduler runtime.data_pipeline.data_sampling "
        "runtime.data_pipeline.data_routing.basic_layer "
        "runtime.data_pipeline.data_routing.scheduler runtime.data_pipeline.data_routing.utils"
    ),
    _DATA_PARALLEL: (
        "module_inject runtime.domino runtime.sequence_parallel runtime.tensor_parallel sequence "
        "utils.bwc"
    ),
    "torch.func.hvp and power iteration; DeepSpeed 0.19 has none either": "runtime.eigenvalue",
    "optimizer.type in the config: OneBitAdam, OneBitLamb, ZeroOneAdam": "runtime.fp16.onebit",
    "optimizer.type in the config: Muon": "runtime.zero.muon",
    "data_types.keep_in_fp32_modules in the config": "runtime.keep_in_fp32",
    "progressive_layer_drop in the config": "runtime.progressive_layer_drop",
    "gc.disable()": "runtime.python_gc",
    "torch.sparse_coo_tensor": "runtime.sparse_tensor",
    "torch_autocast in the config": "runtime.torch_autocast",
    _OFFLOAD: (
        "nvme ops.adam.zenflow_cpu_adam ops.adam.zenflow_torch_adam runtime.superoffload "
        "runtime.swap_tensor runtime.zenflow runtime.zero.offload_states"
    ),
    "deepspeed.zero.GatheredParameters": (
        "runtime.zero.contiguous_memory_allocator runtime.zero.parameter_offload "
        "runtime.zero.partitioned_param_coordinator runtime.zero.partitioned_param_profiler"
    ),
    _LEAF_MODULES: "runtime.zero.leaf_module_config",
    "zero_optimization.zero_hpz_partition_size; DeepSpeed 0.19 has none either": (
        "runtime.zero.mics"
    ),
    "torch.nn.Linear under stage 3": "runtime.zero.linear",
    "torch.nn.Module.named_parameters": "utils.debug",
    "rayzero's ConfigError, or ValueError": "utils.exceptions",
    "deepspeed.DeepSpeedConfig": "utils.config",
    _FRAGMENTS: "utils.mixed_precision_linkage",
    "torchrun, or a job's workers.cpus": "utils.numa",
    "rayzero ckpt export": "utils.zero_to_torch",
}

REFUSED_PACKAGES: Mapping[str, str] = {
    name: use for use, names in _PACKAGES.items() for name in names.split()
}
"""{module of which everything is refused: what to use}."""

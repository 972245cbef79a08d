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

_KERNELS = "torch's own operators: there are no kernels to compile"
_READ_CHECKPOINT = "engine.load_checkpoint, which reads any stage and world size"
_FRAGMENTS = "deepspeed.utils.safe_get_full_fp32_param and its relatives"
_LEAF_MODULES = "set_z3_leaf_modules, or zero_optimization.leaf_module in the config"
_SCHEDULE = "scheduler in the config, or the classes of this module"
_PARAMS = "param.shape and param.numel(), which are those of the full parameter at every stage"
_ZERO = {
    "torch.nn.Linear under stage 3": "TiledLinear TiledLinearReturnBias",
    _PARAMS: "ZeroParamType",
    "deepspeed.zero.Init()": "DeepSpeedTensorOverride",
    "deepspeed.zero.GatheredParameters": "DeepSpeedZeRoOffload unwrap_model_for_generation",
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
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "comm.torch": {"deepspeed.init_distributed": "TorchBackend"},
    "moe.layer": {_EXPERTS: "MoE"},
    "ops": {
        _TRANSFORMER: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        _KERNELS: "ALL_OPS probe_is_compatible",
    },
    "ops.adam": {
        "zero_optimization.offload_optimizer in the config": (
            "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3"
        ),
    },
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.config_utils": {
        "Python's json, and pydantic": (
            "DeepSpeedConfigObject ScientificNotationEncoder get_config_default pp_int"
        ),
    },
    "runtime.lr_schedules": {
        _SCHEDULE: (
            "add_tuning_arguments get_config_from_args get_lr_from_config get_torch_optimizer "
            "override_1cycle_params override_lr_range_test_params override_params "
            "override_warmupCosineLR_params override_warmupLR_params parse_arguments update_lr"
        ),
    },
    "runtime.utils": {
        _DATA_PARALLEL: (
            "PartitionedTensor bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_rank "
            "bwc_tensor_model_parallel_world_size"
        ),
        "engine.get_global_grad_norm()": (
            "CheckOverflow get_flattened_grad_norm get_grad_norm get_weight_norm"
        ),
        "see_memory_usage, of this module": "memory_status",
    },
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "utils.tensor_fragment": {_FRAGMENTS: "fragment_address"},
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
    "utils.zero_to_fp32": {
        "get_fp32_state_dict_from_zero_checkpoint, or rayzero ckpt export": (
            "get_model_state_file get_optim_files"
        ),
    },
    "zero": _ZERO,
}
"""Names that can be imported and raise ConfigError when they are called."""

REFUSED_PACKAGES: Mapping[str, str] = {
    "accelerator.cpu_accelerator": "deepspeed.get_accelerator()",
    "accelerator.cuda_accelerator": "deepspeed.get_accelerator()",
    "autotuning": "rayzero launch --autotuning tune",
    "checkpoint.ds_to_universal": _READ_CHECKPOINT,
    "checkpoint.universal_checkpoint": _READ_CHECKPOINT,
    "elasticity": "rayzero's jobs, whose worker count may change while they run",
    "env_report": "rayzero doctor",
    "inference": _INFERENCE,
    "linear": "PEFT's LoRA: engine.module's frozen weights are sharded at stage 3",
    "model_implementations": _INFERENCE,
    "module_inject": _DATA_PARALLEL,
    "moe.experts": _EXPERTS,
    "moe.mappings": _EXPERTS,
    "moe.sharded_moe": _EXPERTS,
    "monitor": "the config's sections tensorboard, csv_monitor, wandb, comet; engine.monitor",
    "nebula": "engine.save_checkpoint",
    "ops.aio": _KERNELS,
    "ops.deepspeed4science": _KERNELS,
    "ops.fp_quantizer": _KERNELS,
    "ops.op_builder": _KERNELS,
    "ops.quantizer": _KERNELS,
    "ops.random_ltd": _KERNELS,
    "ops.sparse_attention": "torch.nn.functional.scaled_dot_product_attention with a mask",
    "ops.transformer": _TRANSFORMER,
    "pipe": _PIPELINE,
    "profiling": "engine.metrics, and torch.profiler",
    "runtime.compiler": "engine.compile(), or torch.compile",
    "runtime.data_pipeline.curriculum_scheduler": "data_efficiency in the config",
    "runtime.data_pipeline.data_sampling": "data_efficiency in the config",
    "runtime.domino": _DATA_PARALLEL,
    "runtime.fp16.onebit": "optimizer.type in the config: OneBitAdam, OneBitLamb, ZeroOneAdam",
    "runtime.hybrid_engine": _INFERENCE,
    "runtime.pipe": _PIPELINE,
    "runtime.progressive_layer_drop": "progressive_layer_drop in the config",
    "runtime.sequence_parallel": _DATA_PARALLEL,
    "runtime.tensor_parallel": _DATA_PARALLEL,
    "runtime.zero.parameter_offload": "deepspeed.zero.GatheredParameters",
    "runtime.zero.tiling": "torch.nn.Linear under stage 3",
    "sequence": _DATA_PARALLEL,
    "utils.numa": "torchrun, or a job's workers.cpus",
    "utils.timer": "engine.metrics, and torch.profiler",
    "utils.torch": "torch.__version__",
}

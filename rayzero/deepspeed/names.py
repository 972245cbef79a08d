"""The table of DeepSpeed's names: modules, what is in them, and what to use for what is not here.

`WORKS` has {module below `deepspeed`: {where its names are defined: names}}; `name=other` is called
`other` there. `REFUSED` has {module: {what to use: names}}: such a name can be imported, and raises
ConfigError when it is called. Modules in `REFUSED_PACKAGES`, and all below them, have only such
names. `python -m tools.deepspeed_names` writes docs/deepspeed-names.md from it; tests hold it.
"""

from __future__ import annotations

from collections.abc import Mapping

_HERE = "rayzero.deepspeed"
_API = "rayzero.engine.api"

_CHECKPOINTING = {
    f"{_API}.activation_checkpointing": (
        "checkpoint configure is_configured non_reentrant_checkpoint reset"
    ),
}
_COMM = {
    f"{_HERE}.comm": "get_local_rank get_rank get_world_group get_world_size init_distributed",
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
_ZERO = {f"{_API}.params": "GatheredParameters Init"}
_FRAGMENTS = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
    "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
)

WORKS: Mapping[str, Mapping[str, str]] = {
    "": {
        _HERE: (
            "DeepSpeedConfigError DeepSpeedEngine __version__ add_config_arguments comm "
            "get_accelerator init_distributed initialize log_dist logger ops utils checkpointing "
            "runtime zero"
        ),
    },
    "accelerator": {f"{_HERE}.accelerator": "get_accelerator"},
    "accelerator.real_accelerator": {f"{_HERE}.accelerator": "get_accelerator"},
    "checkpoint": {},
    "checkpoint.utils": {f"{_HERE}.utils": "clone_tensors_for_torch_save"},
    "checkpointing": _CHECKPOINTING,
    "comm": _COMM,
    "comm.comm": _COMM,
    "compression": {},
    "compression.helper": {f"{_HERE}.utils": "recursive_getattr recursive_setattr"},
    "launcher": {},
    "launcher.runner": {
        f"{_HERE}.launch_names": (
            "DEEPSPEED_ENVIRONMENT_NAME DEEPSPEED_ENVIRONMENT_PATHS DLTS_HOSTFILE EXPORT_ENVS"
        ),
    },
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
    "ops": {},
    "ops.adagrad": {f"{_HERE}.ops": "DeepSpeedCPUAdagrad"},
    "ops.adam": {f"{_HERE}.ops": "DeepSpeedCPUAdam FusedAdam"},
    "ops.lamb": {f"{_HERE}.ops": "FusedLamb"},
    "ops.lion": {f"{_HERE}.ops": "DeepSpeedCPULion FusedLion"},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.dataloader": {f"{_HERE}.utils": "RepeatingLoader"},
    "runtime.engine": {_HERE: "DeepSpeedEngine"},
    "runtime.lr_schedules": {
        "rayzero.engine.optim.deepspeed_schedules": (
            "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR"
        ),
    },
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "utils": {
        f"{_HERE}.comm": "is_initialized",
        f"{_HERE}.utils": "RepeatingLoader log_dist logger recursive_getattr recursive_setattr",
        f"{_API}.tensor_fragments": _FRAGMENTS,
        **_GROUPS,
    },
    "utils.groups": _GROUPS,
    "utils.logging": {f"{_HERE}.utils": "log_dist logger"},
    "utils.module_utils": {f"{_HERE}.utils": "recursive_getattr recursive_setattr"},
    "utils.tensor_fragment": {f"{_API}.tensor_fragments": _FRAGMENTS},
    "utils.zero_to_fp32": {
        f"{_HERE}.zero_to_fp32": (
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint"
        ),
    },
    "zero": _ZERO,
}

_INFERENCE = "a server for inference; rayzero trains"
_PIPELINE = "stage 3 (zero_optimization.stage), which shards models that do not fit"
_EXPERTS = "experts as ordinary modules, on every rank"
_DATA_PARALLEL = "stage 3 (zero_optimization.stage): all ranks are data parallel"
_TRANSFORMER = "torch.nn.TransformerEncoderLayer, or the model's own"

REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        _INFERENCE: (
            "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine "
            "default_inference_config init_inference"
        ),
        _PIPELINE: "DualPipeVEngine DualPipeVModule PipelineEngine PipelineModule",
        _DATA_PARALLEL: "replace_transformer_layer set_autotp_mode tp_model_init",
        _TRANSFORMER: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
        "deepspeed.zero.Init()": "OnDevice",
        "rayzero.engine.config.parse_config": "DeepSpeedConfig",
    },
    "moe.layer": {_EXPERTS: "MoE"},
    "ops": {_TRANSFORMER: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"},
    "utils": {"rayzero.unshard_modules in the config": "set_z3_leaf_modules"},
    "zero": {
        "nothing: a parameter belongs to the innermost block that contains all its uses": (
            "register_external_parameter"
        ),
        "torch.nn.Linear under stage 3": "TiledLinear TiledLinearReturnBias",
    },
}

_KERNELS = "torch's own operators: there are no kernels to compile"

REFUSED_PACKAGES: Mapping[str, str] = {
    "autotuning": "rayzero plan",
    "elasticity": "rayzero's jobs, whose worker count may change while they run",
    "inference": _INFERENCE,
    "linear": "PEFT's LoRA: engine.module's frozen weights are sharded at stage 3",
    "model_implementations": _INFERENCE,
    "module_inject": _DATA_PARALLEL,
    "moe.experts": _EXPERTS,
    "moe.mappings": _EXPERTS,
    "moe.sharded_moe": _EXPERTS,
    "monitor": "engine.metrics",
    "nebula": "engine.save_checkpoint",
    "ops.aio": _KERNELS,
    "ops.fp_quantizer": _KERNELS,
    "ops.op_builder": _KERNELS,
    "ops.quantizer": _KERNELS,
    "ops.random_ltd": _KERNELS,
    "ops.sparse_attention": "torch.nn.functional.scaled_dot_product_attention with a mask",
    "ops.transformer": _TRANSFORMER,
    "pipe": _PIPELINE,
    "profiling": "engine.metrics, and torch.profiler",
    "runtime.domino": _DATA_PARALLEL,
    "runtime.hybrid_engine": _INFERENCE,
    "runtime.pipe": _PIPELINE,
    "runtime.sequence_parallel": _DATA_PARALLEL,
    "runtime.tensor_parallel": _DATA_PARALLEL,
    "sequence": _DATA_PARALLEL,
}

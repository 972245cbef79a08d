"""`deepspeed.runtime.constants`: names for the config's keys and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = """
buffer_dtype check_overflow checkpoint communication_data_type data_parallel_group data_types
dataloader_drop_last disable_allgather disable_python_gc dump_state fp16
fp16_master_weights_and_grads global_rank grad_accum_dtype gradient_accumulation_steps
gradient_allreduce_op gradient_clipping gradient_predivide_factor keep_in_fp32_modules
legacy_fusion log_level managed_gradient_accumulation max_grad_norm memory_breakdown optimizer
param_dtype prescale_gradients scheduler seq_parallel_communication_data_type steps_per_print
torch_autocast train_batch_size train_micro_batch_size_per_gpu type vocabulary_size
wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
"""
_OTHER_KEYS = {
    "BFLOAT16": "bf16",
    "BFLOAT16_ENABLED": "enabled",
    "BFLOAT16_IMMEDIATE_GRAD_UPDATE": "immediate_grad_update",
    "BFLOAT16_MASTER_WEIGHTS_AND_GRADS": "bf16_master_weights_and_grads",
    "BFLOAT16_OLD": "bfloat16",
    "BFLOAT16_OPTIMIZER_STATES": "bf16_optimizer_states",
    "CHECKPOINT_PARALLEL_WRITE": "parallel_write",
    "CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE": "pipeline_stage",
    "CHECKPOINT_TAG_VALIDATION": "tag_validation",
    "DDP_BFLOAT16": "ddp_bf16",
    "FP16_AUTO_CAST": "auto_cast",
    "FP16_CONSECUTIVE_HYSTERESIS": "consecutive_hysteresis",
    "FP16_ENABLED": "enabled",
    "FP16_HYSTERESIS": "hysteresis",
    "FP16_INITIAL_SCALE_POWER": "initial_scale_power",
    "FP16_LOSS_SCALE": "loss_scale",
    "FP16_LOSS_SCALE_WINDOW": "loss_scale_window",
    "FP16_MIN_LOSS_SCALE": "min_loss_scale",
    "LOAD_UNIVERSAL_CHECKPOINT": "load_universal",
    "OPTIMIZER_PARAMS": "params",
    "PIPE_REPLICATED": "ds_pipe_replicated",
    "SCHEDULER_PARAMS": "params",
    "TORCH_AUTOCAST_DTYPE": "dtype",
    "TORCH_AUTOCAST_ENABLED": "enabled",
    "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES": "lower_precision_safe_modules",
    "USE_DATA_BEFORE_EXPERT_PARALLEL": "use_data_before_expert_parallelism",
    "USE_NODE_LOCAL_STORAGE_CHECKPOINT": "use_node_local_storage",
}
_DEFAULTS: Mapping[Any, str] = {
    False: (
        "BFLOAT16_CHECK_OVERFLOW BFLOAT16_ENABLED BFLOAT16_MASTER_WEIGHTS_AND_GRADS "
        "BFLOAT16_OPTIMIZER_STATES CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE DATALOADER_DROP_LAST "
        "DISABLE_ALLGATHER DISABLE_PYTHON_GC DUMP_STATE FP16_AUTO_CAST FP16_CONSECUTIVE_HYSTERESIS "
        "FP16_ENABLED FP16_MASTER_WEIGHTS_AND_GRADS LEGACY_FUSION LOAD_UNIVERSAL_CHECKPOINT "
        "MEMORY_BREAKDOWN PRESCALE_GRADIENTS TORCH_AUTOCAST_ENABLED "
        "USE_DATA_BEFORE_EXPERT_PARALLEL USE_NODE_LOCAL_STORAGE_CHECKPOINT WALL_CLOCK_BREAKDOWN "
        "ZERO_ALLOW_UNTESTED_OPTIMIZER"
    ),
    True: (
        "BFLOAT16_IMMEDIATE_GRAD_UPDATE MANAGED_GRADIENT_ACCUMULATION ZERO_FORCE_DS_CPU_OPTIMIZER"
    ),
    None: (
        "BUFFER_DTYPE COMMUNICATION_DATA_TYPE GRADIENT_ACCUMULATION_STEPS GRAD_ACCUM_DTYPE "
        "LOG_LEVEL OPTIMIZER_TYPE PARAM_DTYPE SCHEDULER_TYPE STEPS_PER_PRINT TRAIN_BATCH_SIZE "
        "TRAIN_MICRO_BATCH_SIZE_PER_GPU VOCABULARY_SIZE"
    ),
    "WARN": "CHECKPOINT_TAG_VALIDATION",
    "auto": "KEEP_IN_FP32_MODULES",
    "fp32": "SEQ_PARALLEL_COMMUNICATION_DATA_TYPE",
    "mean": "GRADIENT_ALLREDUCE_OP",
    1000: "FP16_LOSS_SCALE_WINDOW",
    16: "FP16_INITIAL_SCALE_POWER",
    2: "FP16_HYSTERESIS",
}

CONSTANTS: Mapping[str, Any] = {
    **{key.upper(): key for key in _KEYS.split()},
    **_OTHER_KEYS,
    **{f"{name}_DEFAULT": it for it, names in _DEFAULTS.items() for name in names.split()},
    # equal to True and False as keys of a dict
    "FP16_LOSS_SCALE_DEFAULT": 0,
    "FP16_MIN_LOSS_SCALE_DEFAULT": 1,
    "GRADIENT_CLIPPING_DEFAULT": 1.0,
    "GRADIENT_PREDIVIDE_FACTOR_DEFAULT": 1.0,
    "CHECKPOINT_TAG_VALIDATION_MODES": ["WARN", "IGNORE", "FAIL"],
    "GRADIENT_ALLREDUCE_OP_MEAN": "mean",
    "GRADIENT_ALLREDUCE_OP_SUM": "sum",
    "GRADIENT_ALLREDUCE_OP_SUPPORTED": ("mean", "sum"),
    "ROUTE_ENCODE": "encode",
    "ROUTE_EVAL": "eval",
    "ROUTE_PREDICT": "predict",
    "ROUTE_TRAIN": "train",
}


def __getattr__(name: str) -> Any:
    try:
        return CONSTANTS[name]
    except KeyError:
        raise AttributeError(name) from None

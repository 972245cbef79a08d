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

REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        _INFERENCE: (
            "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine "
            "default_inference_config init_inference"
        ),
        _PIPELINE: "DualPipeVEngine DualPipeVModule PipelineEngine PipelineModule",
        _DATA_PARALLEL: "replace_transformer_layer set_autotp_mode tp_model_init",
        _TRANSFORMER: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer",
    },
    "comm": {
        "engine.metrics: traffic of the last step": "configure log_summary reset_log",
        "torch.distributed.device_mesh.init_device_mesh": "initialize_mesh_device",
        "deepspeed.init_distributed": "init_deepspeed_backend set_backend",
        "torchrun, which sets the variables that init_distributed reads": "mpi_discovery",
    },
    "comm.torch": {"deepspeed.init_distributed": "TorchBackend"},
    "moe.layer": {_EXPERTS: "MoE"},
    "ops": {_TRANSFORMER: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer"},
    "runtime.utils": {
        _DATA_PARALLEL: "PartitionedTensor",
        "engine.get_global_grad_norm()": "CheckOverflow get_flattened_grad_norm get_weight_norm",
    },
    "zero": {
        "torch.nn.Linear under stage 3": "TiledLinear TiledLinearReturnBias",
    },
}

"""Names that can be imported and raise ConfigError when they are called."""

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

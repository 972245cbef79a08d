"""Sections whose whole subject is not here, most of them gone from DeepSpeed 0.19 as well."""

from __future__ import annotations

from typing import Any

from rayzero.engine.config.keys.spec import (
    NO_OP,
    REFUSED,
    Key,
    active_if_child,
    active_unless,
    is_enabled,
    is_enabled_anywhere,
    is_set,
)

_ONE_AXIS = "ranks differ only in their samples here: ZeRO is the one axis of parallelism"


_REMOVED_REASON = "it is gone from DeepSpeed 0.19 too"

PARALLELISM_KEYS = (
    Key(
        "tensor_parallel",
        REFUSED,
        "layers are cut over ranks",
        _ONE_AXIS,
        "zero_optimization.stage 3, whose memory falls with the ranks as well",
        is_active=active_if_child("autotp_size", 1),
    ),
    Key(
        "expert_parallel", REFUSED, "experts are spread over ranks", _ONE_AXIS, is_active=is_enabled
    ),
    Key(
        "use_data_before_expert_parallelism",
        REFUSED,
        "the order of ranks for experts",
        _ONE_AXIS,
        is_active=is_set,
    ),
    Key(
        "sequence_parallel_size",
        REFUSED,
        "a sequence is cut over so many ranks",
        _ONE_AXIS,
        "activation checkpointing, or shorter sequences",
        is_active=active_unless(1),
    ),
    Key(
        "seq_parallel_communication_data_type",
        NO_OP,
        "the dtype of sums over the ranks of one sequence",
        "no sequence is cut over ranks",
        is_active=is_set,
    ),
    Key(
        "pipeline",
        NO_OP,
        "how a PipelineModule is cut into stages",
        "DeepSpeed reads it for a PipelineModule only, and there is none here",
        is_active=is_set,
    ),
    Key(
        "zero_optimization.mics_shard_size",
        REFUSED,
        "shards are spread over groups of ranks",
        _REMOVED_REASON,
        "zero_optimization.zero_hpz_partition_size",
        is_active=active_unless(-1),
    ),
    Key(
        "zero_optimization.mics_hierarchical_params_gather",
        REFUSED,
        "weights are gathered in two levels",
        _REMOVED_REASON,
        "zero_optimization.zero_hpz_partition_size",
        is_active=is_set,
    ),
    Key(
        "zero_optimization.zeropp_loco_param",
        REFUSED,
        "error feedback for quantized gradients",
        _REMOVED_REASON,
        "zero_optimization.zero_quantized_gradients",
        is_active=is_set,
    ),
    Key(
        "zero_optimization.zenflow",
        REFUSED,
        "important gradients are applied at once, the others later",
        "it changes what is trained: updates would be stale",
        "zero_optimization.offload_optimizer",
        is_active=is_set,
    ),
)

DATA_KEYS = (
    Key(
        "dataloader_drop_last",
        REFUSED,
        "the last samples of an epoch are left out when they fill no batch",
        "every sample is used once an epoch: a batch may reach into the next one",
        "a torch DataLoader of your own",
        is_active=is_set,
    ),
    Key(
        "data_efficiency",
        REFUSED,
        "samples are chosen, and tokens dropped, as training goes on",
        alternative="a dataset in the order you want",
        is_active=is_enabled,
    ),
    Key(
        "curriculum_learning",
        REFUSED,
        "easy samples first",
        _REMOVED_REASON,
        "a dataset in the order you want",
        is_active=is_enabled,
    ),
)


def _is_compile_enabled(value: Any) -> bool:
    names = ("enabled", "deepcompile", "autoep_non_moe")
    return any(active_if_child(name)(value) for name in names)


MODEL_KEYS = (
    Key(
        "compile",
        REFUSED,
        "DeepCompile: ZeRO inside the compiled graph",
        alternative="torch.compile on the modules inside the model",
        is_active=_is_compile_enabled,
    ),
    Key(
        "hybrid_engine",
        REFUSED,
        "one engine that trains and generates",
        alternative="an inference engine with the exported weights",
        is_active=is_enabled,
    ),
    Key(
        "weight_quantization",
        REFUSED,
        "weights are quantized for inference",
        alternative="a quantizing library on the exported weights",
        is_active=lambda value: (
            is_set(value) and (not isinstance(value, dict) or is_set(value.get("enabled", True)))
        ),
    ),
    Key(
        "compression_training",
        REFUSED,
        "the model is pruned and quantized while it trains",
        _REMOVED_REASON,
        "torchao on the model",
        is_active=is_enabled_anywhere,
    ),
    Key(
        "quantize_training",
        REFUSED,
        "weights are quantized step by step",
        _REMOVED_REASON,
        "torchao on the model",
        is_active=is_enabled_anywhere,
    ),
    Key(
        "eigenvalue",
        REFUSED,
        "curvature for quantize_training",
        _REMOVED_REASON,
        is_active=is_enabled,
    ),
    Key(
        "progressive_layer_drop",
        REFUSED,
        "layers are skipped at random",
        _REMOVED_REASON,
        "stochastic depth in the model",
        is_active=is_enabled,
    ),
    Key(
        "sparse_attention",
        REFUSED,
        "attention kernels with block patterns",
        _REMOVED_REASON,
        "torch.nn.attention.flex_attention in the model",
        is_active=is_set,
    ),
    Key(
        "sparse_gradients",
        REFUSED,
        "gradients of embeddings travel as indices and values",
        f"gradients lie in flat buffers; {_REMOVED_REASON}",
        "dense gradients, which overlap with backward",
        is_active=is_set,
    ),
    Key(
        "graph_harvesting", REFUSED, "CUDA graphs of the update", _REMOVED_REASON, is_active=is_set
    ),
    Key(
        "amp",
        REFUSED,
        "NVIDIA Apex",
        _REMOVED_REASON,
        "bf16, fp16 or torch_autocast",
        is_active=is_enabled,
    ),
    Key(
        "vocabulary_size",
        NO_OP,
        "the size of the vocabulary",
        "DeepSpeed only warns when it is not a multiple of 8",
        is_active=is_set,
    ),
)

RUN_KEYS = (
    Key(
        "elasticity",
        REFUSED,
        "a batch size that many numbers of ranks divide",
        f"any number of ranks will do with train_batch_size; {_REMOVED_REASON}",
        "train_batch_size, and workers.min and workers.max in the job file",
        is_active=is_enabled,
    ),
    Key(
        "autotuning",
        REFUSED,
        "settings are tried out before training",
        alternative="settings by hand; rayzero.slots and train_micro_batch_size_per_gpu bound memory",
        is_active=is_enabled,
    ),
    Key(
        "model_info",
        NO_OP,
        "what the autotuner may know of the model",
        "only the autotuner reads it",
        is_active=is_set,
    ),
    Key(
        "disable_allgather",
        NO_OP,
        "weights are not gathered in one collective",
        "DeepSpeed 0.19 does not read it any more",
        is_active=is_set,
    ),
    Key(
        "disable_python_gc",
        NO_OP,
        "Python's garbage collector is turned off",
        "it changes no result; gc.disable() in the script does it",
        is_active=is_set,
    ),
    Key(
        "zero_allow_untested_optimizer",
        NO_OP,
        "optimizers that DeepSpeed does not know are let in",
        "every optimizer that works element by element is let in",
        is_active=is_set,
    ),
    Key(
        "zero_force_ds_cpu_optimizer",
        NO_OP,
        "an offloaded optimizer must be DeepSpeed's own",
        "an offloaded optimizer is torch's",
        is_active=is_set,
    ),
    Key(
        "zero_optimization.cpu_offload_use_pin_memory",
        NO_OP,
        "CPU memory of offloaded tensors is page-locked",
        "DeepSpeed ignores this old name too: pin_memory of offload_optimizer and offload_param",
        is_active=is_set,
    ),
)

"""Keys of DeepSpeed without a field here: refused, or ignored, with the reason.

Most belong to subjects that are out of scope, and many are gone from DeepSpeed 0.19 too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rayzero.engine.config.keys import (
    NO_OP,
    REFUSED,
    Key,
    active_if_child,
    active_unless,
    is_enabled,
    is_enabled_anywhere,
    is_set,
)

_DATA_PARALLEL = "all ranks are data-parallel: ZeRO is the only axis of parallelism"
_REMOVED = "removed from DeepSpeed 0.19 too"
_BACKGROUND = "checkpoints are always written in the background"
_METRICS = "engine.metrics has these numbers, for any logger"


def _refused(
    is_active: Callable[[Any], bool], description: str, why: str = "", alternative: str = ""
) -> Key:
    return Key(REFUSED, description, why, alternative, is_active)


def _ignored(description: str, why: str) -> Key:
    return Key(NO_OP, description, why, is_active=is_set)


_monitor = partial(
    _refused, is_enabled, why=_METRICS, alternative="log engine.metrics from the script"
)


def _is_enabled_by_default(value: Any) -> bool:
    """A section is active unless its `enabled` is false."""
    return is_set(value) and (not isinstance(value, dict) or is_set(value.get("enabled", True)))


def _is_compile_enabled(value: Any) -> bool:
    names = ("enabled", "deepcompile", "autoep_non_moe")
    return any(active_if_child(name)(value) for name in names)


UNSUPPORTED_KEYS: dict[str, dict[str, Key]] = {
    "batch sizes": {
        "managed_gradient_accumulation": _refused(
            lambda value: value not in (None, True, "auto"),
            "false: step() ends a step whenever it is called",
            "the global batch would depend on the script, and a resumed run could not know it",
            "gradient_accumulation_steps, or no_sync()",
        ),
    },
    "optimizer, schedule, gradients": {
        "optimizer.params.max_grad_norm": _refused(
            is_set,
            "gradients are clipped by the optimizer",
            "DeepSpeed rejects it too",
            "gradient_clipping",
        ),
        "gradient_allreduce_op": _refused(
            lambda value: str(value).lower() not in ("none", "auto", "mean"),
            "whether gradients are averaged or summed over the ranks",
            "a sum would make the step depend on the number of ranks",
            "the mean, and a larger learning rate or loss",
        ),
    },
    "monitors and profilers": {
        "comms_logger": _refused(
            is_enabled,
            "every collective is logged",
            "engine.metrics always counts calls, bytes and exposed seconds by collective",
            "engine.metrics",
        ),
        "flops_profiler": _refused(
            is_enabled,
            "operations of each module are counted",
            alternative="torch.utils.flop_counter.FlopCounterMode around the model",
        ),
        "tensorboard": _monitor("losses are sent to TensorBoard"),
        "wandb": _monitor("losses are sent to Weights & Biases"),
        "csv_monitor": _monitor("losses are written to CSV files"),
        "comet": _monitor("losses are sent to Comet"),
    },
    "checkpoints": {
        "checkpoint.writer": _ignored(
            "the writer and its buffers", "there is one writer, which does not use torch.save"
        ),
        "nebula": _refused(
            _is_enabled_by_default,
            "checkpoints are written by Azure's Nebula; removed from DeepSpeed 0.19 too",
            _BACKGROUND,
            "checkpoint in the job file",
        ),
        "datastates_ckpt": _refused(
            is_set,
            "checkpoints are written in the background by DataStates",
            _BACKGROUND,
            "checkpoint in the job file",
        ),
    },
    "NVMe": {
        "aio.use_gds": _refused(
            active_unless(False),
            "the GPU reads NVMe directly",
            "offloaded state is updated on the CPU",
        ),
    },
    "other parallelism": {
        "tensor_parallel": _refused(
            active_if_child("autotp_size", 1),
            "layers are split over ranks",
            _DATA_PARALLEL,
            "zero_optimization.stage 3, whose memory per rank also falls with the world size",
        ),
        "expert_parallel": _refused(is_enabled, "experts are split over ranks", _DATA_PARALLEL),
        "use_data_before_expert_parallelism": _refused(
            is_set, "the order of ranks for experts", _DATA_PARALLEL
        ),
        "sequence_parallel_size": _refused(
            active_unless(1),
            "the number of ranks that a sequence is split over",
            _DATA_PARALLEL,
            "activation checkpointing, or shorter sequences",
        ),
        "seq_parallel_communication_data_type": _ignored(
            "the dtype of sums over the ranks of one sequence", "no sequence is split over ranks"
        ),
        "pipeline": _ignored(
            "how a PipelineModule is split into stages",
            "DeepSpeed reads it for a PipelineModule only, which rayzero does not have",
        ),
        "zero_optimization.mics_shard_size": _refused(
            active_unless(-1),
            "shards are spread over groups of ranks",
            _REMOVED,
            "zero_optimization.zero_hpz_partition_size",
        ),
        "zero_optimization.mics_hierarchical_params_gather": _refused(
            is_set,
            "weights are gathered in two levels",
            _REMOVED,
            "zero_optimization.zero_hpz_partition_size",
        ),
        "zero_optimization.zeropp_loco_param": _refused(
            is_set,
            "error feedback for quantized gradients",
            _REMOVED,
            "zero_optimization.zero_quantized_gradients",
        ),
        "zero_optimization.zenflow": _refused(
            is_set,
            "important gradients are applied at once, the others later",
            "it changes the training result: updates would be stale",
            "zero_optimization.offload_optimizer",
        ),
    },
    "data": {
        "dataloader_drop_last": _refused(
            is_set,
            "the last, incomplete batch of an epoch is dropped",
            "every sample is used once per epoch: a batch may extend into the next one",
            "a torch DataLoader of your own",
        ),
        "data_efficiency": _refused(
            is_enabled,
            "samples are selected, and tokens dropped, during training",
            alternative="a dataset in the order you want",
        ),
        "curriculum_learning": _refused(
            is_enabled, "easy samples first", _REMOVED, "a dataset in the order you want"
        ),
    },
    "changes of the model": {
        "compile": _refused(
            _is_compile_enabled,
            "DeepCompile: ZeRO inside the compiled graph",
            alternative="torch.compile on the modules inside the model",
        ),
        "hybrid_engine": _refused(
            is_enabled,
            "one engine that trains and generates",
            alternative="an inference engine with the exported weights",
        ),
        "weight_quantization": _refused(
            _is_enabled_by_default,
            "weights are quantized for inference",
            alternative="a quantizing library on the exported weights",
        ),
        "compression_training": _refused(
            is_enabled_anywhere,
            "the model is pruned and quantized during training",
            _REMOVED,
            "torchao on the model",
        ),
        "quantize_training": _refused(
            is_enabled_anywhere,
            "weights are quantized step by step",
            _REMOVED,
            "torchao on the model",
        ),
        "eigenvalue": _refused(is_enabled, "curvature for quantize_training", _REMOVED),
        "progressive_layer_drop": _refused(
            is_enabled, "layers are skipped at random", _REMOVED, "stochastic depth in the model"
        ),
        "sparse_attention": _refused(
            is_set,
            "attention kernels with block patterns",
            _REMOVED,
            "torch.nn.attention.flex_attention in the model",
        ),
        "sparse_gradients": _refused(
            is_set,
            "gradients of embeddings are reduced as indices and values",
            f"gradients are in flat buffers; {_REMOVED}",
            "dense gradients, whose reduction overlaps with backward",
        ),
        "graph_harvesting": _refused(is_set, "CUDA graphs of the update", _REMOVED),
        "amp": _refused(is_enabled, "NVIDIA Apex", _REMOVED, "bf16, fp16 or torch_autocast"),
        "vocabulary_size": _ignored(
            "the size of the vocabulary", "DeepSpeed only warns when it is not a multiple of 8"
        ),
    },
    "the run": {
        "elasticity": _refused(
            is_enabled,
            "a batch size that is divisible by many numbers of ranks",
            f"train_batch_size works with any number of ranks; {_REMOVED}",
            "train_batch_size, and workers.min and workers.max in the job file",
        ),
        "autotuning": _refused(
            is_enabled,
            "settings are tried out before training",
            alternative="settings by hand; rayzero.gather_buffers and "
            "train_micro_batch_size_per_gpu bound memory",
        ),
        "model_info": _ignored("the autotuner's model description", "only the autotuner reads it"),
        "disable_allgather": _ignored(
            "weights are not gathered in one collective", "DeepSpeed 0.19 does not read it any more"
        ),
        "disable_python_gc": _ignored(
            "Python's garbage collector is disabled",
            "it changes no result; gc.disable() in the script does it",
        ),
        "zero_allow_untested_optimizer": _ignored(
            "optimizers that DeepSpeed does not know are accepted",
            "every elementwise optimizer is accepted",
        ),
        "zero_force_ds_cpu_optimizer": _ignored(
            "an offloaded optimizer must be DeepSpeed's", "an offloaded optimizer is torch's"
        ),
        "zero_optimization.cpu_offload_use_pin_memory": _ignored(
            "CPU memory of offloaded tensors is page-locked",
            "DeepSpeed ignores this old name too: use pin_memory of offload_optimizer and "
            "offload_param",
        ),
    },
}

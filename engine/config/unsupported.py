"""Keys of DeepSpeed's top level that are refused or ignored, with the reason.

Most belong to subjects that are out of scope, and many are gone from DeepSpeed 0.19 too. Their
values may be anything: only whether they request something is checked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rayzero.engine.config.fields import ConfigSection
from rayzero.engine.config.keys import is_enabled, is_set, no_op, refused

_DATA_PARALLEL = "all ranks are data-parallel: ZeRO is the only axis of parallelism"
_REMOVED = "removed from DeepSpeed 0.19 too"

_refused_section = partial(refused, None, is_active=is_enabled)
_checkpoint_writer = partial(
    refused,
    reason="checkpoints are always written in the background",
    alternative="checkpoint in the job file",
)


def _is_enabled_by_default(value: Any) -> bool:
    """A section is active unless its `enabled` is false."""
    return is_set(value) and (not isinstance(value, dict) or is_set(value.get("enabled", True)))


def _is_enabled_anywhere(value: Any) -> bool:
    """Whether a section, or one nested in it, is enabled."""
    return is_enabled(value) or (
        isinstance(value, dict)
        and any(_is_enabled_anywhere(inner) for inner in value.values() if isinstance(inner, dict))
    )


def _splits_layers(value: Any) -> bool:
    size = value.get("autotp_size") if isinstance(value, dict) else value
    return is_set(size) and size != 1


_model_compression = partial(
    refused,
    None,
    reason=_REMOVED,
    alternative="torchao on the model",
    is_active=_is_enabled_anywhere,
)


class UnsupportedKeys(ConfigSection):
    """The keys without a section or subject among those that have an effect."""

    comms_logger: Any = _refused_section(
        "every collective is logged",
        "engine.metrics always counts calls, bytes and exposed seconds by collective",
        alternative="engine.metrics",
        group="monitors and profilers",
    )
    flops_profiler: Any = _refused_section(
        "operations of each module are counted",
        alternative="torch.utils.flop_counter.FlopCounterMode around the model",
    )
    nebula: Any = _checkpoint_writer(
        None,
        "checkpoints are written by Azure's Nebula; removed from DeepSpeed 0.19 too",
        is_active=_is_enabled_by_default,
        group="checkpoints",
    )
    datastates_ckpt: Any = _checkpoint_writer(
        False, "checkpoints are written in the background by DataStates"
    )
    tensor_parallel: Any = refused(
        None,
        "layers are split over ranks",
        _DATA_PARALLEL,
        alternative="zero_optimization.stage 3, whose memory per rank also falls with the world "
        "size",
        is_active=_splits_layers,
        group="other parallelism",
    )
    expert_parallel: Any = _refused_section("experts are split over ranks", _DATA_PARALLEL)
    use_data_before_expert_parallelism: Any = refused(
        False, "the order of ranks for experts", _DATA_PARALLEL
    )
    sequence_parallel_size: Any = refused(
        1,
        "the number of ranks that a sequence is split over",
        _DATA_PARALLEL,
        alternative="activation checkpointing, or shorter sequences",
    )
    seq_parallel_communication_data_type: Any = no_op(
        "fp32", "the dtype of sums over the ranks of a sequence", "no sequence is split over ranks"
    )
    pipeline: Any = no_op(
        None,
        "how a PipelineModule is split into stages",
        "DeepSpeed reads it for a PipelineModule only, which rayzero does not have",
    )
    dataloader_drop_last: Any = no_op(
        False,
        "the last, incomplete batch of an epoch is dropped",
        "no batch is incomplete: the last one of an epoch extends into the next, so that every "
        "sample is used once per epoch",
        group="data",
    )
    hybrid_engine: Any = _refused_section(
        "an engine that trains and generates",
        alternative="an engine for inference, with the weights",
        group="changes of the model",
    )
    weight_quantization: Any = refused(
        None,
        "weights are quantized for inference",
        alternative="a quantizing library on the exported weights",
        is_active=_is_enabled_by_default,
    )
    compression_training: Any = _model_compression(
        "the model is pruned and quantized during training"
    )
    quantize_training: Any = _model_compression("weights are quantized step by step")
    eigenvalue: Any = _refused_section("curvature for quantize_training", _REMOVED)
    sparse_attention: Any = refused(
        None,
        "attention kernels with block patterns",
        _REMOVED,
        alternative="torch.nn.attention.flex_attention in the model",
    )
    sparse_gradients: Any = refused(
        False,
        "gradients of embeddings are reduced as indices and values",
        f"gradients are in flat buffers; {_REMOVED}",
        alternative="dense gradients, whose reduction overlaps with backward",
    )
    graph_harvesting: Any = refused(False, "CUDA graphs of the update", _REMOVED)
    amp: Any = _refused_section("NVIDIA Apex", _REMOVED, alternative="bf16, fp16 or torch_autocast")
    vocabulary_size: Any = no_op(
        None, "the size of the vocabulary", "DeepSpeed only warns when it is not a multiple of 8"
    )
    elasticity: Any = _refused_section(
        "a batch size that is divisible by many numbers of ranks",
        f"train_batch_size works with any number of ranks; {_REMOVED}",
        alternative="train_batch_size, and workers.min and workers.max in the job file",
        group="the run",
    )
    model_info: Any = no_op(
        None, "the autotuner's model description", "only the autotuner reads it"
    )
    disable_allgather: Any = no_op(
        False, "weights are not gathered at once", "DeepSpeed 0.19 does not read it any more"
    )
    disable_python_gc: Any = no_op(
        False, "Python's garbage collector is disabled", "gc.disable() in the script does it"
    )
    zero_allow_untested_optimizer: Any = no_op(
        False,
        "optimizers unknown to DeepSpeed are accepted",
        "every elementwise optimizer is accepted",
    )
    zero_force_ds_cpu_optimizer: Any = no_op(
        True, "an offloaded optimizer must be DeepSpeed's", "an offloaded optimizer is torch's"
    )

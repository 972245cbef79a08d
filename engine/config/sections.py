"""Sections of DeepSpeed but `zero_optimization`: dtypes, activation checkpointing, timers,
checkpoints, aio."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator

from rayzero.engine.config.fields import (
    ConfigSection,
    DtypeName,
    FiniteFloat,
    Integer,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeSize,
    name_validator,
)
from rayzero.engine.config.keys import Auto, implemented, no_op, refused

_TAG_VALIDATIONS = {name.lower(): name for name in ("Ignore", "Warn", "Fail")}
_AUTO_ENABLED = "the default of transformers' TrainingArguments; set true to train in"
_left_to_kernel = partial(no_op, reason="the kernel's page cache and read-ahead do it")


class Fp16Config(ConfigSection):
    """float16 model weights with fp32 main weights and a scaled loss."""

    enabled: bool = implemented(
        False,
        "float16 weights with fp32 main weights and a scaled loss",
        group="fp16",
        auto=Auto(False, f"{_AUTO_ENABLED} fp16"),
    )
    auto_cast: bool = implemented(
        False, "the model's floating-point inputs are cast to float16; otherwise they are unchanged"
    )
    loss_scale: NonNegativeFloat = implemented(0.0, "static loss scale; 0: dynamic")
    initial_scale_power: Integer = implemented(16, "a dynamic scale starts at 2 to this power")
    # Of a dynamic scale only, as the checks of the rest: DeepSpeed reads them there alone.
    loss_scale_window: Integer = implemented(
        1000, "steps without overflow after which the scale is doubled"
    )
    hysteresis: Integer = implemented(2, "overflows tolerated before the scale is halved")
    consecutive_hysteresis: bool = implemented(
        False, "a step without overflow resets the hysteresis"
    )
    min_loss_scale: FiniteFloat = implemented(1.0, "lower bound of a dynamic scale")
    fp16_master_weights_and_grads: bool = refused(
        False,
        "main weights and main grads in float16 too",
        "an update smaller than a two-thousandth of a weight would be lost",
        alternative="fp32 main weights, which offload_optimizer can keep in CPU memory",
    )

    def initial_dynamic_scale(self) -> int:
        """The value at which a dynamic scale starts."""
        return 1 << self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """A dynamic scale's settings, under the names of DeepSpeed's loss scaler."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class Bf16Config(ConfigSection):
    """bfloat16 model weights with fp32 main weights, gradients and optimizer state."""

    enabled: bool = implemented(
        False,
        "bfloat16 weights with fp32 main weights",
        group="bf16",
        auto=Auto(False, f"{_AUTO_ENABLED} bf16"),
    )
    immediate_grad_update: bool = no_op(
        False, "a gradient is added to the main grad as soon as it is ready", "always done"
    )
    check_grad_overflow: bool = no_op(
        True,
        "a step with an inf or nan in its gradient is skipped",
        "always done: the check is reduced together with the gradient norm and costs nothing",
        old_names=("bf16.check_overflow",),
    )
    bf16_master_weights_and_grads: bool = implemented(
        False,
        "main weights, which are then the model's, and main grads in bfloat16 too: updates below "
        "a 256th of a weight are lost; stages 1 to 3, with bf16_optimizer_states or "
        "offload_optimizer, as in DeepSpeed",
    )
    bf16_optimizer_states: bool = implemented(
        False, "optimizer state in bfloat16; with bf16_master_weights_and_grads only"
    )


class TorchAutocastConfig(ConfigSection):
    """`torch.autocast` around the model's forward; weights keep their dtype."""

    enabled: bool = implemented(
        False, "`torch.autocast` around the model's forward", group="other dtypes"
    )
    dtype: DtypeName = implemented("bf16", "the dtype that autocast computes in")
    lower_precision_safe_modules: tuple[str, ...] | None = no_op(
        None,
        "classes of modules whose gradients and weights are communicated in that dtype",
        "weights are communicated in their own dtype, all gradients in communication_data_type",
    )


class DataTypesConfig(ConfigSection):
    """Dtypes other than the model weights'; None for the default of the precision."""

    grad_accum_dtype: DtypeName | None = implemented(
        None, "the dtype in which gradients are accumulated", group="other dtypes"
    )
    param_dtype: DtypeName | None = refused(
        None,
        "the dtype of the model's weights, whatever the precision",
        alternative="fp16 or bf16, or a model that was built in that dtype",
    )
    buffer_dtype: DtypeName | None = implemented(
        None, "the dtype of the model's floating-point buffers; by default they keep their own"
    )
    keep_in_fp32_modules: str | tuple[str, ...] = refused(
        "auto",
        "buffers that stay fp32 in 16-bit training",
        alternative="the default: buffers keep the dtype that the model gave them",
    )


class ActivationCheckpointingConfig(ConfigSection):
    """Options of `checkpointing.checkpoint`; they have no effect where it is not called."""

    partition_activations: bool = no_op(
        False,
        "checkpoints are partitioned over model-parallel ranks",
        "all ranks are data-parallel: there are no ranks to partition them over",
        group="activation checkpointing",
        old_names=("activation_checkpointing.partitioned_activations",),
    )
    cpu_checkpointing: bool = implemented(
        False, "checkpoints are kept in CPU memory, if checkpointing.configure got the config"
    )
    contiguous_memory_optimization: bool = no_op(
        False, "checkpoints are contiguous in a buffer", "torch's allocator reuses their memory"
    )
    number_checkpoints: NonNegativeInt | None = no_op(
        None, "the number of checkpoints in that buffer", "there is no such buffer"
    )
    synchronize_checkpoint_boundary: bool = no_op(
        False, "the device is synchronized at each checkpoint", "it would only cost time"
    )
    profile: bool = no_op(
        False, "forward and backward of each checkpoint are timed", "torch.profiler shows them"
    )


class ThroughputConfig(ConfigSection):
    """The timer of samples per second."""

    enabled: bool = no_op(
        True, "samples per second are measured", "engine.metrics always has the seconds of a step"
    )
    synchronized: bool = no_op(
        True,
        "the device is synchronized for the measurement",
        "a step ends with a vote on its gradient, which synchronizes the device anyway",
    )


class TimersConfig(ConfigSection):
    """DeepSpeed's timers."""

    throughput: ThroughputConfig = ThroughputConfig()


class ParallelWriteConfig(ConfigSection):
    """Ranks that write a checkpoint concurrently."""

    pipeline_stage: bool = no_op(
        False, "pipeline stages write concurrently", "all ranks write concurrently"
    )


class CheckpointConfig(ConfigSection):
    """DeepSpeed's checkpoint options."""

    tag_validation: Annotated[
        str, BeforeValidator(name_validator(_TAG_VALIDATIONS, "a validation of tags"))
    ] = implemented(
        "Warn",
        "ranks that save under different tags: Fail: an error; Warn: a warning, Ignore: nothing, "
        "and rank 0's tag is used, so that there is one complete checkpoint",
        group="checkpoints",
    )
    load_universal: bool = no_op(
        False,
        "a checkpoint of another stage or number of ranks is loaded",
        "every checkpoint loads at any stage and number of ranks",
    )
    use_node_local_storage: bool = refused(
        False,
        "each node keeps its part of a checkpoint on its local disk",
        "the part would be lost with its node",
        alternative="a folder that all nodes see, or a URL of an object store",
    )
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    checkpoint_serialization: bool = no_op(
        True, "options of torch.save", "checkpoints are safetensors files"
    )
    writer: Any = no_op(
        None, "the writer and its buffers", "there is one writer, which does not use torch.save"
    )


class AioConfig(ConfigSection):
    """DeepSpeed's NVMe I/O."""

    block_size: NonNegativeSize = _left_to_kernel(
        1_048_576, "bytes of one read or write of NVMe", group="NVMe"
    )
    queue_depth: Integer = _left_to_kernel(8, "concurrent requests")
    intra_op_parallelism: Integer = _left_to_kernel(1, "threads of one request")
    thread_count: Integer = _left_to_kernel(1, "threads of one request, in older versions")
    single_submit: bool = _left_to_kernel(False, "requests are submitted one by one")
    overlap_events: bool = _left_to_kernel(True, "requests are submitted while others are pending")
    use_gds: Any = refused(
        False, "the GPU reads NVMe directly", "offloaded state is updated on the CPU"
    )

"""Small sections: activation_checkpointing, timers, checkpoint, aio, rayzero."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rayzero.engine.config.fields import (
    ConfigSection,
    Integer,
    NonNegativeInt,
    NonNegativeSize,
    PositiveFloat,
    PositiveInt,
    name_validator,
)
from rayzero.engine.config.keys import implemented, no_op, refused

_TAG_VALIDATIONS = {name.lower(): name for name in ("Ignore", "Warn", "Fail")}
_PAGE_CACHE = "the kernel's page cache and read-ahead do it"


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
    ] = no_op(
        "Warn",
        "whether ranks that save under different tags are an error",
        "always an error: it would make two checkpoints, both incomplete",
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

    block_size: NonNegativeSize = no_op(
        1_048_576, "bytes of one read or write of NVMe", _PAGE_CACHE, group="NVMe"
    )
    queue_depth: Integer = no_op(8, "concurrent requests", _PAGE_CACHE)
    intra_op_parallelism: Integer = no_op(1, "threads of one request", _PAGE_CACHE)
    thread_count: Integer = no_op(1, "threads of one request, in older versions", _PAGE_CACHE)
    single_submit: bool = no_op(False, "requests are submitted one by one", _PAGE_CACHE)
    overlap_events: bool = no_op(
        True, "requests are submitted while others are pending", _PAGE_CACHE
    )
    use_gds: Any = refused(
        False, "the GPU reads NVMe directly", "offloaded state is updated on the CPU"
    )


class CompressionConfig(ConfigSection):
    """Compression of gradients between ranks."""

    gradients: Literal["none", "fp16", "bf16", "int8", "sign", "lowrank"] = implemented(
        "none",
        "how gradients are encoded: none; fp16, bf16: rounded; int8: eight bits a value, a scale a "
        "block; sign: one bit a value; lowrank: factors of every matrix (PowerSGD)",
    )
    block_size: Annotated[PositiveInt, Field(multiple_of=32)] | None = implemented(
        None, "values that share a scale; by default 256 with int8, 64 with sign"
    )
    rank: PositiveInt = implemented(4, "rank of lowrank's factors")
    error_feedback: bool | None = implemented(
        None,
        "the error of the encoding is added to the next gradients; always with sign and lowrank, "
        "by default not with the others",
    )


class RayzeroConfig(ConfigSection):
    """Keys that DeepSpeed does not have."""

    unshard_modules: tuple[str, ...] = implemented(
        (),
        "class names of the modules gathered as one unit at stage 3; by default the elements of "
        "every ModuleList and Sequential",
        group="rayzero",
        old_names=("rayzero.unit_classes",),
    )
    gather_buffers: Annotated[PositiveInt, Field(ge=2)] = implemented(
        2,
        "buffers for gathered weights at stage 3: live units at once",
        old_names=("rayzero.slots",),
    )
    peak_flops: PositiveFloat | None = implemented(
        None, "peak flop/s of one device, for mfu; known for the usual GPUs"
    )
    compression: CompressionConfig = CompressionConfig()

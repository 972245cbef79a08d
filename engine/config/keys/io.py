"""Rows of checkpoints, NVMe, logging, monitors.

Keys about what goes to disks: checkpoints, and the way to NVMe.

Keys about what a run tells: logs, timers, profilers, monitors.
"""

from __future__ import annotations

from rayzero.engine.config.keys.spec import (
    IMPLEMENTED,
    NO_OP,
    REFUSED,
    Key,
    active_unless,
    is_enabled,
    is_set,
)

_PAGE_CACHE_REASON = "the kernel's page cache and read-ahead do it"

CHECKPOINT_KEYS = (
    Key(
        "checkpoint.tag_validation",
        NO_OP,
        "whether ranks that save under different tags are an error",
        "always an error here: it would be two checkpoints, both of them in parts",
    ),
    Key(
        "checkpoint.load_universal",
        NO_OP,
        "a checkpoint of another stage or number of ranks is loaded",
        "every checkpoint loads at any stage and number of ranks",
    ),
    Key(
        "checkpoint.use_node_local_storage",
        REFUSED,
        "each node keeps its part of a checkpoint on a disk of its own",
        "a node that is lost would take its part along",
        "a folder that all nodes see, or a URL of an object store",
    ),
    Key(
        "checkpoint.parallel_write.pipeline_stage",
        NO_OP,
        "pipeline stages write at the same time",
        "every rank writes its part at the same time",
    ),
    Key(
        "checkpoint.checkpoint_serialization",
        NO_OP,
        "how torch.save writes",
        "checkpoints are safetensors files",
    ),
    Key(
        "checkpoint.writer",
        NO_OP,
        "which writer is used, and its buffers",
        "there is one writer; it never goes through torch.save",
        is_active=is_set,
    ),
    Key(
        "nebula",
        REFUSED,
        "checkpoints go to Azure's Nebula; gone from DeepSpeed 0.19 too",
        "training does not stop for a checkpoint here either",
        "checkpoint in the job file",
        is_active=lambda value: (
            is_set(value) and (not isinstance(value, dict) or _is_nebula_enabled(value))
        ),
    ),
    Key(
        "datastates_ckpt",
        REFUSED,
        "checkpoints are written behind training by DataStates",
        "training does not stop for a checkpoint here either",
        "checkpoint in the job file",
        is_active=is_set,
    ),
)

AIO_KEYS = (
    Key("aio.block_size", NO_OP, "bytes of one read or write of NVMe", _PAGE_CACHE_REASON),
    Key("aio.queue_depth", NO_OP, "requests at once", _PAGE_CACHE_REASON),
    Key("aio.intra_op_parallelism", NO_OP, "threads of one request", _PAGE_CACHE_REASON),
    Key("aio.thread_count", NO_OP, "threads of one request, in older versions", _PAGE_CACHE_REASON),
    Key("aio.single_submit", NO_OP, "requests are handed over one by one", _PAGE_CACHE_REASON),
    Key(
        "aio.overlap_events",
        NO_OP,
        "requests are handed over while others are waited for",
        _PAGE_CACHE_REASON,
    ),
    Key(
        "aio.use_gds",
        REFUSED,
        "NVMe is read by the GPU itself",
        "offloaded state is updated on the CPU",
        is_active=active_unless(False),
    ),
)


def _is_nebula_enabled(section: dict[str, object]) -> bool:
    return is_set(section.get("enabled", True))


_MONITOR_REASON = "engine.metrics has them as numbers, for any logger"


_USE_METRICS = "log engine.metrics from the script"

LOG_KEYS = (
    Key("steps_per_print", IMPLEMENTED, "rank 0 logs loss and lr every this many steps"),
    Key(
        "wall_clock_breakdown",
        NO_OP,
        "seconds of forward, backward and step are logged",
        "engine.metrics has a step's seconds and its exposed communication, always",
    ),
    Key(
        "memory_breakdown",
        NO_OP,
        "memory is logged at many places of a step",
        "engine.metrics has the bytes by class, always",
    ),
    Key(
        "dump_state",
        NO_OP,
        "the config is printed at the start",
        "`rayzero config explain` prints it",
    ),
    Key(
        "log_level",
        NO_OP,
        "the level of DeepSpeed's logger",
        'logging.getLogger("rayzero").setLevel sets ours',
    ),
    Key(
        "timers.throughput.enabled",
        NO_OP,
        "samples a second are measured",
        "engine.metrics has a step's seconds, always",
    ),
    Key(
        "timers.throughput.synchronized",
        NO_OP,
        "the device is waited for to measure them",
        "a step ends with the vote on its gradient, which waits for the device anyway",
    ),
)

MONITOR_KEYS = (
    Key(
        "comms_logger",
        REFUSED,
        "every collective is logged",
        "engine.metrics counts calls, bytes and exposed seconds by collective, always",
        "engine.metrics",
        is_active=is_enabled,
    ),
    Key(
        "flops_profiler",
        REFUSED,
        "operations of each module are counted",
        alternative="torch.utils.flop_counter.FlopCounterMode around the model",
        is_active=is_enabled,
    ),
    Key(
        "tensorboard",
        REFUSED,
        "losses go to TensorBoard",
        _MONITOR_REASON,
        _USE_METRICS,
        is_active=is_enabled,
    ),
    Key(
        "wandb",
        REFUSED,
        "losses go to Weights & Biases",
        _MONITOR_REASON,
        _USE_METRICS,
        is_active=is_enabled,
    ),
    Key(
        "csv_monitor",
        REFUSED,
        "losses go to CSV files",
        _MONITOR_REASON,
        _USE_METRICS,
        is_active=is_enabled,
    ),
    Key(
        "comet", REFUSED, "losses go to Comet", _MONITOR_REASON, _USE_METRICS, is_active=is_enabled
    ),
)

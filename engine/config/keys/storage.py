"""Keys about what goes to disks: checkpoints, and the way to NVMe."""

from __future__ import annotations

from rayzero.engine.config.keys.rows import NO_OP, REFUSED, Key, given, unlike

_IO = "the kernel's page cache and read-ahead do it"

CHECKPOINTS = (
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
        asks=given,
    ),
    Key(
        "nebula",
        REFUSED,
        "checkpoints go to Azure's Nebula; gone from DeepSpeed 0.19 too",
        "training does not stop for a checkpoint here either",
        "checkpoint in the job file",
        asks=lambda value: given(value) and (not isinstance(value, dict) or _nebula(value)),
    ),
    Key(
        "datastates_ckpt",
        REFUSED,
        "checkpoints are written behind training by DataStates",
        "training does not stop for a checkpoint here either",
        "checkpoint in the job file",
        asks=given,
    ),
)

AIO = (
    Key("aio.block_size", NO_OP, "bytes of one read or write of NVMe", _IO),
    Key("aio.queue_depth", NO_OP, "requests at once", _IO),
    Key("aio.intra_op_parallelism", NO_OP, "threads of one request", _IO),
    Key("aio.thread_count", NO_OP, "threads of one request, in older versions", _IO),
    Key("aio.single_submit", NO_OP, "requests are handed over one by one", _IO),
    Key("aio.overlap_events", NO_OP, "requests are handed over while others are waited for", _IO),
    Key(
        "aio.use_gds",
        REFUSED,
        "NVMe is read by the GPU itself",
        "offloaded state is updated on the CPU",
        asks=unlike(False),
    ),
)


def _nebula(section: dict[str, object]) -> bool:
    return given(section.get("enabled", True))

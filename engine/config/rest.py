"""Sections that are read and checked, and change nothing here: the table of keys says why."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from rayzero.engine.config.fields import Integer, Limit, Section, one_of

_VALIDATIONS = {name.lower(): name for name in ("Ignore", "Warn", "Fail")}


class ThroughputConfig(Section):
    """The timer of samples a second."""

    enabled: bool = True
    synchronized: bool = True


class TimersConfig(Section):
    """What is timed."""

    throughput: ThroughputConfig = ThroughputConfig()


class ParallelWriteConfig(Section):
    """Who writes a checkpoint at the same time."""

    pipeline_stage: bool = False


class CheckpointConfig(Section):
    """How DeepSpeed writes checkpoints."""

    tag_validation: Annotated[
        str, BeforeValidator(one_of(_VALIDATIONS, "a validation of tags"))
    ] = "Warn"
    load_universal: bool = False
    use_node_local_storage: bool = False
    parallel_write: ParallelWriteConfig = ParallelWriteConfig()
    checkpoint_serialization: bool = True


class AioConfig(Section):
    """How DeepSpeed reads and writes NVMe."""

    block_size: Limit = 1_048_576
    queue_depth: Integer = 8
    intra_op_parallelism: Integer = 1
    thread_count: Integer = 1
    single_submit: bool = False
    overlap_events: bool = True

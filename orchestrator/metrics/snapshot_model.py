"""The schema of a snapshot, for readers that get one from a file or another process.

Readers rely on the schema: numbers are finite, and in a range that can be shown. Unknown keys are
allowed.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rayzero.engine.validation import validate_document
from rayzero.orchestrator.numbers import Amount, Count, UnixTime


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Limits(_Row):
    min: Count
    max: Count


class _Progress(_Row):
    step: Count
    steps: Count | None
    remaining_s: Amount | None
    step_s: Amount | None
    tokens_per_s: Amount | None
    samples_per_s: Amount | None = None  # a run of an earlier version has none
    data_wait_ratio: Amount | None = None


class _Usage(_Row):
    cpu_cores: Amount | None = None
    gpu_utilization: Amount | None = None


class _Training(_Row):
    loss: FiniteFloat | None
    learning_rate: FiniteFloat | None
    gradient_norm: FiniteFloat | None
    loss_scale: FiniteFloat | None
    model_flops_utilization: FiniteFloat | None


class _Goodput(_Row):
    ratio: Amount
    wall_s: Amount
    unattributed_s: Amount
    seconds: dict[str, Amount]


class _GenerationEntry(_Row):
    at_s: UnixTime
    world_size: Count


class _FaultEntry(_Row):
    at_s: UnixTime
    cause: str
    text: str


class _RecoveryEntry(_Row):
    at_s: UnixTime
    kind: str
    total_s: Amount
    step: Count
    world_size_before: Count
    world_size: Count


class _CheckpointEntry(_Row):
    at_s: UnixTime
    step: Count
    bytes: Amount
    seconds: Amount


class _Replicas(_Row):
    step: Count | None
    bytes: Amount | None


class _Rank(_Row):
    rank: Count
    phase: str | None
    waiting: bool | None
    silent_s: Amount | None


class _RoleValue(_Row):
    mean: FiniteFloat | None


class _Role(_Limits):
    workers: Count
    faults: dict[str, Count]
    generations: list[_GenerationEntry] = Field(default_factory=list)
    seen_faults: list[_FaultEntry] = Field(default_factory=list)
    tokens_per_s: Amount | None = None
    version: Count | None = None
    values: dict[str, _RoleValue] = Field(default_factory=dict)


class _Rollouts(_Row):
    leased: dict[str, Count]
    ready: Count
    published: Count
    lag_max: Count | None


class _Source(_Row):
    samples: Count
    share: Amount
    samples_per_s: Amount | None = None
    bytes_per_s: Amount | None = None
    hit_ratio: Amount | None = None


class _Snapshot(_Row):
    """The value that `rayzero.orchestrator.metrics.snapshot.make_snapshot` returns."""

    version: str
    job: str
    state: str
    stage: Count | None
    at_s: UnixTime
    began_s: UnixTime
    generation: Count
    world_size: Count
    workers: _Limits
    roles: dict[str, _Role] = Field(default_factory=dict)
    rollouts: _Rollouts | None = None
    streams: dict[str, _Source] = Field(default_factory=dict)
    progress: _Progress
    training: _Training
    usage: _Usage = _Usage()
    loss: list[Annotated[list[FiniteFloat | None], Field(min_length=2, max_length=2)]]
    goodput: _Goodput
    generations: list[_GenerationEntry]
    faults: list[_FaultEntry]
    recoveries: list[_RecoveryEntry]
    checkpoints: list[_CheckpointEntry]
    checkpoint_failures: Count
    replicas: _Replicas
    ranks: list[_Rank]


def validate_snapshot(value: Any, what: str) -> None:
    """Raises ConfigError, which names what is wrong, if a value is not a valid snapshot. `what` is
    the name of the value in the message."""
    validate_document(_Snapshot, value, what)

"""The entries of the lists in a run's facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayzero.orchestrator import job_events
from rayzero.orchestrator.numbers import Amount, Count, UnixTime


@dataclass(frozen=True)
class GenerationEntry:
    """The start of a generation, or its loss of a rank. `world_size` counts the ranks that are
    left."""

    at_s: UnixTime
    generation: Count
    world_size: Count


@dataclass(frozen=True)
class FaultEntry:
    """A fault as it was first seen."""

    at_s: UnixTime
    cause: str
    rank: int | None
    step: int
    text: str


@dataclass(frozen=True)
class RecoveryEntry:
    """A repair, a resize, or a reattachment: a new process of the job continues with the lost
    process's workers. The `cause` of a resize is its reason; `total_s` of a reattachment is the
    time without a process."""

    at_s: UnixTime
    kind: Literal["repair", "resize", "reattach"]
    cause: str
    step: Count
    steps_redone: Count
    world_size_before: Count
    world_size: Count
    total_s: Amount
    seconds: dict[str, Amount]


@dataclass(frozen=True)
class CheckpointEntry:
    """A committed checkpoint."""

    at_s: UnixTime
    step: Count
    bytes: Amount
    seconds: Amount


def recovery_entry(
    event: job_events.Repaired | job_events.Resized | job_events.Reattached, at_s: float
) -> RecoveryEntry:
    if isinstance(event, job_events.Reattached):
        left = event.world_size - len(event.lost_ranks)
        cause, took_s = "controller", event.offline_s
        return RecoveryEntry(
            at_s, "reattach", cause, event.step, 0, event.world_size, left, took_s, {}
        )
    is_repair = isinstance(event, job_events.Repaired)
    return RecoveryEntry(
        at_s,
        kind="repair" if is_repair else "resize",
        cause=event.cause if isinstance(event, job_events.Repaired) else event.reason,
        step=event.step,
        steps_redone=event.steps_redone if isinstance(event, job_events.Repaired) else 0,
        world_size_before=event.world_size_before,
        world_size=event.world_size,
        total_s=event.total_s,
        seconds=event.seconds,
    )
